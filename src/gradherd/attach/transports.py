"""How rows get from a row source to the sampler, those of all workers together."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradherd.attach.row_sources import ParameterHooks, RowSource
from gradherd.comm.collectives import all_gather
from gradherd.comm.script import RankRunner
from gradherd.comm.world import World
from gradherd.ordering.coordination import BatchClaim, EpochGatherer, RowGatherer
from gradherd.ordering.sampler import OrderedSampler


class RowTransport(Protocol):
    """Takes the rows of one batch after the other to the sampler."""

    @property
    def bytes(self) -> int:
        """Bytes that this rank has sent for ordering alone."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether a backward has happened whose rows were not fed back yet."""
        ...

    def on_backward(self, began: Callable[[], None]) -> None:
        """Have `began` called before the first gradient of each backward, if that can be told."""
        ...

    def prepare(self) -> None:
        """Get ready for a new batch: a forward begins."""
        ...

    def feed(self, claim: BatchClaim, loss_scale: float) -> None:
        """Feed back the rows of the backward that was waiting."""
        ...

    def by_index(self) -> None:
        """Expect batches in any order from now on."""
        ...

    def wait(self) -> None:
        """Return when nothing runs beside the training loop."""
        ...

    def finish(self) -> None:
        """Let the sampler learn all that was fed. All ranks must call it at the same point."""
        ...

    def forget(self) -> None:
        """Drop the backward that is waiting."""
        ...

    def metrics(self) -> dict[str, Any]:
        """Return figures of this transport's own."""
        ...

    def ordering_state(self) -> dict[str, Any]:
        """Return the state of the ordering. All ranks must call it."""
        ...

    def load_ordering_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the ordering. All ranks must call it."""
        ...

    def close(self) -> None:
        """Leave the model as it was."""
        ...


class _LocalState:
    """Saves and loads an ordering that every rank holds whole."""

    def __init__(self, sampler: OrderedSampler) -> None:
        self._sampler = sampler

    def ordering_state(self) -> dict[str, Any]:
        """Return the state of the ordering."""
        return self._sampler.ordering.state_dict()

    def load_ordering_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the ordering."""
        self._sampler.ordering.load_state_dict(state)

    def metrics(self) -> dict[str, Any]:
        """Return nothing: no figures beyond the bytes."""
        return {}

    def prepare(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing: nothing runs beside the training loop."""


class CountingTransport(_LocalState):
    """For orders that need no gradients: counts the units that were visited."""

    def __init__(self, model: nn.Module, sampler: OrderedSampler) -> None:
        super().__init__(sampler)
        self.bytes = 0
        self.waiting = False
        self._in_order = True
        self._hooks = ParameterHooks(model, self._arrived)

    def _arrived(self, name: str, grad: Tensor) -> None:
        self.waiting = True

    def on_backward(self, began: Callable[[], None]) -> None:
        """Have `began` called before the first gradient of each backward."""
        self._hooks.began = began

    def feed(self, claim: BatchClaim, loss_scale: float) -> None:
        """Count the units."""
        self.waiting = False
        seen = torch.ones((claim.units, self._sampler.world.size), dtype=torch.bool)
        self._sampler.observe(None, seen, first=claim.step if self._in_order else None)

    def by_index(self) -> None:
        """Only count units: which ones does not matter."""
        self._in_order = False

    def finish(self) -> None:
        """Do nothing: units are counted when they are fed."""

    def forget(self) -> None:
        """Drop the backward that is waiting."""
        self.waiting = False

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()


class GatheringTransport(_LocalState):
    """Gathers the rows of all workers."""

    def __init__(
        self, source: RowSource, sampler: OrderedSampler, world: World, device: torch.device
    ) -> None:
        super().__init__(sampler)
        self._source = source
        self._device = device  # where the group of the ranks works
        self._runner = RankRunner(world)
        self._gatherer = RowGatherer(sampler, self._runner)
        self._epoch_gatherer: EpochGatherer | None = None
        # With one worker nothing is sent, so exact rows need not be formed.
        self._alone = world.size == 1

    @property
    def waiting(self) -> bool:
        """Whether the source has rows."""
        return self._source.waiting

    @property
    def bytes(self) -> int:
        """Bytes that this rank has sent to gather rows."""
        return self._runner.bytes

    def on_backward(self, began: Callable[[], None]) -> None:
        """Have `began` called before the first gradient of each backward, if that can be told."""
        self._source.on_backward(began)

    def feed(self, claim: BatchClaim, loss_scale: float) -> None:
        """Feed back a row for each unit of the batch."""
        # Every rank has fed as many batches, so checks are due on all of them at once.
        mask = self._source.check(claim.examples)
        if mask is not None:
            world = self._sampler.world
            masks = all_gather(mask.to(self._device), world).value
            self._source.leave_out(masks.amax(0).cpu())
        if self._epoch_gatherer is not None:
            self._epoch_gatherer.add(self._source.take(claim.examples, loss_scale), claim)
            return
        implicit = self._source.take_implicit(claim.examples, loss_scale) if self._alone else None
        if implicit is not None:
            self._sampler.observe(implicit, first=claim.step)
            return
        self._gatherer.add(self._source.take(claim.examples, loss_scale), claim)
        left = self._sampler.ordering.length - claim.step - claim.units
        if left * self._sampler.unit < self._sampler.batch_size:
            self._gatherer.flush()  # the last batch of the epoch: the next order is needed now

    def by_index(self) -> None:
        """Hold rows until the end of the epoch."""
        if self._epoch_gatherer is None:
            length = self._sampler.ordering.length
            self._epoch_gatherer = EpochGatherer(self._sampler, self._runner, length)

    def metrics(self) -> dict[str, Any]:
        """Return the parameters that rows leave out, and the time rows took in backwards."""
        left_out = self._source.left_out()
        seconds = {"seconds_in_backward": self._source.seconds_in_backward}
        return seconds | ({"rows_left_out": left_out} if left_out else {})

    def load_ordering_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the ordering; the model may have changed as well."""
        super().load_ordering_state(state)
        self._source.restart_checks()

    def finish(self) -> None:
        """Let the sampler learn all that was fed."""
        (self._epoch_gatherer or self._gatherer).flush()

    def forget(self) -> None:
        """Drop the backward that is waiting."""
        self._source.forget()

    def close(self) -> None:
        """Leave the model as it was."""
        self._source.close()
