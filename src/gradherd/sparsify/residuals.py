"""Residuals: error feedback, and merging.

Error feedback keeps what was not sent and adds it to the next gradient. Two vectors do this: one
holds the residual, the sum for the next step is written to the other. So a step can be called off
(some worker had a gradient that is not finite) without a trace. Momentum correction, from Lin et
al., "Deep Gradient Compression", ICLR 2018, arXiv:1712.01887, needs two more.

Letters: D coordinates, K those that are sent.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradherd.sparsify import kernels


class ErrorFeedback:
    """The residual of one worker, and its velocity if there is momentum.

    Args:
        shape: D, or (R, D) for the residuals of R workers that always send together.
        dtype: Dtype of the residual: float32, or float64 for a model of doubles.
        device: Device of the residual.
        momentum: Factor of the momentum correction; 0 needs no velocity.
    """

    def __init__(
        self,
        shape: int | tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        momentum: float = 0.0,
    ) -> None:
        self.residual = torch.zeros(shape, dtype=dtype, device=device)
        self.acc = torch.zeros_like(self.residual)
        # Whether something was not finite. On a GPU the kernel that adds notes it for free; on a
        # CPU it would take a pass of its own.
        fused = self.residual.is_cuda and dtype == torch.float32 and not momentum
        self._bad = torch.zeros(1, dtype=torch.int32, device=device) if fused else None
        self._momentum = momentum
        self.velocity = torch.zeros_like(self.residual) if momentum else None
        self._next_velocity = torch.zeros_like(self.residual) if momentum else None

    def rows(self) -> list["ErrorFeedback"]:
        """Return the feedback of each of R workers; `commit` of the whole makes new ones due."""
        pairs = [
            [None] * len(self.residual) if rows is None else list(rows)
            for rows in (self.residual, self.acc, self.velocity, self._next_velocity)
        ]
        result = []
        for residual, acc, velocity, following in zip(*pairs, strict=True):
            row = ErrorFeedback.__new__(ErrorFeedback)
            row.residual, row.acc, row._bad, row._momentum = residual, acc, None, self._momentum
            row.velocity, row._next_velocity = velocity, following
            result.append(row)
        return result

    def release(self) -> None:
        """Free the vectors: a `DeviceWorker` has taken over what they held."""
        self.residual = self.residual.new_zeros(0)
        self.acc = self.residual

    def restore(self, dim: int) -> None:
        """Hold D zeros again."""
        self.residual = self.residual.new_zeros(dim)
        self.acc = torch.zeros_like(self.residual)

    def begin(self) -> None:
        """Start a step; the last one may have been called off."""
        if self._bad is not None:
            self._bad.zero_()

    def add(self, begin: int, grad: Tensor, scale: float, *, clear: bool = False) -> None:
        """Write residual + `scale` * gradient to `acc`, from coordinate `begin` on.

        Args:
            begin: First coordinate of the gradient.
            grad: Flat gradient; with R workers, one in each row.
            scale: Factor of the gradient.
            clear: Whether to set `grad` to zero; on a GPU the same kernel does it.
        """
        part = slice(begin, begin + grad.shape[-1])
        if self.velocity is None or self._next_velocity is None:
            kernels.add(
                self.residual[..., part],
                grad,
                scale,
                self.acc[..., part],
                bad=self._bad,
                clear=clear,
            )
            return
        # Momentum correction: velocities accumulate in the residual, instead of gradients.
        velocity = self._next_velocity[..., part]
        torch.mul(self.velocity[..., part], self._momentum, out=velocity).add_(grad, alpha=scale)
        torch.add(self.residual[..., part], velocity, out=self.acc[..., part])
        if clear:
            grad.zero_()

    def exclude(self, begin: int, end: int) -> None:
        """Send nothing of [begin, end) in this step.

        DDP drops what arrives for a parameter that no rank used, so it must not be sent.
        """
        # Zeros: sparsifiers do not select them, and what is always sent sends nothing. The residual
        # itself is in the other vector; `commit` restores it from there.
        self.acc[begin:end] = 0

    def finite(self) -> bool:
        """Return whether residual + gradient is finite everywhere."""
        if self._bad is not None:
            return not bool(self._bad)
        # A finite sum is proof, in one pass. If it is not finite, it may just have overflowed.
        return bool(self.acc.sum().isfinite()) or bool(self.acc.isfinite().all())

    def commit(
        self,
        indices: Tensor,
        remainder: Tensor | None,
        *,
        restarted: Tensor | None = None,
        low_pass: float = 1.0,
        excluded: list[tuple[int, int]] | None = None,
    ) -> None:
        """Make what was not sent the new residual.

        Args:
            indices: (K,) coordinates that were sent.
            remainder: (K,) what this worker keeps at those coordinates, with R workers (R, K);
                None is nothing.
            restarted: Coordinates whose velocity restarts; None is none.
            low_pass: Weight of the new residual against the old one.
            excluded: The ranges that `exclude` was called for; they stay as they were.
        """
        if self._next_velocity is not None and restarted is not None:
            self._next_velocity.index_fill_(-1, restarted, 0)
        if remainder is None:
            self.acc.index_fill_(-1, indices, 0)
        else:
            self.acc.index_copy_(-1, indices, remainder)
        for begin, end in excluded or []:
            self.acc[begin:end] = self.residual[begin:end]
            if self.velocity is not None and self._next_velocity is not None:
                self._next_velocity[begin:end] = self.velocity[begin:end]
        # ScaleCom's filter: (1 - beta) old + beta new. Excluded ranges equal the old residual by
        # now, so it leaves them as they are.
        if low_pass != 1:
            self.acc.lerp_(self.residual, 1 - low_pass)
        # Swapped, not copied: the old residual is where the next sum is written.
        self.residual, self.acc = self.acc, self.residual
        self.velocity, self._next_velocity = self._next_velocity, self.velocity


MERGED_KEYS = ("residual", "velocity", "weights", "buffers", "snapshot")
"""Entries of a worker's state that hold a tensor for each parameter (or buffer) of that worker."""

