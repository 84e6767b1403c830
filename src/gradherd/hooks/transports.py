"""How rows get from a row source to the sampler, those of all workers together.

Shapes: U rows of a batch, each the mean gradient of `unit` examples, D columns.
"""

import math
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradherd.comm.collectives import all_gather
from gradherd.comm.script import RankRunner
from gradherd.comm.sliced_mean import ColumnLayout, ShardSpan
from gradherd.flat import FlatSpec
from gradherd.hooks.row_sources import BatchGradientSource, ExampleRowSource, RowSource
from gradherd.ordering.balance import KERNEL_DEVICES
from gradherd.ordering.batches import BatchClaim
from gradherd.ordering.coordination import EpochGatherer, RowGatherer, StepComparison
from gradherd.ordering.sampler import OrderedSampler
from gradherd.rows.row_check import CHECK_FAILED

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
"""Quantiles of the norms that are logged, by the end of their name."""


class RowTransport:
    """Takes one batch after the other to the sampler.

    This one is for orders that need no gradients: it counts the units that were visited.
    """

    quiet: ClassVar[bool] = True
    """Whether a compiled forward need not tell that it begins: the backward asks for its batch.
    Otherwise each forward drops what is left of a backward that failed."""

    def __init__(self, sampler: OrderedSampler, source: RowSource) -> None:
        self._sampler = sampler
        self.source = source
        """Notices backwards, and reads their rows."""
        self._in_order = True

    @property
    def waiting(self) -> bool:
        """Whether a backward has happened whose rows were not fed back yet."""
        return self.source.waiting

    def feed(self, claim: BatchClaim | None, loss_scale: Tensor | float) -> None:
        """Feed back the rows of the backward that was waiting, or drop them without a claim.

        All ranks must call it after each backward, also those for which nothing counts. The loss
        was multiplied by `loss_scale` (GradScaler).
        """
        self.source.clear()
        if claim is not None:
            # To know when the epoch ends.
            seen = torch.ones((claim.units, self._sampler.world.size), dtype=torch.bool)
            self._sampler.observe(None, seen, first=claim.step if self._in_order else None)

    def next_part(self) -> None:
        """Expect another forward and backward of the batch that waits."""
        self.source.next_part()

    def by_index(self) -> None:
        """Expect batches in any order from now on."""
        self._in_order = False

    def wait(self, *, raises: bool = True) -> None:
        """Return when nothing runs beside the training loop.

        Raise what went wrong there, or leave that to the next call unless `raises`.
        """

    def finish(self) -> None:
        """Let the sampler learn all that was fed. All ranks must call it at the same point."""
        self.wait()

    def forget(self) -> None:
        """Drop the backward that is waiting."""
        self.source.clear()

    def metrics(self) -> dict[str, Any]:
        """Return the bytes that this rank has sent, and figures of this transport's own."""
        return {"bytes_for_ordering": 0, "bytes_for_comparing": 0}

    def ordering_state(self) -> dict[str, Any]:
        """Return the state of the ordering. All ranks must call it."""
        return self._sampler.ordering.state_dict()

    def load_ordering_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the ordering. All ranks must call it."""
        self._sampler.ordering.load_state_dict(state)

    def close(self) -> None:
        """Remove the hooks."""
        self.source.remove_hooks()


class RankTransport(RowTransport):
    """Takes the rows of all ranks to the sampler; each rank may hold some columns of them.

    Ranks compare which batch they feed back: signs are for one time step of all workers.
    """

    layout: ColumnLayout | None = None
    """Which columns this rank holds; None if it holds all."""

    def __init__(
        self, sampler: OrderedSampler, source: RowSource, spec: FlatSpec, device: torch.device
    ) -> None:
        super().__init__(sampler, source)
        self.world = world = sampler.world
        self._spec = spec  # where parameters lie in whole rows
        self._device = device  # where the group of the ranks works
        # On the CPU, so that a GPU need not catch up with the host at every step. And ranks reach
        # its collectives at different points of their training step, so on the model's group they
        # could be matched with the wrong ones.
        try:
            self._side = world.side_channel()
        except Exception:
            source.remove_hooks()
            raise
        # A model that is dropped without detach() gives it back, too.
        weakref.finalize(self, self._side.close_side_channel).atexit = False
        self._in_step = StepComparison(sampler)

    def metrics(self) -> dict[str, Any]:
        """Return also the bytes that this rank has sent to compare batches."""
        return super().metrics() | {"bytes_for_comparing": self._in_step.bytes}

    def ordering_state(self) -> dict[str, Any]:
        """Return the state of the ordering with the columns of all ranks. All ranks must call it.

        Columns are in the order of the model's parameters, so the state depends neither on buckets
        or shards nor on the number of ranks.
        """
        layout = self.layout
        if layout is None:
            return super().ordering_state()

        def whole(row: Tensor) -> Tensor:
            by_name, spec = layout.gather(row.to(self._device), self.world), self._spec
            # Parameters that DDP was told to ignore are in no column: zeros.
            sizes = zip(spec.names, spec.numels, strict=True)
            parts = [by_name.get(name, row.new_zeros(count)) for name, count in sizes]
            return torch.cat([part.to(row.device) for part in parts])

        return self._sampler.ordering.state_dict(whole)

    def load_ordering_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the ordering and cut out this rank's columns."""
        super().load_ordering_state(state)
        layout, spec = self.layout, self._spec
        if layout is None:
            return

        # The state has whole rows on every rank, so nothing is sent to load it.
        def columns(row: Tensor) -> Tensor:
            by_name = dict(zip(spec.names, spec.split(row), strict=True))
            return layout.columns(by_name, self.world)

        self._sampler.ordering.map_columns(columns)

    def close(self) -> None:
        """Remove the hooks, and close the group."""
        super().close()
        self._side.close_side_channel()


