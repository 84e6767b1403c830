"""Measure the numbers that a prediction needs: bandwidth, latency, backward and forward pass.

Letters: R ranks.
"""

import math
import statistics
import time

import torch
from torch import nn

from gradherd.comm.collectives import all_gather, all_reduce, send_recv
from gradherd.comm.world import World

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
        begin = _now(device)
        send_recv(message, following, previous, world)
        times.append(_now(device) - begin)
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
    for _ in range(_WARMUP_STEPS + _STEPS):
        optimizer.zero_grad()
        begin = _now(device)
        loss = nn.functional.cross_entropy(net(x), y)
        middle = _now(device)
        loss.backward()
        after = _now(device)
        optimizer.step()
        backwards.append(after - middle)
        others.append(_now(device) - after + middle - begin)
    return statistics.median(backwards[_WARMUP_STEPS:]), statistics.median(others[_WARMUP_STEPS:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        # Kernels run asynchronously: without this, only their launch would be timed.
        torch.cuda.synchronize(device)
    return time.perf_counter()
