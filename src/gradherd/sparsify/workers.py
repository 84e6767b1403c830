"""One worker's side of the exchange, and its state.

Letters: D coordinates, R workers, K coordinates that are sent.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.exchange import Outcome, exchange_step
from gradherd.sparsify.message_sizes import MAX_COORDINATES, VALUE_BITS
from gradherd.sparsify.residuals import ErrorFeedback
from gradherd.sparsify.selector import StepContext
from gradherd.sparsify.settings import Sparsify


class Worker:
    """One worker's side of the exchange, and all that it keeps between steps.

    A step is `set_unit`, then `add` for each part of the gradient, then `script` (run by
    `comm.script`), then `commit`. Until `commit` nothing has changed, so a step can be dropped.

    Args:
        settings: The sparsifier and how it is run.
        dim: D, the number of elements of all parameters.
        rank: Which worker this is, from 0.
        size: R.
        sparse: How many coordinates at the start are sparsified; None is all. The others are
            always sent.
        layers: Number of elements of each sparsified parameter; None is one parameter.
        dtype: Dtype of the residual.
        device: Device of the residual.
        feedback: The residual, if it is part of a larger tensor; None makes one.

    Raises:
        ValueError: The vector is too long for int32 indices.
    """

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
        feedback: ErrorFeedback | None = None,
    ) -> None:
        if dim > MAX_COORDINATES:
            raise ValueError(f"{dim:,} coordinates are too many: indices reach {MAX_COORDINATES:,}")
        self.settings = settings
        self.sparse = dim if sparse is None else sparse
        self.rank, self.size = rank, size
        # Where the step is decided: a step that runs on a GPU counts there (`gpu_worker`).
        self.counters = torch.zeros(2, dtype=torch.int64)
        """Steps that were taken, and steps that were called off."""
        self._layers = layers or [self.sparse]
        self.state = settings.method.begin(self.sparse, size, self._layers)
        self.feedback = feedback or ErrorFeedback(
            dim, dtype=dtype, device=torch.device(device), momentum=settings.momentum
        )
        self._learning_rate: float | None = None
        # Thresholds in a method's settings are in the unit of the first step.
        self._first_learning_rate: float | None = None
        self._unit = 1.0

    @property
    def step(self) -> int:
        """Steps that were taken."""
        return int(self.counters[0])

    @property
    def skipped(self) -> int:
        """Steps that were called off."""
        return int(self.counters[1])

    def decide_on(self, device: torch.device) -> None:
        """Keep counters and the method's state on the device where steps are decided."""
        self.counters = self.counters.to(device)
        self.state = self.state.to(device)

    def set_unit(self, loss_scale: float) -> None:
        """Begin a step whose gradients are multiplied by `loss_scale`."""
        self.feedback.begin()
        ratio = self.next_unit(loss_scale)
        if ratio != 1:
            self.state = self.settings.method.rescale(self.state, ratio)

    def next_unit(self, loss_scale: float) -> float:
        """Set the unit of a step; return the factor by which values change, and thresholds must."""
        self._unit = 1 / loss_scale
        if self.settings.learning_rate is None:
            return 1.0
        rate = float(self.settings.learning_rate())
        if not 0 <= rate < math.inf:
            raise ValueError(f"learning_rate must return a number of at least 0, got {rate}")
        self._unit *= rate
        # Rescaling by zero could not be undone. The next rate is compared with the last one that
        # was not zero.
        if not rate:
            return 1.0
        # With residuals in the unit of parameters, values shrink with the learning rate. Thresholds
        # must follow at once: ExDyna's online rule moves by half a percent per step, so after a
        # drop by ten it would send too little for hundreds of steps.
        ratio = 1.0 if self._learning_rate is None else rate / self._learning_rate
        self._learning_rate = rate
        if self._first_learning_rate is None:
            self._first_learning_rate = rate
        return ratio

    @property
    def unit(self) -> float:
        """Factor of the gradients of this step."""
        return self._unit

    @property
    def lr_is_zero(self) -> bool:
        """Whether the learning rate is zero, so that there is nothing to exchange."""
        return self._unit == 0

    def add(self, begin: int, grad: Tensor, *, clear: bool = False) -> None:
        """Add a flat gradient of the coordinates from `begin` on; zero it if `clear`."""
        self.feedback.add(begin, grad, self._unit, clear=clear)

    @property
    def context(self) -> StepContext:
        """Which worker and step this is."""
        compact = self.settings.values in VALUE_BITS
        return StepContext(self.step, self.rank, self.size, compact=compact)

    def script(self) -> Script[Outcome | None]:
        """Return this worker's script of the step."""
        return exchange_step(
            self.feedback.acc,
            self.sparse,
            self.feedback.finite(),
            self.settings.method,
            self.settings.density(self.step),
            self.state,
            self.context,
            self.settings.values,
        )

    def mean_of(self, outcome: Outcome) -> Tensor:
        """Return the (K,) mean in the unit of gradients, clamped to finite values."""
        if self._unit == 1:
            return outcome.mean
        # Dividing by a very small learning rate may overflow; what is cut off stays in the residual
        # (see `written` in `commit`).
        limit = torch.finfo(outcome.mean.dtype).max
        return (outcome.mean / self._unit).clamp_(-limit, limit)

    def commit(
        self,
        outcome: Outcome | None,
        *,
        written: Tensor | None = None,
        excluded: list[tuple[int, int]] | None = None,
    ) -> None:
        """Keep what was not sent; with None the step is called off, and nothing changes.

        Args:
            outcome: What the script returned.
            written: (K,) the mean as the gradients' dtype could hold it; None is exactly.
            excluded: The ranges that `feedback.exclude` was called for.
        """
        if outcome is None:
            # `step` stays: all workers skip together, and the next step has the same leader,
            # partitions and random draw as this one.
            self.counters[1] += 1
            return
        remainder = outcome.remainder
        if written is not None:
            # All workers lost the same part of the mean, so each of them keeps it.
            lost = outcome.mean - (written if self._unit == 1 else written * self._unit)
            remainder = lost if remainder is None else remainder + lost
        self.feedback.commit(
            outcome.indices,
            remainder,
            restarted=self.restarted(outcome),
            low_pass=outcome.selection.low_pass,
            excluded=excluded,
        )
        self.state = outcome.selection.state
        self.counters[0] += 1

    def restarted(self, outcome: Outcome) -> Tensor | None:
        """Return where velocities restart, so that stale momentum does not carry on.

        Momentum factor masking (section 3.3 of Deep Gradient Compression) is for coordinates that
        have waited. What is sent at every step has not: there, velocities are heavy-ball momentum.
        """
        indices = outcome.selection.indices
        if len(indices) >= self.sparse:
            return None
        return indices if outcome.sent is None else indices[outcome.sent[: len(indices)]]

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the residuals, as numbers, lists and tensors.

        Residuals are saved by parameter name instead (`SparseHook`), so that they do not depend
        on the order of parameters in the vector.
        """
        state = None if self.state is None else _fields(self.state)
        rates = {"rate": self._learning_rate, "first_rate": self._first_learning_rate}
        return self._identity() | {"step": self.step, "method": state} | rates

    def _identity(self) -> dict[str, Any]:
        method = type(self.settings.method).__name__
        return {"kind": method, "rank": self.rank, "workers": self.size, "dim": self.sparse}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `state` fits this worker, or is merged from all such workers.

        Args:
            state: From `state_dict`, or from `merge_residuals`, which fits any number of workers.
        """
        free = ("rank", "workers") if _is_merged(state) else ()
        for key, own in self._identity().items():
            if key not in free and state.get(key) != own:
                raise ValueError(f"sparsify state has {key} {state.get(key)!r}, expected {own!r}")
        if self.state is not None and not _is_merged(state):
            self._check_method(state.get("method") or {})

    def _check_method(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError unless the state of the method has the fields and shapes of this one."""
        own = _fields(self.state)
        for name in own:
            if name not in saved:
                raise ValueError(f"sparsify state has no {name!r} of {self.settings.method}")
        for name, value in _fields(type(self.state)(**saved)).items():
            if isinstance(own[name], Tensor) and value.shape != own[name].shape:
                raise ValueError(
                    f"sparsify state has {name} of {value.numel()} elements, expected "
                    f"{own[name].numel()}: was it saved with other settings than "
                    f"{self.settings.method}?"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; from a merged state, the method starts again.

        Args:
            state: From `state_dict` of the same rank, or merged by `merge_residuals`.

        Raises:
            ValueError: The state belongs to another method, rank, world or model.
        """
        # Checked first: a state that does not fit must not be loaded in part.
        self.check_state(state)
        self.counters[0], self._learning_rate = state["step"], state["rate"]
        self._first_learning_rate = state.get("first_rate")
        if self.state is None:
            return
        if _is_merged(state):
            # Partitions and thresholds of the old number of workers mean nothing for this one. A
            # fresh state is in the unit of the first step, so it is brought to that of the last.
            self.state = self.settings.method.begin(self.sparse, self.size, self._layers)
            if self._learning_rate is not None and self._first_learning_rate is not None:
                ratio = self._learning_rate / self._first_learning_rate
                self.state = self.settings.method.rescale(self.state, ratio)
        else:
            # Copied: a step on a GPU overwrites its state in place.
            saved = _fields(type(self.state)(**state["method"]))
            self.state = type(self.state)(**saved)
        if not self.counters.is_cpu:
            self.decide_on(self.counters.device)


def _is_merged(state: Mapping[str, Any]) -> bool:
    return "rank" in state and state["rank"] is None


def _fields(state: Any) -> dict[str, Any]:
    """Return the fields of a state; tensors as copies on the CPU."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in fields.items()
    }
