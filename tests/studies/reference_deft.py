"""DEFT the obvious way: pieces are lists of coordinates, shares are exact fractions."""

import math
from fractions import Fraction

import numpy as np


def pieces_of(dim, workers, layers):
    pieces, begin = [], 0
    for length in layers:
        whole = np.arange(begin, begin + length)
        parts = (
            np.array_split(whole, workers) if Fraction(length) > Fraction(dim, workers) else [whole]
        )
        pieces += [part.tolist() for part in parts if len(part)]
        begin += length
    return pieces


def norms_of(vector, pieces):
    return [np.float32(math.sqrt(sum(float(vector[c]) ** 2 for c in piece))) for piece in pieces]


def shares_of(norms, pieces, k):
    exact = [Fraction(float(norm)) for norm in norms]
    shares, waiting = [0] * len(pieces), set(range(len(pieces)))
    while waiting:
        first = min(waiting, key=lambda p: (-exact[p], p))
        rest = sum(exact[p] for p in waiting)
        part = int(k * exact[first] / rest) if rest else 0
        shares[first] = min(max(part, 1), len(pieces[first]))
        k -= shares[first]
        waiting.remove(first)
    return shares


def bins_of(shares, pieces, workers):
    """Which pieces are sent whole, and which are in each bin."""
    whole = {p for p in range(len(pieces)) if shares[p] == len(pieces[p])}
    cost = {
        p: len(pieces[p]) * (math.log2(shares[p]) if shares[p] > 1 else 1)
        for p in range(len(pieces))
        if p not in whole
    }
    bins, loads = [[] for _ in range(workers)], [0.0] * workers
    for piece in sorted(cost, key=lambda p: (-cost[p], p)):
        emptiest = loads.index(min(loads))
        bins[emptiest].append(piece)
        loads[emptiest] += cost[piece]
    return whole, bins


def selections_of(acc, k, pieces, step):
    """What is sent whole, and what each worker selects of the rest: sets of coordinates."""
    workers = len(acc)
    shares = [shares_of(norms_of(own, pieces), pieces, k) for own in acc]
    whole, bins = bins_of(shares[step % workers], pieces, workers)
    selections = []
    for rank, own in enumerate(acc):
        mine = set()
        for piece in bins[(step + rank) % workers]:
            by_size = sorted(pieces[piece], key=lambda c: -abs(own[c]))
            mine |= set(by_size[: shares[rank][piece]])
        selections.append(mine)
    return {c for piece in whole for c in pieces[piece]}, selections


def chooser(k, layers):
    def choose(acc, step):
        workers, dim = acc.shape
        if k >= dim:
            return acc
        common, selections = selections_of(acc, k, pieces_of(dim, workers, layers), step)
        sent_indices = sorted(common.union(*selections))
        sent = np.zeros_like(acc)
        sent[:, sent_indices] = acc[:, sent_indices]
        return sent

    return choose
