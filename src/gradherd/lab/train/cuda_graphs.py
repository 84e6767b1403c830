"""What a function does on a GPU, recorded once and replayed: a CUDA graph for each shape.

A pass through a model is hundreds of launches from Python; a replay is one. What is replayed is
what the GPU did, not what Python did: a number drawn on the CPU, a branch or a length would stay
as it was for ever. So a function that draws numbers or makes the GPU wait for the host is never
captured but called.
"""

import contextlib
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

log = logging.getLogger("gradherd")

Function = Callable[..., tuple[Tensor, ...]]
_Shapes = tuple[tuple[torch.Size, torch.dtype], ...]

# As torch's notes on CUDA graphs advise: libraries set themselves up in the first calls.
_WARM_UPS = 3
# The allocator goes on asking a graph whose capture has failed: it must not go away.
_FAILED: list[torch.cuda.CUDAGraph] = []


@dataclass(frozen=True)
class _CapturedGraph:
    """A graph and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        for mine, given in zip(self.inputs, tensors, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.outputs


class GraphedFunction:
    """Calls a function; on a GPU replays it from the second time on that shapes are met.

    The function must be the same work each time: it may read and write in place whatever it
    closes over (parameters, buffers, large tables that are not worth a copy), as long as that
    stays where it is in memory. It must not write to its arguments.

    >>> doubled = GraphedFunction(lambda x: (2 * x,))
    >>> doubled(torch.ones(2))
    (tensor([2., 2.]),)
    """

    def __init__(self, function: Function, restore: Sequence[Tensor] = ()) -> None:
        """Capture nothing yet.

        Args:
            function: Takes and returns tensors.
            restore: What it writes in place: calls that only warm up leave these as they were.
        """
        self._function = function
        self._restore = tuple(restore)
        self._met: set[_Shapes] = set()
        self._replays: dict[_Shapes, _CapturedGraph] = {}
        self._stream: torch.cuda.Stream | None = None
        self.why_not: str | None = None
        """Why the function is called for good; None as long as it may be captured."""

    @property
    def graphs(self) -> int:
        """How many shapes are replayed."""
        return len(self._replays)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return what the function returns.

        After a replay these are the graph's own tensors: use or copy them before the next call.
        """
        if self.why_not is not None or not tensors or not all(t.is_cuda for t in tensors):
            return self._function(*tensors)
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if shapes in self._replays:
            return self._replays[shapes](*tensors)
        if shapes not in self._met:
            # A real call, so that nothing needs to be undone should it draw numbers.
            self._met.add(shapes)
            before = rng_states(tensors[0].device)
            found = self._function(*tensors)
            if rng_advanced(before, rng_states(tensors[0].device)):
                self._give_up("it draws random numbers")
            return found
        try:
            self._replays[shapes] = self._captured(tensors)
        except RuntimeError as error:
            self._give_up(_root_cause(error))
        return self(*tensors)

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self._replays.clear()
        log.warning("a step is not captured as a CUDA graph: %s", why)

    def _captured(self, tensors: tuple[Tensor, ...]) -> _CapturedGraph:
        """Warm up and capture. Raises RuntimeError where that is not possible."""
        with torch.cuda.device(tensors[0].device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                inputs = tuple(torch.empty_like(tensor) for tensor in tensors)
            for mine, given in zip(inputs, tensors, strict=True):
                mine.copy_(given)
            before = [tensor.clone() for tensor in self._restore]
            self._stream.wait_stream(torch.cuda.current_stream())
            try:
                # torch.cuda.graph would stay on its stream after a failure; this does not.
                with torch.cuda.stream(self._stream):
                    self._warm_up(inputs)
                    return self._record(inputs)
            finally:
                torch.cuda.current_stream().wait_stream(self._stream)
                for tensor, value in zip(self._restore, before, strict=True):
                    tensor.copy_(value)

    def _warm_up(self, inputs: tuple[Tensor, ...]) -> None:
        for _ in range(_WARM_UPS - 1):
            self._function(*inputs)
        # Most of what cannot be captured is found here, where failing breaks nothing.
        with _forbid_host_sync():
            self._function(*inputs)

    def _record(self, inputs: tuple[Tensor, ...]) -> _CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        # Shapes are replayed one at a time, and outputs are kept: they may share the rest.
        pool = next(iter(self._replays.values())).graph.pool() if self._replays else None
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                outputs = self._function(*inputs)
        except BaseException:
            _FAILED.append(graph)
            _reset_capture_state()
            raise
        return _CapturedGraph(graph, inputs, outputs)


def rng_states(device: torch.device) -> list[Tensor]:
    """Return where torch's, Python's and NumPy's global generators stand."""
    python = torch.tensor(random.getstate()[1], dtype=torch.int64)
    theirs = np.random.get_state(legacy=False)["state"]
    numpy = torch.tensor([*theirs["key"].tolist(), theirs["pos"]], dtype=torch.int64)
    states = [torch.get_rng_state(), python, numpy]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def rng_advanced(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Return whether numbers were drawn between two looks at the generators.

    >>> cpu = torch.device("cpu")
    >>> before = rng_states(cpu)
    >>> rng_advanced(before, rng_states(cpu))
    False
    >>> _ = torch.rand(1)
    >>> rng_advanced(before, rng_states(cpu))
    True
    """
    return not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def has_dropout(model: nn.Module) -> bool:
    """Return whether a model has dropout that is not zero."""
    return any(
        (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0)
        or (isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0)
        for module in model.modules()
    )


@contextlib.contextmanager
def _forbid_host_sync() -> Iterator[None]:
    """Raise RuntimeError if the host waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode(2)
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not everything is found
        torch.cuda.set_sync_debug_mode(mode)


def _reset_capture_state() -> None:
    """Let torch's generator know that no capture is under way, by one that does not fail.

    After one that has failed, some versions refuse to draw numbers.
    """
    torch.cuda.synchronize()
    number = torch.zeros((), device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        number.add_(1)


def _root_cause(error: BaseException) -> str:
    """Return what went wrong first: the end of a capture that is broken raises once more."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).strip().partition("\n")[0]
