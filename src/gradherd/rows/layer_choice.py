"""Which layers rows are read from: those in which the gradients of examples differ most.

Balancing decides by inner products of centred rows. Every layer adds its share to them, and few
layers have nearly all of it: a small ResNet is ordered as well by 16 of its 41 layers as by all of
them (docs/orders.md). Each of the others would cost as much.

Shapes: B examples, L layers.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from gradherd.rows.sink import SinkPool, SketchedLayer

log = logging.getLogger("gradherd")

CHOSEN_AFTER, CHOSEN_AGAIN = 24, 240
"""Batches before layers are chosen, and chosen anew. Not at once: where a head begins with zeros,
no other layer has a gradient at first."""
LEAST_SHARE = 1e-3
"""Share below which a layer is not read, however few others there are."""

_MOST_EXAMPLES = 64
"""Examples by which layers are compared: inner products of all layers then take little memory."""

# A byte holds the logarithm of a share; lower ones are taken by what a check has to say.
_LOWEST, _STEPS = 16, 8  # eighths of an octave


class LayerChoice:
    """Chooses the layers that rows are read from; the others are idle."""

    def __init__(self, pool: SinkPool, open_to_choice: Sequence[SketchedLayer], most: int | None):
        """Begin with all layers; `most` of those `open_to_choice` are read, None: all of them."""
        self._pool, self._layers = pool, list(open_to_choice)
        self._most = len(self._layers) if most is None else most

    @property
    def is_needed(self) -> bool:
        """Whether there are more layers than are read."""
        return len(self._layers) > self._most

    @property
    def idle(self) -> list[str]:
        """Names of the layers that are not read."""
        return [layer.name for layer in self._layers if layer.is_idle]

    def no_levels(self) -> Tensor:
        """Return the levels (L,) of layers of which nothing is known."""
        return torch.zeros(len(self._layers), dtype=torch.uint8)

    def levels(self, examples: int) -> Tensor:
        """Return how large the share of each layer is in the batch that waits: bytes (L,).

        0 stands for a layer without rows. The largest of all ranks counts.
        """
        count = min(examples, _MOST_EXAMPLES)
        grams = {
            layer.name: gram
            for layer in self._pool.layers
            if (gram := centred_gram(layer, self._pool.arrived, count)) is not None
        }
        found = [at for at, layer in enumerate(self._layers) if layer.name in grams]
        levels, idle = self.no_levels(), set(self.idle)
        # A graph has nothing of idle layers, so what it has chosen stays.
        if not found or (idle and idle.isdisjoint(grams)):
            return levels
        total = torch.stack(list(grams.values())).sum(0)
        each = torch.stack([grams[self._layers[at].name] for at in found])
        shares = (each * total).sum((1, 2)) / (total * total).sum()
        if shares.isfinite().all():
            levels[found] = to_levels(shares).cpu()
        return levels

    def choose(self, levels: Tensor) -> None:
        """Read the layers of the highest levels (L,) from now on, and those without a level."""
        known = levels.tolist()
        if not any(known):
            return
        floor = int(to_levels(torch.tensor(LEAST_SHARE)))
        before = self.idle
        ranked = sorted(range(len(known)), key=lambda at: -known[at])  # equal ones in their order
        read = {at for at in ranked[: self._most] if known[at] >= floor}
        for at, layer in enumerate(self._layers):
            layer.is_idle = known[at] > 0 and at not in read
        if self.idle != before:
            every = len(self._pool.layers)
            log.info("rows are read from %d of %d layers", every - len(self.idle), every)

    def load(self, idle: Sequence[str]) -> None:
        """Continue with layers that were idle."""
        for layer in self._layers:
            layer.is_idle = layer.name in idle


def to_levels(shares: Tensor) -> Tensor:
    """Return bytes that grow with the logarithm of shares.

    >>> to_levels(torch.tensor([1.0, 0.5, 0.001, 0.0])).tolist()
    [255, 247, 175, 16]
    """
    logarithms = 255 + _STEPS * shares.double().clamp(min=0).log2()
    return logarithms.clamp(_LOWEST, 255).to(torch.uint8)


def centred_gram(
    layer: SketchedLayer, arrived: Mapping[str, Tensor], examples: int
) -> Tensor | None:
    """Return the inner products (B, B) of a layer's centred rows; None if none have arrived."""
    grams = []
    for key, one in zip(layer.own_keys, layer.maps, strict=True):
        if key in arrived:
            rows: Tensor = one.vectors(arrived[key][:examples]).double()
            rows = rows - rows.mean(0)
            grams.append(rows @ rows.T)
    return reduce(torch.add, grams) if grams else None
