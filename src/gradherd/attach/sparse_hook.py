"""The sparse exchange in DDP's communication hook.

Each bucket is added to the residual as it arrives; at the last one the whole gradient vector is
exchanged at once, and every bucket gets its part of the mean. Residuals are kept by parameter:
DDP rebuilds its buckets after the first step, and may do so again.

Letters: D numbers of all parameters, K of them that travel.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.attach.bucket_map import BucketMap
from gradherd.comm.collectives import all_reduce
from gradherd.comm.script import AllGather, Script, run
from gradherd.comm.stopwatch import Stopwatch
from gradherd.comm.world import World
from gradherd.sparsify.residuals import FlatLayout
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.step import Outcome, Worker


class SparseHook:
    """Exchanges a DDP model's gradients as the settings say."""

    def __init__(self, ddp: DDP, settings: Sparsify, scaler: GradScaler | None = None) -> None:
        group = ddp.process_group
        self._world = World(dist.get_rank(group), dist.get_world_size(group), group)
        self._parameters = sparsifiable(ddp)
        counts = [(name, p.numel()) for name, p in self._parameters.items()]
        self.layout = FlatLayout.of(counts, settings.dense_below)
        self._scaler = scaler
        kinds = {p.dtype for p in self._parameters.values()}
        self._worker = Worker(
            settings,
            self.layout.size,
            rank=self._world.rank,
            size=self._world.size,
            sparse=self.layout.sparse,
            layers=self.layout.layers,
            dtype=torch.float64 if torch.float64 in kinds else torch.float32,
            device=next(iter(self._parameters.values())).device,
        )
        places = self.layout.slices()
        self._places: dict[Tensor, slice] = {
            p: places[name] for name, p in self._parameters.items()
        }
        self._taken: list[tuple[dist.GradBucket, Future[Tensor]]] = []
        self._metrics: dict[str, Any] = {}
        self.total_bytes = 0
        self._clock = Stopwatch()  # what choosing and exchanging cost the backward
        self._active = True
        ddp.register_comm_hook(self, sparse_hook)
        self._used = _Used(ddp, self._parameters) if _tracks_use(ddp) else None

    def take(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Add a bucket to the residual; with the last one, exchange."""
        with self._clock:
            return self._take(bucket)

    def _take(self, bucket: dist.GradBucket) -> Future[Tensor]:
        flat = bucket.buffer()
        done: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else None)
        if not self._active:
            all_reduce(flat.div_(self._world.size), self._world)
            done.set_result(flat)
            return done
        if bucket.index() == 0:
            self._worker.set_unit(self._scaler.get_scale() if self._scaler else 1.0)
        self._taken.append((bucket, done))
        others = []
        for parameter, piece in BucketMap.pieces(bucket):
            if parameter in self._places:
                self._worker.add(self._places[parameter].start, piece, clear=True)
            else:  # frozen when we were attached: no residual, so it travels whole
                others.append((piece, all_reduce(piece / self._world.size, self._world)))
        for piece, (mean, sent) in others:
            piece.copy_(mean)
            self.total_bytes += sent
        if bucket.is_last():
            taken, self._taken = self._taken, []
            self._exchange(BucketMap([one for one, _ in taken], self._places))
            for one, its in taken:
                its.set_result(one.buffer())
        return done

    def _exchange(self, buckets: BucketMap) -> None:
        if self._worker.weightless:
            if self._used is not None:
                self._used.take()
            return  # The learning rate is zero: gradients weigh nothing, residuals wait.
        (outcome, idle), sent = run(self._script(buckets), self._world)
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
        idle = [self._places[p] for p in self._places if p not in buckets.parameters]
        if self._used is not None:
            anywhere: Tensor = yield AllGather(self._used.take())
            flags = anywhere.any(0).tolist()
            idle += [
                place for used, place in zip(flags, self._places.values(), strict=True) if not used
            ]
        spans = [(place.start, place.stop) for place in idle]
        for begin, end in spans:
            self._worker.feedback.exclude(begin, end)
        outcome = yield from self._worker.script()
        return outcome, spans

    def metrics(self) -> dict[str, Any]:
        """Return the figures of the last step."""
        kept = self._worker.feedback.residual
        return self._metrics | {
            "residual_norm": float(torch.linalg.vector_norm(kept)),
            "steps": self._worker.step,
            "skipped_steps": self._worker.skipped,
            "always_sent": self.layout.size - self.layout.sparse,
            "total_bytes": self.total_bytes,
            "exchange_seconds": self._clock.seconds,
        }

    @property
    def place(self) -> tuple[int, int]:
        """Which rank this is, and of how many."""
        return self._world.rank, self._world.size

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
        self._active = False
        if self._used is not None:
            self._used.remove()


def sparse_hook(state: SparseHook, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook."""
    return state.take(bucket)


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


def _tracks_use(ddp: DDP) -> bool:
    return bool(ddp.find_unused_parameters or ddp.static_graph)


def _shaped(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return a view in the parameter's shape: in a bucket numbers lie as in the parameter."""
    dense = torch.empty_like(parameter, device="meta")  # keeps strides where they are dense
    return flat.as_strided(parameter.shape, dense.stride(), flat.storage_offset())


class _Used:
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
