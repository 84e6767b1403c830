"""Per-example gradients of a model, read off the user's own backward.

Shapes: B examples, D elements of all trainable parameters.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor, nn

from gradherd.flat import FlatSpec
from gradherd.rows.exact_rows import FactoredRows
from gradherd.rows.parameter_owners import (
    ParameterOwner,
    parameter_owners,
    refuse_compiled,
    unwrap_model,
)
from gradherd.rows.row_check import Registrar, RowCheck
from gradherd.rows.row_terms import ParameterTerms, TermReader
from gradherd.rows.terms import DenseTerm, Term, at_least_float32

Reduction = Literal["mean", "sum"]


class Capture:
    """Read per-example gradients off a model's ordinary backward.

    Call `pop_rows` after `backward()` and before `optimizer.step()`. Rows leave
    out parameters that are frozen when the capture is created. They also leave out parameters
    without gradients of single examples; on the first batches and now and then `RowCheck` finds
    those whose rows do not add up to their gradient.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> capture = Capture(model)
    >>> model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).mean().backward()
    >>> capture.pop_rows(2).dense()
    tensor([[1., 2.],
            [3., 4.]])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_dim: int | None = None,
        strict: bool = False,
        batch_size: int | None = None,
        sharded: Registrar | None = None,
        owners: Sequence[ParameterOwner] | None = None,
    ) -> None:
        """Register the hooks.

        Args:
            model: Any module, or one wrapped in DDP.
            batch_dim: Batch dimension of the model's inputs; None takes the first dimension that
                has as many entries as there are examples. Give 1 for time-major models whose
                number of time steps may equal the batch size.
            strict: Raise where a parameter would be left out.
            batch_size: Examples in a full batch of the loader, if they are known. Then batch
                dimensions are found before the first backward, and rows of checkpointed layers are
                formed as their gradients arrive, if that takes less memory than input and gradient.
            sharded: For a model whose modules hold shards of their parameters between passes
                (FSDP): hooks the gradients of whole parameters. Rows leave out modules without a
                rule: those are run again, for which their parameters would have to be gathered.
            owners: Read the parameters of these modules only; None reads all.
        """
        refuse_compiled(model)
        model = unwrap_model(model)
        if owners is None:
            owners = list(parameter_owners(model))
        # A set of tensors by identity: tied weights appear in several owners, but once in a row.
        owned = {p for owner in owners for p in owner.parameters.values()}
        self.spec = FlatSpec.of(model, owned)
        self._model = model
        parameters = [p for p in model.parameters() if p in owned]
        self._check = RowCheck(self.spec, parameters, strict=strict, register=sharded)
        # Fixes dtype and device of the rows, also for a batch without any gradient.
        self._like = torch.empty(0)
        if parameters:
            first = parameters[0]  # not new_empty: a shard's would be a DTensor
            self._like = at_least_float32(torch.empty(0, dtype=first.dtype, device=first.device))
        try:
            self._reader = TermReader(
                model,
                owners,
                self.spec,
                self._check,
                batch_dim,
                like=self._like,
                batch_size=batch_size,
                sharded=sharded is not None,
            )
        except RuntimeError:  # too much would be left out
            self._check.remove_hooks()
            raise
        self._recorder = self._reader.recorder
        self._terms: ParameterTerms | None = None
        self._failures: dict[str, str] = {}

    def on_backward(self, began: Callable[[], None]) -> None:
        """Call `began` before the first gradient of each backward."""
        self._recorder.began = began

    @property
    def num_calls(self) -> int:
        """Number of module calls that are held for their gradients until the next pop."""
        return len(self._recorder.calls)

    @property
    def waiting(self) -> bool:
        """Whether a backward has reached a parameter since the last pop."""
        return self._check.reached

    @property
    def seconds_in_backward(self) -> float:
        """Seconds spent on rows inside backwards so far."""
        return self._reader.seconds

    @property
    def left_out(self) -> dict[str, str]:
        """Names of the parameters that rows leave out, with the reason."""
        return dict(self._check.left_out)

    def pop_rows(
        self, examples: int, *, reduction: Reduction = "mean", loss_scale: float = 1.0
    ) -> FactoredRows:
        """Return the rows of everything recorded since the last pop, and forget it.

        Several backwards before a pop add up, as those of one loss would.

        Args:
            examples: B, the number of examples of the batch.
            reduction: How the loss reduces the examples. "mean": rows are multiplied by B, so
                that they are the gradients of single examples. "sum": they are left as they are.
            loss_scale: Factor that the loss was multiplied by (GradScaler); rows are divided by
                it.
        """
        scale = row_scale(examples, reduction, loss_scale)
        early, held = self._pop_terms(examples)
        terms = tuple(
            (*(DenseTerm(rows) for rows in early.get(index, ())), *uses)
            for index, uses in enumerate(held)
        )
        return FactoredRows(self.spec, terms, examples, scale, self._like)

    def _early_rows(self, examples: int) -> dict[int, list[Tensor]]:
        """Return the rows read during the backward that count, by parameter."""
        early: dict[int, list[Tensor]] = {}
        for one in self._reader.early:
            if one.examples != examples:
                self.clear()
                raise RuntimeError(
                    f"the model was given {one.examples} examples, but the batch has "
                    f"{examples}: one batch of the loader is one forward"
                )
            if one.task in self._check.tasks[one.parameter]:
                early.setdefault(one.parameter, []).append(one.rows)
        return early

    def check_bitmask(self, examples: int) -> Tensor | None:
        """Check the rows that wait if a check is due.

        Ranks must leave out the same parameters. Each calls this before a pop, combines the masks
        of all ranks, and gives the result to `leave_out`. With one worker, a pop does so itself.

        Args:
            examples: B, the number of examples of the batch.

        Returns:
            A byte for each parameter, 1 if it has to be left out; None if no check is due.
        """
        if not self._check.due:
            return None
        terms = self._read_terms(examples)
        # Kept for the pop, which would otherwise compute them a second time.
        self._terms = terms
        hint = (
            "the loss contains gradients (create_graph=True)" if self._recorder.create_graph else ""
        )
        self._failures = self._check.failures(
            terms.by_parameter, terms.tolerances, examples, self._like, hint
        )
        self._failures |= terms.unbatched
        return self._check.mask(self._failures)

    def leave_out(self, mask: Tensor) -> None:
        """Leave out the parameters whose byte in `mask` is not 0, from the rows that wait on.

        Raises:
            RuntimeError: In strict mode, or if more than half of the elements are left out.
        """
        chosen = [name for name, byte in zip(self.spec.names, mask.tolist(), strict=True) if byte]
        reasons = {name: self._failures.get(name, "on another rank") for name in chosen}
        try:
            self._check.leave_out(reasons)
        except RuntimeError:
            self.clear()
            raise

    def ignored(self) -> AbstractContextManager[None]:
        """Return a context in which forwards are not recorded, as those of another search."""
        return self._recorder.silent()

    def restart_checks(self) -> None:
        """Check the next batches as if they were the first, such as after loading a state."""
        self._check.restart()
        self._recorder.records_model = True

    def clear(self) -> None:
        """Forget everything recorded."""
        self._reader.clear()
        self._terms = None
        self._check.clear()

    def remove_hooks(self) -> None:
        """Remove the hooks and forget everything."""
        self._recorder.remove_hooks()
        self._check.remove_hooks()
        self.clear()

    def _pop_terms(
        self, examples: int
    ) -> tuple[dict[int, list[Tensor]], tuple[tuple[Term, ...], ...]]:
        """Return the rows read early, and the other terms, of each parameter; forget the calls."""
        try:
            early = self._early_rows(examples)
            if self._terms is None and (mask := self.check_bitmask(examples)) is not None:
                self.leave_out(mask)
            terms = self._terms
            if terms is None:
                terms = self._read_terms(examples)
                # Not in step with other ranks, which follow with the next check.
                self._check.leave_out(terms.unbatched)
        finally:
            self.clear()
            self._check.next_batch(self._model.training)
            # The model's own calls hold its inputs, and are needed to probe batch dimensions only.
            self._recorder.records_model = self._check.due
        left_out, names = self._check.left_out, self.spec.names
        early = {index: rows for index, rows in early.items() if names[index] not in left_out}
        return early, tuple(
            () if name in left_out else tuple(uses)
            for name, uses in zip(names, terms.by_parameter, strict=True)
        )

    def _read_terms(self, examples: int) -> ParameterTerms:
        try:
            return self._reader.read(examples)
        except Exception:
            self.clear()  # otherwise the same error would come at every step
            raise


def row_scale(examples: int, reduction: str, loss_scale: float) -> float:
    """Return the factor from what a backward gives to the gradients of single examples."""
    if examples < 1:
        raise ValueError(f"examples must be at least 1, got {examples}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if not loss_scale > 0:
        raise ValueError(f"loss_scale must be positive, got {loss_scale}")
    # A mean divides the loss of each example by B; its own gradient is B times what arrived.
    return (examples if reduction == "mean" else 1) / loss_scale
