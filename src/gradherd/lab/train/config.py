"""The settings of a run, and the runs of a comparison."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradherd.lab.tasks.task import Defaults
from gradherd.lab.train import POWERSGD, ROWS, exchange_names
from gradherd.ordering.registry import POLICIES
from gradherd.ordering.sharding import UnitSharding
from gradherd.rows.settings import RowSettings, SketchRows
from gradherd.sparsify.local import LocalSteps
from gradherd.sparsify.selector import check_density
from gradherd.sparsify.settings import make_settings


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of one run, validated on construction."""

    task: str
    """Name of a task, or path/to/file.py:ClassName."""
    order: str = "d-rr"
    """Name of an order."""
    sparsify: str = "dense"
    """Name of a sparsifier; "dense" averages the whole gradient, as DDP does."""
    density: float | None = None
    """Fraction of the gradient to send; None for dense runs."""
    method: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    """Further settings of the sparsifier, as JSON values; None for its defaults and dense runs."""
    seed: int = 0
    """Seed of the model, the order and all other random numbers."""
    workers: int
    """Number of workers."""
    batch_size: int
    """Examples per worker and step."""
    unit: int
    """Consecutive examples that are ordered as one unit."""
    rows: str = "auto"
    """How gradients are read for ordering: auto, batch, exact or sketch."""
    sketch_size: int | None = None
    """Elements of a sketched row, with rows="sketch" only; None is the default of SketchRows."""
    epochs: int
    """Number of epochs."""
    optimizer: Literal["sgd", "adamw"]
    """Optimizer."""
    lr: float
    """Learning rate."""
    momentum: float
    """Momentum of SGD."""
    weight_decay: float
    """Weight decay."""
    clip: float | None
    """Largest norm of the averaged gradient; None disables clipping. See `mean_clip`."""
    lr_drop: float | None
    """Factor by which the learning rate drops; None keeps it constant."""
    lr_drop_every: int | None
    """Epochs between two drops."""
    lr_warmup: float | None = None
    """Share of all steps over which the learning rate rises linearly from zero; None is none."""
    lr_schedule: Literal["constant", "cosine"] | None = None
    """How the learning rate goes on after that: constant (also None) or cosine, to zero."""
    local_steps: int | None = None
    """Steps between two exchanges, None at every step; `method` has more of `LocalSteps`."""
    augment: bool | None = None
    """Whether the task transforms examples at random before each epoch; None is no."""
    autocast: Literal["bf16"] | None = None
    """Precision of the passes of simulated workers; None is that of the parameters."""
    held_out: float | None = None
    """Share of the training examples that are held out; the metric is then the loss on these."""
    limit: int | None = None
    """Number of examples used of each part; None uses all."""
    virtual: bool = False
    """Whether all workers run in one process."""
    device: str = "cpu"
    """Device: cpu or cuda."""
    parallel: Literal["fsdp", "hsdp"] | None = None
    """How real workers hold it: None is whole (DDP), "fsdp" shards, "hsdp" two replicas of them."""

    def __post_init__(self) -> None:
        _check_known("order", self.order, tuple(POLICIES))
        _check_known("sparsify", self.sparsify, exchange_names())
        if self.sparsify == POWERSGD and (not self.virtual or self.local_steps is not None):
            raise ValueError("powersgd is exchanged at every step, by simulated workers: --virtual")
        _check_known("rows", self.rows, ROWS)
        if self.sketch_size is not None and self.rows != "sketch":
            raise ValueError(
                f"sketch_size goes with rows='sketch', got {self.sketch_size} with {self.rows!r}"
            )
        if self.sketch_size is not None and self.sketch_size < 1:
            raise ValueError(f"sketch_size must be at least 1 or None, got {self.sketch_size}")
        if (self.sparsify == "dense") != (self.density is None):
            raise ValueError(
                f"density goes with a sparsifier, got {self.density} with {self.sparsify}"
            )
        if self.density is not None:
            check_density(self.density)
        _check_schedule(self)
        if self.local_steps is not None:
            self.local()  # built only to be checked
        elif self.method is not None:
            _check_method(self.sparsify, self.density, self.method)
        if self.method is not None:
            if self.method.get("momentum") and (self.momentum or self.optimizer != "sgd"):
                raise ValueError(
                    f"method has momentum {self.method['momentum']}, which replaces that of the "
                    "optimizer: that must be sgd with momentum 0, "
                    f"got {self.optimizer} with {self.momentum} (momentum = 0.0 beside method)"
                )
        _check_known("autocast", self.autocast or "bf16", ("bf16",))
        if self.held_out is not None and not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be in (0, 1), got {self.held_out}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be in [0, {2**31}), got {self.seed}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1 or None, got {self.limit}")
        self._check_parallel()
        settings = dataclasses.asdict(self)
        shared = {
            f.name: settings[f.name] for f in dataclasses.fields(Defaults) if f.name in settings
        }
        # Built only to be checked: a run has the same constraints as a task's defaults.
        Defaults(**shared, seeds=1, source="a run")

    def _check_parallel(self) -> None:
        if self.parallel is None:
            return
        _check_known("parallel", self.parallel, ("fsdp", "hsdp"))
        if self.local_steps is not None:
            raise ValueError(f"local_steps need whole models, got parallel {self.parallel!r}")
        if self.virtual:
            raise ValueError(f"parallel {self.parallel!r} shards a model over real workers only")
        if self.parallel == "fsdp" and self.density is not None:
            raise ValueError(
                f"sparsify {self.sparsify!r} works between replicas, and fsdp has one: use hsdp"
            )
        if self.parallel == "hsdp" and (self.workers < 2 or self.workers % 2):
            raise ValueError(f"hsdp needs an even number of workers, got {self.workers}")

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
        return cls(**{**base, "task": task, **given})

    @property
    def exchange(self) -> str:
        """Name of the exchange in records: the sparsifier, and how often it runs if not always."""
        local = "" if self.local_steps is None else f" every {self.local_steps}"
        return f"{self.sparsify}{local}"

    @property
    def arm(self) -> tuple[str, str, float | None]:
        """What is compared: order, sparsifier and density."""
        return self.order, self.exchange, self.density

    def row_choice(self) -> str | RowSettings:
        """Return the `rows` argument of `attach`: a name, or settings."""
        return self.rows if self.sketch_size is None else SketchRows(size=self.sketch_size)

    def local(self) -> LocalSteps:
        """Return the settings of local steps; `local_steps` is not None.

        Raises:
            ValueError: `method` has a setting that local steps do not have, or it is out of range.
        """
        settings = dict(self.method or {})
        names = {f.name for f in dataclasses.fields(LocalSteps)} - {"every", "method"}
        own = {key: settings.pop(key) for key in names.intersection(settings)}
        if odd := sorted({"clip", "momentum", "warmup_steps", "warmup_from"} & settings.keys()):
            raise ValueError(f"method has {odd[0]}, which local steps do not have")
        _check_json(own)
        method = make_settings(self.sparsify, self.density, **settings).method
        try:
            return LocalSteps(every=self.local_steps, method=method, **own)  # type: ignore[arg-type]
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


