"""The sparse exchange of a DDP hook without waiting for the host, where method and device allow it.

A `SparseHook` hands its buckets to this class if gradients are on a GPU and the method agrees by
consensus: then a step launches kernels and reads nothing back. The residual is stored as the
buckets are. DDP rebuilds those after the first backward; a bucket that is not where it used to be
waits for the last one, and everything is laid out anew.

What the host does for a bucket takes longer than the GPU does, so after a few steps it is cut to
the least: the pass over a bucket is replayed as a CUDA graph, and DDP gets a future that was made
before. With one rank all that follows the last bucket is a single CUDA graph, too; with several,
collectives come in between, and its two hundred operations are launched one by one.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future

from gradherd.comm.script import run
from gradherd.comm.world import World
from gradherd.gpu import has_triton
from gradherd.sparsify.device_worker import DeviceWorker, Placement
from gradherd.sparsify.selector import target_count
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.workers import Worker

log = logging.getLogger("gradherd")

# Steps that are launched one by one before the tail is captured: Triton compiles and libraries
# allocate in their first calls, which a capture does not allow.
_WARMUP_STEPS = 3
# Backwards in which parameters are compared one by one. DDP rebuilds its buckets once; from then on
# a bucket is known by its memory.
_CHECKED_STEPS = 3
# Buckets up to which each has a graph. A model with more of them keeps the GPU busy anyway.
_MOST_GRAPHS = 64


def runs_on_device(settings: Sparsify, worker: Worker, workers: int) -> bool:
    """Return whether the steps of a worker have fixed shapes, and kernels to run them."""
    residual = worker.feedback.residual
    if not (residual.is_cuda and has_triton() and residual.dtype == torch.float32):
        return False
    return has_fixed_shapes(settings, worker, workers)


def has_fixed_shapes(settings: Sparsify, worker: Worker, workers: int) -> bool:
    """Return whether all lengths of a step are known beforehand."""
    make_rule = getattr(settings.method, "device_rule", None)
    if make_rule is None or settings.momentum or not worker.sparse:
        return False
    rule = make_rule(worker.sparse, worker.state)
    most = max(settings.density(0), settings.method.density)
    return rule is not None and rule.fits(target_count(most, worker.sparse), workers)


class DeviceExchange:
    """Takes the buckets of each backward, and overwrites them with the mean.

    Args:
        settings: The method and how it is run.
        worker: Holds residual and state until the first backward, and the learning rate.
        slices: Where each parameter is in the flat vector of all.
        world: The ranks that exchange.
        scaler: The GradScaler of the loop, if there is one.
    """

    def __init__(
        self,
        settings: Sparsify,
        worker: Worker,
        slices: Mapping[Tensor, slice],
        world: World,
        scaler: GradScaler | None,
    ) -> None:
        self._settings, self._worker, self._slices = settings, worker, slices
        self._world, self._scaler = world, scaler
        self._device: DeviceWorker | None = None
        self._buckets: list[tuple[int, int, list[int]]] = []
        self._late: list[tuple[int, dist.GradBucket]] = []
        self._unfinished = False
        self._checked = 0
        self._warm = settings.warmup_steps == 0
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._adds: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        """The pass over each bucket, by where the residual is (`DeviceWorker.turn`)."""
        self._futures: list[Future[Tensor]] = []
        """Of each bucket, made once; empty while buckets may still change."""
        self._launched = 0
        # With several ranks the script runs collectives in between, and these are not captured.
        self._may_capture = world.size == 1
        self._may_replay = True

    def add(self, number: int, bucket: dist.GradBucket) -> Future[Tensor] | None:
        """Add bucket `number` of a backward to the residual, or keep it until all have arrived.

        Returns:
            A future of the buffer that can be handed to DDP, if there is one.
        """
        if number == 0:
            if self._unfinished and self._device is not None:
                self._device.clear()  # The backward before has raised.
            self._late, self._unfinished = [], True
            self._begin()
        if self._device is None or not self._is_known(number, bucket):
            self._late.append((number, bucket))
            return None
        graph = self._adds.get((self._device.turn, number))
        if graph is None:
            self._device.add(number, bucket.buffer())
        else:
            graph.replay()
        return self._futures[number] if self._futures else None

    def _begin(self) -> None:
        # Residuals are in the unit of parameters (gradient times learning rate), and the rate may
        # have changed since the last step.
        ratio = self._worker.next_unit(1.0)
        if ratio != 1 and self._device is not None:
            self._device.rescale(ratio)
        elif ratio != 1:
            method = self._settings.method
            self._worker.state = method.rescale(self._worker.state, ratio)
        if self._device is not None:
            self._device.begin(self._unit())

    def _unit(self) -> float | Tensor:
        """Return the factor of gradients; a loss scale stays on the device."""
        if self._scaler is None or not self._scaler.is_enabled():
            return self._worker.unit
        # get_scale() would wait for the device.
        scale = self._scaler._get_scale_async()
        return self._worker.unit if scale is None else self._worker.unit / scale.float()

    def _is_known(self, number: int, bucket: dist.GradBucket) -> bool:
        if number >= len(self._buckets):
            return False
        address, count, parameters = self._buckets[number]
        flat = bucket.buffer()
        # A bucket that DDP has rebuilt has other memory, which is cheaper to compare than its
        # parameters.
        if (flat.data_ptr(), flat.numel()) != (address, count):
            return False
        if self._checked < _CHECKED_STEPS:
            return [id(parameter) for parameter in bucket.parameters()] == parameters
        return True

    def takes(self, buckets: Sequence[dist.GradBucket]) -> bool:
        """Return whether it can exchange these buckets: all parameters known, of one dtype."""
        if not self._late:
            return True
        # A parameter that was frozen at attach has no place in the residual, and one residual
        # cannot hold two dtypes.
        known = all(p in self._slices for bucket in buckets for p in bucket.parameters())
        return known and len({bucket.buffer().dtype for bucket in buckets}) == 1

    def exchange(self, buckets: Sequence[dist.GradBucket]) -> int:
        """Exchange a gradient; return the bytes that this rank sent."""
        if self._late:
            self._place(buckets)
        else:
            self._checked += 1
        assert self._device is not None
        late, self._late = self._late, []
        for number, bucket in late:
            self._device.add(number, bucket.buffer())
        self._unfinished = False
        if self._worker.weightless:
            self._device.clear()
            return 0  # A learning rate of zero: the buckets are zero, as `add` has left them.
        k = target_count(self._density(), self._worker.sparse)
        sent = self._tail(k, buckets)
        self._device.commit()
        return sent

    def _density(self) -> float:
        if self._warm:
            return self._settings.method.density
        # In a warm-up the host must know how many steps were not called off, so it waits.
        assert self._device is not None
        step = int(self._device.state.step)
        self._warm = step >= self._settings.warmup_steps
        return self._settings.density(step)

    def _tail(self, k: int, buckets: Sequence[dist.GradBucket]) -> int:
        """Run what follows the last bucket, from a CUDA graph if there is one."""
        device = self._device
        assert device is not None
        # Residual and sum change places after each step, so there are two graphs of everything.
        key = (device.turn, k, device.unit_is_one)
        if key in self._graphs:
            self._graphs[key].replay()
            device.outcome = device.outcomes[key]
            return 0
        flats = [bucket.buffer() for bucket in buckets]
        if self._warm and flats[0].is_cuda:
            self._launched += 1
            if self._launched > _WARMUP_STEPS:
                self._capture_adds(flats)
                if self._may_capture and self._capture(key, k, flats):
                    return self._tail(k, buckets)
        return run(device.script(k, flats), self._world).bytes

    def _capture_adds(self, flats: list[Tensor]) -> None:
        """Capture the pass over each bucket, and make their futures."""
        device = self._device
        assert device is not None
        if (device.turn, 0) in self._adds or len(flats) > _MOST_GRAPHS or not self._may_replay:
            return
        graphs, stream = [], torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for number, flat in enumerate(flats):
                    graphs.append(torch.cuda.CUDAGraph())
                    graphs[-1].capture_begin(capture_error_mode="thread_local")
                    device.add(number, flat)
                    graphs[-1].capture_end()
        except RuntimeError as error:
            log.warning("passes over buckets are not captured as CUDA graphs: %s", error)
            self._may_replay = False
            return
        torch.cuda.current_stream().wait_stream(stream)
        self._adds.update({(device.turn, number): one for number, one in enumerate(graphs)})
        if not self._futures:
            # Completed, and without a device to wait for, so nothing is left to do in a step. That
            # is enough: autograd makes the stream on which DDP reads the buckets wait for those
            # on which its hooks ran.
            self._futures = [Future() for _ in flats]
            for future, flat in zip(self._futures, flats, strict=True):
                future.set_result(flat)

    def _capture(self, key: Any, k: int, flats: list[Tensor]) -> bool:
        """Capture a tail; return whether that worked."""
        device = self._device
        assert device is not None
        if len(self._graphs) >= 8:  # Shapes that change all the time are not worth a graph.
            self._may_capture = False
            return False
        graph = torch.cuda.CUDAGraph()
        # One pool for all graphs: they never run at the same time.
        pools = [one.pool() for one in self._graphs.values()]
        try:
            # Other threads, such as nccl's watchdog, may call CUDA meanwhile.
            with torch.cuda.graph(
                graph, pool=pools[0] if pools else None, capture_error_mode="thread_local"
            ):
                run(device.script(k, flats), self._world)
        except RuntimeError as error:
            log.warning("the exchange is not captured as a CUDA graph: %s", error)
            self._may_capture = False
            return False
        assert device.outcome is not None
        self._graphs[key], device.outcomes[key] = graph, device.outcome
        return True

    def _place(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Lay out the residual as these buckets are."""
        parameters = [bucket.parameters() for bucket in buckets]
        spans = [[(self._slices[p].start, p.numel()) for p in bucket] for bucket in parameters]
        old, flat = self._device, self._worker.feedback.residual
        like = flat if old is None else old.residual
        placement = Placement(spans, self._worker.sparse, like.device)
        new = DeviceWorker(
            self._rule() if old is None else old.rule,
            placement,
            like.new_zeros(placement.size),
            rank=self._world.rank,
            size=self._world.size,
            sparse=self._worker.sparse,
            values=self._settings.values,
            step=self._worker.step,
            skipped=self._worker.skipped,
        )
        if old is None:
            new.take(flat, {piece.begin: piece.begin for piece in placement.pieces})
            # Its memory would otherwise be held twice: as large as the model.
            self._worker.feedback.release()
        else:
            new.take_over(old)
        new.begin(self._unit())
        self._device = new
        self._buckets = [
            (bucket.buffer().data_ptr(), bucket.buffer().numel(), [id(p) for p in own])
            for bucket, own in zip(buckets, parameters, strict=True)
        ]
        self._checked, self._launched = 0, 0
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._adds.clear()
        self._futures = []

    def _rule(self) -> Any:
        method: Any = self._settings.method
        return method.device_rule(self._worker.sparse, self._worker.state)

    def residual_parts(self) -> dict[int, Tensor] | None:
        """Return the residual of each parameter by its first coordinate; None before a backward."""
        if self._device is None:
            return None
        residual = self._device.residual
        return {
            piece.begin: residual[piece.position : piece.position + piece.elements]
            for piece in self._device.placement.pieces
        }

    @property
    def residual(self) -> Tensor:
        """The residual, in storage order; zeros between buckets."""
        return self._worker.feedback.residual if self._device is None else self._device.residual

    def pull(self) -> None:
        """Copy state and counters to the worker; waits for the device."""
        if self._device is None:
            return
        state, method = self._device.state, self._settings.method
        assert hasattr(method, "after")
        self._worker.state = method.after(self._worker.state, state.read(self._device.rule))
        self._worker.step, self._worker.skipped = int(state.step), int(state.skipped)

    def reset(self, dim: int) -> None:
        """Give the residual back to the worker, as D zeros: a saved one will be loaded."""
        if self._device is not None:
            self._worker.feedback.restore(dim)
        # Laid out anew at the next backward, from what was loaded.
        self._device, self._buckets = None, []
        self._forget_graphs()
        self._warm = self._settings.warmup_steps == 0

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last step; waits for the device."""
        return {} if self._device is None else self._device.metrics()
