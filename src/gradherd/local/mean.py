"""The mean of a vector over workers, in few bits each way, with error feedback both ways.

Each worker owns a slice of the vector. It sends every owner that slice of its own vector in few
bits, the owner sums what arrives and sends the sum to all in few bits. What rounding takes from a
worker's vector is the caller's to keep (`unsent`); what it takes from a sum stays with the owner,
who adds it to the next one. One bit is that of 1-bit SGD (Seide et al., Interspeech 2014): a sign,
and the mean magnitude of each group of 256.

On a CPU a vector goes through the cache in blocks: a pass over memory takes longer than the
arithmetic. On a GPU one bit has kernels of its own (`triton_mean`).

Letters: D coordinates, padded to R slices of S; R workers; E numbers that are averaged exactly.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradherd.comm.message_sizes import GROUP, VALUE_BITS, ValueFormat, level_bytes
from gradherd.comm.packing import decode_values, encode_values
from gradherd.gpu import has_triton

LARGEST = 1e30
"""A difference beyond this counts as not finite: sums of such values could overflow."""
_BLOCK = 1 << 15  # coordinates that a CPU takes at a time: all that is read of them stays cached
_SIGNS = 1.0 - 2.0 * np.unpackbits(
    np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
)


class _Codec(ABC):
    """How values are written as codes, and as levels of groups, on any device."""

    per_byte, levels = 1, 0

    @abstractmethod
    def encode(self, values: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
        """Write (n,) values, n a multiple of 256; return () a bound of their magnitudes."""

    @abstractmethod
    def decode(self, codes: Tensor, levels: Tensor, out: Tensor, divisor: int) -> Tensor:
        """Read (n,) values into `out`, divided."""

    def subtract(self, values: Tensor, codes: Tensor, levels: Tensor, scratch: Tensor) -> Tensor:
        """Leave in `values` what rounding took from them."""
        return values.sub_(self.decode(codes, levels, scratch[: len(values)], 1))


class _Signs(_Codec):
    """One bit for each value, on a CPU: two passes of numpy for what takes torch ten."""

    per_byte, levels = 8, 1

    def __init__(self, dtype: torch.dtype) -> None:
        self._table = torch.from_numpy(_SIGNS).to(dtype).numpy()
        self._scratch = torch.empty(_BLOCK, dtype=dtype)
        self._negative = np.empty(_BLOCK, np.bool_)

    def encode(self, values: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
        count, groups = len(values), values.view(-1, GROUP)
        magnitudes = torch.abs(groups, out=self._scratch[:count].view(-1, GROUP))
        level = magnitudes.sum(1).div_(GROUP)
        levels.copy_(level)
        negative = np.signbit(values.numpy(), out=self._negative[:count])
        codes.copy_(torch.from_numpy(np.packbits(negative, bitorder="little")))
        return level.max()

    def decode(self, codes: Tensor, levels: Tensor, out: Tensor, divisor: int) -> Tensor:
        np.take(self._table, codes.numpy(), axis=0, out=out.view(-1, 8).numpy(), mode="clip")
        out.view(-1, GROUP).mul_(levels.to(out.dtype).div_(divisor)[:, None])
        return out

    def subtract(self, values: Tensor, codes: Tensor, levels: Tensor, scratch: Tensor) -> Tensor:
        """Leave in `values` what rounding took from them: their signs need not be read back."""
        groups, rounded = values.view(-1, GROUP), scratch[: len(values)]
        torch.copysign(levels.to(values.dtype)[:, None], groups, out=rounded.view(-1, GROUP))
        return values.sub_(rounded)


class _Levels(_Codec):
    """A few bits for each value, as `packing` rounds them."""

    def __init__(self, bits: int) -> None:
        self._bits, self.per_byte = bits, 8 // bits
        self.levels = level_bytes(GROUP, bits) // 2

    def encode(self, values: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
        packed, border = encode_values(values, self._bits), 2 * len(levels)
        levels.copy_(packed[:border].view(torch.bfloat16))
        codes.copy_(packed[border:])
        return levels.max()

    def decode(self, codes: Tensor, levels: Tensor, out: Tensor, divisor: int) -> Tensor:
        packed = torch.cat([levels.contiguous().view(torch.uint8), codes])
        return out.copy_(decode_values(packed, len(out), self._bits, out.dtype)).div_(divisor)


class _Cast(_Codec):
    """Values in a dtype: exactly in their own."""

    def __init__(self, wire: torch.dtype) -> None:
        self._limit = torch.finfo(wire).max

    def encode(self, values: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
        largest = values.abs().max()
        codes.copy_(values.clamp(-self._limit, self._limit))
        return largest

    def decode(self, codes: Tensor, levels: Tensor, out: Tensor, divisor: int) -> Tensor:
        return out.copy_(codes).div_(divisor)


class Messages:
    """(n, bytes) messages, one in a row, and views of what each holds.

    The header is four int32; then numbers to be averaged exactly, codes of a slice and their
    levels.
    """

    def __init__(
        self, rows: int, parts: Sequence[tuple[str, int, torch.dtype]], device: Any
    ) -> None:
        sizes = [-(-count * dtype.itemsize // 8) * 8 for _, count, dtype in parts]
        self.raw = torch.zeros(rows, sum(sizes), dtype=torch.uint8, device=device)
        begin = 0
        for (name, count, dtype), size in zip(parts, sizes, strict=True):
            part = self.raw[:, begin : begin + count * dtype.itemsize].view(dtype)
            setattr(self, name, part)
            begin += size

    header: Tensor
    exact: Tensor
    codes: Tensor
    levels: Tensor


class FewBitMean:
    """What one worker sends for a mean of (D,) vectors over R = `size` workers, and keeps of it.

    `send`, an all-to-all of messages, `own`, an all-gather, then `mean` of each block. Vectors are
    (`length`,), of which the first `dim` coordinates count and the others are padding.

    >>> alone = FewBitMean(3)
    >>> alone.length, alone.size
    (256, 1)
    """

    def __init__(
        self,
        dim: int,
        *,
        exact: int = 0,
        rank: int = 0,
        size: int = 1,
        values: ValueFormat = "int1",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        device = torch.device(device)
        self.dim, self.rank, self.size, self.exact = dim, rank, size, exact
        self.slice = -(-dim // (size * GROUP)) * GROUP
        self.length = size * self.slice
        self._real = min(max(dim - rank * self.slice, 0), self.slice)
        # One worker alone sends nothing, so it has nothing to round.
        bits = VALUE_BITS.get(values, 0) if size > 1 else 0
        wire = torch.bfloat16 if values == "bf16" and size > 1 else dtype
        self.kernels: Any = None
        if bits == 1 and device.type == "cuda" and dtype == torch.float32 and has_triton():
            from gradherd.local import triton_mean  # takes a second, and needs Triton

            self.kernels = triton_mean
        fast = bits == 1 and device.type == "cpu"
        codec: _Codec = _Signs(dtype) if fast else _Levels(bits) if bits else _Cast(wire)
        self._codec: _Codec = codec
        block = min(_BLOCK, self.slice) if device.type == "cpu" else self.slice
        self._block = max(1, block)
        self.error: Tensor | None = None
        """(S,) what rounding has taken from the sums of the slice that this worker owns."""
        if bits or wire != dtype:
            self.error = torch.zeros(self.slice, dtype=dtype, device=device)
        parts = [
            ("header", 4, torch.int32),
            ("exact", -(-exact // size), dtype),
            ("codes", self.slice // codec.per_byte, torch.uint8 if bits else wire),
            ("levels", self.slice // GROUP * codec.levels, torch.bfloat16),
        ]
        self.sent = Messages(size, parts, device)
        # What was sent is read again only for what rounding took of it; one worker has one message.
        alone, exact_codes = size == 1, self.error is None
        self.received = self.sent if alone else Messages(size, parts, device)
        self.gathered = self.sent if exact_codes else Messages(size, parts, device)
        self.sum = self.sent if alone else Messages(1, parts, device)
        self._where: dict[str, Any] = {"dtype": dtype, "device": device}

    # Made when first asked for: kernels need no room beside the vectors, unless a state is saved.

    @cached_property
    def _values(self) -> Tensor:
        return torch.empty(self._block, **self._where)

    @cached_property
    def _decoded(self) -> Tensor:
        return torch.empty(self._block, **self._where)

    def blocks(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield (owner, part of its slice, part of the vector) for all blocks, in order."""
        for owner in range(self.size):
            first = owner * self.slice
            for begin in range(0, self.slice, self._block):
                end = min(begin + self._block, self.slice)
                yield owner, slice(begin, end), slice(first + begin, first + end)

    def _decode(
        self, messages: Messages, row: int, part: slice, out: Tensor, divisor: int = 1
    ) -> Tensor:
        codes, levels = self._of(messages, row, part)
        return self._codec.decode(codes, levels, out[: part.stop - part.start], divisor)

    def _of(self, messages: Messages, row: int, part: slice) -> tuple[Tensor, Tensor]:
        each, codec = GROUP, self._codec
        codes = messages.codes[row, part.start // codec.per_byte : part.stop // codec.per_byte]
        levels = slice(part.start // each * codec.levels, part.stop // each * codec.levels)
        return codes, messages.levels[row, levels]

    def _difference(self, own: Tensor, shared: Tensor, owed: Tensor | None, at: slice) -> Tensor:
        values = torch.sub(shared[at], own[at], out=self._values[: at.stop - at.start])
        if owed is not None:
            values.add_(owed[at])
        if at.stop > self.dim:
            values[max(0, self.dim - at.start) :] = 0
        return values

    def send(
        self,
        own: Tensor,
        shared: Tensor,
        owed: Tensor | None,
        exact: Tensor,
        position: tuple[int, int] = (0, 0),
    ) -> Messages:
        """Write messages to all owners of `shared` - `own` + `owed`.

        Args:
            own: (length,) weights of this worker.
            shared: (length,) weights that all share.
            owed: (length,) what was not sent before and is not in `own`; None is nothing.
            exact: (E,) numbers that are averaged exactly.
            position: Two numbers that must be equal on all workers.
        """
        if self.kernels:
            largest = self.kernels.send(self, own, shared, owed)
        else:
            found = [
                self._codec.encode(
                    self._difference(own, shared, owed, at), *self._of(self.sent, owner, part)
                )
                for owner, part, at in self.blocks()
            ]
            largest = torch.stack(found).max() if found else exact.new_zeros(())
        small = exact[: len(shared) - self.length]  # parameters; buffers may well be infinite
        finite = (largest <= LARGEST) & (small.abs() <= LARGEST).all()
        self.sent.header[:, 0], self.sent.header[:, 1] = position
        self.sent.header[:, 2], self.sent.header[:, 3] = finite, self.dim
        each = self.sent.exact.shape[1]
        for owner in range(self.size if each else 0):
            piece = exact[owner * each : (owner + 1) * each]
            self.sent.exact[owner, : len(piece)] = piece
        return self.sent

    def own(self, ok: Tensor | None = None) -> Messages:
        """Return the message to all about this worker's slice, made of those `received`.

        With kernels, nothing is kept of a sum unless the int32 `ok` is 1.
        """
        rows = self.received.exact
        total = rows[0].clone()
        for row in rows[1:]:  # one by one: `sum(0)` may group them differently elsewhere
            total += row
        # Those equal everywhere, such as masks, keep their bits: their mean need not have them.
        same = (rows == rows[0]).all(0)
        self.sum.exact[0] = torch.where(same, rows[0], total / self.size)
        if self.kernels:
            self.kernels.own(self, ok)
            return self.sum
        for begin in range(0, self.slice, self._block):
            part = slice(begin, min(begin + self._block, self.slice))
            total = self._values[: part.stop - begin] if self.error is None else self.error[part]
            for row in range(self.size):
                if row == 0 and self.error is None:
                    self._decode(self.received, row, part, total)
                else:
                    total.add_(self._decode(self.received, row, part, self._decoded))
            self._clear_padding(total, part)
            self._codec.encode(total, *self._of(self.sum, 0, part))
            if self.error is not None:
                self._codec.subtract(total, *self._of(self.sum, 0, part), self._decoded)
                self._clear_padding(total, part)
        return self.sum

    def take_back(self) -> None:
        """Undo `own`, to rounding: nobody has received the sum."""
        for begin in range(0, self.slice if self.error is not None else 0, self._block):
            part = slice(begin, min(begin + self._block, self.slice))
            assert self.error is not None
            error = self.error[part].add_(self._decode(self.sum, 0, part, self._decoded))
            for row in range(self.size):
                error.sub_(self._decode(self.received, row, part, self._decoded))
            self._clear_padding(error, part)

    def _clear_padding(self, values: Tensor, part: slice) -> None:
        """Set what lies behind the real coordinates of the own slice to zero: bits have no zero."""
        if part.stop > self._real:
            values[max(0, self._real - part.start) :] = 0

    def mean(self, owner: int, part: slice) -> Tensor:
        """Return the mean of a block, from what was `gathered`, until the next call."""
        return self._decode(self.gathered, owner, part, self._decoded, self.size)

    def unsent(
        self, own: Tensor, shared: Tensor, owed: Tensor | None, owner: int, part: slice, at: slice
    ) -> Tensor:
        """Return what rounding has taken of a block that was sent, until the next call."""
        values = self._difference(own, shared, owed, at)
        if self.error is None:
            return values.zero_()  # it was sent exactly
        self._codec.subtract(values, *self._of(self.sent, owner, part), self._decoded)
        if at.stop > self.dim:
            values[max(0, self.dim - at.start) :] = 0
        return values

    def spread_error(self) -> Tensor | None:
        """Return (length,) the owner's error, zero outside of its slice; None without rounding."""
        if self.error is None:
            return None
        whole = self.error.new_zeros(self.length)
        whole[self.rank * self.slice : (self.rank + 1) * self.slice] = self.error
        return whole
