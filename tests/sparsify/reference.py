"""Slow, obvious sparsification, straight from the papers: numpy, all workers at once.

Nothing here knows the code under test. Vectors are numpy arrays, workers are rows.
"""

import math

import numpy as np


def even_borders(dim, wanted, parts):
    """Borders of partitions of as many blocks each; blocks of dim // wanted, aligned to 32."""
    size = dim // wanted
    if size > 32:
        size = size // 32 * 32
    size = max(1, size)
    count = math.ceil(dim / size)
    borders, at = [0], 0
    for part in range(parts):
        at += count // parts + (1 if part < count % parts else 0)
        borders.append(min(at * size, dim))
    return borders


def bounds(blocks, cuts):
    """The coordinates at which partitions begin and end."""
    return [min(cut * blocks.size, blocks.dim) for cut in cuts]


def published_moves(cuts, loads, *, per_block, least=8):
    """Dynamic topology of ExDyna's published code: one block a border, heavy beside light."""
    cuts, loads = list(cuts), [float(load) for load in loads]
    mean = int(sum(loads) / len(loads))
    for p in range(len(loads) - 1):
        left, right = loads[p] / mean, loads[p + 1] / mean
        if left > 1.05 and right < 0.95238 and cuts[p + 1] - cuts[p] - 1 >= least:
            cuts[p + 1] -= 1
            loads[p] -= int(per_block)
            loads[p + 1] += int(per_block)
        if left < 0.95238 and right > 1.05 and cuts[p + 2] - cuts[p + 1] - 1 >= least:
            cuts[p + 1] += 1
            loads[p] += int(per_block)
            loads[p + 1] -= int(per_block)
    return cuts


def online_rule(tau, selected, k):
    """Threshold after a step, with the branch that the published code cannot reach."""
    share = selected / k
    if share > 1.1:
        return tau * 1.005
    if share > 1:
        return tau * 1.00125
    if share > 1 / 1.1:
        return tau * 0.9987
    return tau * 0.995


class OnlineExDyna:
    """ExDyna with its online threshold and partitions that stay, all workers at once."""

    def __init__(self, workers, dim, density, *, rotate=True):
        self.workers, self.dim, self.rotate = workers, dim, rotate
        self.k = max(1, int(density * dim))
        self.borders = even_borders(dim, 1024, workers)
        self.residuals = np.zeros((workers, dim), np.float32)
        self.step = -1
        self.selected = None
        self.tau = None

    def reduce(self, grads):
        """Return the indices in the order of workers, counts, and the (D,) mean."""
        self.step += 1
        if self.step == 0:
            self.tau = 1 / (2 * math.sqrt(self.k))
        else:
            self.tau = online_rule(self.tau, self.selected, self.k)
        acc = self.residuals + grads
        indices, counts = [], []
        for rank in range(self.workers):
            part = (self.step + rank) % self.workers if self.rotate else rank
            begin, end = self.borders[part], self.borders[part + 1]
            own = (begin + np.flatnonzero(np.abs(acc[rank, begin:end]) >= self.tau)).tolist()
            if not own and end > begin:
                own = [begin + self.step % (end - begin)]
            indices += own
            counts.append(len(own))
        total = acc[0, indices].copy()
        for rank in range(1, self.workers):
            total += acc[rank, indices]
        mean = np.zeros(self.dim, np.float32)
        mean[indices] = total / np.float32(self.workers)
        acc[:, indices] = 0
        self.residuals = acc
        self.selected = len(indices)
        return indices, counts, mean


class MomentumCorrection:
    """Deep Gradient Compression: velocity accumulates, both are cleared where it was sent."""

    def __init__(self, dim, momentum):
        self.u, self.v, self.momentum = np.zeros(dim), np.zeros(dim), momentum

    def add(self, grad):
        self.u = self.momentum * self.u + grad
        self.v = self.v + self.u

    def send(self, indices):
        sent = self.v[indices].copy()
        self.u[indices] = 0
        self.v[indices] = 0
        return sent
