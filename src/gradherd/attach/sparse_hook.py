"""The sparse exchange in DDP's communication hook.

Each bucket is added to the residual as it arrives. With the last one the whole gradient is
exchanged, and every bucket gets its part of the mean. Residuals are stored by parameter: DDP
rebuilds its buckets after the first step.

Shapes: D elements of all parameters, K of them that are sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.attach.bucket_hook import BucketHook, world_of
from gradherd.attach.bucket_map import BucketMap
from gradherd.comm.collectives import all_reduce
from gradherd.comm.script import AllGather, Script, run
from gradherd.sparsify.exchange import Outcome
from gradherd.sparsify.residuals import FlatLayout
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.workers import Worker


class SparseHook(BucketHook):
    """Exchanges a DDP model's gradients sparsely."""

    def __init__(self, ddp: DDP, settings: Sparsify, scaler: GradScaler | None = None) -> None:
        self._parameters = sparsifiable(ddp)
        counts = [(name, p.numel()) for name, p in self._parameters.items()]
        self.layout = FlatLayout.of(counts, settings.dense_below)
        self._scaler = scaler
        super().__init__(ddp, world_of(ddp))
        dtypes = {p.dtype for p in self._parameters.values()}
        self._worker = Worker(
            settings,
            self.layout.size,
            rank=self.world.rank,
            size=self.world.size,
            sparse=self.layout.sparse,
            layers=self.layout.layers,
            dtype=torch.float64 if torch.float64 in dtypes else torch.float32,
            device=next(iter(self._parameters.values())).device,
        )
        slices = self.layout.slices()
        self._slices: dict[Tensor, slice] = {
            p: slices[name] for name, p in self._parameters.items()
        }
        self._metrics: dict[str, Any] = {}
        self._usage = _ParameterUsage(ddp, self._parameters) if _tracks_usage(ddp) else None

    def add(self, bucket: dist.GradBucket) -> None:
        """Add a bucket to the residual."""
        if bucket.index() == 0:
            self._worker.set_unit(self._scaler.get_scale() if self._scaler else 1.0)
        others = []
        for parameter, piece in BucketMap.pieces(bucket):
            if parameter in self._slices:
                self._worker.add(self._slices[parameter].start, piece, clear=True)
            else:  # frozen when we were attached: it has no residual, so it is sent whole
                others.append((piece, all_reduce(piece / self.world.size, self.world)))
        for piece, (mean, sent) in others:
            piece.copy_(mean)
            self.total_bytes += sent

    def exchange(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Exchange what the method selects, and write the mean into the buckets."""
        self._exchange(BucketMap(buckets, self._slices))

    def _exchange(self, buckets: BucketMap) -> None:
        if self._worker.weightless:
            if self._usage is not None:
                self._usage.take()
            return  # The learning rate is zero: gradients weigh nothing, residuals wait.
        (outcome, idle), sent = run(self._script(buckets), self.world)
        self.total_bytes += sent
        if outcome is None:
            self._worker.commit(None)
            buckets.fill(torch.nan)  # on all ranks, so that all of them notice
            return
        written = buckets.put(outcome.indices, self._worker.mean_of(outcome))
        self._worker.commit(outcome, written=written, excluded=idle)
        self._metrics = outcome.metrics(self.layout.sparse) | {"bytes": sent}

    def _script(self, buckets: BucketMap) -> Script[tuple[Outcome | None, list[tuple[int, int]]]]:
        """Exchange, but nothing of parameters that no rank has used: DDP would drop it."""
        idle = [self._slices[p] for p in self._slices if p not in buckets.parameters]
        if self._usage is not None:
            anywhere: Tensor = yield AllGather(self._usage.take())
            flags = anywhere.any(0).tolist()
            idle += [
                place for used, place in zip(flags, self._slices.values(), strict=True) if not used
            ]
        spans = [(place.start, place.stop) for place in idle]
        for begin, end in spans:
            self._worker.feedback.exclude(begin, end)
        outcome = yield from self._worker.script()
        return outcome, spans

    def metrics(self) -> dict[str, Any]:
        """Return the figures of the last step."""
        residual = self._worker.feedback.residual
        return self._metrics | {
            "residual_norm": float(torch.linalg.vector_norm(residual)),
            "steps": self._worker.step,
            "skipped_steps": self._worker.skipped,
            "always_sent": self.layout.size - self.layout.sparse,
            "total_bytes": self.total_bytes,
            "exchange_seconds": self.stopwatch.seconds,
        }

    def last_step(self) -> dict[str, Any]:
        """Return what `metrics` says of the last step alone, which costs nothing."""
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter, and what the method remembers."""
        feedback = self._worker.feedback
        state = self._worker.state_dict()
        state["residual"] = self._by_name(feedback.residual)
        if feedback.velocity is not None:
            state["velocity"] = self._by_name(feedback.velocity)
        return state

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        places = self.layout.slices()
        return {
            name: _shaped(flat[places[name]], p).clone() for name, p in self._parameters.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, on the same rank, or from a merged state."""
        self.check_state(state)
        feedback = self._worker.feedback
        self._restore(feedback.residual, state["residual"])
        if feedback.velocity is not None:
            self._restore(feedback.velocity, state["velocity"])
        self._worker.load_state_dict(dict(state))

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise unless `state` is of this model and method, and of this rank or merged."""
        self._check(state.get("residual", {}))
        if self._worker.feedback.velocity is not None:
            if "velocity" not in state:
                raise ValueError("state has no 'velocity': it was saved without momentum")
            self._check(state["velocity"])
        self._worker.check_state(state)

    def _check(self, saved: Mapping[str, Tensor]) -> None:
        if saved.keys() != self._parameters.keys():
            odd = sorted(saved.keys() ^ self._parameters.keys())
            raise ValueError(f"residuals are of another model: {odd[0]!r} is on one side only")
        for name, parameter in self._parameters.items():
            if saved[name].shape != parameter.shape:
                shapes = f"{tuple(saved[name].shape)}, expected {tuple(parameter.shape)}"
                raise ValueError(f"residual of {name!r} has shape {shapes}")

    def _restore(self, flat: Tensor, saved: Mapping[str, Tensor]) -> None:
        places = self.layout.slices()
        for name, parameter in self._parameters.items():
            _shaped(flat[places[name]], parameter).copy_(saved[name])

    def close(self) -> None:
        """Only average from now on."""
        super().close()
        if self._usage is not None:
            self._usage.remove()


def sparsifiable(ddp: DDP) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients DDP exchanges, or say why that cannot be."""
    ignored = set(getattr(ddp, "parameters_to_ignore", ()))
    found = {
        name.replace("_orig_mod.", ""): parameter  # the same name with torch.compile and without
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }
    for name, parameter in found.items():
        if not parameter.is_floating_point():
            raise ValueError(f"{name} holds {parameter.dtype}; only real numbers can be sparsified")
    for path, module in ddp.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{path or 'the model'} has sparse gradients, which DDP exchanges without the "
                "hook: make it with sparse=False"
            )
    return found


def _tracks_usage(ddp: DDP) -> bool:
    return bool(ddp.find_unused_parameters or ddp.static_graph)


def _shaped(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return a view in the parameter's shape: in a bucket numbers lie as in the parameter."""
    dense = torch.empty_like(parameter, device="meta")  # keeps strides where they are dense
    return flat.as_strided(parameter.shape, dense.stride(), flat.storage_offset())


class _ParameterUsage:
    """Notices which parameters had a gradient in the backwards of one exchange."""

    def __init__(self, ddp: DDP, parameters: Mapping[str, nn.Parameter]) -> None:
        self._ddp = ddp
        self._accumulating = False
        self._device = next(iter(parameters.values())).device
        self._flags = [False] * len(parameters)
        self._handles = [
            parameter.register_hook(self._mark(at))
            for at, parameter in enumerate(parameters.values())
        ]
        self._handles.append(ddp.register_forward_pre_hook(self._forward))

    def _forward(self, module: nn.Module, args: Any) -> None:
        """Forget what was seen before, unless it waits to be exchanged (no_sync)."""
        if not torch.is_grad_enabled():
            return
        if not self._accumulating:
            self._flags = [False] * len(self._flags)
        if not self._ddp.require_backward_grad_sync:
            self._accumulating = True

    def _mark(self, at: int) -> Any:
        def mark(grad: Tensor) -> None:
            self._flags[at] = True

        return mark

    def take(self) -> Tensor:
        """Return (parameters,) flags, and start anew."""
        flags = torch.tensor(self._flags, dtype=torch.uint8, device=self._device)
        self._flags = [False] * len(self._flags)
        self._accumulating = False
        return flags

    def remove(self) -> None:
        """Notice no more."""
        for handle in self._handles:
            handle.remove()