COMMON_KEYS = ("shared", "outer_momentum", "arrival")
"""Large entries that are equal on all workers (local steps)."""


def clip_together(grads: Sequence[Tensor], most: float | Tensor) -> None:
    """Scale tensors down in place until their norm together is at most `most`.

    If one is not finite, all become NaN: the step is called off then. A GPU is not waited for.
    """
    # In double precision, so that it does not matter how a gradient is divided into tensors: real
    # and simulated workers then find the same factor.
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    scale_by(grads, torch.linalg.vector_norm(torch.stack(norms)), most)


def scale_by(grads: Sequence[Tensor], norm: Tensor, most: float | Tensor) -> None:
    """Scale tensors down in place whose () norm together is above `most`; see `clip_together`."""
    factor = clip_factor(norm, most)
    for grad in grads:
        grad.mul_(factor.to(torch.float64 if grad.dtype == torch.float64 else torch.float32))


def clip_factor(norm: Tensor, most: float | Tensor) -> Tensor:
    """Return the factor that brings norms down to `most`, at most 1."""
    # The small number is that of torch.nn.utils.clip_grad_norm_. Infinity times zero is NaN.
    return (most / (norm + 1e-6)).clamp(max=1.0)


def merge_residuals(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all workers into one that any number of workers can load.

    A step applies the mean over workers, so the mean of the residuals is what must not change:
    every new worker gets that mean. The state of the method (thresholds, partitions) belongs to
    the old number of workers and is dropped; it settles again within a few steps.

    Args:
        states: `SparseHook.state_dict()` of each rank. A generator that loads one after the other
            keeps memory small.

    Returns:
        A state for `SparseHook.load_state_dict` on every rank of a world of any size.

    Raises:
        ValueError: These are not the states of all workers after the same step.
    """
    first: Mapping[str, Any] | None = None
    sums: dict[str, dict[str, Tensor]] = {}
    ranks: list[Any] = []
    for state in states:
        first = state if first is None else first
        for key in ("kind", "workers", "dim", "step", "taken"):
            if state.get(key) != first.get(key):
                raise ValueError(
                    f"states to merge differ in {key}: {first.get(key)!r} and {state.get(key)!r}"
                )
        ranks.append(state.get("rank"))
        for key in MERGED_KEYS:
            for name, own in state.get(key, {}).items():
                # Summed in float64, to round once and not at every rank.
                sums.setdefault(key, {}).setdefault(name, torch.zeros_like(own).double()).add_(own)
    if first is None or set(ranks) != set(range(first["workers"])) or len(ranks) > len(set(ranks)):
        of_all = "" if first is None else f" of {first['workers']}"
        raise ValueError(f"states must be of all ranks{of_all}, each once, got ranks {ranks}")
    means = {
        key: {name: (total / len(ranks)).to(first[key][name]) for name, total in named.items()}
        for key, named in sums.items()
    }
    return {**first, **means, "rank": None, "method": None}
