"""What all rooms share about GPUs: whether Triton is there, its launches, and CUDA graphs."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("gradherd")


@cache
def has_triton() -> bool:
    """Return whether Triton is installed; it is optional, and absent where there is no GPU."""
    return find_spec("triton") is not None


def on_cpu(value: Any) -> Any:
    """Return a copy of a tensor in CPU memory, and anything else as it is."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *args: Any, **options: Any) -> Any:
    """Launch a kernel of Triton where its tensors are.

    Triton itself launches on the current device, whatever the device of the tensors. Here the
    kernel's `first` argument tells it. `options` are constants, and options such as num_warps.
    """
    with torch.cuda.device_of(first):
        return kernel[grid](first, *args, **options)


class Launch:
    """A launch that comes again and again, with the same numbers and other memory.

    Looking for the compiled kernel takes longer than launching it, so it is kept.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], *numbers: Any) -> None:
        """Prepare; `numbers` are all arguments behind the memory, constants included."""
        self._kernel, self._grid, self._numbers = kernel, grid, numbers
        self._run: Any = None
        self._function: Any = None
        self._metadata: Any = None

    def __call__(self, stream: int, *memory: int) -> None:
        """Launch on the current device, which must be that of the memory, and its current stream.

        Memory is given by addresses; the kernel must not be specialized for them.
        """
        if self._run is None:
            done = self._kernel[self._grid](*memory, *self._numbers)
            if hasattr(done, "function"):  # Triton's interpreter has none
                self._run, self._function = done.run, done.function
                self._metadata = done.packed_metadata
            return
        # As Triton's own `done[grid]` does it, but for the hooks of its profiler.
        self._run(
            *self._grid, stream, self._function, self._metadata, None, None, None,
            *memory, *self._numbers,
        )  # fmt: skip


def this_stream(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return what another thread enters to work on this thread's stream of a device.

    What it enqueues there comes after what this thread has enqueued, and before what comes next.
    """
    if device.type != "cuda":
        return nullcontext
    return partial(torch.cuda.stream, torch.cuda.current_stream(device))


class SideStream:
    """A stream for what another thread does beside the training loop; on a CPU, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_this(self) -> AbstractContextManager[None]:
        """Return what another thread enters to work with what this thread has enqueued so far.

        Neither thread makes the other wait: the stream does, and at the end of the block the thread
        that works. So what it has written is there for all streams when the block ends, and memory
        that it was given is not in use any more: keep a reference to it until then.
        """
        if self._stream is None:
            return nullcontext()
        return _entered(self._stream, torch.cuda.current_stream(self._stream.device).record_event())


@contextmanager
def _entered(stream: torch.cuda.Stream, begun: torch.cuda.Event) -> Iterator[None]:
    # It also sets the current device, which a new thread has not inherited.
    with torch.cuda.stream(stream):
        stream.wait_event(begun)
        try:
            yield
        finally:
            stream.synchronize()  # without the GIL


def captured(
    works: Sequence[Callable[[], Any]], what: str, device: torch.device, *, pool: Any = None
) -> list[torch.cuda.CUDAGraph] | None:
    """Capture each of several works as a CUDA graph, without running it.

    Works launch kernels on fixed memory. Graphs that never run at the same time may share a `pool`.
    Returns None, with a warning of `what`, if one cannot be made.
    """
    graphs: list[torch.cuda.CUDAGraph] = []
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    # A graph that nobody needs any more must not be destroyed meanwhile: it would end the capture.
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            for work in works:
                graphs.append(torch.cuda.CUDAGraph())
                # Other threads, such as nccl's watchdog, may call CUDA meanwhile.
                graphs[-1].capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    # Also after an error: the stream would record whatever follows, for ever.
                    graphs[-1].capture_end()
    except RuntimeError as error:
        log.warning("no CUDA graph for %s, whose kernels are launched one by one: %s", what, error)
        return None
    finally:
        if collects:
            gc.enable()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graphs
