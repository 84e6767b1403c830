"""What a comparison consists of, as plain values.

An arm is what is compared: an order, a sparsifier, a density. Its runs differ by their seed alone.
"""

from dataclasses import dataclass

from gradherd.lab.train.record import RunRecord

ArmKey = tuple[str, str, float | None]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and sample standard deviation over seeds."""

    mean: float | None
    """None if there is no run, or if one of them was not finite."""
    std: float | None
    """0.0 for a single seed, which tells nothing about the spread; None where the mean is."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Arm minus reference, seed by seed."""

    mean: float
    seeds: tuple[int, ...]
    """The seeds that both have; at least two."""
    epoch: int | None
    """After how many epochs both were read; None if each was read after its own last one."""
    low: float | None
    """Lower end of the 95 % t interval; None if all differences are equal, but not zero."""
    high: float | None
    p: float | None
    """Of the paired t-test, two-sided; None where the interval is."""
    sign_flip_p: float | None
    """Of the exact sign-flip test, two-sided; at least 2 / 2**seeds. None over 20 seeds."""

    @property
    def shown(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """All runs of one order, sparsifier and density."""

    label: str
    order: str
    sparsify: str
    density: float | None
    runs: tuple[RunRecord, ...]
    """All of them, by seed."""
    used: tuple[RunRecord, ...]
    """Those that went as far as `epochs`, or diverged before: all figures are over these."""
    epochs: int
    """How far the figures go: all epochs asked for, or as far as its longest run came."""
    planned: int
    """How many epochs were asked for."""
    final_loss: Spread
    final_metric: Spread
    loss_by_epoch: tuple[Spread, ...]
    metric_by_epoch: tuple[Spread, ...]
    seconds_by_epoch: tuple[float, ...]
    """Seconds since the start after each epoch, mean over seeds."""
    bytes_by_epoch: tuple[float, ...]
    """Bytes since the start after each epoch, mean over seeds."""
    mean_density: float | None
    """Share that travelled, mean over steps and seeds."""
    padding: float | None
    """Mean over epochs and seeds; None for dense arms."""

    @property
    def key(self) -> ArmKey:
        """What makes it this arm."""
        return self.order, self.sparsify, self.density

    @property
    def finished(self) -> bool:
        """Whether a run of it went through all epochs that were asked for."""
        return self.epochs > 0 and self.epochs >= self.planned

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that its figures are over."""
        return tuple(run.seed for run in self.used)

    @property
    def seconds(self) -> float | None:
        """In all, mean over seeds."""
        return self.seconds_by_epoch[-1] if self.seconds_by_epoch else None

    @property
    def bytes(self) -> float | None:
        """What the mean worker sent in all, mean over seeds."""
        return self.bytes_by_epoch[-1] if self.bytes_by_epoch else None


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An arm beside the one it is measured against."""

    arm: Arm
    reference: Arm
    epochs_to: int | None
    """First epoch whose mean loss is at or below the reference's final mean; None if never."""
    reference_epochs_to: int | None
    """When the reference was there itself: its last epoch, or an earlier one if it got worse."""
    epochs_to_by_seed: tuple[int | None, ...]
    """The same for each seed of the arm alone."""
    seconds_to: float | None
    """Seconds up to the end of that epoch, mean over seeds."""
    bytes_to: float | None
    loss: Difference | None
    """Of final losses; None with fewer than two common seeds, or if one is not finite."""
    late_loss: Difference | None
    """Of each run's mean loss over the last half of the epochs that both arms have; None with fewer
    than 4 epochs or two common seeds, or if one of these losses is not finite."""
    metric: Difference | None
    bytes_ratio: float | None
    """Bytes of the arm / of the reference, both up to their last common epoch."""
    seconds_ratio: float | None

    @property
    def common_seeds(self) -> tuple[int, ...]:
        """The seeds that both have, in the arm's order."""
        return tuple(seed for seed in self.arm.seeds if seed in self.reference.seeds)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What some arms of a comparison can answer."""

    kind: str
    """order, sparsify, or both."""
    text: str
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All arms on one task."""

    task: str
    description: str
    metric_name: str
    higher_is_better: bool
    arms: tuple[Arm, ...]
    """The first one is the baseline."""
    pairs: tuple[Pair, ...]
    """Each arm beside the baseline, the baseline beside itself."""
    questions: tuple[Question, ...]
    notes: tuple[str, ...]
    """What a reader has to know before trusting the figures."""

    @property
    def baseline(self) -> Arm:
        """The first arm."""
        return self.arms[0]

    @property
    def records(self) -> tuple[RunRecord, ...]:
        """All runs of all arms."""
        return tuple(run for arm in self.arms for run in arm.runs)
