"""Coordination under FSDP2: the reduce-scatter and the ordering of whole batches share an exchange.

FSDP reduces gradients by a reduce-scatter. Here it is an all-to-all: this rank receives its slice
of every worker's gradient, for the bytes of a ring reduce-scatter. Their mean is the shard of the
gradient that FSDP wants, and the slices are what coordinated balancing needs.

Where the slices do not come for free, the gradient is exchanged separately when the batch is fed
back: under `set_requires_gradient_sync(False)` and in the backward that ends it, which reduces the
sum of several batches, and with replicas (HSDP), where a reduce-scatter sees some workers only.

Shapes: R ranks (the workers), C columns of this rank over all parameters.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradherd.comm.collectives import all_to_all
from gradherd.comm.sliced_mean import Columns, mean_of_rows
from gradherd.comm.stopwatch import Stopwatch
from gradherd.comm.world import World
from gradherd.hooks.coordinated_hook import Release, SlicedTransport
from gradherd.hooks.fsdp_torch import ShardedGroup, ShardedParameter, sharded_groups
from gradherd.hooks.layouts import ColumnLayout, ShardSpan
from gradherd.ordering.sampler import OrderedSampler


class SlicingReduceScatter:
    """A reduce-scatter for FSDP that keeps this rank's slice of every rank's gradient."""

    def __init__(self, owner: "ShardedCoordination", group: ShardedGroup, before: Any) -> None:
        self._owner, self._group, self._before = owner, group, before

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Allocate memory as torch does."""
        memory: Tensor = self._before.allocate(*args, **kwargs)
        return memory

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the reduced (N,) input to the (N / R,) output."""
        world = World(dist.get_rank(group), dist.get_world_size(group), group)
        with self._owner.stopwatch:
            # FSDP lays out its input rank by rank, so row r is what rank r is to receive.
            block, sent = all_to_all(input_tensor.view(world.size, -1), world)
            # Rows are added in float32 or better, whatever the dtype of the reduction.
            mean_of_rows(block, output_tensor, share=self._group.share(op))
        self._owner.total_bytes += sent
        self._owner.keep(self._group, block)


class ShardedCoordination(SlicedTransport):
    """Lets FSDP average its gradients, and the sampler learn from whole batches of all workers."""

    def __init__(self, model: nn.Module, sampler: OrderedSampler, world: World) -> None:
        """Hook into the model's groups. All ranks must do so at the same point.

        Args:
            model: A model that `fully_shard` was called on.
            sampler: The sampler that learns.
            world: The ranks that train.
        """
        super().__init__(model, sampler, world)
        self._groups = sharded_groups(model)
        self._replaces = shares_reduce_scatter(self._groups, world)
        spans = tuple(
            # Without the reduce-scatter any cut would do; a flat one pads least.
            ShardSpan(p.name, *((p.shape, p.dim) if self._replaces else ((_numel(p),), 0)))
            for group in self._groups
            for p in group.parameters
        )
        self.layout, widths = ColumnLayout(spans), [span.width(world.size) for span in spans]
        ends = list(accumulate(widths))
        self._columns = {
            span.name: slice(end - width, end)
            for span, end, width in zip(spans, ends, widths, strict=True)
        }
        self.total_bytes, self.stopwatch = 0, Stopwatch()
        self._blocks: list[tuple[Sequence[ShardedParameter], Tensor, float]] = []
        self._rows: Tensor | None = None  # (R, C) of the batch that is being signed
        self._handles: list[Any] = []
        for group in self._groups if self._replaces else []:
            self._handles.append(group.note_present())
            self._handles.append(
                group.set_reduce_scatter(partial(SlicingReduceScatter, self, group))
            )

    @property
    def waiting(self) -> bool:
        """Whether a gradient has arrived that was not fed back yet."""
        return bool(self._blocks or self._separate)

    def _comes_alone(self) -> bool:
        # What waits at the first gradient of a backward is of earlier ones.
        alone = all(group.reduces and not group.accumulates for group in self._groups)
        return self._replaces and alone

    def keep(self, group: ShardedGroup, block: Tensor) -> None:
        """Keep the (R, n) slices of one reduce-scatter until the batch is fed back."""
        if self._decided and self._shares:
            # What FSDP has divided by before the reduction (half precision) is multiplied back:
            # rows are plain gradients.
            factor, _ = group.divide_factors(block.dtype)
            self._blocks.append((group.noted, block, factor))

    def _take_slices(self) -> tuple[Columns, Release]:
        """Return the (R, C) columns of all groups; zero where a parameter had no gradient."""
        size, (blocks, self._blocks) = self.world.size, (self._blocks, [])
        assert blocks, "every backward that coordinates ends with a reduce-scatter"
        wide = torch.promote_types(blocks[0][1].dtype, torch.float32)
        self._thread.wait()  # for the batch before, which is in the same memory
        rows = self._rows
        if rows is None or rows.dtype != wide:
            device = blocks[0][1].device
            rows = torch.empty(size, self.layout.width(size), dtype=wide, device=device)
        self._rows = rows
        # Parameters without a gradient in this batch are in no block.
        rows.zero_()
        for present, block, factor in blocks:
            at = 0
            for parameter in present:
                width = parameter.padded_numel(size)
                if parameter.name in self._columns:  # else it was frozen when this was attached
                    own = rows[:, self._columns[parameter.name]]
                    own.add_(block[:, at : at + width], alpha=factor)
                at += width
        return (rows,), self._refill

    def _refill(self, instead: Tensor | None) -> None:
        # The memory of the slices is filled again when the batch was signed, if it is not kept.
        self._rows = self._rows if instead is None else instead

    def _exchange_separately(self, grads: dict[str, Tensor]) -> tuple[Columns, Release, int]:
        # Whole gradients: FSDP has not reduced them, or has reduced them together with earlier
        # ones.
        rows, sent = all_to_all(self.layout.cut(grads, self.world.size), self.world)
        return (rows.to(torch.promote_types(rows.dtype, torch.float32)),), _nothing, sent

    def _drop_slices(self) -> None:
        self._blocks = []

    def metrics(self) -> dict[str, Any]:
        """Return what reducing gradients has cost, where ordering shares that exchange."""
        return super().metrics() if self._replaces else {}

    def close(self) -> None:
        """Remove the hooks, stop the thread and close its group."""
        for handle in self._handles:
            handle.remove()
        super().close()


def _nothing(instead: Tensor | None) -> None:
    """Stand for a release of memory that is used once."""


def shares_reduce_scatter(groups: Sequence[ShardedGroup], world: World) -> bool:
    """Return whether every reduce-scatter is between all workers and may be replaced."""
    return world.size > 1 and all(
        group.shard_world.ranks() == world.ranks()
        and group.replicate_world.size == 1
        and not group.has_own_reduce_scatter()
        for group in groups
        if group.parameters
    )


def _numel(parameter: ShardedParameter) -> int:
    return math.prod(parameter.shape)
