"""`gradherd advise`: predict whether a sparse exchange pays on a given cluster."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import torch.distributed as dist
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradherd.advise import units
from gradherd.advise.calibrate import LinkMeasurement, measure_cluster
from gradherd.advise.choices import Setting
from gradherd.advise.costs import (
    DEVICES,
    GOODPUT,
    NetworkLink,
    guess_backward,
    typical_overheads,
)
from gradherd.advise.decide import advise
from gradherd.cli.arguments import (
    Flag,
    check_at_least,
    check_name,
    json_help,
    print_json,
    under_torchrun,
)
from gradherd.cli.errors import CommandFailed, UsageError
from gradherd.cli.launch import join_torchrun, measure_on_ranks
from gradherd.cli.options import usable_device
from gradherd.comm.ranks import RankError
from gradherd.comm.world import World

_MAX_WORKERS = 1 << 24
# Largest model that --measure builds: parameters and gradients take 8 bytes each.
_MAX_MEASURED_PARAMS = 4_000_000_000
_DEFAULT_BANDWIDTH = 10e9  # bits per second: what rented machines usually have
_DEFAULT_LATENCY = 50e-6
_PLACEHOLDER = {"bandwidth": 1e9, "backward": 1.0}
"""Stands for what is still to be measured, so that all others are checked first."""
OverheadOption = Annotated[
    str | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="(from --device)")
]


@dataclass(frozen=True, kw_only=True)
class OverheadOptions:
    """Time per step that a method spends computing, if you have measured it."""

    fp16_overhead: OverheadOption = None
    """Converting to half precision and back."""
    powersgd_overhead: OverheadOption = None
    """Matrix products and orthogonalisation of PowerSGD."""
    topk_overhead: OverheadOption = None
    """Adding the residual, selecting and writing the mean, with topk."""
    exdyna_overhead: OverheadOption = None
    """The same with exdyna."""
    ride_overhead: OverheadOption = None
    """cd-grab on top of a dense exchange."""
    sketch_overhead: OverheadOption = None
    """cd-grab beside any other exchange."""

    def given(self) -> dict[str, float | None]:
        """Return seconds by the field names of `Overheads`; None where nothing is given."""
        seconds = {}
        for key, text in dataclasses.asdict(self).items():
            option = f"--{key.replace('_', '-')}"
            value = None if text is None else _parse_time(option, text)
            seconds[key.removesuffix("_overhead")] = value
        return seconds


@dataclass(frozen=True, kw_only=True)
class AdviseCommand:
    """Predict the time of a training step with every exchange and order, and recommend one.

    Describe the model (--params, --backward), the number of workers and the network. The prediction
    knows what collectives cost (the better of ring and tree), that a dense exchange overlaps with
    the backward pass while a sparse one cannot, and how long selection takes. Or let it measure
    network, latency and backward pass with --measure: on local workers, or on those that torchrun
    starts, as in torchrun --nproc-per-node 8 -m gradherd advise --params 25M --measure.

    Units: --bandwidth 1G, 100M or 2.5e9 is in bits per second, as networks are sold (50GB/s with a
    capital B is in bytes); times are in seconds, or 80ms, 50us; --params 25M, 7B or 7e9.

    Example: gradherd advise --params 25M --workers 8 --bandwidth 10G --backward 60ms
    """

    params: str
    """Number of parameters, such as 25M or 7e9."""
    workers: int = 4
    """Number of workers."""
    bandwidth: Annotated[str | None, tyro.conf.arg(metavar="BITS", help_behavior_hint="(10G)")] = (
        None
    )
    """Speed of a worker's network link in bits per second."""
    latency: Annotated[str | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="(50us)")] = (
        None
    )
    """Time of a short message to another worker."""
    backward: Annotated[
        str | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="(a guess by --params)")
    ] = None
    """Time of a backward pass."""
    forward: Annotated[
        str | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="(half the backward)")
    ] = None
    """Time of everything else in a step: forward pass, optimizer, data."""
    density: float = 0.001
    """Share of the gradient that a sparse exchange sends, in (0, 1]."""
    rank: int = 1
    """Rank of PowerSGD."""
    side: float = 1024
    """Typical number of rows and columns of the model's matrices, for PowerSGD."""
    device: str = "cuda"
    """cuda or cpu: where gradients are. Decides how long selection takes, and where to measure."""
    overlap: Annotated[
        float | None, tyro.conf.arg(metavar="SHARE", help_behavior_hint="(1; cpu: 0)")
    ] = None
    """Share of the backward pass that a dense exchange can overlap with, in [0, 1]."""
    overheads: OverheadOptions = field(default_factory=OverheadOptions)
    """Time per step that a method spends computing, if you have measured it."""
    measure: Flag = False
    """Measure bandwidth, latency, backward and forward; options that you give take precedence."""
    json: Annotated[
        bool,
        json_help(
            'Print {"choices": [{"name", "step_seconds", "bytes", ...}], '
            '"break_even_bandwidth", "break_even_bandwidth_fp16", "pays", "advice", '
            '"assumed", "setting"}.'
        ),
    ] = False

    def run(self) -> None:
        """Measure if asked to, predict, and print the advice."""
        check_at_least("--workers", self.workers, 1)
        check_name("--device", self.device, DEVICES)
        if self.workers > _MAX_WORKERS:
            raise UsageError(f"--workers must be at most {_MAX_WORKERS:,}, got {self.workers}")
        params = _parse("--params", self.params, units.parse_count)
        given, assumed = self._given(), list[str]()
        if self.measure:
            self._setting(params, given | _PLACEHOLDER)  # refuse bad options before measuring
            cluster = _measure_cluster(params, self.workers, self.device)
            if cluster is None:
                return  # rank 0 prints
            setting = self._setting(params, cluster.values | given, workers=cluster.workers)
        else:
            defaults = {
                "bandwidth": _DEFAULT_BANDWIDTH,
                "backward": guess_backward(self.device, params),
            }
            assumed = [option for option in defaults if option not in given]
            setting = self._setting(params, defaults | given)
        self._print(setting, assumed)

    def _given(self) -> dict[str, float]:
        """Return what is given as options, in bits per second and seconds."""
        given = {}
        if self.bandwidth is not None:
            given["bandwidth"] = _parse("--bandwidth", self.bandwidth, units.parse_rate)
        for option in ("latency", "backward", "forward"):
            text = getattr(self, option)
            if text is not None:
                given[option] = _parse_time(f"--{option}", text)
        return given

    def _setting(
        self, params: float, values: dict[str, float], *, workers: int | None = None
    ) -> Setting:
        # On a CPU the cores that exchange are those that compute: nothing overlaps.
        overlap = self.overlap if self.overlap is not None else float(self.device != "cpu")
        link = NetworkLink(
            bandwidth=values["bandwidth"],
            latency=values.get("latency", _DEFAULT_LATENCY),
            # A bandwidth that is given is that of the link, headers included, even beside
            # --measure.
            goodput=values.get("goodput", GOODPUT) if self.bandwidth is None else GOODPUT,
        )
        overheads = typical_overheads(self.device, params)
        try:
            return Setting(
                params=params,
                workers=self.workers if workers is None else workers,
                link=link,
                backward=values["backward"],
                forward=values.get("forward", values["backward"] / 2),
                overheads=overheads.replaced_by(self.overheads.given()),
                density=self.density,
                rank=self.rank,
                side=self.side,
                overlap=overlap,
            )
        except ValueError as error:
            # Fields of Setting are called like the options, and its errors begin with the name.
            raise UsageError(f"--{error}") from None

    def _print(self, setting: Setting, assumed: list[str]) -> None:
        result = advise(setting) | {"assumed": assumed}
        if self.json:
            used = dataclasses.asdict(setting)
            if not math.isfinite(setting.link.bandwidth):
                used["link"]["bandwidth"] = None  # one worker has no link; JSON has no infinity
            print_json({**result, "setting": used})
            return
        console = Console()
        console.print(_choices_table(setting, result))
        console.print(escape(str(result["advice"])))
        if assumed:
            options = " and ".join(f"--{option}" for option in assumed)
            console.print(f"Not given, so assumed: {options}. Give yours, or add --measure.")


