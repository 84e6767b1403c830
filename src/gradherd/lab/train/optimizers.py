"""Optimizer steps: torch's own for one model, and the same maths for many stacked models.

Letters: S runs, D parameters.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

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


def set_lr(optimizer: torch.optim.Optimizer, rate: float) -> None:
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


def worker_seed(seed: int, worker: int) -> int:
    """Return the seed of what a worker draws for itself, such as dropout."""
    return (seed + 1) * 1_000_003 + worker


def get_rng_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a model on this device draws from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_rng_states(states: list[Tensor], device: torch.device) -> None:
    """Let generators go on from these states."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


State = tuple[Tensor, ...]
"""What an optimizer remembers of S runs, each (S, ...)."""
# torch's own.
_BETAS, _EPS, _CLIP_EPS = (0.9, 0.999), 1e-8, 1e-6


@dataclass(frozen=True, kw_only=True)
class FunctionalOptimizer:
    """The settings of an optimizer that do not change from step to step."""

    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None

    @classmethod
    def of(cls, config: RunConfig) -> "FunctionalOptimizer":
        """Return the rule of a run."""
        return cls(
            optimizer=config.optimizer,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            clip=config.clip,
        )

    def start(self, parameters: Tensor) -> State:
        """Return what is remembered before the first step of (S, D) parameters."""
        if self.optimizer == "adamw":
            # In double precision, as torch has it: 1 - 0.999 loses digits otherwise.
            taken = parameters.new_zeros((len(parameters), 1), dtype=torch.float64)
            return torch.zeros_like(parameters), torch.zeros_like(parameters), taken
        return (torch.zeros_like(parameters),)

    def move(
        self, parameters: Tensor, state: State, rate: Tensor, grads: Tensor
    ) -> tuple[Tensor, State]:
        """Return (S, D) parameters and the state after a step; nothing is changed in place.

        Args:
            parameters: (S, D).
            state: As `start` or the last step gave it.
            rate: (S, 1) learning rates.
            grads: (S, D) averaged gradients.
        """
        if self.clip is not None:
            norm = torch.linalg.vector_norm(grads, dim=1, keepdim=True)
            grads = grads * (self.clip / (norm + _CLIP_EPS)).clamp(max=1.0)
        step: Callable[..., tuple[Tensor, State]]
        step = self._adamw if self.optimizer == "adamw" else self._sgd
        return step(parameters, state, rate, grads)

    def _sgd(
        self, parameters: Tensor, state: State, rate: Tensor, grads: Tensor
    ) -> tuple[Tensor, State]:
        decay = self.weight_decay
        push = grads.add(parameters, alpha=decay) if decay else grads
        velocity = state[0] * self.momentum + push
        return parameters - rate * velocity, (velocity,)

    def _adamw(
        self, parameters: Tensor, state: State, rate: Tensor, grads: Tensor
    ) -> tuple[Tensor, State]:
        first, second, taken = state
        taken = taken + 1
        first = torch.lerp(first, grads, 1 - _BETAS[0])
        second = _BETAS[1] * second + (1 - _BETAS[1]) * grads * grads
        parts = [(1 - beta**taken).to(parameters.dtype) for beta in _BETAS]
        size = (second / parts[1]).sqrt() + _EPS
        moved = parameters * (1 - rate * self.weight_decay)
        return moved - rate / parts[0] * first / size, (first, second, taken)
