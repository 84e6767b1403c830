"""Find the numbers that the advice is made from: link, latency, backward.

Letters: R ranks.
"""

import math
import time
from typing import NamedTuple

import torch
from torch import nn

from gradherd.comm.collectives import all_gather, all_reduce, send_recv
from gradherd.comm.world import World

_LAYERS = 6
_BATCH = 4
_SHORT = 4  # bytes
_LONG = 1 << 24
_REPEATS, _LONG_REPEATS = 50, 7
_WARM = 2
_STEPS = 5
_CPU = torch.device("cpu")


class Measured(NamedTuple):
    """What ranks have found out together."""

    bandwidth: float
    """Bits per second that arrive, from each rank at the next one, all of them at once."""
    latency: float
    """Seconds that a short message takes to the next rank."""
    backward: float
    """Seconds of a backward pass of a model of that size."""
    forward: float
    """Seconds of all else in a step: forward and optimizer."""


def wide(params: int) -> nn.Sequential:
    """Return six equal linear layers with about `params` parameters in all.

    Nothing has more parameters for so little arithmetic, so what counts is their exchange.
    """
    side = max(1, int((math.sqrt(1 + 4 * params / _LAYERS) - 1) / 2))
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        layers += [nn.Linear(side, side), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def hop(size: int, repeats: int, world: World, device: torch.device = _CPU) -> float:
    """Return the seconds that `size` bytes take from each rank to the next, all at once."""
    if world.size == 1:
        return 0.0
    mine, times = torch.zeros(size, dtype=torch.uint8, device=device), []
    onward, back = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for _ in range(1 + repeats):
        all_reduce(torch.zeros(1, device=device), world)  # start together
        begin = _now(device)
        send_recv(mine, onward, mine, back, world)
        times.append(_now(device) - begin)
    # The slowest rank counts, at each message; the first one makes connections.
    return float(all_gather(torch.tensor(times[1:], device=device), world).value.amax(0).median())


def measure(params: int, kind: str) -> Measured:
    """Measure on this rank, together with all others; all get the same."""
    world, device = World.detect(), torch.device(kind)
    latency = hop(_SHORT, _REPEATS, world, device)
    whole = hop(_LONG, _LONG_REPEATS, world, device)
    bandwidth = 8 * _LONG / max(1e-9, whole - latency) if world.size > 1 else math.inf
    found = torch.tensor(passes(params, device), device=device)
    backward, forward = all_gather(found, world).value.amax(0).tolist()
    return Measured(bandwidth, latency, backward, forward)


def passes(params: int, device: torch.device) -> tuple[float, float]:
    """Return the median seconds of a backward pass, and of all else in a step."""
    torch.manual_seed(0)
    net = wide(params).to(device)
    side = net[0].in_features
    assert isinstance(side, int)
    x = torch.randn(_BATCH, side, device=device)
    y = torch.randint(side, (_BATCH,), device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    backwards, others = [], []
    for _ in range(_WARM + _STEPS):
        optimizer.zero_grad()
        begin = _now(device)
        loss = nn.functional.cross_entropy(net(x), y)
        middle = _now(device)
        loss.backward()
        after = _now(device)
        optimizer.step()
        backwards.append(after - middle)
        others.append(_now(device) - after + middle - begin)
    return _median(backwards[_WARM:]), _median(others[_WARM:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _median(found: list[float]) -> float:
    return float(torch.tensor(found, dtype=torch.float64).median())
