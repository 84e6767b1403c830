"""A sparsifier as a user would write one: what the registry and the contracts must accept."""

from dataclasses import dataclass

import torch

from gradherd.sparsify.selector import Proposal, Selection, check_density


@dataclass(frozen=True)
class EveryNth:
    """Send every n-th coordinate, beginning one further at every step.

    The second line of a docstring is not part of the summary.
    """

    density: float = 1e-3
    stride_factor: int = 1

    def __post_init__(self):
        check_density(self.density)
        if self.stride_factor < 1:
            raise ValueError(f"stride_factor must be at least 1, got {self.stride_factor}")

    def begin(self, dim, workers, layers):
        return None

    def propose(self, step):
        return Proposal(torch.zeros(0, dtype=torch.int32))

    def agree(self, step, own, headers):
        yield from ()
        if step.k >= step.dim:
            indices = step.everything()
        else:
            stride = self.stride_factor * (step.dim // step.k)
            indices = torch.arange(step.number % stride, step.dim, stride)
        return Selection(indices, [len(indices)] * step.size, None)
