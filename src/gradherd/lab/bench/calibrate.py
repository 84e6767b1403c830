"""Measure what `gradherd advise` predicts from: bandwidth, latency, backward and forward pass.

Letters: R ranks.
"""

import math
import statistics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradherd.comm.collectives import all_gather, all_reduce, send_recv
from gradherd.comm.world import World
from gradherd.lab.bench.timing import elapsed_seconds

_LAYERS = 6
_BATCH = 4
# A short message is all latency, a long one nearly all bandwidth.
_SHORT_BYTES, _LONG_BYTES = 4, 1 << 24
_SHORT_REPEATS, _LONG_REPEATS = 50, 7
_WARMUP_STEPS, _STEPS = 2, 5
_CPU = torch.device("cpu")


def wide_model(params: int) -> nn.Sequential:
    """Return six equal linear layers with about `params` parameters in all.

    With a small batch such a model has many parameters for little arithmetic, so the exchange of
    its gradients dominates.
    """
    # A linear layer has side * side weights and side biases: solve for the side.
    side = max(1, int((math.sqrt(1 + 4 * params / _LAYERS) - 1) / 2))
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        layers += [nn.Linear(side, side), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def ring_seconds(
    size: int,
    repeats: int,
    world: World,
    device: torch.device = _CPU,
    *,
    fastest: bool = False,
) -> float:
    """Return the median seconds in which every rank sends `size` bytes to the next one.

    Args:
        size: Bytes of a message.
        repeats: Rounds that are timed.
        world: The ranks; with one rank there is nothing to send.
        device: Where messages lie.
        fastest: Return the fastest round instead: what the link can do. A busy machine only adds
            to it, and slows down computing and not the link.

    Returns:
        The same value on all ranks.
    """
    if world.size == 1:
        return 0.0
    message, times = torch.zeros(size, dtype=torch.uint8, device=device), []
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for _ in range(1 + repeats):
        all_reduce(torch.zeros(1, device=device), world)  # a barrier: start together
        times.append(
            elapsed_seconds(lambda: send_recv(message, following, previous, world), device)
        )
    # A round takes as long as its slowest rank. The first round opens connections: leave it out.
    rounds = all_gather(torch.tensor(times[1:], device=device), world).value.amax(0)
    return float(rounds.min() if fastest else rounds.median())


def measure_cluster(params: int, device_name: str) -> dict[str, float]:
    """Measure network and compute on this rank together with all others; the same on all ranks.

    Returns:
        "bandwidth", the bits per second that arrive when every rank sends to the next one at the
        same time, and in seconds: "latency", of a short message to the next rank; "backward", of a
        model of the given size; "forward", the rest of a step: forward pass and optimizer.
    """
    world, device = World.detect(), torch.device(device_name)
    latency = ring_seconds(_SHORT_BYTES, _SHORT_REPEATS, world, device)
    long = ring_seconds(_LONG_BYTES, _LONG_REPEATS, world, device, fastest=True)
    # What a message takes whatever its size is latency, not bandwidth.
    bandwidth = 8 * _LONG_BYTES / max(1e-9, long - latency) if world.size > 1 else math.inf
    # Synchronous training waits for the slowest rank, hence the maximum.
    own = torch.tensor(step_seconds(params, device), device=device)
    backward, forward = all_gather(own, world).value.amax(0).tolist()
    times = {"latency": latency, "backward": backward, "forward": forward}
    return {"bandwidth": bandwidth, **times}


def step_seconds(params: int, device: torch.device) -> tuple[float, float]:
    """Return the median seconds of a backward pass, and of the rest of a step."""
    torch.manual_seed(0)
    net = wide_model(params).to(device)
    side = net[0].in_features
    assert isinstance(side, int)
    x = torch.randn(_BATCH, side, device=device)
    y = torch.randint(side, (_BATCH,), device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    # Medians: other processes may disturb single steps. The first steps allocate memory.
    backwards, others = [], []
    losses: list[Tensor] = []
    for _ in range(_WARMUP_STEPS + _STEPS):
        optimizer.zero_grad()
        forward = elapsed_seconds(lambda: losses.append(cross_entropy(net(x), y)), device)
        backwards.append(elapsed_seconds(losses.pop().backward, device))
        others.append(forward + elapsed_seconds(optimizer.step, device))
    return statistics.median(backwards[_WARMUP_STEPS:]), statistics.median(others[_WARMUP_STEPS:])
