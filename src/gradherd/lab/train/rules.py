"""Steps of the optimizers as pure functions on many models at once.

The same maths as `steps.make_optimizer` and `steps.clip_and_step`: those of torch.

Letters: S runs, D parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradherd.lab.train.config import RunConfig

State = tuple[Tensor, ...]
"""What an optimizer remembers of S runs, each (S, ...)."""
# torch's own.
_BETAS, _SMALLEST, _CLIP_SMALLEST = (0.9, 0.999), 1e-8, 1e-6


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The settings of an optimizer that do not change from step to step."""

    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None

    @classmethod
    def of(cls, config: RunConfig) -> "Rule":
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
            grads = grads * (self.clip / (norm + _CLIP_SMALLEST)).clamp(max=1.0)
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
        size = (second / parts[1]).sqrt() + _SMALLEST
        moved = parameters * (1 - rate * self.weight_decay)
        return moved - rate / parts[0] * first / size, (first, second, taken)
