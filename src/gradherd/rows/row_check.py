"""Rows that prove themselves: do the gradients of single examples add up to the gradient?

On a few batches the rows of each parameter are summed and compared with the gradient that autograd
hands to the parameter in the same backward, before it is accumulated, averaged by DDP or clipped.
Where they differ, the rows describe another function than the one that is trained: the weight is
used outside the module that owns it, the loss contains gradients, or an output stayed hidden. Such
a parameter is left out of the rows from then on.

Shapes: B examples, N elements of a parameter.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.flat import FlatSpec
from gradherd.rows.module_hooks import register_first, remove_hook

log = logging.getLogger("gradherd")

FIRST_CHECKS = 3
"""Batches checked after the start, and after each change of the model's mode."""
CHECK_EVERY = 1000
"""Batches between later checks: paths that depend on the data may come up late."""
MAX_SHARE = 0.5
"""Share of the elements that may be left out before the rest is no basis for an order."""

_RELEVANT_SHARE = 1e-2
"""Share of the whole row below which errors are measured against the whole row."""


# Correct rows reach about 3 unit roundoffs of the sum of the row norms, wrong ones 5 % of it and
# more. Half precision leaves less room between the two than float32.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e4 * 2**-24,
    torch.float16: 16 * 2**-11,
    torch.bfloat16: 16 * 2**-8,
}
_TF32_TOLERANCE = 16 * 2**-11

Registrar = Callable[[nn.Parameter, Callable[[Tensor], None]], Any]
"""Has a function called with each gradient of a parameter; returns what removes it."""


