"""The mean in few bits by its definition: a worker, a slice and a group of 256 at a time."""

import torch

from gradherd.comm.message_sizes import VALUE_BITS
from gradherd.comm.packing import decode_values, encode_values


def one_bit(values):
    """Round (256 n,) values to their signs, and the mean magnitude of each 256 as bf16."""
    out = torch.empty_like(values)
    for at in range(0, len(values), 256):
        group = values[at : at + 256]
        level = (group.abs().sum() / 256).bfloat16().to(values.dtype)
        out[at : at + 256] = torch.where(group < 0, -level, level)
    return out


def rounded(values, form):
    """Return values as those who receive them read them."""
    if form == "int1":
        return one_bit(values)
    if form in VALUE_BITS:
        bits = VALUE_BITS[form]
        return decode_values(encode_values(values, bits), len(values), bits, values.dtype)
    return values.bfloat16().to(values.dtype) if form == "bf16" else values


class Reference:
    """R workers that average (D,) vectors; `lost` is what the owners of slices have yet to send."""

    def __init__(self, dim, size, form):
        self.dim, self.size, self.form = dim, size, form if size > 1 else "fp32"
        self.slice = -(-dim // (256 * size)) * 256
        self.lost = torch.zeros(size, self.slice)

    def mean(self, rows):
        """Return the (D,) mean of (R, D) rows, and (R, D) what each worker did not send."""
        padded = torch.zeros(self.size, self.size * self.slice, dtype=rows.dtype)
        padded[:, : self.dim] = rows
        parts = padded.view(self.size, self.size, self.slice)
        mean, sent = torch.zeros_like(parts[0]), torch.zeros_like(parts)
        for owner in range(self.size):
            total = self.lost[owner].to(rows.dtype)
            for worker in range(self.size):
                sent[worker, owner] = rounded(parts[worker, owner], self.form)
                total = total + sent[worker, owner]
            total[max(0, self.dim - owner * self.slice) :] = 0
            read = rounded(total, self.form)
            mean[owner] = read / self.size
            lost = total - read
            lost[max(0, self.dim - owner * self.slice) :] = 0
            self.lost[owner] = lost
        unsent = rows - sent.view(self.size, -1)[:, : self.dim]
        return mean.view(-1)[: self.dim], unsent
