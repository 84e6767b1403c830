"""Error feedback: what was not sent is kept and added to the next gradient.

Two vectors, one that holds what is kept and one that the next step's sum is written to, so that
a step can be called off (a gradient was not finite, on any worker) without a trace. With momentum
there are two more: the correction of Lin et al., "Deep Gradient Compression", ICLR 2018.

Letters: D coordinates, K those that travel.
"""

import torch
from torch import Tensor

from gradherd.sparsify import kernels
from gradherd.sparsify.tally import Tally


class Feedback:
    """Residuals of one worker."""

    def __init__(
        self, dim: int, *, dtype: torch.dtype, device: torch.device, momentum: float = 0.0
    ) -> None:
        self.kept = torch.zeros(dim, dtype=dtype, device=device)
        self.acc = torch.zeros_like(self.kept)
        # On a GPU the pass that adds also counts; on a CPU that would cost a pass more.
        on_gpu = self.kept.is_cuda and dtype == torch.float32 and not momentum
        self._tally = Tally.around(self.kept.new_ones(())) if on_gpu else None
        self._momentum = momentum
        self.velocity = torch.zeros_like(self.kept) if momentum else None
        self._velocity = torch.zeros_like(self.kept) if momentum else None

    def begin(self) -> None:
        """Start a step, also after one that came to nothing."""
        if self._tally is not None:
            self._tally.counts.zero_()

    def add(self, begin: int, grad: Tensor, unit: float, *, clear: bool = False) -> None:
        """Add `unit` times a flat gradient to what is kept from coordinate `begin` on.

        Args:
            begin: The first coordinate.
            grad: Their gradient; zeros afterwards if `clear`, in the same pass on a GPU.
            unit: What it is multiplied by.
            clear: Whether to clear it.
        """
        part = slice(begin, begin + len(grad))
        if self.velocity is None or self._velocity is None:
            kernels.add(self.kept[part], grad, unit, self.acc[part], tally=self._tally, clear=clear)
            return
        # The velocity is what accumulates; masking it where it was sent keeps it from being late.
        velocity = self._velocity[part]
        torch.mul(self.velocity[part], self._momentum, out=velocity).add_(grad, alpha=unit)
        torch.add(self.kept[part], velocity, out=self.acc[part])
        if clear:
            grad.zero_()

    def leave_out(self, begin: int, end: int) -> None:
        """Let nothing of [begin, end) travel in this step."""
        self.acc[begin:end] = 0

    def finite(self) -> bool:
        """Tell whether all that was added is finite."""
        if self._tally is not None:
            return bool(self._tally.finite())
        # One pass; a sum may overflow where no term has.
        return bool(self.acc.sum().isfinite()) or bool(self.acc.isfinite().all())

    def commit(
        self,
        indices: Tensor,
        left: Tensor | None,
        *,
        sent: Tensor | None = None,
        low_pass: float = 1.0,
        left_out: list[tuple[int, int]] | None = None,
    ) -> None:
        """Keep what did not travel.

        Args:
            indices: (K,) what travelled.
            left: (K,) what of it this worker keeps; None is nothing.
            sent: (K,) whether a value of this worker was in it; None is all of them.
            low_pass: Weight of the new residual against the old one.
            left_out: What `leave_out` was called for.
        """
        if self._velocity is not None:
            self._velocity.index_fill_(0, indices if sent is None else indices[sent], 0)
        if left is None:
            self.acc.index_fill_(0, indices, 0)
        else:
            self.acc.index_copy_(0, indices, left)
        for begin, end in left_out or []:
            self.acc[begin:end] = self.kept[begin:end]
            if self.velocity is not None and self._velocity is not None:
                self._velocity[begin:end] = self.velocity[begin:end]
        if low_pass != 1:
            self.acc.lerp_(self.kept, 1 - low_pass)
        self.kept, self.acc = self.acc, self.kept
        self.velocity, self._velocity = self._velocity, self.velocity