class GatheringTransport(RankTransport):
    """Gathers the rows of all workers."""

    source: BatchGradientSource | ExampleRowSource

    def __init__(
        self,
        source: BatchGradientSource | ExampleRowSource,
        sampler: OrderedSampler,
        device: torch.device,
        scattered: int | None,
    ) -> None:
        # `scattered` is how many columns a row has, if each rank gets some of them.
        spec = FlatSpec(("row",), ((scattered or 0,),))
        super().__init__(sampler, source, spec, device)
        if scattered is not None:
            self.layout = ColumnLayout((ShardSpan("row", (scattered,), 0),))
        self._runner = RankRunner(self.world, later=self._side)
        self._gatherer = RowGatherer(
            sampler, self._runner, policy_checks=self._policy_checks, scatters=scattered is not None
        )
        self.figures: RowFigures | None = None
        """What measures the rows of each batch, if somebody wants to know."""
        self._alone = self.world.size == 1

    def feed(self, claim: BatchClaim | None, loss_scale: Tensor | float) -> None:
        """Feed back a row for each unit of the batch."""
        if self._gatherer.in_order and not self._alone:
            comparison = self._in_step.compare(claim, self._side)
            if not comparison.same:
                self.source.clear()
                # Ranks will come to the end of the epoch at different steps, so what waits must
                # be sent here, where all of them are.
                self._gatherer.flush()
                self._in_step.pass_over(claim, comparison)
                return
        if claim is None:
            self.source.clear()
            return
        if isinstance(self.source, ExampleRowSource):
            self._check(self.source, claim)
        rows = self.source.take(claim.examples, loss_scale)
        if self.figures is not None:
            self.figures.add(rows)
        self._gatherer.add(rows, claim)
        left = self._sampler.ordering.length - claim.step - claim.units
        # A last batch that is shorter may be dropped by the loader (drop_last), and would then
        # never come.
        if self._gatherer.in_order and left * self._sampler.unit < self._sampler.batch_size:
            self._gatherer.flush()  # the last batch of the epoch: the next order is needed now

    def _policy_checks(self, rows: Tensor) -> bool:
        """Say whether the policy alone leaves out rows that are not finite, on their device."""
        policy, here = self._sampler.ordering.policy, rows.device.type in KERNEL_DEVICES
        return self._alone and here and policy.leaves_out_broken_rows

    def _check(self, source: ExampleRowSource, claim: BatchClaim) -> None:
        """Check the rows that wait, if that is due, and leave out the same on all ranks."""
        # Every rank has fed as many batches, so checks are due on all of them at once.
        error: Exception | None = None
        try:
            # Compares the mean of the rows with the gradient of the batch, so it comes before they
            # are taken.
            mask = source.check_bitmask(claim.examples)
        except Exception as raised:
            if self._alone:
                raise
            # The others wait for this rank's answer.
            error, mask = raised, source.failed_check()
        if mask is None:
            return
        masks = all_gather(mask.to(self._device), self.world).value.cpu()
        if error is not None:
            raise error
        failed = [rank for rank, one in enumerate(masks.tolist()) if CHECK_FAILED in one]
        if failed:
            source.clear()
            raise RuntimeError(
                f"rows could not be read on {'rank' if len(failed) == 1 else 'ranks'} "
                f"{', '.join(map(str, failed))}, which raised an error of its own"
            )
        # The union over ranks: rows of all ranks must have the same columns.
        source.leave_out(masks.amax(0))

    def by_index(self) -> None:
        """Hold rows until the end of the epoch."""
        if self._gatherer.in_order:
            sampler = self._sampler
            steps = (sampler.ordering.length, -(-len(sampler) // sampler.batch_size))
            scatters = self.layout is not None
            self._gatherer = EpochGatherer(sampler, self._runner, *steps, scatters=scatters)

    def metrics(self) -> dict[str, Any]:
        """Return also the parameters that rows leave out."""
        source, found = self.source, super().metrics() | {"bytes_for_ordering": self._runner.bytes}
        left_out = list(source.left_out) if isinstance(source, ExampleRowSource) else []
        return found | ({"rows_left_out": left_out} if left_out else {})

    def finish(self) -> None:
        """Let the sampler learn all that was fed."""
        if self._gatherer.in_order and self._gatherer.waiting:
            self._in_step.check_end(self._side)
        self._gatherer.flush()


# --- What rows tell beside an order ------------------------------------------------------------


def signal_and_noise(rows: Any, unit: int) -> Tensor:
    """Return (2,) estimates from (U, D) rows of `unit` examples each, U at least 2.

    The first is that of the squared norm of the true gradient, which may be negative; the second
    that of the variance of one example's gradient, summed over parameters. A mean over b examples
    has the expected square |G|^2 + tr(Sigma) / b. Two sizes of b, one row and the whole batch, give
    unbiased estimates of both (arXiv:1812.06162, appendix A.1).

    >>> signal_and_noise(torch.tensor([[3.0, 0.0], [1.0, 0.0]]), unit=1)
    tensor([3., 2.])
    """
    small, big = unit, unit * len(rows)
    if isinstance(rows, Tensor):
        of_rows, of_mean = rows.square().sum(1).mean(), rows.mean(0).square().sum()
    else:  # not formed
        gram = rows.gram.float()
        of_rows, of_mean = gram.diagonal().mean(), gram.mean()
    signal = (big * of_mean - small * of_rows) / (big - small)
    return torch.stack([signal, (of_rows - of_mean) / (1 / small - 1 / big)])


class RowFigures:
    """The norms of the last batch, and the noise scale averaged over batches.

    Of sketched rows they are estimates: a squared norm is right on average, and its relative error
    is about sqrt(2 / columns), which is 6% with 512 columns.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit  # examples of a row
        self._norms: Tensor | None = None  # (U,) of the last batch
        self._average: Tensor | None = None  # (2,) signal and noise

    def add(self, rows: Any) -> None:
        """Measure the (U, D) rows of a batch, without a wait for the device."""
        if isinstance(rows, Tensor):
            rows = rows.detach().float()
            self._norms = torch.linalg.vector_norm(rows, dim=1)
        else:
            self._norms = rows.gram.diagonal().float().clamp(min=0).sqrt()
        if len(rows) < 2:  # one size of b tells no noise
            return
        both = signal_and_noise(rows, self._unit)
        before = torch.zeros_like(both) if self._average is None else self._average
        # The mean of quotients would be biased; the quotient of two means is not. Both begin at 0,
        # so both are too small by the same factor. A batch that overflowed (AMP) does not count.
        self._average = torch.where(both.isfinite().all(), before.lerp(both, 0.02), before)

    def scalars(self) -> dict[str, float]:
        """Return quantiles of the norms and the noise scale, with one wait for the device."""
        if self._norms is None:
            return {}
        names = [f"row_norm_{name}" for name in QUANTILES]
        levels = torch.tensor(list(QUANTILES.values()), device=self._norms.device)
        values = self._norms.quantile(levels)
        if self._average is not None:
            names.append("noise_scale")
            values = torch.cat([values, self._average[1:] / self._average[:1]])
        found = dict(zip(names, values.tolist(), strict=True))
        # Loggers stumble over NaN.
        return {name: value for name, value in found.items() if math.isfinite(value)}
