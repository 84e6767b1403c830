"""Kernels with all of their arguments but addresses, which are filled in from step to step.

Launching a kernel from Python takes as long as a small layer; replaying a CUDA graph of all kernels
of a group takes a tenth of it, and no copy is needed if the addresses are those of an earlier step.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger("gradherd")

_MOST_PLACED = 2  # each may have a graph of its own


class KernelLaunch:
    """One kernel with all of its arguments but the addresses."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        fields: Tensor,
        tiles: Tensor,
        constants: dict[str, Any],
        options: dict[str, int],
    ) -> None:
        self._kernel, self._programs = kernel, programs
        self._tables, self._constants, self._options = (fields, tiles), constants, options
        self._compiled: Callable[..., None] | None = None

    def __call__(self, pointers: Tensor) -> None:
        """Launch it."""
        if self._compiled is not None:
            self._compiled(pointers, *self._tables, *self._constants.values())
            return
        done = self._kernel[(self._programs,)](
            pointers, *self._tables, **self._constants, **self._options
        )
        # From now on without looking for the compiled kernel, which takes longer than launching.
        if hasattr(done, "function"):  # Triton's interpreter has none
            self._compiled = done[(self._programs, 1, 1)]


class PlacedLaunch:
    """The launches of a plan with the addresses of one step."""

    def __init__(self, launches: list[KernelLaunch], pointers: Tensor) -> None:
        """Start without addresses.

        Args:
            launches: The launches.
            pointers: Memory for addresses on the device.
        """
        self._launches = launches
        self.pointers = pointers
        self.addresses: list[int] = []
        """What `pointers` holds."""
        self.runs = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Run all kernels."""
        self.runs += 1
        if self.graph is not None:
            self.graph.replay()
        else:
            self.launch_all()

    def launch_all(self) -> None:
        """Launch kernel after kernel."""
        for launch in self._launches:
            launch(self.pointers)


@dataclass
class LaunchPlan:
    """The launches of a group of layers."""

    launches: list[KernelLaunch]
    room: int
    """Addresses of a step at most."""
    device: torch.device
    places: np.ndarray[Any, np.dtype[np.int64]]
    """Which addresses point into the scratch memory."""
    offsets: np.ndarray[Any, np.dtype[np.int64]]
    scratch: int
    """Bytes of scratch memory."""
    held: list[Any] = field(default_factory=list)
    placed: list[PlacedLaunch] = field(default_factory=list)
    """For the addresses of the last steps; the latest at the end."""

    def place(self, addresses: list[int]) -> tuple[PlacedLaunch, bool]:
        """Return launches for some addresses, and whether these have to be copied to the device.

        A loop of equal steps gets the same memory from torch's allocator again and again, or the
        memory of two steps in turn. So the addresses are there already, most of the time.
        """
        if self.placed and self.placed[-1].addresses == addresses:
            return self.placed[-1], False
        for at, one in enumerate(reversed(self.placed), 1):
            if one.addresses == addresses:
                self.placed.append(self.placed.pop(-at))
                return one, False
        if len(self.placed) < _MOST_PLACED:
            pointers = torch.zeros(self.room, dtype=torch.int64, device=self.device)
            self.placed.append(PlacedLaunch(self.launches, pointers))
        else:  # the oldest; its graph reads whatever addresses are there
            self.placed.append(self.placed.pop(0))
        self.placed[-1].addresses = addresses
        return self.placed[-1], True


def capture_graph(launch: PlacedLaunch) -> bool:
    """Make some kernels a CUDA graph; say whether graphs can be made here."""
    if torch.cuda.is_current_stream_capturing():  # by the user
        return True
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(torch.cuda.Stream(launch.pointers.device)):
            # Of this thread only: others may allocate memory meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch.launch_all()
            finally:
                graph.capture_end()
    except RuntimeError as error:
        log.warning("no CUDA graphs for rows, whose kernels are launched one by one: %s", error)
        return False
    launch.graph = graph
    return True
