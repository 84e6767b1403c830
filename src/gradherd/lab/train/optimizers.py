"""Optimizer steps: torch's own for one model, and the same maths for many stacked models.

Letters: S runs, D parameters.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.lab.tasks.defaults import Hyperparameters
from gradherd.lab.train import POWERSGD
from gradherd.lab.train.config import RunConfig
from gradherd.sparsify.settings import Sparsify, make_settings


def make_optimizer(parameters: Iterable[nn.Parameter], config: RunConfig) -> torch.optim.Optimizer:
    """Return the optimizer that the settings ask for."""
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_and_step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float | None
) -> None:
    """Clip the averaged gradient and take a step."""
    if clip is not None:
        nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()


def sparse_settings(config: RunConfig) -> Sparsify:
    """Return how gradients are exchanged in a run that has a density."""
    clip = None if config.clip is None else config.clip * math.sqrt(config.workers)
    settings: dict[str, Any] = {"clip": clip, **(config.method or {})}
    return make_settings(config.sparsify, config.density, **settings)


def mean_clip(config: RunConfig) -> float | None:
    """Return where the averaged gradient is clipped; None if it is not.

    With a sparsifier workers clip their own gradients instead, before these join the residuals. The
    mean of R independent gradients is smaller by the root of R than each of them, so the same
    setting allows each that many times as much (Deep Gradient Compression, arXiv:1712.01887,
    section 3.2, which says so of their sum).
    """
    sparse = config.density is not None and config.sparsify != POWERSGD
    return None if sparse and config.local_steps is None else config.clip


def flat_grad(parameters: list[nn.Parameter]) -> Tensor:
    """Return (D,) all gradients in one vector, zeros for parameters without one."""
    return torch.cat(
        # A branch that was not used has no gradient, but its place in the vector stays.
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
    )


def worker_seed(seed: int, worker: int) -> int:
    """Return the seed of a worker's own random numbers, such as dropout masks.

    >>> worker_seed(seed=0, worker=3)
    1000006
    """
    # A prime apart, so that workers of neighbouring seeds do not share numbers; far from the seed
    # of the model itself.
    return (seed + 1) * 1_000_003 + worker


def get_rng_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a model on this device uses."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_rng_states(states: list[Tensor], device: torch.device) -> None:
    """Set the generators to these states."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


State = tuple[Tensor, ...]
"""State of an optimizer over S runs; the first dimension of each tensor is S."""
# The defaults of torch.optim.AdamW and clip_grad_norm_.
_BETAS, _EPS, _CLIP_EPS = (0.9, 0.999), 1e-8, 1e-6


@dataclass(frozen=True)
class FunctionalOptimizer:
    """The step of an optimizer as a pure function on S stacked models.

    `make_optimizer` and `clip_and_step` compute the same for one model. A pure function can be
    traced and captured, and takes a learning rate per run.
    """

    settings: Hyperparameters

    def init(self, parameters: Tensor) -> State:
        """Return the state before the first step of (S, D) parameters."""
        if self.settings.optimizer == "adamw":
            # In double precision, as in torch: 1 - 0.999**t would lose digits in float32.
            steps = parameters.new_zeros((len(parameters), 1), dtype=torch.float64)
            return torch.zeros_like(parameters), torch.zeros_like(parameters), steps
        return (torch.zeros_like(parameters),)

    def update(
        self, parameters: Tensor, state: State, lr: Tensor, grads: Tensor
    ) -> tuple[Tensor, State]:
        """Return (S, D) parameters and the state after a step; nothing is changed in place.

        Args:
            parameters: (S, D).
            state: As returned by `init` or the previous step.
            lr: (S, 1) learning rates.
            grads: (S, D) averaged gradients.
        """
        if (clip := self.settings.clip) is not None:
            norm = torch.linalg.vector_norm(grads, dim=1, keepdim=True)
            # Multiplied always, by 1 if nothing is clipped: a branch would be frozen into the
            # graph.
            grads = grads * (clip / (norm + _CLIP_EPS)).clamp(max=1.0)
        step: Callable[..., tuple[Tensor, State]]
        # Settings are Python values: this branch is the same in every step and may be frozen.
        step = self._adamw if self.settings.optimizer == "adamw" else self._sgd
        return step(parameters, state, lr, grads)

    def _sgd(
        self, parameters: Tensor, state: State, lr: Tensor, grads: Tensor
    ) -> tuple[Tensor, State]:
        decay = self.settings.weight_decay
        # L2 regularisation, part of the gradient, as in torch.optim.SGD.
        direction = grads.add(parameters, alpha=decay) if decay else grads
        # Two fused operations: a step of a small model is all overhead.
        velocity = torch.add(direction, state[0], alpha=self.settings.momentum)
        return torch.addcmul(parameters, lr, velocity, value=-1), (velocity,)

    def _adamw(
        self, parameters: Tensor, state: State, lr: Tensor, grads: Tensor
    ) -> tuple[Tensor, State]:
        first, second, steps = state
        steps = steps + 1
        first = torch.lerp(first, grads, 1 - _BETAS[0])
        second = _BETAS[1] * second + (1 - _BETAS[1]) * grads * grads
        corrections = [(1 - beta**steps).to(parameters.dtype) for beta in _BETAS]
        scale = (second / corrections[1]).sqrt() + _EPS
        # Decoupled from the gradient, as in torch.optim.AdamW.
        decayed = parameters * (1 - lr * self.settings.weight_decay)
        return decayed - lr / corrections[0] * first / scale, (first, second, steps)
