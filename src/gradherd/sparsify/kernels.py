"""The passes over whole vectors, each as fast as this machine's libraries allow.

On a CPU torch is slow at comparing (five times numpy's time) and at finding what is true (ten
times), so numpy does that there, on the same memory.
"""

import numpy as np
import torch
from torch import Tensor

_SAMPLES = 8192


def accumulate(kept: Tensor, grad: Tensor, out: Tensor, unit: float) -> Tensor:
    """Write kept + unit * grad to `out`, clear `grad`, and return a sum that is finite if all is.

    Args:
        kept: (D,) residual, left alone: the step may yet be called off.
        grad: (D,) gradient of any floating type.
        out: (D,) like `kept`.
        unit: What a gradient is multiplied by.
    """
    torch.add(kept, grad, alpha=unit, out=out)
    grad.zero_()
    return out.sum()


def above(values: Tensor, floor: float) -> Tensor:
    """Return where |values| >= floor, ascending: (D,) -> (k,) int64.

    >>> above(torch.tensor([0.5, -3.0, 2.0]), 1.0)
    tensor([1, 2])
    """
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        found = np.flatnonzero(np.abs(values.numpy()) >= floor)
        return torch.from_numpy(found)
    return (values.abs() >= floor).nonzero().view(-1)


def largest(values: Tensor, k: int) -> Tensor:
    """Return where the k largest magnitudes are, ascending: (D,) -> (k,) int64.

    A sample tells a floor that most likely leaves a few more than k; if it leaves fewer, the
    whole vector is searched. Either way the answer is exact.

    >>> largest(torch.tensor([0.5, -3.0, 2.0]), 2)
    tensor([1, 2])
    """
    stride = len(values) // _SAMPLES
    if stride > 4 and 8 * k < len(values):
        sample = values[::stride].abs()
        rank = min(len(sample), int(1.5 * k / stride) + 16)
        found = above(values, float(sample.topk(rank).values[-1]))
        if len(found) >= k:
            return found[values[found].abs().topk(k).indices].sort().values
    return values.abs().topk(k).indices.sort().values
