"""What one worker remembers between steps: residuals, the method's state, the step."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.choice import Place
from gradherd.sparsify.feedback import Feedback
from gradherd.sparsify.reducer import Outcome, reduce
from gradherd.sparsify.settings import Sparsify


class Worker:
    """One worker's side of the exchange: `add` gradients, run `script`, then `commit`."""

    def __init__(
        self,
        settings: Sparsify,
        dim: int,
        *,
        rank: int,
        size: int,
        sparse: int | None = None,
        layers: list[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.settings = settings
        self.sparse = dim if sparse is None else sparse
        self._rank, self._size = rank, size
        self.step = 0
        self.skipped = 0
        self.state = settings.method.begin(self.sparse, size, layers or [self.sparse])
        self.feedback = Feedback(
            dim, dtype=dtype, device=torch.device(device), momentum=settings.momentum
        )
        self._rate: float | None = None
        self._unit = 1.0

    def set_unit(self, loss_scale: float) -> None:
        """Prepare a step whose gradients were multiplied by `loss_scale`."""
        self._unit = 1 / loss_scale
        if self.settings.learning_rate is None:
            return
        rate = float(self.settings.learning_rate())
        if not 0 <= rate < math.inf:
            raise ValueError(f"learning_rate must tell a number of at least 0, got {rate}")
        self._unit *= rate
        if not rate:
            return
        if self._rate is not None and rate != self._rate:
            self.state = self.settings.method.rescale(self.state, rate / self._rate)
        self._rate = rate

    @property
    def weightless(self) -> bool:
        """Whether the learning rate is zero: there is nothing to exchange then."""
        return self._unit == 0

    def add(self, begin: int, grad: Tensor) -> None:
        """Take a flat gradient of the coordinates from `begin` on."""
        self.feedback.add(begin, grad, self._unit)

    def script(self) -> Script[Outcome | None]:
        """Return what this worker says in this step."""
        return reduce(
            self.feedback.acc,
            self.sparse,
            self.feedback.finite(),
            self.settings.method,
            self.settings.density(self.step),
            self.state,
            Place(self.step, self._rank, self._size),
            torch.bfloat16 if self.settings.values == "bf16" else self.feedback.kept.dtype,
        )

    def mean_of(self, outcome: Outcome) -> Tensor:
        """Return the (K,) mean in the units of gradients."""
        return outcome.mean if self._unit == 1 else outcome.mean / self._unit

    def commit(
        self,
        outcome: Outcome | None,
        *,
        lost: Tensor | None = None,
        left_out: list[tuple[int, int]] | None = None,
    ) -> None:
        """Keep what did not travel; None calls the step off, and all is as it was before.

        Args:
            outcome: What the script returned.
            lost: (K,) what of the mean could not be written to the gradients.
            left_out: What `feedback.leave_out` was called for.
        """
        if outcome is None:
            self.skipped += 1
            return
        left = outcome.left
        if lost is not None and bool(lost.any()):
            # Everybody lost the same part of the mean, so everybody keeps it.
            mine = lost * self._unit
            left = mine if left is None else left + mine
        self.feedback.commit(
            outcome.indices,
            left,
            sent=outcome.sent,
            low_pass=outcome.chosen.low_pass,
            left_out=left_out,
        )
        self.state = outcome.chosen.state
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return all but the residuals: numbers, lists and tensors."""
        state = None if self.state is None else _fields(self.state)
        return {"step": self.step, "rate": self._rate, "method": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.step, self._rate = state["step"], state["rate"]
        if self.state is not None:
            self.state = type(self.state)(**state["method"])


def _fields(state: Any) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
