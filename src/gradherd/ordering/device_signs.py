"""Greedy signs of single examples on a GPU, one batch after the other, without waiting for any.

Steps are alike: as many rows of the same length. So everything lies in fixed memory, and after a
few batches their kernels are a CUDA graph, which is launched in a tenth of the time. The host reads
the signs at the end of the epoch (`BalanceState.settle`).

Shapes: b rows of a worker in a call, M workers, D columns.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from gradherd.ordering.gram import fast_form, give_up_kernels

log = logging.getLogger("gradherd")

DEVICES_TO_STAY_ON = {"cuda"}
"""Where rows are signed without waiting for the device; tests add the CPU."""
MAX_COLUMNS = 1 << 20
"""Longest rows that are copied to memory of their own: sketches, not whole gradients."""
_RUNS_BEFORE_GRAPH = 3  # batch sizes that do not come again are not worth one
_MOST_SIZES = 4


class DeviceSigner:
    """Signs the rows of workers, each of which has its own mean and running sum."""

    def __init__(self, like: Tensor) -> None:
        """Reserve memory for sums of the shape (M, D) of `like`."""
        # Contiguous, which kernels rely on and a slice of gathered rows is not.
        self.running, self.total, self.mean = like.new_zeros(3, *like.shape)
        self._has_mean = False
        self._uses_graphs = like.is_cuda
        self._blocks: dict[int, _Block] = {}
        self._stream: Any = None

    def take_over(self, running: Tensor, total: Tensor, mean: Tensor | None) -> None:
        """Continue from (M, D) sums and the mean, if these are not the memory of this object."""
        for own, given in ((self.running, running), (self.total, total)):
            if given is not own:
                own.copy_(given)
        if mean is not None and mean is not self.mean:
            self.mean.copy_(mean)
        elif mean is None and self._has_mean:
            self.mean.zero_()
        self._has_mean = mean is not None

    def sign(self, rows: Tensor) -> Tensor | None:
        """Sign rows (b, M, D), minus the mean, and add them to `running` and `total`.

        Returns:
            (b, M) int8, overwritten by the next call; 0 where a row is not finite. None if the
            device refuses the kernels: then nothing has changed.
        """
        self._follow_stream()
        block = self._blocks.get(len(rows))
        if block is None:
            try:
                block = _Block(rows)
            except Exception as error:  # of Triton or its compiler, which have many kinds
                give_up_kernels(error)
                return None
            if len(self._blocks) >= _MOST_SIZES:
                self._blocks.clear()
            self._blocks[len(rows)] = block
        # Centring copies the rows to fixed memory at the same time.
        torch.sub(rows.transpose(0, 1), self.mean.unsqueeze(1), out=block.z)
        block.run(self.mean, self.running, self.total)
        if self._uses_graphs and block.runs == _RUNS_BEFORE_GRAPH:
            self._uses_graphs = block.capture(self.mean, self.running, self.total)
        return block.signs.T

    def _follow_stream(self) -> None:
        """Let the current stream wait for the one that the batch before was signed on."""
        if not self.running.is_cuda:
            return
        now = torch.cuda.current_stream(self.running.device)
        if self._stream is not None and now != self._stream:
            now.wait_stream(self._stream)
        self._stream = now


class _Block:
    """The vectors of a batch in fixed memory, and the kernels that sign them."""

    def __init__(self, rows: Tensor) -> None:
        count, workers, columns = rows.shape
        self.z = rows.new_empty(workers, count, columns)
        self.signs = rows.new_zeros(workers, count, dtype=torch.int8)
        fast = fast_form(self.z, self.z[:, 0])
        self._parts = [
            fast.BlockMemory(self.z[:, lo : lo + fast.MOST], self.signs[:, lo : lo + fast.MOST])
            for lo in range(0, count, fast.MOST)
        ]
        self.runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        # A first run for nothing: if a kernel is refused, no sum has changed yet.
        self.z.zero_()
        self._launch(*rows.new_zeros(3, workers, columns))

    def run(self, mean: Tensor, running: Tensor, total: Tensor) -> None:
        """Sign the vectors; add them to `running`, and with the mean to `total`, all (M, D)."""
        self.runs += 1
        if self._graph is not None:
            self._graph.replay()
        else:
            self._launch(mean, running, total)

    def _launch(self, mean: Tensor, running: Tensor, total: Tensor) -> None:
        for part in self._parts:
            part.sign(mean, running, total)

    def capture(self, mean: Tensor, running: Tensor, total: Tensor) -> bool:
        """Make the kernels a CUDA graph on this memory; say whether graphs can be made here."""
        if torch.cuda.is_current_stream_capturing():  # by the user
            return True
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.z.device)):
                # Of this thread only: others may allocate memory meanwhile.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._launch(mean, running, total)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            log.warning("no CUDA graph for signs, whose kernels are launched one by one: %s", error)
            return False
        self._graph = graph
        return True


def signer_for(rows: Tensor, before: DeviceSigner | None) -> DeviceSigner | None:
    """Return what can sign rows (b, M, D): the one from `before` if it can, None if none can."""
    if rows.shape[2] > MAX_COLUMNS or fast_form(rows, rows[0]) is None:
        return None
    if before is not None and before.running.shape == rows.shape[1:]:
        if before.running.device == rows.device:
            return before
    return DeviceSigner(rows[0])
