"""Greedy signs of single examples on a GPU, one batch after the other, without waiting for any.

Steps are alike: as many rows of the same length. So everything lies in fixed memory, and after a
few batches their kernels are a CUDA graph, which is launched in a tenth of the time. The host reads
the signs at the end of the epoch (`SignState.sync_sides`).

Shapes: b rows of a worker in a call, M workers, D columns.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gradherd.gpu import captured
from gradherd.ordering.balance import MOST, fast_form, give_up_kernels
from gradherd.ordering.sign_rules import Greedy, SignRule

SIGNING_DEVICES = {"cuda"}
"""Where rows are signed without waiting for the device; tests add the CPU."""
_MOST_ELEMENTS = 1 << 24
"""Elements of all rows that are copied at a time: sketches are, whole gradients are not."""
_MOST_ROWS = 128
_RUNS_BEFORE_GRAPH = 3  # batch sizes that do not come again are not worth one
_MOST_SIZES = 4


class Sums(NamedTuple):
    """What an order adds rows up to."""

    running: Tensor
    """(M, D) signed sums."""
    total: Tensor | None = None
    """(M, D) plain sums, if the order uses them."""
    mean: Tensor | None = None
    """(M, D) what is subtracted from rows before they are signed; None is zero."""


class DeviceSigner:
    """Signs the rows of workers, each of which has its own mean and running sum."""

    def __init__(self, like: Tensor) -> None:
        """Reserve memory for sums of the shape (M, D) of `like`."""
        # Contiguous, which kernels rely on and a slice of gathered rows is not.
        self.running, self.total, self.mean = like.new_zeros(3, *like.shape)
        self._has_mean = False
        self._most = _rows_at_a_time(like.numel())
        self._uses_graphs = like.is_cuda
        self._blocks: dict[int, _Block] = {}
        self._stream: torch.cuda.Stream | None = None

    def fits(self, rows: Tensor) -> bool:
        """Say whether it can sign rows (b, M, D)."""
        own = self.running
        return own.shape == rows.shape[1:] and fast_form(rows, own) is not None

    def sign(self, rows: Tensor, sums: Sums) -> tuple[Tensor | None, Sums]:
        """Sign rows (b, M, D) and add them up; arguments and result as in `sign_on_device`."""
        parts = rows.split(self._most)
        # All blocks before the first part is signed: one that is refused later would leave sums in
        # which the rows before it count already.
        try:
            blocks = [self._block_for(part) for part in parts]
        except Exception as error:  # of Triton or its compiler, which have many kinds
            give_up_kernels(error)
            return None, sums
        self._take(sums)
        signs = []
        for part, block in zip(parts, blocks, strict=True):
            # Centring copies the rows to fixed memory at the same time.
            torch.sub(part.transpose(0, 1), self.mean.unsqueeze(1), out=block.z)
            block.run(self.mean, self.running, self.total)
            if self._uses_graphs and block.runs == _RUNS_BEFORE_GRAPH:
                self._uses_graphs = block.capture(self.mean, self.running, self.total)
            # The next part has the same memory.
            signs.append(block.signs_by_row if len(parts) == 1 else block.signs_by_row.clone())
        total = None if sums.total is None else self.total
        mean = None if sums.mean is None else self.mean
        return torch.cat(signs) if len(signs) > 1 else signs[0], Sums(self.running, total, mean)

    def _take(self, sums: Sums) -> None:
        """Continue with these sums, after whatever the batch before was signed on."""
        if self.running.is_cuda:
            now = torch.cuda.current_stream(self.running.device)
            if self._stream is not None and self._stream != now:
                now.wait_stream(self._stream)
            self._stream = now
        for own, value in zip((self.running, self.total, self.mean), sums, strict=True):
            if value is not None and value is not own:
                own.copy_(value)
        if sums.mean is None and self._has_mean:
            self.mean.zero_()
        self._has_mean = sums.mean is not None

    def _block_for(self, rows: Tensor) -> "_Block":
        """Return memory for the rows; raise what the device raises if it refuses the kernels."""
        block = self._blocks.get(len(rows))
        if block is None:
            block = _Block(rows)
            if len(self._blocks) >= _MOST_SIZES:
                self._blocks.clear()
            self._blocks[len(rows)] = block
        return block


class _Block:
    """The vectors of a batch in fixed memory, and the kernels that sign them."""

    def __init__(self, rows: Tensor) -> None:
        count, workers, columns = rows.shape
        self.z = rows.new_empty(workers, count, columns)
        self.signs = rows.new_zeros(workers, count, dtype=torch.int8)
        self.signs_by_row = self.signs.T
        fast = fast_form(self.z, self.z[:, 0])
        self._parts = [
            fast.BlockMemory(*part)
            for part in zip(self.z.split(MOST, 1), self.signs.split(MOST, 1), strict=True)
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
        launches = [partial(self._launch, mean, running, total)]
        self._graph = next(iter(captured(launches, "signs", self.z.device) or ()), None)
        return self._graph is not None


def sign_on_device(
    rule: SignRule, rows: Tensor, sums: Sums, before: DeviceSigner | None
) -> tuple[Tensor | None, Sums, DeviceSigner | None]:
    """Sign rows (b, M, D) minus the mean where they are, without the host waiting.

    Args:
        rule: Decides the signs.
        rows: The rows, in visiting order.
        sums: What they are added to; may be overwritten.
        before: What the rows before were signed with.

    Returns:
        (b, M) int8 on the device, overwritten by the next call, 0 where a row is not finite; None
        if it cannot be done here, and then nothing has changed. The new sums, and what signed.
    """
    here = rows.numel() and rows.device.type in SIGNING_DEVICES
    if not here or not isinstance(rule, Greedy):
        return None, sums, before
    signer = _signer_for(rows, before)
    if signer is None:
        return None, sums, None
    return *signer.sign(rows, sums), signer


def _signer_for(rows: Tensor, before: DeviceSigner | None) -> DeviceSigner | None:
    """Return what can sign rows (b, M, D): the one from `before` if it can, None if none can."""
    if before is not None and before.fits(rows):
        return before
    if not _rows_at_a_time(rows[0].numel()) or fast_form(rows, rows[0]) is None:
        return None
    return DeviceSigner(rows[0])


def _rows_at_a_time(elements: int) -> int:
    """Return how many rows (M, D) of so many elements are signed in one go; 0 if too long."""
    return min(_MOST_ROWS, _MOST_ELEMENTS // max(1, elements) // MOST * MOST)