def sparse_recipe(config: RunConfig) -> RunConfig:
    """Return a sparse run with what trains best: no momentum, and the rate lr / (1 - momentum).

    What is sent has waited for many steps, and momentum would repeat it many times more.
    """
    sparse = config.density is not None and config.local_steps is None
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
    momentum is chosen, sparse arms get those of `sparse_recipe`.

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
            seed=seed,
            **chosen,
        )
        for seed in seeds
        for order in orders
        for exchange in exchanges
    ]
    return configs if own_choice else [sparse_recipe(config) for config in configs]


def count_steps(config: RunConfig, examples: int) -> int:
    """Return the number of steps of a run, over all epochs.

    Args:
        config: Its settings.
        examples: Number of training examples.
    """
    # Through the sharding, not examples // batch: the last units are repeated to fill all workers.
    sharding = UnitSharding(examples, config.unit, config.workers, drop_last=False)
    return -(-sharding.length * config.unit // config.batch_size) * config.epochs


def _check_method(sparsify: str, density: float | None, method: Mapping[str, Any]) -> None:
    """Raise ValueError unless the sparsifier accepts the settings and a record can hold them."""
    if density is None:
        raise ValueError(f"method goes with a sparsifier, got {method} with {sparsify}")
    _check_json(method)
    # Built only to be checked: a study should fail when it is read, not hours later.
    make_settings(sparsify, density, **method)


def _check_json(method: Mapping[str, Any]) -> None:
    try:
        # The record is JSON, and NaN is not.
        json.dumps(method, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"method must be a dict of JSON values, got {method}: {error}") from None


def _check_schedule(config: RunConfig) -> None:
    if config.lr_warmup is not None and not 0 <= config.lr_warmup < 1:
        raise ValueError(f"lr_warmup must be in [0, 1), got {config.lr_warmup}")
    if config.lr_schedule not in (None, "constant", "cosine"):
        raise ValueError(f"lr_schedule must be constant or cosine, got {config.lr_schedule!r}")
    if config.lr_schedule == "cosine" and config.lr_drop is not None:
        raise ValueError(
            f"lr_schedule 'cosine' and lr_drop {config.lr_drop} both lower the learning rate: "
            "choose one (a task's drop goes with lr_schedule 'constant')"
        )


def _check_known(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known are {', '.join(known)}")
