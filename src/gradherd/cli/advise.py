"""`gradherd advise`: will a sparse exchange pay here?"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradherd.advise import units
from gradherd.advise.choices import Setting
from gradherd.advise.decide import advise
from gradherd.advise.link import GOODPUT, Link
from gradherd.advise.overheads import DEVICES, guessed_backward, usual
from gradherd.cli.usage import UsageError, at_least, name, print_json

_MOST_WORKERS = 1 << 24
Given = Annotated[str | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="(from --device)")]


@dataclass(frozen=True, kw_only=True)
class Own:
    """Times that methods compute in a step, where you have measured them."""

    fp16_overhead: Given = None
    """Converting to half precision and back."""
    powersgd_overhead: Given = None
    """PowerSGD's products and orthogonalising."""
    topk_overhead: Given = None
    """Residual, picking and writing the mean, by top-k."""
    exdyna_overhead: Given = None
    """The same by exdyna."""
    ride_overhead: Given = None
    """cd-grab on a dense exchange."""
    sketch_overhead: Given = None
    """cd-grab beside any other exchange."""

    def known(self) -> dict[str, float | None]:
        """Return seconds by the names that `Overheads` has."""
        found = {}
        for key, text in dataclasses.asdict(self).items():
            option = f"--{key.replace('_', '-')}"
            found[key.removesuffix("_overhead")] = None if text is None else _time(option, text)
        return found


@dataclass(frozen=True, kw_only=True)
class Advise:
    """Predict what a training step takes with every exchange and order, and say what to use.

    Tell it the model (--params, --backward), the workers and the link; it knows what collectives
    cost (the better of ring and tree), that a dense exchange hides behind the backward pass and a
    sparse one cannot, and how long picking takes. Or let it measure link, latency and backward with
    --measure: on local workers, or on those of `torchrun ... -m gradherd advise --measure`.

    Units: --bandwidth 1G, 100M or 2.5e9 are bits per second, as networks are sold (50GB/s with a
    capital B are bytes); times are seconds or 80ms, 50us; --params 25M, 7B or 7e9.

    Example: gradherd advise --params 25M --workers 8 --bandwidth 10G --backward 60ms
    """

    params: str
    """Numbers in the model, such as 25M or 7e9."""
    workers: int = 4
    """Workers that train together."""
    bandwidth: Annotated[str | None, tyro.conf.arg(metavar="BITS", help_behavior_hint="(10G)")] = (
        None
    )
    """Speed of a worker's link, bits per second."""
    latency: Annotated[str | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="(50us)")] = (
        None
    )
    """Time that a short message takes to another worker."""
    backward: Annotated[
        str | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="(a guess by --params)")
    ] = None
    """Time of a backward pass."""
    forward: Annotated[
        str | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="(half the backward)")
    ] = None
    """Time of all else in a step: forward, optimizer, data."""
    density: float = 0.001
    """Share of the gradient that a sparse exchange sends, in (0, 1]."""
    rank: int = 1
    """Rank of PowerSGD."""
    side: float = 1024
    """Rows and columns of the model's matrices, about, for PowerSGD."""
    device: str = "cuda"
    """cuda or cpu: where gradients are, for the time that picking takes (and for --measure)."""
    overlap: Annotated[
        float | None, tyro.conf.arg(metavar="SHARE", help_behavior_hint="(1; cpu: 0)")
    ] = None
    """Share of the backward pass in which a dense exchange gets on, in [0, 1]."""
    own: Own = field(default_factory=Own)
    """Times that methods compute in a step, where you have measured them."""
    measure: bool = False
    """Measure link, latency, backward and forward; what is given by hand stays as given."""
    json: bool = False
    """Print {"choices": [{"name", "step_seconds", "bytes", ...}], "break_even_bandwidth",
    "break_even_bandwidth_fp16", "pays", "advice", "assumed", "setting"}."""

    def run(self) -> None:
        """Predict."""
        at_least("--workers", self.workers, 1)
        name("--device", self.device, DEVICES)
        if self.workers > _MOST_WORKERS:
            raise UsageError(f"--workers must be at most {_MOST_WORKERS:,}, got {self.workers}")
        params = _read("--params", self.params, units.count)
        given, assumed = self._given(), list[str]()
        if self.measure:
            from gradherd.cli.advise_measure import measured

            self._setting(params, given | _PLACEHOLDER)  # complain before minutes are spent
            found = measured(params, self.workers, self.device)
            if found is None:
                return  # another rank speaks
            setting = self._setting(params, found.values | given, workers=found.workers)
        else:
            guessed = {
                "bandwidth": _BANDWIDTH,
                "backward": guessed_backward(self.device, params),
            }
            assumed = [option for option in guessed if option not in given]
            setting = self._setting(params, guessed | given)
        self._show(setting, assumed)

    def _given(self) -> dict[str, float]:
        """Return what was told, in plain units."""
        found = {}
        if self.bandwidth is not None:
            found["bandwidth"] = _read("--bandwidth", self.bandwidth, units.rate)
        for option in ("latency", "backward", "forward"):
            text = getattr(self, option)
            if text is not None:
                found[option] = _time(f"--{option}", text)
        return found

    def _setting(
        self, params: float, numbers: dict[str, float], *, workers: int | None = None
    ) -> Setting:
        overlap = self.overlap if self.overlap is not None else float(self.device != "cpu")
        link = Link(
            bandwidth=numbers["bandwidth"],
            latency=numbers.get("latency", 50e-6),
            goodput=numbers.get("goodput", GOODPUT) if self.bandwidth is None else GOODPUT,
        )
        try:
            return Setting(
                params=params,
                workers=self.workers if workers is None else workers,
                link=link,
                backward=numbers["backward"],
                forward=numbers.get("forward", numbers["backward"] / 2),
                overheads=usual(self.device, params).with_known(self.own.known()),
                density=self.density,
                rank=self.rank,
                side=self.side,
                overlap=overlap,
            )
        except ValueError as error:
            raise UsageError(f"--{error}") from None

    def _show(self, setting: Setting, assumed: list[str]) -> None:
        result = advise(setting) | {"assumed": assumed}
        if self.json:
            told = dataclasses.asdict(setting)
            if not math.isfinite(setting.link.bandwidth):
                told["link"]["bandwidth"] = None  # one worker has no link
            print_json({**result, "setting": told})
            return
        console = Console()
        console.print(_table(setting, result))
        console.print(escape(str(result["advice"])))
        if assumed:
            options = " and ".join(f"--{option}" for option in assumed)
            console.print(f"Not told, so assumed: {options}. Tell yours, or --measure them.")


