"""The optimizer's side of a step, the same for real ranks and workers in one process."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gradherd.lab.train.config import RunConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: RunConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the settings."""
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_and_step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float | None
) -> None:
    """Clip the averaged gradient and step."""
    if clip is not None:
        nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()


def flat_grad(parameters: list[nn.Parameter]) -> Tensor:
    """Return (D,) all gradients in one vector; one that is missing is zero."""
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
    )


def seed_of_worker(seed: int, worker: int) -> int:
    """Return the seed of what a worker draws for itself, such as dropout."""
    return (seed + 1) * 1_000_003 + worker


def generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a model on this device draws from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_generator_states(states: list[Tensor], device: torch.device) -> None:
    """Let generators go on from these states."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
