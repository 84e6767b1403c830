"""Where gradients come from: one class for each way to read them during a backward.

A feed notices that a backward has happened (`waiting`), turns it into rows when it is asked to
(`feed`), and hands them to the sampler, of all workers together.

Letters: B examples of a batch, U units of it, D parameters, k numbers of a row.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from gradherd.comm.world import World
from gradherd.ordering.gather import Gather
from gradherd.ordering.sampler import OrderedSampler
from gradherd.ordering.walks import Claim
from gradherd.rows.capture import Capture
from gradherd.rows.flat import FlatSpec
from gradherd.rows.rows import Grouped
from gradherd.rows.settings import ExactRows, SketchRows
from gradherd.rows.sketch import count_sketch


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


class ParameterHooks:
    """Calls back with each parameter's gradient, in every backward, before it is accumulated."""

    def __init__(self, model: nn.Module, arrived: Callable[[str, Tensor], None]) -> None:
        def hook(name: str) -> Callable[[Tensor], None]:
            return lambda grad: arrived(name, grad.detach())

        self._handles = [
            parameter.register_hook(hook(name))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


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
    """What feeds share whose rows are gathered from all workers."""

    def __init__(self, sampler: OrderedSampler, world: World) -> None:
        self._gather = Gather(sampler, world)

    @property
    def bytes(self) -> int:
        """What was sent to gather rows."""
        return self._gather.bytes

    def prepare(self) -> None:
        """Nothing to do."""

    def by_index(self) -> None:
        """Let rows wait for the end of the epoch."""
        self._gather.sort = True

    def wait(self) -> None:
        """Nothing runs."""

    def finish(self) -> None:
        """Show what has been gathered."""
        self._gather.flush()


class WholeBatches(Gathered):
    """The gradient of a whole batch: as it is, or a count sketch of it."""

    def __init__(
        self,
        model: nn.Module,
        sampler: OrderedSampler,
        world: World,
        sketch: SketchRows | None,
    ) -> None:
        self._spec = FlatSpec.of(model)
        self._offsets = dict(zip(self._spec.names, self._spec.offsets, strict=True))
        self._sketch = sketch
        self._row: Tensor | None = None
        super().__init__(sampler, world)
        self._hooks = ParameterHooks(model, self._arrived)

    @property
    def waiting(self) -> bool:
        """Whether a gradient has arrived."""
        return self._row is not None

    def _arrived(self, name: str, grad: Tensor) -> None:
        flat, offset = grad.flatten().float(), self._offsets[name]
        if self._row is None:
            self._row = flat.new_zeros(self._sketch.size if self._sketch else self._spec.size)
        if self._sketch is None:
            self._row[offset : offset + len(flat)] += flat
        else:
            self._row += count_sketch(flat, self._sketch.size, self._sketch.seed, offset=offset)

    def feed(self, claim: Claim, loss_scale: float) -> None:
        """Hand over the batch's one row."""
        assert self._row is not None
        row, self._row = self._row.div_(loss_scale), None
        self._gather.add(claim, row.unsqueeze(0))

    def forget(self) -> None:
        """Drop the gradient that waits."""
        self._row = None

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()


class Examples(Gathered):
    """The gradient of every example, read off the layers: exact, or a sketch."""

    def __init__(
        self,
        model: nn.Module,
        sampler: OrderedSampler,
        world: World,
        settings: ExactRows | SketchRows,
    ) -> None:
        self._sampler = sampler
        self._alone = world.size == 1
        self._settings = settings
        self._capture = Capture(model, batch_dim=settings.batch_dim)
        super().__init__(sampler, world)

    @property
    def waiting(self) -> bool:
        """Whether gradients have arrived."""
        return self._capture.uses > 0

    def feed(self, claim: Claim, loss_scale: float) -> None:
        """Hand over a row for each unit of the batch."""
        settings, unit = self._settings, self._sampler.unit
        if isinstance(settings, SketchRows):
            single = self._capture.sketch(
                claim.examples,
                settings.size,
                settings.seed,
                reduction=settings.reduction,
                loss_scale=loss_scale,
            )
            self._gather.add(claim, single.view(claim.units, unit, -1).mean(1))
            return
        taken = self._capture.take(
            claim.examples, reduction=settings.reduction, loss_scale=loss_scale
        )
        rows = Grouped(taken, unit)
        if self._alone and not self._gather.sort:  # Nothing travels, so nothing is formed.
            self._sampler.observe(rows, first=claim.step)
        else:
            self._gather.add(claim, rows.dense())

    def forget(self) -> None:
        """Drop the gradients that wait."""
        self._capture.clear()

    def close(self) -> None:
        """Remove the hooks."""
        self._capture.detach()
