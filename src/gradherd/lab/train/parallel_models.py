"""A task's model on real ranks: whole (DDP, local steps), or in shards (FSDP2, HSDP).

All offer the same: a module to train, a whole model to evaluate, and a state to save.
"""

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.sliced_mean import ONE_BUCKET_ELEMENTS, SlicedMean, padded_length
from gradherd.comm.world import World
from gradherd.hooks.attach import attach
from gradherd.hooks.bucket_hook import BucketHook
from gradherd.hooks.herd import Herd
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.trainer import broadcast_buffers
from gradherd.ordering.sampler import OrderedSampler
from gradherd.sparsify.settings import Sparsify


class ParallelModel:
    """A model that several ranks train together; by default every rank holds it whole."""

    def __init__(self, model: nn.Module, config: RunConfig, world: World) -> None:
        self.whole, self._config, self._world = model, config, world
        self.module: Any = model
        """What is trained; `whole` is what is evaluated, after `refresh`."""

    def attach(
        self, order: OrderedSampler, sparsify: Sparsify | None, optimizer: torch.optim.Optimizer
    ) -> Herd:
        """Attach gradherd."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Bring `whole` up to date, on all ranks together: here, give all rank 0's buffers."""
        broadcast_buffers(self.whole, self._world)

    def exchange_costs(self, metrics: Mapping[str, Any], steps: int) -> tuple[float, float]:
        """Return seconds and bytes of exchanging gradients in so many steps."""
        return metrics["exchange_seconds"], metrics["total_bytes"]

    def state(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what rank 0 saves for all ranks, and what this rank saves for itself."""
        return {"model": dict(self.whole.state_dict()), "optimizer": optimizer.state_dict()}, {}

    def load(
        self, shared: Mapping[str, Any], own: Mapping[str, Any], optimizer: torch.optim.Optimizer
    ) -> None:
        """Load what `state` returned; with another number of ranks, `own` is empty."""
        self.whole.load_state_dict(shared["model"])
        optimizer.load_state_dict(shared["optimizer"])


def make_parallel_model(model: nn.Module, config: RunConfig, world: World) -> ParallelModel:
    """Return the model as the settings ask for."""
    if config.local_steps is not None:
        return LocalModel(model, config, world)
    if config.parallel is None:
        return ReplicatedModel(model, config, world)
    return ShardedModel(model, config, world)


class MeanHook(BucketHook):
    """Averages a DDP model's gradients in a hook, and counts what that costs.

    Small models are averaged as one vector by slices (`comm.sliced_mean`): each element is summed
    by one rank in the order of ranks, so workers in one process get the same bits. Large ones are
    averaged bucket by bucket with all-reduce while the backward runs, as DDP does by itself.
    """

    def __init__(self, ddp: DDP, world: World) -> None:
        super().__init__(ddp, world)
        parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        size = sum(p.numel() for p in parameters)
        alike = len({(p.dtype, p.device) for p in parameters}) == 1
        # As one vector only while that is cheap: it waits for the whole backward.
        self._one_bucket = size <= ONE_BUCKET_ELEMENTS and alike and world.size > 1
        # Padded to whole slices per rank, once: the padding stays zero.
        length = padded_length(size, world.size) if self._one_bucket else 0
        self._flat = parameters[0].detach().new_zeros(length)
        self._mean = SlicedMean(world)

    def collects(self) -> bool:
        """Return whether the model is averaged as one vector."""
        return self.active and self._one_bucket

    def average(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average a bucket by all-reduce; count the wait after the last one."""
        begin, future = time.perf_counter(), super().average(bucket)
        if not bucket.is_last() or self.world.size == 1:
            return future

        def arrived(done: Future[Tensor]) -> Tensor:
            self.stopwatch.seconds += time.perf_counter() - begin
            return done.value()

        # Only the wait after the last bucket: earlier ones overlap with the backward.
        return future.then(arrived)

    def exchange(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Average all buckets as one vector."""
        buffers = [bucket.buffer() for bucket in buckets]
        flats = self._flat[: sum(map(len, buffers))].split([len(buffer) for buffer in buffers])
        for flat, buffer in zip(flats, buffers, strict=True):
            flat.copy_(buffer)
        before = self._mean.bytes
        self._mean.start(self._flat)
        self._mean.finish()
        self.total_bytes += self._mean.bytes - before
        for flat, buffer in zip(flats, buffers, strict=True):
            buffer.copy_(flat)


class ReplicatedModel(ParallelModel):
    """A model that every rank holds whole: DDP."""

    def __init__(self, model: nn.Module, config: RunConfig, world: World) -> None:
        super().__init__(model, config, world)
        self.module = DDP(model)
        self._mean_hook: MeanHook | None = None

    def attach(
        self, order: OrderedSampler, sparsify: Sparsify | None, optimizer: torch.optim.Optimizer
    ) -> Herd:
        """Attach gradherd, and average in a hook of ours if it registers none."""
        rows = self._config.row_choice()
        herd = attach(self.module, order=order, sparsify=sparsify, rows=rows)
        # Ordering whole batches and sparsifying register a hook of their own.
        if not self.module._comm_hooks:
            self._mean_hook = MeanHook(self.module, self._world)
        return herd

    def exchange_costs(self, metrics: Mapping[str, Any], steps: int) -> tuple[float, float]:
        """Return seconds and bytes of exchanging gradients so far."""
        if self._mean_hook is not None:
            return self._mean_hook.stopwatch.seconds, self._mean_hook.total_bytes
        return super().exchange_costs(metrics, steps)


class LocalModel(ParallelModel):
    """A model that every rank trains on its own between two exchanges."""

    def attach(
        self, order: OrderedSampler, sparsify: Sparsify | None, optimizer: torch.optim.Optimizer
    ) -> Herd:
        """Attach gradherd, which counts the steps of the optimizer."""
        rows, local = self._config.row_choice(), self._config.local()
        return attach(self.module, order=order, optimizer=optimizer, local=local, rows=rows)


class ShardedModel(ParallelModel):
    """A model in shards: over all ranks ("fsdp"), or in two replicas ("hsdp")."""

    def __init__(self, model: nn.Module, config: RunConfig, world: World) -> None:
        # These imports take seconds, which other trainings need not wait for.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(model, config, world)
        self.module = copy.deepcopy(model)
        replicas = 2 if config.parallel == "hsdp" else 1
        shape = (replicas, world.size // replicas)
        names = ("replicate", "shard")
        self._mesh = init_device_mesh(torch.device(config.device).type, shape, mesh_dim_names=names)
        # With a sparsifier gradherd averages over replicas; otherwise torch does.
        native = replicas > 1 and config.density is None
        mesh = self._mesh if native else self._mesh["shard"]
        for child in self.module.modules():
            if isinstance(child, nn.ModuleList | nn.Sequential):
                for block in child:
                    if any(True for _ in block.parameters()):
                        fully_shard(block, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        # A ring's reduce-scatter, then between replicas an all-reduce of a shard.
        self._bytes_of_step = 4 * elements * (shape[1] - 1) / shape[1]
        if native:
            self._bytes_of_step += 8 * elements / shape[1] * (replicas - 1) / replicas

    def attach(
        self, order: OrderedSampler, sparsify: Sparsify | None, optimizer: torch.optim.Optimizer
    ) -> Herd:
        """Attach gradherd."""
        mesh = None if sparsify is None else self._mesh
        rows = self._config.row_choice()
        return attach(self.module, order=order, sparsify=sparsify, rows=rows, mesh=mesh)

    def refresh(self) -> None:
        """Gather the parameters into the whole model."""
        broadcast_buffers(self.module, self._world)
        parameters: dict[str, Any] = dict(self.module.named_parameters())
        buffers = dict(self.module.named_buffers())
        with torch.no_grad():
            for name, parameter in self.whole.named_parameters():
                parameter.copy_(parameters[name].full_tensor())
            for name, buffer in self.whole.named_buffers():
                buffer.copy_(buffers[name])

    def exchange_costs(self, metrics: Mapping[str, Any], steps: int) -> tuple[float, float]:
        """Return seconds and bytes of exchanging gradients so far, without gathered parameters."""
        sparse = metrics["total_bytes"] if self._config.density is not None else 0
        return metrics.get("exchange_seconds", 0.0), steps * self._bytes_of_step + sparse

    def state(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return this rank's shards of model and optimizer."""
        saved = optimizer.state_dict()
        state = {k: {n: _local(v) for n, v in one.items()} for k, one in saved["state"].items()}
        model = {name: _local(value) for name, value in self.module.state_dict().items()}
        return {}, {"model": model, "optimizer": {**saved, "state": state}}

    def load(
        self, shared: Mapping[str, Any], own: Mapping[str, Any], optimizer: torch.optim.Optimizer
    ) -> None:
        """Load this rank's shards."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        saved = own["optimizer"]
        state = {
            # The state of the k-th parameter; a count of steps is a number, not a shard.
            k: {n: _like(v, parameters[k]) for n, v in one.items()}
            for k, one in saved["state"].items()
        }
        optimizer.load_state_dict({**saved, "state": state})
        now = self.module.state_dict()
        self.module.load_state_dict({n: _like(v, now[n]) for n, v in own["model"].items()})


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _like(value: Any, parameter: Any) -> Any:
    """Return a shard as a DTensor like the parameter's, or the value itself."""
    if not hasattr(parameter, "to_local") or not isinstance(value, Tensor) or value.dim() == 0:
        return value
    kind: Any = type(parameter.data)
    return kind.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
