"""What one worker remembers between steps: residuals, the method's state, the step."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.choice import Place
from gradherd.sparsify.exchange import WIRES
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
        if not rate > 0:
            raise ValueError(f"learning_rate must be positive at a step, got {rate}")
        if self._rate is not None and rate != self._rate:
            self.state = self.settings.method.rescale(self.state, rate / self._rate)
        self._rate = rate
        self._unit *= rate

    def add(self, begin: int, grad: Tensor) -> None:
        """Take a flat gradient of the coordinates from `begin` on, and clear it."""
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
            WIRES[self.settings.values],
        )

    def commit(
        self, outcome: Outcome | None, left_out: list[tuple[int, int]] | None = None
    ) -> Tensor | None:
        """Keep what did not travel; return the (K,) mean in the units of gradients.

        None where a worker had something that is not finite: then all is as it was before.
        """
        if outcome is None:
            self.feedback.discard()
            self.skipped += 1
            return None
        self.feedback.commit(
            outcome.indices, outcome.left, low_pass=outcome.chosen.low_pass, left_out=left_out
        )
        self.state = outcome.chosen.state
        self.step += 1
        return outcome.mean if self._unit == 1 else outcome.mean / self._unit

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