class RowCheck:
    """Compares rows with gradients when a check is due, and remembers which parameters failed."""

    def __init__(
        self,
        spec: FlatSpec,
        parameters: Sequence[nn.Parameter],
        *,
        strict: bool = False,
        register: Registrar | None = None,
        project: Callable[[int, Tensor], Tensor],
    ) -> None:
        """Register a hook on each parameter.

        Args:
            spec: Names and sizes of the parameters.
            parameters: The parameters, in the order of `spec`.
            strict: Raise when a parameter would be left out.
            register: Registers a hook for a parameter's gradient; None is torch's own way, in
                front of the user's hooks.
            project: Linear map of the gradient of a parameter, given by its index, to what rows
                are compared in; returns a tensor of its own.
        """
        self.began: Callable[[], None] = lambda: None
        """Called with each gradient of a parameter, before it is noted."""
        self.left_out: dict[str, str] = {}
        """Names of the parameters that are left out, with the reason."""
        self.due = True
        """Whether the rows of the current batch are to be checked."""
        self.reached = False
        """Whether a backward has reached any parameter since the last `clear`."""
        self._spec = spec
        self._strict = strict
        self._project = project
        self._references: list[Tensor | None] = [None] * len(parameters)
        self._batches = 0
        self._remaining = FIRST_CHECKS
        self._training: bool | None = None
        self._parameters, self._register = parameters, register or register_first
        self._handles: dict[int, Any] = {}
        self._set_hooks()

    def _set_hooks(self) -> None:
        """Register the hooks that are missing and remove those that are not needed."""
        for index, parameter in enumerate(self._parameters):
            # A hook in Python for each of them takes longer than many a small layer. But a backward
            # may reach nothing but parameters that are left out, and counts.
            if self.due or self.is_left_out(index):
                if index not in self._handles:
                    self._handles[index] = self._register(parameter, self._hook(index))
            elif index in self._handles:
                remove_hook(parameter, self._handles.pop(index))

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            self.began()
            self.reached = True
            if self.due:
                self._receive(index, grad.detach().to_dense() if grad.is_sparse else grad.detach())

        return hook

    def _receive(self, index: int, grad: Tensor) -> None:
        """Keep a gradient to compare it with rows."""
        kept = self._project(index, grad)
        before = self._references[index]
        self._references[index] = kept if before is None else before + kept

    def reference(self, index: int) -> Tensor | None:
        """Return the gradient of a parameter in this batch, as projected; None without one."""
        return self._references[index]

    def is_left_out(self, index: int) -> bool:
        """Say whether a parameter is left out."""
        return self._spec.names[index] in self.left_out

    def judge(
        self,
        measured: Mapping[int, tuple[float, float, float]],
        has_rows: Set[int],
        allowed: float,
        dtype: torch.dtype,
    ) -> dict[str, str]:
        """Return the parameters whose errors are too large, with the reason.

        Args:
            measured: For parameters by index, the norm of the difference between rows and
                gradient, the norm of the gradient, and the sum of the norms of the rows.
            has_rows: The parameters that have rows at all.
            allowed: The relative error that their precision allows.
            dtype: Of the rows.
        """
        # Errors that are small beside the whole row do not matter. Without this, a gradient that
        # is nothing but rounding (of a LayerNorm over one feature) would fail.
        floor = _RELEVANT_SHARE * sum(norms for _, _, norms in measured.values())
        reasons: dict[str, str] = {}
        for index, (error, size, norms) in measured.items():
            # Written with `not`, so that an error of NaN fails as well.
            if not error <= allowed * max(norms, floor) + torch.finfo(dtype).tiny * 1e6:
                reasons[self._spec.names[index]] = _reason(error, size, index in has_rows)
        return reasons

    def mask(self, names: Iterable[str]) -> Tensor:
        """Return a byte for each parameter: 1 if it is among `names` or left out already."""
        chosen = {*names, *self.left_out}
        return torch.tensor([name in chosen for name in self._spec.names], dtype=torch.uint8)

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Leave more parameters out, with one line in the log.

        Raises:
            RuntimeError: In strict mode, or if more than half of the elements are left out.
        """
        new = {name: why for name, why in reasons.items() if name not in self.left_out}
        if not new:
            return
        self.left_out |= new
        self._set_hooks()
        sizes = dict(zip(self._spec.names, self._spec.numels, strict=True))
        share = sum(sizes[name] for name in self.left_out) / max(1, self._spec.size)
        listed = "; ".join(f"{name} ({why})" for name, why in list(new.items())[:5])
        listed += f"; and {len(new) - 5} more" if len(new) > 5 else ""
        what = (
            f"{len(self.left_out)} of {len(sizes)} parameters, {share:.1%} of the elements, have "
            f"no usable gradients of single examples: {listed}"
        )
        if self._strict:
            raise RuntimeError(f"{what}. With strict=True nothing may be left out")
        if share > MAX_SHARE:
            raise RuntimeError(
                f"{what}. The rest is too little to order examples by: order whole batches "
                "(unit=batch_size, rows='batch')"
            )
        log.warning("%s; rows leave them out from now on", what)

    def clear(self) -> None:
        """Forget the gradients of the current batch."""
        self.reached = False
        if self.due:
            self._references = [None] * len(self._references)

    def next_batch(self, training: bool) -> None:
        """Forget the current batch, and decide whether the next one is checked.

        Args:
            training: Mode of the model. Other modes may take other paths.
        """
        self.clear()
        self._batches += 1
        # Counted before a change of mode is looked at: that starts the count again.
        self._remaining = max(0, self._remaining - 1)
        if self._training is not None and training != self._training:
            self._remaining = FIRST_CHECKS
        self._training = training
        before = self.due
        self.due = self._remaining > 0 or self._batches % CHECK_EVERY == 0
        if self.due != before:
            self._set_hooks()

    def restart(self) -> None:
        """Check the next batches as if they were the first."""
        self.clear()
        self._remaining, self.due = FIRST_CHECKS, True
        self._set_hooks()

    def remove_hooks(self) -> None:
        """Remove the hooks and forget the current batch."""
        for index, handle in self._handles.items():
            remove_hook(self._parameters[index], handle)
        self._handles = {}
        self.clear()


def _reason(error: float, size: float, has_rows: bool) -> str:
    if not has_rows:
        return "no call of the module that owns it led to its gradient"
    off = f"{error / size:.0%} off" if size > 0 else "the gradient is 0"
    return f"they do not add up to its gradient, {off}: is it used outside the module that owns it?"


def tolerance(tensors: Iterable[Tensor]) -> float:
    """Return the relative error that sums over these tensors may have."""
    widest = 0.0
    for dtype, cuda in {(t.dtype, t.is_cuda) for t in tensors if t.is_floating_point()}:
        widest = max(widest, TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16]))
        matmul = torch.get_float32_matmul_precision()
        if dtype == torch.float32 and matmul == "medium":
            widest = max(widest, TOLERANCES[torch.bfloat16])
        # Convolutions use TF32 by default.
        elif (
            dtype == torch.float32
            and cuda
            and (matmul == "high" or torch.backends.cudnn.allow_tf32)
        ):
            widest = max(widest, _TF32_TOLERANCE)
    return widest
