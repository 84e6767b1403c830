"""The outer optimizer of local steps: it moves the weights that all workers share."""

import torch
from torch import Tensor

from gradherd.local.settings import LocalSteps


class OuterOptimizer:
    """The weights that all workers share, and the SGD step that moves them.

    The mean of the differences takes the place of the gradient. All workers compute the same step
    from the same bits, so the shared weights are never sent.

    >>> outer = OuterOptimizer(LocalSteps(outer_momentum=0), torch.tensor([1.0, 2.0]))
    >>> outer.step(torch.tensor([0.0, 0.5]))
    >>> outer.shared
    tensor([1.0000, 1.5000])
    """

    def __init__(self, settings: LocalSteps, shared: Tensor) -> None:
        self.settings, self.shared = settings, shared
        self.momentum = torch.zeros_like(shared) if settings.outer_momentum else None

    def step(self, mean: Tensor, at: slice = slice(None)) -> None:
        """Move a part of the shared weights against the mean of (weights before - weights after).

        `mean` is overwritten.
        """
        settings, direction = self.settings, mean
        if self.momentum is not None:
            # As torch.optim.SGD does it; every product is rounded, as in `triton_mean`.
            momentum = self.momentum[at].mul_(settings.outer_momentum).add_(mean)
            direction = mean.add_(momentum.mul(settings.outer_momentum))
        if settings.outer_lr != 1:
            direction.mul_(settings.outer_lr)
        self.shared[at].sub_(direction)
