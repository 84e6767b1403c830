"""Rows that prove themselves: do the gradients of single examples add up to the gradient?

On a few batches the rows of each parameter are summed and compared with the gradient that autograd
hands to the parameter in the same backward, before it is accumulated, averaged by DDP or clipped.
Where they differ, the rows describe another function than the one that is trained: the weight is
used outside the module that owns it, the loss contains gradients, or an output stayed hidden. Such
a parameter is left out of the rows from then on.

Shapes: B examples, n columns of a parameter's rows.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.flat import FlatSpec
from gradherd.rows.layer_plan import ParameterUse, arrived_rows
from gradherd.rows.module_hooks import register_first, remove_hook
from gradherd.rows.sink import SinkPool, at_least_float32
from gradherd.rows.sink_layers import DirectLayer

log = logging.getLogger("gradherd")

FIRST_CHECKS = 3
"""Batches checked after the start, and after each change of the model's mode."""
CHECK_EVERY = 1000
"""Batches between later checks: paths that depend on the data may come up late."""
MAX_SHARE = 0.5
"""Share of the elements that may be left out before the rest is no basis for an order."""
CHECK_FAILED = 3
"""Stands for every parameter in the mask of a rank whose check raised an error."""

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
Apart = dict[str, list[tuple[int, Tensor]]]
"""Rows (B, n) by the name of the parameter: of each use, behind its slot."""