_BANDWIDTH = 10e9
"""Bits per second, where nobody told: what machines are rented with."""
_PLACEHOLDER = {"bandwidth": 1e9, "backward": 1.0}
"""Stands for what is going to be measured."""


def _read(option: str, text: str, reader: Callable[[str], float]) -> float:
    try:
        return reader(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _time(option: str, text: str) -> float:
    return _read(option, text, units.seconds)


def _table(setting: Setting, result: dict[str, Any]) -> Table:
    table = Table(
        title=f"{setting.params:,.0f} parameters, {setting.workers} workers, "
        f"{units.show_rate(setting.link.bandwidth)}, "
        f"latency {units.show_seconds(setting.link.latency)}, "
        f"backward {units.show_seconds(setting.backward)}",
        title_justify="left",
    )
    table.add_column("exchange and order")
    for heading in ("step", "exchange", "own work", "sent", "time / dense"):
        table.add_column(heading, justify="right")
    dense = result["choices"][0]["step_seconds"]
    best = min(choice["step_seconds"] for choice in result["choices"])
    for choice in result["choices"]:
        taken = choice["step_seconds"]
        table.add_row(
            choice["name"],
            units.show_seconds(taken),
            units.show_seconds(choice["exchange_seconds"]),
            units.show_seconds(choice["overhead_seconds"]),
            units.show_bytes(choice["bytes"]),
            f"{taken / dense:.3g}" if dense else "",
            style="bold green" if taken == best else None,
        )
    return table
