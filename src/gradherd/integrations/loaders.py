"""What all integrations share: the settings, and a training loader with one sampler.

A framework has habits of its own with a loader: it replaces the sampler, shards once more, fetches
batches ahead or skips some on resume. Whatever would change which examples a rank visits is
refused here in one sentence. Batches that are fetched ahead are no obstacle: a loader that is
followed (`ordering.batches`) tells the sampler which batch the loop has received.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from gradherd.hooks.attach import attach
from gradherd.hooks.herd import Herd
from gradherd.local.settings import LocalSteps
from gradherd.ordering.batches import FollowedIterator
from gradherd.ordering.policy import Policy
from gradherd.ordering.sampler import OrderedSampler
from gradherd.rows.settings import RowSettings
from gradherd.sparsify.selector import Selector
from gradherd.sparsify.settings import Sparsify


@dataclass(frozen=True, kw_only=True)
class HerdSettings:
    """What a user gives an integration, whatever the framework."""

    order: str | Policy | None = None
    """Order of the training examples: a name from `POLICIES`, such as "cd-grab", or a policy; None
    keeps the framework's own."""
    unit: int | str = "batch"
    """Consecutive examples that are ordered as one; whole batches work with every model."""
    sparsify: str | Selector | Sparsify | None = None
    """How DDP exchanges gradients, such as `ExDyna(density=0.01)`; None leaves that to DDP."""
    local: LocalSteps | None = None
    """Steps that each rank takes on its own between two exchanges, such as `LocalSteps()`; None
    averages gradients at every step."""
    rows: str | RowSettings = "auto"
    """How gradients are read for ordering; see `attach`."""
    seed: int = 0
    """Seed of the order."""

    def __post_init__(self) -> None:
        if self.order is None and self.sparsify is None and self.local is None:
            raise ValueError("nothing to do: give order=, sparsify= or local=")
        if isinstance(self.unit, str) and self.unit != "batch":
            raise ValueError(f"unit must be 'batch' or a number of examples, got {self.unit!r}")

    def make_sampler(self, loader: Any, *, prepared: bool = False) -> OrderedSampler | None:
        """Return the sampler for a training loader without shuffle; None without an order.

        Raises:
            ValueError: The loader decides on the order itself, cannot be ordered, or the framework
                has `prepared` it before.
        """
        if self.order is None:
            return None
        if prepared:
            raise ValueError(
                "loader is prepared already, so its examples would be sharded twice: give the "
                "loader as it was before"
            )
        check_loader(loader)
        return self.sampler_of(loader.dataset, loader.batch_size)

    def sampler_of(self, dataset: Any, batch_size: int) -> OrderedSampler:
        """Return the sampler for a data set and the batch size of one rank."""
        assert self.order is not None
        unit = batch_size if isinstance(self.unit, str) else self.unit
        # Frameworks may skip batches; how far their loops are is counted where batches arrive.
        return OrderedSampler(
            dataset, self.order, batch_size=batch_size, unit=unit, seed=self.seed, skips=True
        )

    def attach(
        self,
        model: nn.Module,
        sampler: OrderedSampler | None,
        scaler: GradScaler | None = None,
        optimizer: Any = None,
    ) -> Herd:
        """Attach to a model that the framework has wrapped, and to its optimizer."""
        return attach(
            model,
            order=sampler,
            sparsify=self.sparsify,
            local=self.local,
            optimizer=None if self.local is None else optimizer,
            rows=self.rows,
            scaler=scaler,
        )


class HerdOwner:
    """What trainers and callbacks share: the settings, and the herd while there is one."""

    _settings: HerdSettings
    _log_rows: bool
    _herd: Herd | None = None

    @property
    def herd(self) -> Herd:
        """The herd of the current or last training, for its metrics and its sampler."""
        if self._herd is None:
            raise RuntimeError("there is no herd yet: it is attached when training begins")
        return self._herd

    def _sync(self) -> None:
        """Give all ranks equal weights, if they take local steps."""
        # After the training the herd is kept, for its metrics.
        if self._settings.local is not None and self._herd is not None and self._herd.attached:
            self._herd.sync()

    def _detach(self) -> None:
        """Leave the model as it was, if the herd is attached."""
        if self._herd is not None:
            self._herd.detach()


def check_loader(loader: Any) -> None:
    """Raise ValueError if the order of a training loader is not ours to decide."""
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"order needs one torch DataLoader for training, got a {type(loader).__name__}"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"the training loader makes its batches with {type(loader.batch_sampler).__name__}: "
            "give it batch_size instead, because the order decides what a batch holds"
        )
    if not getattr(loader, "in_order", True):
        raise ValueError("the training loader has in_order=False: gradients need batches in order")
    if not isinstance(loader.sampler, SequentialSampler):
        shuffles = isinstance(loader.sampler, RandomSampler)
        own = "shuffle=True" if shuffles else f"the sampler {type(loader.sampler).__name__}"
        raise ValueError(
            f"the training loader has {own}, but the order decides, and shards over ranks by "
            "itself: remove it"
        )


def with_sampler(loader: Any, sampler: Sampler[Any], *, follow: bool = False) -> Any:
    """Return a copy of a loader that draws from `sampler`; the rest stays as the user set it.

    It may be of a subclass such as StatefulDataLoader. If `follow`, the copy counts for the sampler
    how many batches its loop has received. Not where the framework's own loader around it fetches
    ahead.
    """
    # A copy, not a new object: a subclass may take other arguments than DataLoader does.
    ordered = copy.copy(loader)
    batches = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    # DataLoader forbids these assignments, because a running iterator would not notice them. The
    # copy has none yet.
    object.__setattr__(ordered, "sampler", sampler)
    object.__setattr__(ordered, "batch_sampler", batches)
    if follow:
        ordered.__class__ = _followed_class(type(loader))
    return ordered


def _followed_class(kind: type[Any]) -> type[Any]:
    """Return a subclass of a loader's class whose loops tell the sampler what they receive."""

    def iterate(loader: Any) -> FollowedIterator:
        return FollowedIterator(partial(kind.__iter__, loader), loader.sampler)

    return type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__})
