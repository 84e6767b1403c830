"""The seam of the sparsifying half: what a method is, and all of them by name."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.choice import Chosen, Place, Proposal
from gradherd.sparsify.cltk import CLTK
from gradherd.sparsify.deft import Deft
from gradherd.sparsify.dense import Dense
from gradherd.sparsify.exdyna import ExDyna
from gradherd.sparsify.gtopk import GTopK
from gradherd.sparsify.micro import Micro
from gradherd.sparsify.randomk import RandomK
from gradherd.sparsify.sage import Sage
from gradherd.sparsify.sidco import SIDCo
from gradherd.sparsify.threshold import Threshold
from gradherd.sparsify.topk import TopK


class Selector(Protocol):
    """Chooses which coordinates of residual + gradient travel.

    A method is a frozen dataclass: it is its own settings. What it remembers it returns as a new
    state (a frozen dataclass, or None), so that a step can be called off. Everything that decides
    what is asked of other workers must be the same on all of them.
    """

    @property
    def density(self) -> float:
        """Share of the coordinates that should travel."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether no coordinate can be picked by two workers."""
        ...

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> Any:
        """Return the state before the first step; `layers` are the lengths of tensors in D."""
        ...

    def propose(self, acc: Tensor, k: int, state: Any, place: Place) -> Proposal:
        """Find out what can be found out alone.

        Args:
            acc: (D,) residual + gradient of this worker.
            k: How many coordinates should travel, at least one.
            state: What the method remembers.
            place: Which worker this is, in which step.
        """
        ...

    def settle(
        self,
        acc: Tensor,
        k: int,
        state: Any,
        place: Place,
        proposal: Proposal,
        headers: Tensor,
    ) -> Script[Chosen]:
        """Agree with the others, whose (R, H) headers are known now (on the CPU)."""
        ...

    def rescale(self, state: Any, factor: float) -> Any:
        """Return the state after all values were multiplied by `factor`."""
        ...


SPARSIFIERS: dict[str, Callable[..., Selector]] = {
    "dense": Dense,
    "exdyna": ExDyna,
    "micro": Micro,
    "deft": Deft,
    "topk": TopK,
    "gtopk": GTopK,
    "cltk": CLTK,
    "randomk": RandomK,
    "threshold": Threshold,
    "sage": Sage,
    "sidco": SIDCo,
}
"""Methods by name."""
