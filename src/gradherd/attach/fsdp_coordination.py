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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradherd.attach.coordinated_hook import SliceSigner
from gradherd.attach.fsdp_torch import ShardedGroup, ShardedParameter, sharded_groups
from gradherd.attach.layouts import ShardLayout, ShardSpan
from gradherd.attach.parameter_hooks import ParameterHooks
from gradherd.comm.collectives import all_to_all
from gradherd.comm.sliced_mean import mean_of_rows
from gradherd.comm.stopwatch import Stopwatch
from gradherd.comm.world import World
from gradherd.flat import FlatSpec
from gradherd.ordering.batch_claims import BatchClaim
from gradherd.ordering.policy import COLUMNS
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


class ShardedCoordination:
    """Lets FSDP average its gradients, and the sampler learn from whole batches of all workers."""

    def __init__(self, model: nn.Module, sampler: OrderedSampler, world: World) -> None:
        """Hook into the model's groups. All ranks must do so at the same point.

        Args:
            model: A model that `fully_shard` was called on.
            sampler: The sampler that learns.
            world: The ranks that train.
        """
        self._model, self._sampler, self.world = model, sampler, world
        self._groups = sharded_groups(model)
        self._shares = shares_reduce_scatter(self._groups, world)
        self.layout = ShardLayout(
            tuple(
                # Without the reduce-scatter any cut would do; a flat one pads least.
                ShardSpan(p.name, *((p.shape, p.dim) if self._shares else ((_numel(p),), 0)))
                for group in self._groups
                for p in group.parameters
            )
        )
        self._signer = SliceSigner(sampler, world)
        self._separate_bytes = 0
        self.total_bytes = 0
        """Bytes that this rank has sent to reduce gradients, if ordering shares that exchange."""
        self.stopwatch = Stopwatch()
        """Time spent in the reduce-scatter."""
        self.waiting = False
        """Whether a gradient has arrived that was not fed back yet."""
        self._blocks: list[tuple[Sequence[ShardedParameter], Tensor, float]] = []
        self._present: dict[int, Sequence[ShardedParameter]] = {}
        self._separate: dict[str, Tensor] = {}
        self._decided = self._coordinates = False
        # Two sets: signs are computed from one beside the training loop while the other is filled.
        self._buffers: list[Tensor | None] = [None, None]
        self._hooks = ParameterHooks(model, self._arrived)
        self._handles: list[Any] = []
        for group in self._groups if self._shares else []:
            self._handles.append(group.before_reduce(self._noting(group)))
            self._handles.append(
                group.set_reduce_scatter(partial(SlicingReduceScatter, self, group))
            )

    @property
    def bytes(self) -> int:
        """Bytes that this rank has sent for ordering alone."""
        return self._separate_bytes + self._signer.bytes

    def on_backward(self, began: Callable[[], None]) -> None:
        """Call `began` before the first gradient of each backward."""
        self._hooks.began = began

    def prepare(self) -> None:
        """Reset before a backward, also after one that failed."""
        self._drop()

    def _drop(self) -> None:
        self._blocks, self._separate = [], {}
        self._decided = self.waiting = False

    def _arrived(self, name: str, grad: Tensor) -> None:
        if not self._decided:
            # At the first gradient of a backward: what waits now is of earlier ones.
            alone = all(group.reduces and not group.accumulates for group in self._groups)
            self._coordinates, self._decided = self._shares and alone, True
        self.waiting = True
        if not self._coordinates:
            # A parameter may have several gradients: two backwards of one forward are one batch.
            before = self._separate.get(name)
            self._separate[name] = grad.clone() if before is None else before.add_(grad)

    def _noting(self, group: ShardedGroup) -> Callable[[], None]:
        """Return a hook that notes which parameters the next reduce-scatter contains."""

        def note() -> None:
            self._present[id(group)] = group.present()

        return note

    def keep(self, group: ShardedGroup, block: Tensor) -> None:
        """Keep the (R, n) slices of one reduce-scatter until the batch is fed back."""
        if self._decided and self._coordinates:
            # What FSDP has divided by before the reduction (half precision) is multiplied back:
            # rows are plain gradients.
            factor, _ = group.divide_factors(block.dtype)
            self._blocks.append((self._present[id(group)], block, factor))

    def feed(self, claim: BatchClaim | None, loss_scale: float) -> None:
        """Start to sign this batch of every worker beside the training loop.

        Args:
            claim: The units that the gradient belongs to; None if it counts for nothing.
            loss_scale: What the loss was multiplied by (GradScaler).
        """
        rows = self._joined_blocks() if self._coordinates else self._exchange_separately()
        self._drop()
        self._signer.submit(rows, claim, loss_scale)

    def _joined_blocks(self) -> Tensor:
        """Return the (R, C) columns of all groups; zero where a parameter had no gradient."""
        size = self.world.size
        assert self._blocks, "every backward that coordinates ends with a reduce-scatter"
        wide = torch.promote_types(self._blocks[0][1].dtype, torch.float32)
        # The older of the two: its signs are done, as `submit` waits for the batch before.
        rows = self._buffers.pop(0)
        if rows is None or rows.dtype != wide:
            device = self._blocks[0][1].device
            rows = torch.empty(size, self.layout.columns(size), dtype=wide, device=device)
        self._buffers.append(rows)
        # Parameters without a gradient in this batch are in no block, and the buffer holds an
        # earlier batch.
        rows.zero_()
        starts = self.layout.starts(size)
        for present, block, factor in self._blocks:
            at = 0
            for parameter in present:
                width = parameter.padded_numel(size)
                if parameter.name in starts:  # else it was frozen when this was attached
                    rows[:, starts[parameter.name]].add_(block[:, at : at + width], alpha=factor)
                at += width
        return rows

    def _exchange_separately(self) -> Tensor:
        """Return (R, C) slices of a gradient that no reduce-scatter held alone."""
        # Whole gradients: FSDP has not reduced them, or has reduced them together with earlier
        # ones.
        grads = {name: grad for name, grad in self._separate.items()}
        rows, sent = all_to_all(self.layout.cut(grads, self.world.size), self.world)
        self._separate_bytes += sent
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def by_index(self) -> None:
        """Refuse batches that are given by their examples.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "whole batches that are exchanged with FSDP's gradients cannot be given by index: "
            "their order would differ between ranks; attach with rows='sketch'"
        )

    def wait(self) -> None:
        """Return when the signs of all batches are computed."""
        self._signer.wait()

    def finish(self) -> None:
        """Return when the signs of all batches are computed."""
        self._signer.wait()

    def forget(self) -> None:
        """Drop a gradient that was not fed back yet."""
        self._drop()

    def metrics(self) -> dict[str, Any]:
        """Return what reducing gradients has cost, where ordering shares that exchange."""
        if not self._shares:
            return {}
        return {"exchange_seconds": self.stopwatch.seconds, "total_bytes": self.total_bytes}

    def close(self) -> None:
        """Remove the hooks, stop the thread and close its group."""
        for handle in self._handles:
            handle.remove()
        self._hooks.remove()
        self._signer.close()

    def ordering_state(self) -> dict[str, Any]:
        """Return the state of the ordering with the columns of all ranks. All ranks must call it.

        Columns are in the order of the model's parameters, as under DDP: the state depends neither
        on the mesh nor on the number of ranks.
        """
        state = self._sampler.ordering.state_dict()
        names, balance = FlatSpec.of(self._model).names, state["balance"]
        for key in COLUMNS:
            if key in balance:
                gathered = [self.layout.gather(row, self.world) for row in balance[key]]
                rows = [torch.cat([by_name[name] for name in names]) for by_name in gathered]
                balance[key] = torch.stack(rows)
        return state

    def load_ordering_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the ordering and cut out this rank's columns."""
        self._sampler.ordering.load_state_dict(state)
        spec = FlatSpec.of(self._model)

        def columns(row: Tensor) -> Tensor:
            by_name = dict(zip(spec.names, spec.split(row), strict=True))
            # The state has whole rows on every rank, so nothing is sent to load it.
            return self.layout.cut(by_name, self.world.size)[self.world.rank]

        self._sampler.ordering.map_columns(columns)


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
