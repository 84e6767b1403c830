"""The sparse exchange in DDP's communication hook, and between replicas of a sharded model.

Under DDP the whole gradient is exchanged after the last bucket, since selection needs all of it;
every bucket then gets its part of the mean, and the backward waits for that.

Residuals are one flat vector. On a CPU it is in the order of the model, small parameters last, and
a `Placement` translates to the buckets, which DDP rebuilds after the first step. On a GPU it lies
as the buckets do and follows them, so that one kernel adds a whole bucket as it arrives. States are
by parameter.

Inside a replica `fully_shard` reduces gradients as ever: a reduce-scatter gives every rank its
shard. Its all-reduce hook adds the shard to a vector of this rank's and leaves zeros in its place.
At the end of the backward the vector is exchanged with the ranks that hold the same shard in other
replicas, and the mean is added to p.grad.

Shapes: D elements of all parameters, or of this rank's shards, in the flat vector, K of them that
are sent.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.checks import MOST_BROKEN
from gradherd.comm.collectives import all_gather
from gradherd.comm.world import World
from gradherd.flat import exchangeable, in_memory_order, local_shard, plain_name
from gradherd.hooks.bucket_hook import BucketHook, row_sparse_parameters
from gradherd.hooks.exchange import GradientExchange
from gradherd.hooks.fsdp import ShardedGroup, ShardedWorlds, is_inner, is_last_backward
from gradherd.hooks.parameter_hooks import ParameterUsage
from gradherd.sparsify.gpu_worker import GpuSteps, runs_on_device
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.worker import Placement, clip_together
from gradherd.torch_names import call_after_backward, current_backward, scale_on_device


class SparseHook(BucketHook, GradientExchange):
    """Exchanges a DDP model's gradients sparsely, with error feedback."""

    # They hold a few rows each, and the sum of some rows is exact: nothing to select or to keep.
    passes_sparse = True

    def __init__(self, ddp: DDP, settings: Sparsify, scaler: GradScaler | None) -> None:
        """Register with DDP, whose hook must be free. All ranks must do so at the same point."""
        parameters, world = sparsifiable(ddp), World.of(ddp.process_group)
        GradientExchange.__init__(self, ddp, parameters, settings, world, None, scaler)
        # After the checks: registering a hook with DDP cannot be undone.
        BucketHook.__init__(self, ddp, world)
        self._clip = settings.clip
        self._slices: dict[Tensor, slice] = {
            p: self.layout.slices[name] for name, p in parameters.items()
        }
        self._flats: list[Tensor] = []  # the buckets of the exchange that runs
        self._placement: Placement | None = None  # of the parameters in them
        # A backward may leave parameters unused; DDP itself tracks that only then.
        may_vary = ddp.find_unused_parameters or ddp.static_graph
        self._usage = ParameterUsage(ddp) if may_vary else None
        # Which ones it has used must be read on the host, once per step.
        on_device = self._usage is None and runs_on_device(self._worker)
        self._steps = GpuSteps(self._worker) if on_device else None
        self._late: list[tuple[int, dist.GradBucket]] = []  # not added before all have arrived
        self._exchanges = 0
        self._last_counts = [-1, 0]
        self._copied: tuple[Tensor, torch.cuda.Event] | None = None

    def add(self, bucket: dist.GradBucket) -> Future[Tensor] | None:
        """Add a bucket to the residual on a GPU, beside the rest of the backward."""
        if self._steps is None:
            return None
        number = len(self._collected) - 1
        if number == 0:
            self._late = []
            scale = scale_on_device(self._scaler)
            self._steps.begin(None if scale is None else scale.float())
        # All are clipped together. And the residual, which lies as the buckets do, is laid out anew
        # once all are known.
        if self._clip is not None or not self.is_known(number, bucket):
            self._late.append((number, bucket))
            return None
        return self._steps.add(number, bucket.buffer())

    def exchange(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Exchange what the method selects, and write the mean into the buckets."""
        flats = self._flats = [bucket.buffer() for bucket in buckets]
        if self._clip is not None:
            scale = scale_on_device(self._scaler)
            clip_together(flats, self._clip if scale is None else self._clip * scale.double())
        if self.learn(buckets):
            self._place(buckets)
        if self._steps is None:
            self._step_on_host(buckets)
        else:
            for number, bucket in self._late:
                self._steps.add(number, bucket.buffer())
            sent = self._steps.exchange(flats, self.world)
            self.total_bytes += sent
            self._metrics = {"bytes": sent}
            self._look_back()
        # DDP replaces its first buckets: who holds on to them keeps a gradient's memory alive.
        self._flats, self._late = [], []

    def _step_on_host(self, buckets: Sequence[dist.GradBucket]) -> None:
        self._begin()
        for bucket in buckets:
            parameters = bucket.parameters()
            parts = bucket.buffer().split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter in self._slices:
                    # Cleared in the same kernel: `_write` writes only what was sent.
                    self._worker.add(self._slices[parameter].start, part, clear=True)
                else:  # It was frozen when the hook was attached, so it has no residual.
                    self._average_whole(part)
        self._run(None if self._usage is None else self._usage.take())

    def _write(self, indices: Tensor, mean: Tensor, used: set[str]) -> Tensor:
        assert self._placement is not None
        return self._placement.write(self._flats, self._placement.positions(indices), mean)

    def _spoil(self, used: set[str]) -> None:
        for flat in self._flats:
            flat.fill_(torch.nan)

    def _place(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Find out where parameters lie in other buckets; on a GPU the residual follows them."""
        here = {p for bucket in buckets for p in bucket.parameters()}
        if missing := [name for name, p in self.parameters.items() if p not in here]:
            raise RuntimeError(
                f"{missing[0]} was frozen when DDP was made ({len(missing)} such parameters), and "
                "DDP will never average its gradient: make DDP after unfreezing"
            )
        spans = [
            [
                (self._slices[p].start if p in self._slices else None, p.numel())
                for p in bucket.parameters()
            ]
            for bucket in buckets
        ]
        self._placement = Placement(spans, self._worker.sparse, self._residual.device)
        if self._steps is None:
            return
        # Parameters that were frozen when this was attached have no residual.
        if here == self._slices.keys() and len({one.buffer().dtype for one in buckets}) == 1:
            self._steps.place(self._placement)
        else:  # DDP's first buckets, of which nothing was added: the host takes over for good.
            self._steps = None

    def _look_back(self) -> None:
        """Every so many steps, see how those before went: the GPU is never waited for."""
        self._exchanges += 1
        if self._exchanges % MOST_BROKEN:
            return
        done, skipped = self._last_counts
        if self._copied is not None:
            counts, copied = self._copied
            copied.synchronize()  # long ago
            self._last_counts = counts.tolist()
            if self._last_counts[1] > skipped:
                self._broken.note(MOST_BROKEN if self._last_counts[0] == done else 1)
        counters = self._worker.counters
        if counters.is_cuda:
            event = torch.cuda.Event()
            self._copied = counters.to("cpu", non_blocking=True), event
            event.record()

    def last_step(self) -> dict[str, Any]:
        """Return the metrics of the last step that need no computation; waits for a GPU."""
        on_device = {} if self._steps is None else self._steps.metrics()
        return on_device | self._metrics

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        # As buckets are, from which gradients come; on a GPU they lie as in the buckets, too.
        feedback, slices = self._worker.feedback, self.layout.slices
        return {
            name: in_memory_order(feedback.part(flat, slices[name].start, p.numel()), p)
            for name, p in self.parameters.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was saved."""
        super().load_state_dict(state)
        if self._steps is not None:
            self._steps.reset()

    def close(self) -> None:
        """Remove the hooks on parameters; DDP keeps its hook, which only averages from now on."""
        super().close()
        if self._usage is not None:
            self._usage.remove()


def sparsifiable(ddp: DDP) -> dict[str, nn.Parameter]:
    """Return the parameters to exchange, by name: not those with row-sparse gradients.

    Raises:
        ValueError: A parameter is not real, or there is none.
    """
    ignored = set(getattr(ddp, "parameters_to_ignore", ()))
    by_rows = row_sparse_parameters(ddp)
    parameters = exchangeable(
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if name not in ignored and parameter not in by_rows
    )
    if not parameters:
        raise ValueError(
            "every parameter has row-sparse gradients (sparse=True), which are exchanged by rows "
            "already: leave sparsify out"
        )
    return parameters


class ShardedSparseHook(GradientExchange):
    """Exchanges a sharded model's gradients sparsely between its replicas."""

    def __init__(
        self,
        model: nn.Module,
        settings: Sparsify,
        worlds: ShardedWorlds,
        world: World,
        scaler: GradScaler | None,
    ) -> None:
        """Hook into the model's groups. All ranks must do so at the same point."""
        parameters = exchangeable(model.named_parameters())
        super().__init__(model, parameters, settings, world, worlds, scaler)
        self._model, self._slices = model, self.layout.slices
        # Groups may be reduced several times before an exchange: layers that are used twice, and
        # set_requires_all_reduce(False).
        self._grad = torch.zeros_like(self._residual)
        self._touched: set[str] = set()
        self._averages = True
        self._backward = -1  # the number of the last one; no backward has this
        self._handles = [
            group.set_all_reduce_hook(partial(self._collect, group)) for group in worlds.groups
        ]

    def _collect(self, group: ShardedGroup, reduced: Tensor) -> None:
        """Add the flat result of a reduce-scatter to this rank's vector, and clear it."""
        if is_inner(self._model):
            raise RuntimeError(
                "the model is part of a larger one that fully_shard was called on: attach to that"
            )
        if current_backward() != self._backward:
            # After FSDP's own callback, which waits for the reduced gradients: it came first.
            self._backward = current_backward()
            call_after_backward(self._end_of_backward)
        # Read here, in the backward: the loop may set it anew before each one.
        self._averages = group.averages_replicas
        # Torch divides after this hook, but what is cleared here never gets there.
        _, divisor = group.divide_factors(reduced.dtype)
        at = 0
        with self.stopwatch:
            for parameter in group.noted:
                piece, name = reduced[at : at + parameter.local_numel], plain_name(parameter.name)
                if name in self._slices:
                    self._grad[self._slices[name]].add_(piece, alpha=1 / divisor)
                    self._touched.add(name)
                    piece.zero_()
                else:  # It was frozen when the hook was attached, so it has no residual.
                    self._average_whole(piece)
                at += parameter.span.width(self.shards.size)

    def _end_of_backward(self) -> None:
        """Exchange what this backward has reduced, and add the mean to p.grad."""
        # Without a reduction (set_requires_gradient_sync), or to be averaged over replicas later.
        if not self._touched or not self._averages or not is_last_backward(self._model):
            return
        with self.stopwatch, torch.no_grad():
            touched, self._touched = self._touched, set()
            loss_scale = self._begin()
            if self._worker.settings.clip is not None:
                # The gradient of a replica: every rank of its shards has a part.
                own = torch.linalg.vector_norm(self._grad, dtype=torch.float64)
                norms, sent = all_gather(own.view(1), self.shards)
                self.total_bytes += sent
                most = self._worker.settings.clip * loss_scale
                clip_together([self._grad], most, torch.linalg.vector_norm(norms))
            self._worker.add(0, self._grad, clear=True)
            # Inside a replica all ranks use the same parameters, or the reduce-scatter itself would
            # fail. Replicas may differ.
            self._run(touched)

    def _local_grad(self, name: str) -> Tensor:
        """Return this rank's shard of p.grad, flat."""
        parameter = self.parameters[name]
        if parameter.grad is None:  # used by other replicas only
            parameter.grad = torch.zeros_like(parameter)
        return local_shard(parameter.grad).view(-1)

    def _spoil(self, used: set[str]) -> None:
        for name in used:
            self._local_grad(name).fill_(torch.nan)

    def _write(self, indices: Tensor, mean: Tensor, used: set[str]) -> Tensor:
        """Add the (K,) mean to p.grad; return (K,) what the dtypes of the gradients could hold."""
        self._grad.index_copy_(0, indices, mean)  # it was cleared, and is again below
        for name in used:
            part, grad = self._grad[self._slices[name]], self._local_grad(name)
            if grad.dtype != part.dtype:
                limit = torch.finfo(grad.dtype).max
                part.copy_(part.clamp(-limit, limit).to(grad.dtype))
            grad.add_(part.to(grad.dtype))
        written = self._grad[indices]
        self._grad.index_fill_(0, indices, 0)
        return written

    def _vectors(self) -> dict[str, Tensor]:
        return super()._vectors() | {"partial": self._grad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was saved."""
        super().load_state_dict(state)
        self._touched = set(self.parameters) if self._grad.any() else set()

    def close(self) -> None:
        """Leave the model, whose replicas nobody averages from now on."""
        super().close()
        for handle in self._handles:
            handle.remove()
