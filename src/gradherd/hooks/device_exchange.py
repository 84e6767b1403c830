"""The sparse exchange of a DDP hook without waiting for the host, where method and device allow it.

A `SparseHook` hands its buckets to this class if gradients are on a GPU and the method agrees by
consensus: then a step launches kernels and reads nothing back (`sparsify.gpu_worker`). The residual
is stored as the buckets are. DDP rebuilds those after the first backward; a bucket that is not
where it used to be waits for the last one, and the residual is laid out anew.

What the host does for a bucket takes longer than the GPU does, so after a few steps it is cut to
the least: the pass over a bucket is replayed as a CUDA graph, and DDP gets a future that was made
before. With one rank all that follows the last bucket is a single CUDA graph, too; with several,
collectives come in between, and its two hundred operations are launched one by one.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future

from gradherd.comm.script import run
from gradherd.comm.world import World
from gradherd.gpu import captured
from gradherd.hooks.torch_names import scale_on_device
from gradherd.sparsify.gpu_worker import GpuSteps, StepTensors
from gradherd.sparsify.selector import target_count
from gradherd.sparsify.worker import Placement, Worker

# Steps that are launched one by one before anything is captured: Triton compiles and libraries
# allocate in their first calls, which a capture does not allow.
_LAUNCHED_FIRST = 3
# Backwards in which parameters are compared one by one. DDP rebuilds its buckets once; from then on
# a bucket is known by its memory.
_CHECKED_STEPS = 3
# Buckets up to which each has a graph. A model with more of them keeps the GPU busy anyway.
_MOST_GRAPHS = 64
# Tails that are captured. Shapes that change all the time are not worth a graph.
_MOST_TAILS = 8


def placement_of(
    buckets: Sequence[dist.GradBucket], slices: Mapping[Tensor, slice], worker: Worker
) -> Placement:
    """Return where the parameters of buckets lie, of which `slices` has those that are sent."""
    spans = [
        [(slices[p].start if p in slices else None, p.numel()) for p in bucket.parameters()]
        for bucket in buckets
    ]
    return Placement(spans, worker.sparse, worker.feedback.residual.device)


class DeviceExchange:
    """Takes the buckets of each backward, and overwrites them with the mean.

    Args:
        worker: Whose steps run on the device; it owns the residual and all else that is kept.
        slices: Where each parameter is in the flat vector of all.
        world: The ranks that exchange.
        scaler: The GradScaler of the loop, if there is one.
    """

    def __init__(
        self,
        worker: Worker,
        slices: Mapping[Tensor, slice],
        world: World,
        scaler: GradScaler | None,
    ) -> None:
        self._worker, self._slices = worker, slices
        self._world, self._scaler = world, scaler
        self._steps: GpuSteps | None = None
        self._buckets: list[tuple[int, int, list[int]]] = []
        self._late: list[tuple[int, dist.GradBucket]] = []
        self._unfinished = False
        self._checked = 0
        self._warm = False
        self._tails: dict[Any, tuple[torch.cuda.CUDAGraph, StepTensors]] = {}
        """What follows the last bucket; a replay overwrites its metrics."""
        self._adds: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        """The pass over each bucket, by where the residual is (`GpuSteps.turn`)."""
        self._futures: list[Future[Tensor]] = []
        """Of each bucket, made once; empty while buckets may still change."""
        self._launched = 0
        # With several ranks the script runs collectives in between, and these are not captured.
        self._captures_tails = world.size == 1
        self._captures_adds = True

    def add(self, number: int, bucket: dist.GradBucket) -> Future[Tensor] | None:
        """Add bucket `number` of a backward to the residual, or keep it until all have arrived.

        Returns:
            A future of the buffer that can be handed to DDP, if there is one.
        """
        if number == 0:
            if self._unfinished and self._steps is not None:
                self._steps.clear()  # The backward before has raised.
            self._late, self._unfinished = [], True
            if self._steps is not None:
                self._steps.begin(self._loss_scale())
        if self._steps is None or not self._is_known(number, bucket):
            self._late.append((number, bucket))
            return None
        graph = self._adds.get((self._steps.turn, number))
        if graph is None:
            self._steps.add(number, bucket.buffer())
        else:
            graph.replay()
        return self._futures[number] if self._futures else None

    def _loss_scale(self) -> Tensor | None:
        scale = scale_on_device(self._scaler)
        return None if scale is None else scale.float()

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
        """Return whether it can exchange these buckets: the parameters of the residual, one dtype.

        DDP and the residual differ in parameters that were frozen when the one was made and not
        when the other was.
        """
        if not self._late:
            return True
        known = {p for bucket in buckets for p in bucket.parameters()} == self._slices.keys()
        return known and len({bucket.buffer().dtype for bucket in buckets}) == 1

    def exchange(self, buckets: Sequence[dist.GradBucket]) -> int:
        """Exchange a gradient; return the bytes that this rank sent."""
        steps = self._place(buckets) if self._late or self._steps is None else self._steps
        self._checked += 1
        late, self._late = self._late, []
        for number, bucket in late:
            steps.add(number, bucket.buffer())
        sent = self._tail(steps, target_count(self._density(), self._worker.sparse), buckets)
        steps.commit()
        self._unfinished = False  # After an error, the next step begins with `clear`.
        return sent

    def _density(self) -> float:
        settings = self._worker.settings
        if self._warm or not settings.warmup_steps:
            self._warm = True
            return settings.method.density
        # In a warm-up the host must know how many steps were not called off, so it waits.
        step = self._worker.step
        self._warm = step >= settings.warmup_steps
        return settings.density(step)

    def _tail(self, steps: GpuSteps, k: int, buckets: Sequence[dist.GradBucket]) -> int:
        """Run what follows the last bucket, from a CUDA graph if there is one."""
        # Residual and sum change places after each step, so there are two graphs of everything.
        key = (steps.turn, k, steps.unit_is_one)
        flats = [bucket.buffer() for bucket in buckets]
        if key not in self._tails and self._warm and flats[0].is_cuda:
            self._launched += 1
            if self._launched > _LAUNCHED_FIRST:
                self._capture_adds(steps, flats)
                self._capture_tail(steps, key, k, flats)
        if key in self._tails:
            graph, steps.outcome = self._tails[key]
            graph.replay()
            return 0
        return run(steps.script(k, flats), self._world).bytes

    def _capture_adds(self, steps: GpuSteps, flats: list[Tensor]) -> None:
        """Capture the pass over each bucket, and make their futures."""
        if (steps.turn, 0) in self._adds or len(flats) > _MOST_GRAPHS or not self._captures_adds:
            return
        graphs = captured(
            [partial(steps.add, *one) for one in enumerate(flats)],
            "passes over buckets",
            flats[0].device,
        )
        if graphs is None:
            self._captures_adds = False
            return
        self._adds.update({(steps.turn, number): one for number, one in enumerate(graphs)})
        if not self._futures:
            # Completed, and without a device to wait for, so nothing is left to do in a step. That
            # is enough: autograd makes the stream on which DDP reads the buckets wait for those
            # on which its hooks ran.
            self._futures = [Future() for _ in flats]
            for future, flat in zip(self._futures, flats, strict=True):
                future.set_result(flat)

    def _capture_tail(self, steps: GpuSteps, key: Any, k: int, flats: list[Tensor]) -> None:
        if len(self._tails) >= _MOST_TAILS or not self._captures_tails:
            return
        # One pool for all graphs: they never run at the same time.
        pools = [graph.pool() for graph, _ in self._tails.values()]
        graphs = captured(
            [lambda: run(steps.script(k, flats), self._world)],
            "the exchange",
            flats[0].device,
            pool=pools[0] if pools else None,
        )
        if graphs is None:
            self._captures_tails = False
            return
        assert steps.outcome is not None
        self._tails[key] = graphs[0], steps.outcome

    def _place(self, buckets: Sequence[dist.GradBucket]) -> GpuSteps:
        """Lay out the residual as these buckets are."""
        placement = placement_of(buckets, self._slices, self._worker)
        old, new = self._steps, GpuSteps(self._worker, placement)
        if old is None:
            new.begin(self._loss_scale())
        else:
            new.take_over(old)
        self._steps = new
        self._buckets = [
            (one.buffer().data_ptr(), one.buffer().numel(), [id(p) for p in one.parameters()])
            for one in buckets
        ]
        self._checked = -1  # Counted from the next backward on.
        self._forget_graphs()
        return new

    def _forget_graphs(self) -> None:
        self._tails.clear()
        self._adds.clear()
        self._futures, self._launched = [], 0

    def reset(self) -> None:
        """Go on from another state, which was loaded into the worker."""
        self._forget_graphs()
        self._warm = False
        if self._steps is not None:
            self._steps.outcome = None
            self._steps.clear()

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last step; waits for the device."""
        return {} if self._steps is None else self._steps.metrics()