class RowCheck:
    """Compares rows with gradients when a check is due, and remembers which parameters failed."""

    def __init__(
        self,
        spec: FlatSpec,
        parameters: Sequence[nn.Parameter],
        uses: Mapping[str, Sequence[ParameterUse]],
        pool: SinkPool,
        *,
        strict: bool = False,
        register: Registrar | None = None,
        also_at: Sequence[int] = (),
    ) -> None:
        """Register a hook on each parameter.

        Args:
            spec: Names and sizes of the parameters.
            parameters: The parameters, in the order of `spec`.
            uses: The layers that use each parameter, by its name.
            pool: Has the rows that have arrived, and is told whether those of the next batch are to
                be checked.
            strict: Raise when a parameter would be left out.
            register: Registers a hook for a parameter's gradient; None is torch's own way, in
                front of the user's hooks.
            also_at: Numbers of more batches that are checked.
        """
        self.left_out: dict[str, str] = {}
        """Names of the parameters that are left out, with the reason."""
        self.reached = False
        """Whether a backward has reached any parameter since the last `clear`."""
        self.dtypes = {p.dtype for p in parameters}
        """In which the model computes."""
        self.failures: dict[str, str] | None = None
        """Parameters of this batch without usable rows, with the reason; None before the check."""
        self._spec, self._uses, self._pool = spec, uses, pool
        self._parameters = dict(zip(spec.names, parameters, strict=True))
        self._strict, self._register = strict, register or register_first
        # Projected gradients of this batch, by the name of the parameter and by slot.
        self._references: dict[str, dict[int, Tensor]] = {}
        self.batches = 0
        """Batches so far."""
        self._also_at = also_at
        self._remaining = FIRST_CHECKS
        self._training: bool | None = None
        pool.is_apart = True
        self._handles: dict[str, Any] = {}
        self._set_hooks()

    def _set_hooks(self) -> None:
        """Register the hooks that are missing and remove those that are not needed."""
        for name, parameter in self._parameters.items():
            # A hook in Python for each of them takes longer than many a small layer. But a backward
            # may reach nothing but parameters that are left out, and counts.
            if self._pool.is_apart or name in self.left_out:
                if name not in self._handles:
                    self._handles[name] = self._register(parameter, self._hook(name))
            elif name in self._handles:
                remove_hook(parameter, self._handles.pop(name))

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            self._pool.begin()
            self.reached = True
            if self._pool.is_apart and name in self._uses:
                self._receive(name, grad.detach().to_dense() if grad.is_sparse else grad.detach())

        return hook

    def _receive(self, name: str, grad: Tensor) -> None:
        """Keep a gradient to compare it with rows."""
        known = self._references.setdefault(name, {})
        with torch.no_grad():
            for slot, use in {use.slot: use for use in self._uses[name]}.items():
                kept = use.project(at_least_float32(grad))
                # A copy: it may be the gradient itself, which DDP averages in place.
                known[slot] = known[slot] + kept if slot in known else kept.clone()

    @property
    def is_regular(self) -> bool:
        """Whether the current batch is checked in any case, not just after a start."""
        every = self.batches > 0 and self.batches % CHECK_EVERY == 0
        return every or self.batches in self._also_at

    def check(self, examples: int) -> Tensor:
        """Return a byte for each parameter, not 0 if something is wrong with its rows."""
        apart = {
            name: found
            for name, uses in self._uses.items()
            if name not in self.left_out
            # In a graph idle layers have none; they share no parameters.
            and ((found := arrived_rows(uses, self._pool.arrived)) or not uses[0].layer.is_idle)
        }
        self.failures = self._judge(apart, self._tolerance())
        self.failures |= self._used_once(apart, examples) | self.without_batch()
        chosen = {*self.failures, *self.left_out}
        return torch.tensor([name in chosen for name in self._spec.names], dtype=torch.uint8)

    def _judge(self, apart: Apart, allowed: float) -> dict[str, str]:
        """Return the parameters whose errors are too large, with the reason."""
        measured: dict[str, list[float]] = {}
        for name, found in apart.items():
            known = self._references.get(name, {})
            # A parameter without any rows is compared with its gradient.
            each = [
                _compare([rows for at, rows in found if at == slot], known.get(slot))
                for slot in dict(found) or known
            ]
            error, size, norms = torch.stack(each).sum(0).tolist() if each else (0.0, 0.0, 0.0)
            if math.isfinite(size):
                measured[name] = [error, size, norms]
        # Errors that are small beside the whole row do not matter. Without this, a gradient that
        # is nothing but rounding (of a LayerNorm over one feature) would fail.
        floor = _RELEVANT_SHARE * sum(norms for _, _, norms in measured.values())
        least = torch.finfo(self._pool.like.dtype).tiny * 1e6
        # Written with `not`, so that an error of NaN fails as well.
        return {
            name: _reason(error, size, bool(apart[name]))
            for name, (error, size, norms) in measured.items()
            if not error <= allowed * max(norms, floor) + least
        }

    def _used_once(self, apart: Apart, examples: int) -> dict[str, str]:
        """Return parameters with a copy for each example of which only the first was used."""
        once = {}
        for name, found in apart.items():
            if found and examples > 1 and isinstance(self._uses[name][0].layer, DirectLayer):
                rows = found[0][1][:examples]
                used, same = (rows != 0).any(1), (rows == rows[:1]).all()
                if bool(used[0]) and (not bool(used[1:].any()) or bool(same)):
                    once[name] = "its module uses it once for all examples"
        return once

    def without_batch(self) -> dict[str, str]:
        """Return the parameters of layers whose input holds no examples, with the reason."""
        pool, strangers = self._pool, self._pool.strangers
        if not strangers:
            return {}
        if pool.last_batch is None and pool.given_dim is None:
            raise ValueError(
                f"the loop calls parts of the attached model ({', '.join(strangers)}), not the "
                "model itself, so it is not known which dimension of their inputs holds the "
                "examples: call the model, or give the settings of rows batch_dim=0 if it is the "
                "first one"
            )
        return {
            name: strangers[use.layer.name]
            for name, uses in self._uses.items()
            for use in uses
            if use.layer.name in strangers
        }

    def _tolerance(self) -> float:
        """Return the relative error that sums may have."""
        pool = self._pool
        dtypes = {*self.dtypes, *pool.dtypes, pool.like.dtype}
        if any(getattr(layer, "in_float32", False) for layer in pool.layers):
            dtypes.add(torch.float32)
        widest = max(TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16]) for dtype in dtypes)
        if torch.float32 in dtypes:
            matmul = torch.get_float32_matmul_precision()
            # Convolutions use TF32 by default.
            rounds = matmul == "high" or torch.backends.cudnn.allow_tf32
            if matmul == "medium":
                widest = max(widest, TOLERANCES[torch.bfloat16])
            elif rounds and pool.like.is_cuda:
                widest = max(widest, _TF32_TOLERANCE)
        return widest

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
        for name in new:
            for use in self._uses.get(name, ()):
                use.silence(self._pool.arrived)
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
        """Forget the current batch."""
        self.reached, self.failures = False, None
        self._references.clear()

    def next_batch(self, training: bool) -> None:
        """Forget the current batch, and decide whether the next one is checked.

        `training` is the mode of the model: another one may take other paths.
        """
        self.clear()
        self.batches += 1
        # Counted before a change of mode is looked at: that starts the count again.
        self._remaining = max(0, self._remaining - 1)
        if self._training is not None and training != self._training:
            self._remaining = FIRST_CHECKS
        self._training = training
        before = self._pool.is_apart
        self._pool.is_apart = self._remaining > 0 or self.is_regular
        if self._pool.is_apart != before:
            self._set_hooks()

    def restart(self) -> None:
        """Check the next batches as if they were the first."""
        self.clear()
        self._remaining, self._pool.is_apart = FIRST_CHECKS, True
        self._set_hooks()

    def remove_hooks(self) -> None:
        """Remove the hooks and forget the current batch."""
        for name, handle in self._handles.items():
            remove_hook(self._parameters[name], handle)
        self._handles = {}
        self.clear()


def _compare(uses: Sequence[Tensor], reference: Tensor | None) -> Tensor:
    """Return (3,) the norms of error and gradient, and the sum of the norms of the rows."""
    rows = [at_least_float32(one) for one in uses]
    # Of each use by itself: rows of two uses may cancel.
    norms = [one.norm(dim=1).sum() for one in rows]
    sums = [one.sum(0) for one in rows]
    if reference is not None:
        sums.append(-reference.to(sums[0] if sums else reference))
    error = torch.stack(sums).sum(0)
    size = error.new_zeros(()) if reference is None else sums[-1].norm()
    return torch.stack([error.norm(), size, sum(norms, error.new_zeros(()))])


def _reason(error: float, size: float, has_rows: bool) -> str:
    if not has_rows:
        return "no call of the module that owns it led to its gradient"
    off = f"{error / size:.0%} off" if size > 0 else "the gradient is 0"
    return f"they do not add up to its gradient, {off}: is it used outside the module that owns it?"