class _Cluster(NamedTuple):
    """What the workers have measured together."""

    workers: int
    values: dict[str, float]


def _measure_cluster(params: float, workers: int, device: str) -> _Cluster | None:
    """Measure on torchrun's ranks or on local ones; return None on all ranks but the first."""
    # Before ranks are started: all of them would run out of memory at once.
    if params > _MAX_MEASURED_PARAMS:
        raise UsageError(f"--measure builds a model of {params:.3g} parameters: at most 4e9")
    if not under_torchrun():
        if device != "cpu":
            raise UsageError(
                "--measure on a GPU needs torchrun, with one worker per GPU; or add --device cpu"
            )
        try:
            measured = measure_on_ranks(measure_cluster, workers, int(params), device)
            return _as_cluster(workers, measured)
        except RankError as error:
            raise CommandFailed(error.reason) from None
    usable_device(device)
    join_torchrun(device)
    try:
        world = World.detect()
        result = measure_cluster(int(params), device)
        return _as_cluster(world.size, result) if world.rank == 0 else None
    finally:
        dist.destroy_process_group()


def _as_cluster(workers: int, measured: LinkMeasurement) -> _Cluster:
    # The bandwidth was measured as data that arrived, so no share of it is headers.
    values = {**measured._asdict(), "goodput": 1.0}
    if math.isinf(measured.bandwidth):
        # One rank has measured nothing.
        values["latency"] = 0.0
    return _Cluster(workers, values)


def _parse(option: str, text: str, parse: Callable[[str], float]) -> float:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _parse_time(option: str, text: str) -> float:
    return _parse(option, text, units.parse_seconds)


def _choices_table(setting: Setting, result: dict[str, Any]) -> Table:
    table = Table(
        title=f"{setting.params:,.0f} parameters, {setting.workers} workers, "
        f"{units.format_rate(setting.link.bandwidth)}, "
        f"latency {units.format_seconds(setting.link.latency)}, "
        f"backward {units.format_seconds(setting.backward)}",
        title_justify="left",
    )
    table.add_column("exchange and order")
    for heading in ("step", "exchange", "computing", "sent", "time / dense"):
        table.add_column(heading, justify="right")
    dense = result["choices"][0]["step_seconds"]
    best = min(choice["step_seconds"] for choice in result["choices"])
    for choice in result["choices"]:
        seconds = choice["step_seconds"]
        table.add_row(
            choice["name"],
            units.format_seconds(seconds),
            units.format_seconds(choice["exchange_seconds"]),
            units.format_seconds(choice["overhead_seconds"]),
            units.format_bytes(choice["bytes"]),
            f"{seconds / dense:.3g}" if dense else "",
            style="bold green" if seconds == best else None,
        )
    return table
