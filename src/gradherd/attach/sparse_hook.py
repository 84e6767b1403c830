"""The sparse exchange in DDP's communication hook.

Each bucket is added to the residual as it arrives, which overlaps with the rest of the backward.
After the last one the whole gradient is exchanged, and every bucket gets its part of the mean; the
backward waits for that. Selection needs the whole gradient, so it cannot begin earlier.

Residuals are stored in a flat vector in the order of the model, not of the buckets: DDP rebuilds
those after the first step. `BucketMap` translates between the two.

Shapes: D elements of all parameters in the flat vector, K of them that are sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.attach.bucket_hook import BucketHook, world_of
from gradherd.attach.device_exchange import DeviceExchange
from gradherd.attach.layouts import BucketMap, pieces
from gradherd.attach.parameter_usage import ParameterUsage, tracks_usage
from gradherd.attach.state import gather_states
from gradherd.comm.collectives import all_reduce
from gradherd.comm.script import AllGather, Script, run
from gradherd.flat import FlatSpec, in_memory_order
from gradherd.sparsify.exchange import Outcome
from gradherd.sparsify.gpu_worker import runs_on_device
from gradherd.sparsify.residuals import clip_together
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.workers import Worker

Spans = list[tuple[int, int]]
"""Ranges (begin, end) of the flat vector."""


class SparseHook(BucketHook):
    """Exchanges a DDP model's gradients sparsely, with error feedback."""

    # They hold a few rows each, and the sum of some rows is exact: nothing to select or to keep.
    passes_sparse = True

    key = "sparsify"
    """Name of this part in a herd's state."""

    def __init__(self, ddp: DDP, settings: Sparsify, scaler: GradScaler | None = None) -> None:
        """Register with DDP. All ranks must do so at the same point.

        Args:
            ddp: The model; its hook must still be free.
            settings: The method, its density and what else it needs.
            scaler: The GradScaler of the loop, if there is one: residuals are divided by its scale.

        Raises:
            ValueError: The gradients of a parameter cannot be sparsified.
        """
        self._parameters = sparsifiable(ddp)
        self.layout = FlatSpec.small_last(self._parameters, settings.dense_below)
        self._scaler, self._clip = scaler, settings.clip
        # After the checks: registering a hook with DDP cannot be undone.
        super().__init__(ddp, world_of(ddp))
        dtypes = {p.dtype for p in self._parameters.values()}
        self._worker = Worker(
            settings,
            self.layout.size,
            rank=self.world.rank,
            size=self.world.size,
            sparse=self.layout.sparse,
            layers=self.layout.sparse_numels,
            # At least float32, also for half-precision parameters: a residual sums up many
            # gradients, each of them small against it.
            dtype=torch.float64 if torch.float64 in dtypes else torch.float32,
            device=next(iter(self._parameters.values())).device,
        )
        slices = self.layout.slices
        self._slices: dict[Tensor, slice] = {
            p: slices[name] for name, p in self._parameters.items()
        }
        self._metrics: dict[str, Any] = {}
        self._device: DeviceExchange | None = None
        # Which parameters a backward has used must be read on the host, once per step.
        if not tracks_usage(ddp) and runs_on_device(self._worker):
            self._device = DeviceExchange(self._worker, self._slices, self.world, scaler)
        self._usage = ParameterUsage(ddp, self._parameters) if tracks_usage(ddp) else None

    def add(self, bucket: dist.GradBucket) -> Future[Tensor] | None:
        """Add a bucket to the residual, unless the norm of all buckets must be known first."""
        return None if self._clip is not None else self._take(self.position, bucket)

    def _take(self, number: int, bucket: dist.GradBucket) -> Future[Tensor] | None:
        if self._device is not None:
            return self._device.add(number, bucket)
        self._add(bucket, first=number == 0)
        return None

    def _take_clipped(self, buckets: Sequence[dist.GradBucket], clip: float) -> None:
        """Clip this worker's gradient, then add all buckets to the residual."""
        scale = None if self._scaler is None else self._scaler._get_scale_async()
        flats = [bucket.buffer() for bucket in buckets]
        clip_together(flats, clip if scale is None else clip * scale.double())
        for number, bucket in enumerate(buckets):
            self._take(number, bucket)

    def _add(self, bucket: dist.GradBucket, first: bool) -> None:
        if first:
            # Once per backward: the loss scale and the learning rate may change between steps,
            # and residuals of earlier steps must stay comparable.
            self._worker.set_unit(self._scaler.get_scale() if self._scaler else 1.0)
        for parameter, piece in pieces(bucket):
            if parameter in self._slices:
                # Cleared in the same kernel: `exchange` writes only what was sent.
                self._worker.add(self._slices[parameter].start, piece, clear=True)
            else:  # It was frozen when the hook was attached, so it has no residual.
                self._average_whole(piece)

    def _average_whole(self, piece: Tensor) -> None:
        """Average the (n,) elements of one parameter over ranks, in place and all of them."""
        mean, sent = all_reduce(piece / self.world.size, self.world)
        piece.copy_(mean)
        self.total_bytes += sent

    def exchange(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Exchange what the method selects, and write the mean into the buckets."""
        if self._clip is not None:
            self._take_clipped(buckets, self._clip)
        if self._device is not None and self._device.takes(buckets):
            sent = self._device.exchange(buckets)
            self.total_bytes += sent
            self._metrics = {"bytes": sent}
            return
        if self._device is not None:
            # Before anything was added: a parameter was frozen when the hook was attached, say.
            self._device = None
            for bucket in buckets:
                self._add(bucket, first=bucket is buckets[0])
        if self._worker.lr_is_zero:
            # The learning rate is zero: residuals are in the unit of parameters, so this gradient
            # adds nothing to them. The buckets are zero, as `add` has left them.
            if self._usage is not None:
                self._usage.take()
            return
        bucket_map = BucketMap(buckets, self._slices)
        (outcome, unused), sent = run(self._script(bucket_map), self.world)
        self.total_bytes += sent
        if outcome is None:
            # Some rank had a gradient that is not finite. NaN on all ranks, so that a GradScaler
            # skips the step on all of them; the residual stays what it was before the step.
            self._worker.commit(None)
            bucket_map.fill(torch.nan)
            return
        # A narrow dtype rounds or clamps the mean. What the bucket could not hold goes back into
        # the residual, so the optimizer gets it later.
        written = bucket_map.put(outcome.indices, self._worker.mean_of(outcome))
        self._worker.commit(outcome, written=written, excluded=unused)
        self._metrics = outcome.metrics(self.layout.sparse) | {"bytes": sent}

    def _script(self, bucket_map: BucketMap) -> Script[tuple[Outcome | None, Spans]]:
        """Exchange the gradient; return the outcome and the ranges that were left out."""
        unused = yield from self._unused_spans(bucket_map)
        for begin, end in unused:
            self._worker.feedback.exclude(begin, end)
        outcome = yield from self._worker.script()
        return outcome, unused

    def _unused_spans(self, bucket_map: BucketMap) -> Script[Spans]:
        """Return where the parameters are that no rank has used.

        DDP leaves the gradients of those as they are, whatever the bucket holds. A residual that
        was sent for them would be lost.
        """
        unused = [self._slices[p] for p in self._slices if p not in bucket_map.parameters]
        if self._usage is not None:
            # Other ranks may have used them: a parameter is left out on all ranks or on none.
            anywhere: Tensor = yield AllGather(self._usage.take())
            flags = anywhere.any(0).tolist()
            unused += [
                span for used, span in zip(flags, self._slices.values(), strict=True) if not used
            ]
        return [(span.start, span.stop) for span in unused]

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last step, and totals so far."""
        residual = self._worker.feedback.residual
        return self.last_step() | {
            "residual_norm": float(torch.linalg.vector_norm(residual)),
            "steps": self._worker.step,
            "skipped_steps": self._worker.skipped,
            "always_sent": self.layout.size - self.layout.sparse,
            "total_bytes": self.total_bytes,
            "exchange_seconds": self.stopwatch.seconds,
        }

    def last_step(self) -> dict[str, Any]:
        """Return the metrics of the last step that need no computation."""
        if self._device is not None:
            return self._device.metrics() | self._metrics
        return self._metrics

    def state_dict(self, gather: bool = True) -> dict[str, Any]:
        """Return this rank's residuals by parameter, and the state of the method.

        Args:
            gather: Whether rank 0 also gets the states of the other ranks, in "other_ranks".
        """
        state = self._own_state()
        if gather and self.world.size > 1:
            others = gather_states(state, self.world)
            if self.world.rank == 0:
                state["other_ranks"] = others[1:]
        return state

    def _own_state(self) -> dict[str, Any]:
        feedback, state = self._worker.feedback, self._worker.state_dict()
        state["residual"] = self._by_name(feedback.residual)
        if feedback.velocity is not None:
            state["velocity"] = self._by_name(feedback.velocity)
        return state

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Return copies of a (D,) vector's parts, in the shapes of the parameters."""
        return {name: part.clone() for name, part in self._parts(flat).items()}

    def _parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a (D,) vector's parts, in the shapes and the order of the parameters."""
        slices, feedback = self.layout.slices, self._worker.feedback
        return {
            name: in_memory_order(feedback.part(flat, slices[name].start, p.numel()), p)
            for name, p in self._parameters.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was saved, on the same rank, or from a merged state.

        Raises:
            ValueError: The state is of another model, method or rank.
        """
        self.check_state(state)  # before anything changes
        feedback = self._worker.feedback
        self._restore(feedback.residual, state["residual"])
        if feedback.velocity is not None:
            self._restore(feedback.velocity, state["velocity"])
        self._worker.load_state_dict(dict(state))
        if self._device is not None:
            self._device.reset()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that a state is of this model and method, and of this rank or merged.

        Raises:
            ValueError: It is not.
        """
        self._check_shapes(state.get("residual", {}))
        if self._worker.feedback.velocity is not None:
            if "velocity" not in state:
                raise ValueError("state has no 'velocity': it was saved without momentum")
            self._check_shapes(state["velocity"])
        elif "velocity" in state:
            raise ValueError(
                "state has 'velocity', which would be lost: it was saved with momentum, so attach "
                "with Sparsify(momentum=...)"
            )
        self._worker.check_state(state)

    def _check_shapes(self, saved: Mapping[str, Tensor]) -> None:
        if saved.keys() != self._parameters.keys():
            odd = sorted(saved.keys() ^ self._parameters.keys())
            raise ValueError(f"residuals are of another model: {odd[0]!r} is on one side only")
        for name, parameter in self._parameters.items():
            if saved[name].shape != parameter.shape:
                shapes = f"{tuple(saved[name].shape)}, expected {tuple(parameter.shape)}"
                raise ValueError(f"residual of {name!r} has shape {shapes}")

    def _restore(self, flat: Tensor, saved: Mapping[str, Tensor]) -> None:
        """Copy saved tensors into their parts of a (D,) vector."""
        for name, part in self._parts(flat).items():
            part.copy_(saved[name])

    def close(self) -> None:
        """Remove the hooks on parameters; DDP keeps its hook, which only averages from now on."""
        super().close()
        if self._usage is not None:
            self._usage.remove()


def sparsifiable(ddp: DDP) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients DDP exchanges, by name.

    Args:
        ddp: The model.

    Returns:
        All but those with row-sparse gradients, which DDP averages by itself.

    Raises:
        ValueError: A parameter is not real, or there is none.
    """
    ignored = set(getattr(ddp, "parameters_to_ignore", ()))
    # As DDP finds them: by the module that holds the parameter.
    by_rows = {
        parameter
        for module in ddp.module.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for parameter in module.parameters(recurse=False)
    }
    parameters = {
        # The same name with torch.compile and without, so that checkpoints fit both.
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored and parameter not in by_rows
    }
    if not parameters:
        raise ValueError(
            "every parameter has row-sparse gradients (sparse=True), which are exchanged by rows "
            "already: leave sparsify out"
        )
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ValueError(f"{name} holds {parameter.dtype}; only real numbers can be sparsified")
    return parameters
