"""Where rows go: from a reader to the sampler, of all workers together."""

from typing import Protocol

import torch
from torch import Tensor, nn

from gradherd.attach.row_sources import EachExample, ParameterHooks, Reader
from gradherd.comm.world import World
from gradherd.ordering.gather import Gather
from gradherd.ordering.sampler import OrderedSampler
from gradherd.ordering.walks import Claim


class Feed(Protocol):
    """Reads gradients off a model and shows them to its sampler."""

    @property
    def waiting(self) -> bool:
        """Whether a backward has happened that was not fed back yet."""
        ...

    @property
    def bytes(self) -> int:
        """What this rank has sent for ordering alone."""
        ...

    def prepare(self) -> None:
        """Get ready for a new batch: a forward begins."""
        ...

    def feed(self, claim: Claim, loss_scale: float) -> None:
        """Hand over the rows of the batch that was just walked back."""
        ...

    def by_index(self) -> None:
        """Expect batches out of order from now on."""
        ...

    def wait(self) -> None:
        """Return when no job runs beside the training loop."""
        ...

    def finish(self) -> None:
        """Let the sampler learn all that was fed. All ranks must call it at the same point."""
        ...

    def forget(self) -> None:
        """Drop the backward that waits."""
        ...

    def close(self) -> None:
        """Leave the model as it was."""
        ...


class NoRows:
    """For orders that need no gradients: only tells that time passes."""

    bytes = 0

    def __init__(self, model: nn.Module, sampler: OrderedSampler) -> None:
        self._sampler = sampler
        self.waiting = False
        self._in_order = True
        self._hooks = ParameterHooks(model, self._arrived)

    def _arrived(self, name: str, grad: Tensor) -> None:
        self.waiting = True

    def prepare(self) -> None:
        """Nothing to do."""

    def feed(self, claim: Claim, loss_scale: float) -> None:
        """Count the units."""
        self.waiting = False
        seen = torch.ones((claim.units, self._sampler.world.size), dtype=torch.bool)
        self._sampler.observe(None, seen, first=claim.step if self._in_order else None)

    def by_index(self) -> None:
        """Count units only: which ones does not matter."""
        self._in_order = False

    def wait(self) -> None:
        """Nothing runs."""

    def finish(self) -> None:
        """Nothing waits."""

    def forget(self) -> None:
        """Drop the backward that waits."""
        self.waiting = False

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()


class Gathered:
    """Hands over what a reader reads; rows are gathered from all workers."""

    def __init__(self, reader: Reader, sampler: OrderedSampler, world: World) -> None:
        self._reader = reader
        self._sampler = sampler
        self._gather = Gather(sampler, world)
        # Alone, nothing travels, so exact rows need not be formed.
        self._alone = reader if world.size == 1 and isinstance(reader, EachExample) else None

    @property
    def waiting(self) -> bool:
        """Whether the reader has something."""
        return self._reader.waiting

    @property
    def bytes(self) -> int:
        """What was sent to gather rows."""
        return self._gather.bytes

    def prepare(self) -> None:
        """Nothing to do."""

    def feed(self, claim: Claim, loss_scale: float) -> None:
        """Hand over a row for each unit of the batch."""
        if self._alone is not None and self._alone.exact and not self._gather.sort:
            rows = self._alone.unformed(claim.examples, loss_scale)
            self._sampler.observe(rows, first=claim.step)
        else:
            self._gather.add(claim, self._reader.take(claim.examples, loss_scale))

    def by_index(self) -> None:
        """Let rows wait for the end of the epoch."""
        self._gather.sort = True

    def wait(self) -> None:
        """Nothing runs."""

    def finish(self) -> None:
        """Show what has been gathered."""
        self._gather.flush()

    def forget(self) -> None:
        """Drop the backward that waits."""
        self._reader.forget()

    def close(self) -> None:
        """Leave the model as it was."""
        self._reader.close()
