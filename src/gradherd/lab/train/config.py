"""The settings of a run: one schema for records, study files and the command line.

`RunConfig` is the schema. Its fields, with those it inherits from `Hyperparameters`, are all that
can be set of a run, and `run_settings` describes them: name, type, choices, default and the text
below the field. From that description come
- the keys of a study file (`lab.study.kinds.CompareStudy`), all but those of one run or machine;
- the options of `gradherd train` and `compare` (`cli.options.TrainingOptions`): `lr_drop_every` is
  `--lr-drop-every`, its help the text below the field. A field of `Hyperparameters` that is not
  given is the task's.
So a new setting is one field here, and its check in `__post_init__`; errors begin with the name of
the setting, which the command line turns into the option's.

No torch is imported until a run is checked: `gradherd train --help` reads this module.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from gradherd.comm.checks import check_in, check_whole
from gradherd.lab.tasks.defaults import Defaults, Hyperparameters
from gradherd.lab.text import check_known, field_texts
from gradherd.lab.train import POWERSGD, ROWS, exchange_names
from gradherd.ordering.registry import POLICIES, make_policy

if TYPE_CHECKING:
    from gradherd.local.settings import LocalSteps
    from gradherd.rows.settings import RowSettings


@dataclass(frozen=True, kw_only=True)
class RunConfig(Hyperparameters):
    """The settings of one run, validated on construction."""

    task: str
    """Name of a task, or path/to/file.py:ClassName."""
    order: str = "d-rr"
    """Order of examples."""
    sparsify: str = "dense"
    """How gradients are exchanged; "dense" averages the whole gradient, as DDP does."""
    density: float | None = None
    """Share of the gradient that a sparsifier should send; None for dense runs."""
    method: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    """Further settings of the sparsifier, and fields of `LocalSteps` if there are local steps, as
    JSON values; None for the defaults."""
    local_steps: int | None = None
    """Steps between two exchanges; None exchanges at every step."""
    seed: int = 0
    """Seed of the model, the order and all other random numbers."""
    lr_warmup: float | None = None
    """Share of all steps over which the learning rate rises from zero, such as 0.05."""
    lr_schedule: Literal["constant", "cosine"] | None = None
    """How the learning rate goes on: constant (with the drops, if there are any) or cosine."""
    augment: bool | None = None
    """Transform the examples at random before each epoch, if the task can: crops and flips."""
    autocast: Literal["bf16"] | None = None
    """Precision of the passes of simulated workers; that of the parameters if not given."""
    rows: str = "auto"
    """How gradients are read for ordering."""
    sketch_size: int | None = None
    """Size of a sketched gradient; goes with sketched rows."""
    held_out: float | None = None
    """Share of the training examples that are held out; the metric is then the loss on these."""
    limit: int | None = None
    """Use only this many examples of the training set and of the test set."""
    virtual: bool = False
    """Run all workers in this process: room for a thousand workers, and the same results up to
    rounding, after which orders may differ."""
    device: str = "cpu"
    """cpu or cuda; cuda needs --virtual or torchrun."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("order", self.order, tuple(POLICIES))
        check_known("sparsify", self.sparsify, exchange_names())
        check_known("rows", self.rows, ROWS)
        for one in run_settings().values():
            # Literal is checked by mypy only.
            if one.choices and (value := getattr(self, one.name)) is not None:
                check_known(one.name, value, one.choices)
        for name in ("sketch_size", "limit", "local_steps"):
            if (count := getattr(self, name)) is not None:
                check_whole(name, count, 1)
        self._check_rows()
        check_in(f"[0, {2**31})", seed=self.seed)
        if self.held_out is not None:
            check_in("(0, 1)", held_out=self.held_out)
        if self.autocast is not None and not self.virtual:
            raise ValueError(f"autocast {self.autocast!r} works with simulated workers: --virtual")
        if self.lr_warmup is not None:
            check_in("[0, 1)", lr_warmup=self.lr_warmup)
        if self.lr_schedule == "cosine" and self.lr_drop is not None:
            raise ValueError(
                f"lr_schedule 'cosine' and lr_drop {self.lr_drop} both lower the learning rate: "
                "choose one (a task's drop goes with lr_schedule 'constant')"
            )
        self._check_exchange()

    def _check_rows(self) -> None:
        if self.sketch_size is not None and self.rows != "sketch":
            raise ValueError(
                f"sketch_size {self.sketch_size} has no effect with rows {self.rows!r}: "
                "choose rows 'sketch'"
            )
        unlike = self.rows == "batch" and self.unit != self.batch_size
        if unlike and make_policy(self.order).needs_rows:
            raise ValueError(
                f"rows 'batch' order whole batches: got unit {self.unit} of {self.batch_size}"
            )

    def _check_exchange(self) -> None:
        from gradherd.sparsify.selector import check_density
        from gradherd.sparsify.settings import make_settings

        if self.sparsify == POWERSGD and (not self.virtual or self.local_steps is not None):
            raise ValueError("powersgd is exchanged at every step, by simulated workers: --virtual")
        if (self.sparsify == "dense") != (self.density is None):
            raise ValueError(
                f"density goes with a sparsifier, got {self.density} with {self.sparsify}"
            )
        if self.density is not None:
            check_density(self.density)
        if self.local_steps is not None:
            self.local()  # built only to be checked: a study should fail when it is read
        elif self.method is not None:
            if self.density is None:
                raise ValueError(
                    f"method goes with a sparsifier, got {self.method} with {self.sparsify}"
                )
            _check_json(self.method)
            make_settings(self.sparsify, self.density, **self.method)
        if (self.method or {}).get("momentum") and (self.momentum or self.optimizer != "sgd"):
            raise ValueError(
                f"method has momentum {(self.method or {})['momentum']}, which replaces that of "
                "the optimizer: that must be sgd with momentum 0, "
                f"got {self.optimizer} with {self.momentum} (momentum = 0.0 beside method)"
            )

    @classmethod
    def of(cls, task: str, defaults: Defaults, **chosen: Any) -> "RunConfig":
        """Return a task's default settings, overridden by those that are chosen and not None.

        If the defaults order whole batches, another batch size still orders whole batches.

        Args:
            task: Name of the task, or path/to/file.py:ClassName.
            defaults: The task's defaults.
            **chosen: Fields of RunConfig; None keeps the default.

        Raises:
            ValueError: A setting is invalid; the message names it.
        """
        own = {f.name for f in dataclasses.fields(cls)}
        given = {name: value for name, value in chosen.items() if value is not None}
        base = {k: v for k, v in dataclasses.asdict(defaults).items() if k in own}
        # Else a smaller batch size would fail, and a larger one would silently order half batches.
        if "batch_size" in given and "unit" not in given and defaults.unit == defaults.batch_size:
            given["unit"] = given["batch_size"]
        if given.get("lr_schedule") == "cosine" and "lr_drop" not in given:
            base |= {"lr_drop": None, "lr_drop_every": None}  # Cosine takes the place of drops.
        if given.get("optimizer") == "adamw":
            base["momentum"] = 0.0  # AdamW has its own.
        return cls(**{**base, "task": task, **given})

    @property
    def exchange(self) -> str:
        """Name of the exchange in records: the sparsifier, and how often it runs if not always.

        Values of few bits are named, as `gradherd advise` does: exdyna-int4.
        """
        if self.local_steps is not None:
            return f"{self.sparsify} every {self.local_steps}"
        values = (self.method or {}).get("values", "fp32")
        return self.sparsify if values == "fp32" else f"{self.sparsify}-{values}"

    @property
    def arm(self) -> tuple[str, str, float | None]:
        """What is compared: order, sparsifier and density."""
        return self.order, self.exchange, self.density

    def row_choice(self) -> "str | RowSettings":
        """Return the `rows` argument of `attach`: a name, or settings."""
        from gradherd.rows.settings import SketchRows

        return self.rows if self.sketch_size is None else SketchRows(size=self.sketch_size)

    def local(self) -> "LocalSteps":
        """Return the settings of local steps, which `method` may name; `local_steps` is not None.

        Raises:
            ValueError: `method` has a setting that local steps do not have, or it is out of range;
                or there is a sparsifier.
        """
        from gradherd.local.settings import LocalSteps

        if self.sparsify != "dense" or self.density is not None:
            raise ValueError(
                f"local steps send all coordinates in few bits: leave out {self.sparsify}"
            )
        own = dict(self.method or {})
        names = {f.name for f in dataclasses.fields(LocalSteps)} - {"every"}
        if odd := sorted(own.keys() - names):
            raise ValueError(f"method has {odd[0]}, which local steps do not have")
        _check_json(own)
        try:
            return LocalSteps(every=self.local_steps, **own)  # type: ignore[arg-type]
        except TypeError as error:  # Checks compare values, which fails for a str and a number.
            raise ValueError(f"local steps cannot be run with {own}: {error}") from None

    def lr_at(self, epoch: int, step: int = 0, steps: int = 1) -> float:
        """Return the learning rate of a step.

        Args:
            epoch: The epoch, counted from 1.
            step: The step within it, counted from 0.
            steps: Steps of an epoch.

        >>> defaults = Defaults(workers=1, batch_size=1, lr=1.0, lr_drop=0.1, lr_drop_every=10,
        ...                     epochs=20, seeds=1, source="ours")
        >>> config = RunConfig.of("digits", defaults)
        >>> [config.lr_at(epoch) for epoch in (1, 10, 11)]
        [1.0, 1.0, 0.1]
        """
        factor = 1.0
        if self.lr_drop is not None and self.lr_drop_every is not None:
            factor = self.lr_drop ** ((epoch - 1) // self.lr_drop_every)
        if self.lr_warmup is None and self.lr_schedule in (None, "constant"):
            return float(self.lr * factor)
        done, total = (epoch - 1) * steps + step, self.epochs * steps
        warmup = round((self.lr_warmup or 0.0) * total)
        if done < warmup:
            # The first step has a rate above zero, or it would be wasted.
            return float(self.lr * factor * (done + 1) / warmup)
        if self.lr_schedule == "cosine":
            factor *= 0.5 * (1 + math.cos(math.pi * (done - warmup) / (total - warmup)))
        return float(self.lr * factor)

    def folder(self) -> Path:
        """Return a folder name that is unique among the runs of a comparison.

        >>> defaults = Defaults(workers=1, batch_size=1, lr=1.0, epochs=2, seeds=1, source="ours")
        >>> RunConfig.of("digits", defaults, sparsify="topk", density=0.01, seed=3).folder()
        PosixPath('d-rr_topk-0.01/seed-3')
        """
        density = "" if self.density is None else f"-{self.density:g}"
        method = self.exchange.replace(" ", "-") + density
        if self.held_out is not None:  # runs of one arm that differ in their rate
            method += f"-lr-{self.lr:g}"
        return Path(f"{self.order}_{method}") / f"seed-{self.seed}"


class Exchange(NamedTuple):
    """How the gradients of an arm are exchanged."""

    sparsify: str
    density: float | None = None
    """None is the density that all arms share."""
    local_steps: int | None = None
    values: str | None = None
    """How values are sent; None is the default of methods, or of local steps."""


def sparse_recipe(config: RunConfig) -> RunConfig:
    """Return a run with the rate and the momentum of dense training that suit its exchange.

    A sparse one has no momentum, and the rate lr / (1 - momentum): what is sent has waited for many
    steps, and momentum would repeat it many times more. Local steps have the rate that `LocalSteps`
    names.
    """
    if config.local_steps is not None:
        factor = config.local().lr_factor(config.workers, config.optimizer)
        return dataclasses.replace(config, lr=float(f"{config.lr * factor:.6g}"))
    sparse = config.density is not None
    sparse &= config.sparsify != POWERSGD  # which sends all of a gradient, roughly
    if not sparse or not config.momentum or (config.method or {}).get("momentum"):
        return config
    lr = float(f"{config.lr / (1 - config.momentum):.6g}")  # 0.5, not 0.5000000000000001
    return dataclasses.replace(config, momentum=0.0, lr=lr)


def plan_runs(
    task: str,
    defaults: Defaults,
    *,
    orders: Sequence[str],
    sparsifiers: Sequence[str | Exchange],
    density: float | None,
    seeds: Sequence[int],
    **chosen: Any,
) -> list[RunConfig]:
    """Return a run for each seed and each arm, the arms of a seed next to each other.

    A comparison that is interrupted then consists of complete pairs. Unless a learning rate or a
    momentum is chosen, arms get those of `sparse_recipe`.

    >>> from gradherd.lab.tasks.digits import Digits
    >>> runs = plan_runs("digits", Digits.defaults, orders=["d-rr", "cd-grab"],
    ...             sparsifiers=["dense"], density=None, seeds=[0, 1])
    >>> [(run.seed, run.order) for run in runs]
    [(0, 'd-rr'), (0, 'cd-grab'), (1, 'd-rr'), (1, 'cd-grab')]
    """
    own_choice = chosen.get("lr") is not None or chosen.get("momentum") is not None
    exchanges = [Exchange(one) if isinstance(one, str) else one for one in sparsifiers]
    configs = [
        RunConfig.of(
            task,
            defaults,
            order=order,
            sparsify=exchange.sparsify,
            # One --density serves all arms; a dense run has none.
            density=None if exchange.sparsify == "dense" else exchange.density or density,
            local_steps=exchange.local_steps,
            method=exchange.values and {"values": exchange.values},
            seed=seed,
            **chosen,
        )
        for seed in seeds
        for order in orders
        for exchange in exchanges
    ]
    return configs if own_choice else [sparse_recipe(config) for config in configs]


def count_steps(config: RunConfig, examples: int) -> int:
    """Return the number of steps of a run, over all epochs."""
    from gradherd.ordering.sharding import UnitSharding

    # Through the sharding, not examples // batch: the last units are repeated to fill all workers.
    sharding = UnitSharding(examples, config.unit, config.workers, drop_last=False)
    return -(-sharding.length * config.unit // config.batch_size) * config.epochs


class RunSetting(NamedTuple):
    """What a study file and the command line need to know of a field of `RunConfig`."""

    name: str
    kind: type
    """Type of its values in a file: bool, int, float, str or dict."""
    choices: tuple[str, ...]
    """All its values, if they are few."""
    default: Any
    by_task: bool
    """Whether the task has a value for it."""
    help: str
    """The text below the field."""


@cache
def run_settings() -> dict[str, RunSetting]:
    """Return all fields of `RunConfig` by name.

    >>> run_settings()["optimizer"]
    RunSetting(name='optimizer', kind=<class 'str'>, choices=('sgd', 'adamw'), default='sgd', \
by_task=True, help='Optimizer.')
    """
    hints, texts = get_type_hints(RunConfig), field_texts(RunConfig)
    by_task = {field.name for field in dataclasses.fields(Hyperparameters)}
    settings = {}
    for field in dataclasses.fields(RunConfig):
        hint = hints[field.name]
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        (kind,) = (one for one in options if one is not NoneType)
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        kind = str if choices else dict if get_origin(kind) is not None else kind
        default = None if field.default is dataclasses.MISSING else field.default
        settings[field.name] = RunSetting(
            field.name, kind, choices, default, field.name in by_task, texts.get(field.name, "")
        )
    return settings


def _check_json(method: Mapping[str, Any]) -> None:
    try:
        # The record is JSON, and NaN is not.
        json.dumps(method, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"method must be a dict of JSON values, got {method}: {error}") from None
