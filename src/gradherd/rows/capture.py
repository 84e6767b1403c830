"""Rows of a whole model, read off the user's own backward: exact, or sketches.

Every layer hands over its rows during the backward (`rows.sink`). For sketches a layer maps each
example's gradient to a few columns, which are added to a row at a place of their own; for exact
rows it hands over the gradients themselves. The backward of modules without such a layer runs once
for each example, and hands over gradients, too (`rows.looped_modules`).

Shapes: B examples, N columns of a map, k elements of a row, D elements of all parameters.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.flat import FlatSpec
from gradherd.rows.batch_dims import BatchDims
from gradherd.rows.factored_rows import FactoredRows
from gradherd.rows.layer_choice import CHOSEN_AFTER, CHOSEN_AGAIN, LayerChoice
from gradherd.rows.layer_plan import LayerPlan, arrived_rows, compiled_modules, unwrap_model
from gradherd.rows.module_hooks import UncopiedHook
from gradherd.rows.outer_rows import OuterRows
from gradherd.rows.row_check import CHECK_FAILED, Registrar, RowCheck
from gradherd.rows.settings import (
    DEFAULT_RANK,
    TOKEN_RANK,
    ExactRows,
    SketchRows,
    TwoSidedRows,
    row_length,
)
from gradherd.rows.sink import ROW, SINGLE, SinkPool, SketchedLayer, at_least_float32
from gradherd.rows.sink_layers import DirectLayer
from gradherd.rows.sink_maps import Map, MapSettings
from gradherd.rows.sketch import CountSketch, hashes
from gradherd.torch_names import mark_constant

log = logging.getLogger("gradherd")

# Gradients that `matrix` maps at a time.
_MATRIX_ROWS = 1024
_EXACT = ExactRows()


# What a traced model hands on as it is. A tuple: torch before 2.10 cannot trace unions of types.
_TRACED = (Tensor, bool, int, float, str)


class Capture:
    """Read per-example gradients, or sketches of them, off a model's ordinary backward.

    Call `pop_rows` after `backward()`. Rows leave out parameters that are frozen when the capture
    is created. They also leave out parameters without gradients of single examples; on the first
    batches and now and then `RowCheck` finds those whose rows do not add up to their gradient.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> capture = Capture(model)
    >>> model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).mean().backward()
    >>> capture.pop_rows(2)
    tensor([[1., 2.],
            [3., 4.]])
    """

    def __init__(
        self,
        model: nn.Module,
        settings: ExactRows | SketchRows | TwoSidedRows = _EXACT,
        *,
        batch_size: int | None = None,
        sharded: Registrar | None = None,
        keeps_factors: bool = False,
    ) -> None:
        """Tap the layers.

        Args:
            model: Any module, or one wrapped in DDP or by torch.compile.
            settings: Which rows: sizes, seed and reduction.
            batch_size: Examples in a full batch of the loader. A model that was compiled before its
                first batch needs it.
            sharded: For a model whose modules hold shards of their parameters between passes
                (FSDP): hooks the gradients of whole parameters. Rows leave out modules without a
                layer.
            keeps_factors: Whether exact rows of weights are not formed, where what they are made
                of is smaller: `pop` returns `FactoredRows`.
        """
        outer, model = model, unwrap_model(model)
        self.spec = FlatSpec.of(model)
        self._model, self._reduction = model, settings.reduction
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        # Fixes dtype and device of the rows, also for a batch without any gradient.
        self._like = torch.empty(0)
        if self._parameters:
            first = self._parameters[0]  # not new_empty: a shard's would be a DTensor
            self._like = at_least_float32(torch.empty(0, dtype=first.dtype, device=first.device))
        maps = _map_settings(settings, model, self.spec.size, self._like)
        self._keeps_factors = keeps_factors and maps.is_exact
        maps = replace(maps, keeps_factors=self._keeps_factors)
        self._size = maps.size
        if not maps.is_exact:
            self._sketch = CountSketch(maps.size, maps.seed)
        self._pool = SinkPool(
            self._like,
            batch_size,
            is_exact=maps.is_exact,
            keeps_factors=self._keeps_factors,
            is_sharded=sharded is not None,
        )
        self._pool.given_dim = settings.batch_dim
        self._dims = BatchDims(model, self._pool, batch_size=batch_size)
        self._look_traced = mark_constant(lambda *given: self._look_at_given(*given))
        plan = LayerPlan(model, self.spec, maps, self._pool, self._dims)
        self._uses, self._untap = plan.uses, plan.untap
        # Parameters whose gradients arrive as they are, and not as columns.
        self._whole = [name for name, uses in self._uses.items() if uses[0].layer.is_whole]
        # Maps of the others by the key of what arrives: of each layer by itself, and of all.
        self._sketched: dict[str, tuple[SketchedLayer | None, Map]] = {
            own: (layer, one)
            for layer in self._pool.layers
            if not layer.is_whole
            for own, one in zip(layer.own_keys, layer.maps, strict=True)
            if one is not None
        }
        self._place([one for _, one in self._sketched.values()])
        self._sketched |= {one.key: (None, one) for _, one in [*self._sketched.values()]}
        most = None if isinstance(settings, ExactRows) else settings.layers
        self._choice = LayerChoice(self._pool, self._open_to_choice(), most)
        self._check = RowCheck(
            self.spec,
            self._parameters,
            self._uses,
            self._pool,
            strict=settings.strict,
            register=sharded,
            also_at=(CHOSEN_AFTER, CHOSEN_AGAIN) if self._choice.is_needed else (),
        )
        if batch_size is not None:
            self._pool.make_sinks(batch_size)
        before = UncopiedHook(self._before_model, self._before_compiled)
        after = UncopiedHook(self._after_model, self._after_model)
        # In front of FSDP's own hook: the model is run inside.
        self._handles = [
            outer.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            outer.register_forward_hook(after, always_call=True),
        ]
        try:
            self._check.leave_out(plan.left_out)
        except RuntimeError:
            self.remove_hooks()
            raise

    # What happens in a step.

    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        pool = self._pool
        if not torch.is_grad_enabled() or pool.recorded is not None or not pool.is_open:
            return
        if self._parameters and self._parameters[0].device != self._like.device:
            raise RuntimeError(
                f"the model is on {self._parameters[0].device} now, but it was attached on "
                f"{self._like.device}: move it first, then attach"
            )
        examples = self._look_at(args, kwargs)
        if examples is not None and examples > pool.examples:
            pool.make_sinks(examples)
        pool.batch = pool.last_batch = examples

    def _after_model(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._pool.recorded is None:
            self._pool.batch = None

    def _look_at(self, args: Any, kwargs: Any) -> int | None:
        """Return the examples of a batch; find batch dimensions if its kind is new."""
        kind_of_device = self._like.device.type
        if torch.is_autocast_enabled(kind_of_device):
            self._check.dtypes.add(torch.get_autocast_dtype(kind_of_device))
        return self._dims.look_at(args, kwargs)

    # The same while the model is traced: these are part of the graph.

    def _before_compiled(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._pool.recorded is not None:
            return
        given = (*args, *kwargs.values())
        odd = [one for one in given if one is not None and not isinstance(one, _TRACED)]
        if not odd:
            self._look_traced(len(args), tuple(kwargs), *given)
        dim, pool = self._dims.model_dim, self._pool
        first = _first_tensor(given, dim)
        pool.batch = None if first is None else first.shape[dim]
        if torch.is_grad_enabled():
            pool.last_batch = pool.batch

    def _look_at_given(self, count: int, names: tuple[str, ...], *given: Any) -> None:
        self._look_at(given[:count], dict(zip(names, given[count:], strict=True)))

    def on_backward(self, began: Callable[[], None]) -> None:
        """Call `began` before what each backward brings is noted."""
        self._pool.before_first = began

    @property
    def waiting(self) -> bool:
        """Whether a backward has reached a parameter since the last pop."""
        return bool(self._pool.arrived) or self._check.reached

    def next_part(self) -> None:
        """Put rows to come behind those that wait: the next forward has more of this batch."""
        self._pool.next_part()

    def is_complete(self, examples: int) -> bool:
        """Return whether all B = `examples` of a batch have rows that wait."""
        return max(self._pool.seen, default=0) >= examples

    @property
    def left_out(self) -> dict[str, str]:
        """Names of the parameters that rows leave out, with the reason."""
        return dict(self._check.left_out)

    # Checks.

    def check_bitmask(self, examples: int) -> Tensor | None:
        """Check the rows of a batch of B = `examples` that wait, if a check is due.

        Ranks must leave out the same parameters. Each calls this before a pop, combines the masks
        of all ranks, and gives the result to `leave_out`. With one worker, a pop does so itself.

        Returns:
            A byte for each parameter, not 0 if something is wrong with it, and the levels of
            layers (`LayerChoice`); None if no check is due.
        """
        if not self._pool.is_apart:
            return None
        self._refuse_mismatch(examples)
        mask, choice = self._check.check(examples), self._choice
        levels = choice.levels(examples) if self._may_choose() else choice.no_levels()
        return torch.cat([mask, levels])

    def failed_check(self) -> Tensor:
        """Return the mask of a rank whose check raised an error."""
        mask = torch.full((len(self.spec.names),), CHECK_FAILED, dtype=torch.uint8)
        return torch.cat([mask, self._choice.no_levels()])

    def leave_out(self, mask: Tensor) -> None:
        """Leave out the parameters whose byte in `mask` says so, from the rows that wait on.

        And read the layers that its levels choose.

        Raises:
            RuntimeError: In strict mode, or if more than half of the elements are left out.
        """
        count = len(self.spec.names)
        flags = dict(zip(self.spec.names, mask[:count].tolist(), strict=True))
        chosen = [name for name, byte in flags.items() if byte]
        failures = self._check.failures or {}
        try:
            self._check.leave_out({name: failures.get(name, "on another rank") for name in chosen})
        except RuntimeError:
            self.clear()
            raise
        self._choice.choose(mask[count:])

    def _refuse_mismatch(self, examples: int) -> None:
        sizes = self._pool.seen
        try:
            for rows in self._pool.arrived.values():
                if isinstance(rows, OuterRows):
                    rows.check()
        except RuntimeError:
            self.clear()
            raise
        if self._pool.differentiated:
            self.clear()
            raise RuntimeError(
                "the loss contains gradients (create_graph=True), of which rows of single examples "
                "know nothing: order whole batches (unit=batch_size, rows='batch')"
            )
        if self._pool.arrived and not sizes and examples > self._pool.examples:
            sizes = {self._pool.examples}
        if self._pool.is_apart and not sizes:  # compiled layers do not tell
            rest = [bool(rows[examples:].any()) for rows in self._pool.arrived.values()]
            sizes = {self._pool.examples} if any(rest) else sizes
        if len(sizes) > 1 or (sizes and examples not in sizes):
            self.clear()
            raise RuntimeError(
                f"the model was given {min(sizes - {examples})} examples, but the batch has "
                f"{examples}: give the model each batch of the loader in one forward, or in "
                "several, each followed by its backward"
            )

    # Rows.

    def pop_rows(self, examples: int, *, loss_scale: Tensor | float = 1.0) -> Tensor:
        """Return the rows (B, k) of everything since the last pop, and forget it; exact: (B, D).

        B = `examples` is the number of examples of the batch; rows are divided by `loss_scale`,
        which the loss was multiplied by (GradScaler). Several backwards before a pop add up, as
        those of one loss would.
        """
        rows = self.pop(examples, loss_scale=loss_scale)
        return rows if isinstance(rows, Tensor) else rows.dense()

    def pop(self, examples: int, *, loss_scale: Tensor | float = 1.0) -> Tensor | FactoredRows:
        """Do the same; with `keeps_factors`, the rows are not formed."""
        # A mean divides the loss of each example by B; its own gradient is B times what arrived.
        scale = (examples if self._reduction == "mean" else 1) / loss_scale
        try:
            self._refuse_mismatch(examples)
            if self._check.failures is None and (mask := self.check_bitmask(examples)) is not None:
                self.leave_out(mask)
            # Not in step with other ranks, which follow with the next check.
            self._check.leave_out(self._check.without_batch())
            with torch.no_grad():
                rows: Tensor | FactoredRows
                if self._keeps_factors:
                    parts = self._whole_rows(examples)
                    rows = FactoredRows(parts, self.spec, examples, self._like, scale)
                else:
                    rows = self._rows(examples).mul_(scale)
        finally:
            self._check.next_batch(self._model.training)
            self.clear()
        return rows

    def _may_choose(self) -> bool:
        """Say whether layers may be chosen by the current batch."""
        if not (self._check.is_regular and self._choice.is_needed):
            return False
        # Blocks that are compiled by themselves share one graph, so they are read alike.
        return not any(compiled_modules(self._model))  # the model's own name is empty

    def _open_to_choice(self) -> list[SketchedLayer]:
        """Return the layers that need not be read."""
        # A weight that is used twice, as by an embedding and a head, is read in both places.
        layers = [{id(use.layer) for use in uses} for uses in self._uses.values()]
        shared = {layer for several in layers if len(several) > 1 for layer in several}
        return [
            layer
            for layer in self._pool.layers
            if not (layer.is_whole or isinstance(layer, DirectLayer) or id(layer) in shared)
        ]

    def _rows(self, examples: int) -> Tensor:
        """Return the rows (B, k), neither averaged nor unscaled; exact: (B, D)."""
        arrived = self._pool.arrived
        total = arrived[ROW] if ROW in arrived else self._like.new_zeros(examples, self._size)
        total = total[:examples]
        # In the order of the backward, in which layers that are not apart were added.
        for key, rows in arrived.items():
            layer, one = self._sketched.get(key, (None, None))
            if one is not None and not (layer and layer.is_idle):
                self._add(total, one, rows[:examples])
        for name, whole in self._whole_rows(examples).items():
            if self._pool.is_exact:
                total[:, self.spec.slices[name]] = whole
            else:
                total += self._sketch(whole, name)
        return total

    def _whole_rows(self, examples: int) -> dict[str, Any]:
        """Return the gradients of parameters that arrive as they are: (B, N), or `OuterRows`."""
        found = {}
        for name in self._whole:
            parts = [rows for _, rows in arrived_rows(self._uses[name], self._pool.arrived)]
            if parts and name not in self._check.left_out:
                found[name] = reduce(add, parts)[:examples]
        return found

    def _place(self, maps: list[Map]) -> None:
        """Decide where in a row the columns of maps are added."""
        lengths = {one.key: one.length for one in maps}
        starts = dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))
        fits = sum(lengths.values()) <= self._size  # side by side, and nothing is lost
        for one in maps:
            room = self._size - one.length
            if fits:
                one.start = starts[one.key]
            elif room >= 0:
                # They have random signs already, so what falls on the same place does not add up.
                one.start = int(hashes(self._sketch.seed, one.key, 0, 1)[0] % (room + 1))
            # Spectra are added up before they are transformed back, others before they are hashed.
            waits = one.start is None or one.length != one.size
            one.place = (one.key, one.size, 0) if waits else (ROW, self._size, one.start or 0)

    def _add(self, total: Tensor, one: Map, columns: Tensor) -> None:
        """Add the columns (B, N) of a map to rows (B, k)."""
        columns = one.vectors(columns)
        if one.start is None:
            total += self._sketch(columns, one.key)
        else:
            total[:, one.start : one.start + columns.shape[1]].add_(columns)

    def matrix(self) -> Tensor:
        """Return (D, k), which takes a gradient to its row; the model must have taken a batch.

        For callers that have the gradients of single examples anyway.
        """
        if self._whole or self._check.left_out or self._choice.idle:
            raise ValueError("rows of this model are not a product of its gradients and a matrix")
        blocks = []
        for name, count, shape in zip(
            self.spec.names, self.spec.numels, self.spec.shapes, strict=True
        ):
            for lo in range(0, count, _MATRIX_ROWS):
                basis = self._like.new_zeros(min(_MATRIX_ROWS, count - lo), count)
                basis.diagonal(lo).fill_(1)
                blocks.append(self.project_rows(name, basis.view(-1, *shape)))
        return torch.cat(blocks)

    def project_rows(self, name: str, grads: Tensor) -> Tensor:
        """Return what gradients (B, *shape) of one parameter add to the rows (B, k)."""
        uses = self._uses[name]
        singles = (use for use in uses if use.slot == SINGLE and use.layer.uses_single)
        use = next(singles, uses[0])
        one: Map = use.layer.maps[use.slot]
        part = grads.new_zeros(len(grads), one.size)
        use.columns(part).copy_(torch.stack([use.project(grad) for grad in grads]))
        total = grads.new_zeros(len(grads), self._size)
        self._add(total, one, part)
        return total

    def restart_checks(self) -> None:
        """Check the next batches as if they were the first."""
        self.clear()
        self._check.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return which layers are read, and after how many batches."""
        return {"batches": self._check.batches, "idle": self._choice.idle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read the same layers; the model may have changed as well, so checks begin again."""
        self._check.batches = state.get("batches", 0)
        self._choice.load(state.get("idle") or ())
        self.restart_checks()

    def clear(self) -> None:
        """Forget everything recorded."""
        self._pool.clear()
        self._check.clear()

    def remove_hooks(self) -> None:
        """Leave the model as it was."""
        self._pool.is_open = False
        for handle in self._handles:
            handle.remove()
        for untap in self._untap:
            untap()
        self._check.remove_hooks()
        self.clear()


def _map_settings(
    settings: ExactRows | SketchRows | TwoSidedRows, model: nn.Module, size: int, like: Tensor
) -> MapSettings:
    """Return sizes and seed of the maps of a model with `size` parameters."""
    if isinstance(settings, ExactRows):
        return MapSettings(0, size, 0, like, is_exact=True)
    tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
    rank = settings.rank if isinstance(settings, TwoSidedRows) else None
    rank = rank or (TOKEN_RANK if tokens else DEFAULT_RANK)
    return MapSettings(rank, row_length(settings, size), settings.seed, like)


def _first_tensor(tree: Any, dim: int) -> Tensor | None:
    """Return the first tensor in nested arguments that has a dimension; traced with the model."""
    if isinstance(tree, Tensor):
        return tree if tree.dim() > dim else None
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, (tuple, list)):
        for one in tree:
            found = _first_tensor(one, dim)
            if found is not None:
                return found
    return None
