"""CUDA graphs of a function: captured once for each input shape, then replayed.

A forward and backward from Python is hundreds of kernel launches; a replay is one. A replay repeats
what the GPU did, not what Python did: a random number drawn on the CPU, a branch or a length would
be frozen. So a function that draws random numbers or synchronizes with the host is never captured
but called.

`torch.cuda.make_graphed_callables` covers little of this: it takes one shape, captures a backward
pass that is inside our functions already, checks for neither random numbers nor host syncs, and
raises where this falls back to calling. `torch.cuda.graph` does the capture itself.
"""

import contextlib
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradherd.lab.train.optimizers import get_rng_states, set_rng_states

log = logging.getLogger("gradherd")

Function = Callable[..., tuple[Tensor, ...]]
_Shapes = tuple[tuple[torch.Size, torch.dtype], ...]

# Libraries allocate workspaces in their first calls, which must not happen during capture
# (torch's notes on CUDA graphs).
_WARMUP_CALLS = 3
# The allocator keeps querying a graph whose capture has failed, so these are never freed.
_FAILED: list[torch.cuda.CUDAGraph] = []


@dataclass(frozen=True)
class _CapturedGraph:
    """A graph with its static input and output tensors."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        # A graph reads the addresses it was captured with, so new values go there.
        for static, tensor in zip(self.inputs, tensors, strict=True):
            static.copy_(tensor)
        self.graph.replay()
        return self.outputs


class GraphedFunction:
    """A function that is called once per input shape and, on a GPU, replayed from then on.

    The function must do the same work each time. It may read and write in place whatever it closes
    over (parameters, buffers, large tensors that are not worth a copy), as long as that stays at
    the same address. It must not write to its arguments.

    >>> double = GraphedFunction(lambda x: (2 * x,))
    >>> double(torch.ones(2))
    (tensor([2., 2.]),)
    """

    def __init__(self, function: Function, restore: Sequence[Tensor] = ()) -> None:
        """Wrap a function; nothing is captured yet.

        Args:
            function: Takes and returns tensors.
            restore: Tensors that it writes in place; calls that do not count are undone in these.
        """
        self._function = function
        self._restore = tuple(restore)
        self._called: set[_Shapes] = set()
        self._graphs: dict[_Shapes, _CapturedGraph] = {}
        self._stream: torch.cuda.Stream | None = None
        self.fallback_reason: str | None = None
        """Why the function is always called; None as long as it may be captured."""

    @property
    def graphs(self) -> int:
        """Number of captured shapes."""
        return len(self._graphs)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return what the function returns.

        After a replay these are the graph's static outputs: the next call overwrites them.
        """
        outputs = self.attempt(*tensors)
        return self._function(*tensors) if outputs is None else outputs

    def attempt(self, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """Return what the function returns, or None if it cannot be captured.

        After None, generators and the tensors in `restore` are as before: the caller can compute
        the same thing in another way, such as worker after worker with generators of their own.
        """
        if self.fallback_reason is not None or not _all_on_gpu(tensors):
            return None
        # Shapes are frozen in a graph: the shorter last batch of an epoch gets its own.
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if shapes in self._graphs:
            return self._graphs[shapes](*tensors)
        if shapes not in self._called:
            self._called.add(shapes)
            return self._call_first(tensors)
        try:
            graph = self._graphs[shapes] = self._capture(tensors)
        except RuntimeError as error:
            self._fall_back(_root_cause(error))
            return None
        return graph(*tensors)

    def _call_first(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Call the function; undo it and return None if it draws random numbers."""
        before, values = RngStates(tensors[0].device), [tensor.clone() for tensor in self._restore]
        outputs = self._function(*tensors)
        if not before.have_advanced():
            return outputs
        # A graph would replay for ever a mask that was drawn on the CPU.
        self._fall_back("it draws random numbers")
        before.restore()
        for tensor, value in zip(self._restore, values, strict=True):
            tensor.copy_(value)
        return None

    def _fall_back(self, reason: str) -> None:
        self.fallback_reason = reason
        # Frees their memory: they are not used again.
        self._graphs.clear()
        # A warning, not an error: the results are the same, only slower.
        log.warning("a step is not captured as a CUDA graph: %s", reason)

    def _capture(self, tensors: tuple[Tensor, ...]) -> _CapturedGraph:
        """Warm up and capture; raise RuntimeError if the function cannot be captured."""
        with torch.cuda.device(tensors[0].device):
            if self._stream is None:
                # Capture is not allowed on the default stream.
                self._stream = torch.cuda.Stream()
            # Tensors created in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                inputs = tuple(torch.empty_like(tensor) for tensor in tensors)
            for static, tensor in zip(inputs, tensors, strict=True):
                static.copy_(tensor)
            # Warm-up calls update BatchNorm statistics, and the step has not been taken yet.
            before = [tensor.clone() for tensor in self._restore]
            # The copies above run on the current stream.
            self._stream.wait_stream(torch.cuda.current_stream())
            try:
                # After a failed capture torch.cuda.graph leaves its stream current; this context
                # restores the previous one.
                with torch.cuda.stream(self._stream):
                    self._warm_up(inputs)
                    return self._record(inputs)
            finally:
                # The values below may only be restored once the warm-up has finished.
                torch.cuda.current_stream().wait_stream(self._stream)
                for tensor, value in zip(self._restore, before, strict=True):
                    tensor.copy_(value)

    def _warm_up(self, inputs: tuple[Tensor, ...]) -> None:
        for _ in range(_WARMUP_CALLS - 1):
            self._function(*inputs)
        # Detects most of what cannot be captured here, where failing leaves no broken state.
        with _forbid_host_sync():
            self._function(*inputs)

    def _record(self, inputs: tuple[Tensor, ...]) -> _CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        # Only one shape is replayed at a time, and outputs stay allocated: they can share a pool.
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                outputs = self._function(*inputs)
        # KeyboardInterrupt, too: whatever ends a capture leaves torch in the same broken state.
        except BaseException:
            _FAILED.append(graph)
            _reset_capture_state()
            raise
        return _CapturedGraph(graph, inputs, outputs)


def _all_on_gpu(tensors: tuple[Tensor, ...]) -> bool:
    # Without an input there is no device to capture on.
    return bool(tensors) and all(tensor.is_cuda for tensor in tensors)


class RngStates:
    """The states of torch's, Python's and NumPy's global generators when this was made.

    >>> before = RngStates(torch.device("cpu"))
    >>> before.have_advanced()
    False
    >>> _ = torch.rand(1)
    >>> before.have_advanced()
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._torch = device, get_rng_states(device)
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)

    def have_advanced(self) -> bool:
        """Return whether random numbers were drawn since."""
        now = RngStates(self._device)
        same = all(map(torch.equal, self._torch, now._torch)) and self._python == now._python
        here, there = self._numpy["state"], now._numpy["state"]
        same_numpy = here["pos"] == there["pos"] and np.array_equal(here["key"], there["key"])
        return not (same and same_numpy)

    def restore(self) -> None:
        """Set all generators to these states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        set_rng_states(self._torch, self._device)


def has_dropout(model: nn.Module) -> bool:
    """Return whether a model has dropout with a non-zero probability."""
    return any(
        (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0)
        or (isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0)
        for module in model.modules()
    )


class SideBySide:
    """Runs functions one after the other; on a GPU, on streams beside each other.

    The kernels of one small model fill only a part of a GPU. What the functions return belongs to
    the stream that is current here, so they should write to memory that was allocated on it.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        # More streams fill a GPU no further.
        self._streams = [torch.cuda.Stream() for _ in range(8)] if on_gpu else []

    def __call__(self, functions: Sequence[Callable[[], Any]]) -> None:
        """Call all functions; on a GPU, the current stream waits for them."""
        if not self._streams:
            for function in functions:
                function()
            return
        current, used = torch.cuda.current_stream(), self._streams[: len(functions)]
        for stream in used:
            stream.wait_stream(current)
        for at, function in enumerate(functions):
            with torch.cuda.stream(used[at % len(used)]):
                function()
        for stream in used:
            current.wait_stream(stream)


@contextlib.contextmanager
def _forbid_host_sync() -> Iterator[None]:
    """Raise RuntimeError if the host synchronizes with the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode(2)
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "not all synchronizing operations are detected"
        torch.cuda.set_sync_debug_mode(mode)


def _reset_capture_state() -> None:
    """Clear torch's capture state by a capture that succeeds.

    After a failed capture the CUDA generator of some versions refuses to draw random numbers.
    """
    torch.cuda.synchronize()
    scalar = torch.zeros((), device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        scalar.add_(1)


def _root_cause(error: BaseException) -> str:
    """Return the first error: leaving a broken capture raises another one on top."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).strip().partition("\n")[0]
