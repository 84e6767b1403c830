"""`gradherd advise`: predict whether a sparse exchange pays on a given cluster."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from gradherd.advise import units
from gradherd.advise.choices import Setting
from gradherd.advise.costs import DEVICES, GOODPUT, NetworkLink, typical_overheads
from gradherd.advise.decide import advise
from gradherd.advise.measured import MODELS
from gradherd.cli.arguments import (
    check_at_least,
    check_name,
    print_json,
    under_torchrun,
)
from gradherd.cli.errors import CommandFailed, UsageError
from gradherd.cli.parser import Arg
from gradherd.cli.tables import print_advice
from gradherd.sparsify.message_sizes import DEFAULT_DENSITY

# For annotations only: a prediction is arithmetic, and importing torch takes seconds.
if TYPE_CHECKING:
    from gradherd.advise.calibrate import LinkMeasurement

_MAX_WORKERS = 1 << 24
# Largest model that --measure builds: parameters and gradients take 8 bytes each.
_MAX_MEASURED_PARAMS = 4_000_000_000
_DEFAULT_BANDWIDTH = 10e9  # bits per second: what rented machines usually have
_DEFAULT_LATENCY = 50e-6
_PLACEHOLDER = {"bandwidth": 1e9, "backward": 1.0}
"""Stands for what is still to be measured, so that all others are checked first."""
OVERHEADS = {
    "fp16": "converting to half precision and back",
    "powersgd": "matrix products and orthogonalisation",
    "topk": "residual, selection and mean",
    "exdyna": "the same",
    "local": "an exchange of local steps, once in so many",
    "order": "cd-grab on top of a dense exchange",
    "sketch": "cd-grab beside any other exchange",
}
"""What can be told by --overhead: fields of `Overheads`, and what is computed there."""


@dataclass(frozen=True, kw_only=True)
class AdviseCommand:
    """Predict the time of a training step with every exchange and order, and recommend one.

    Describe the model (--params and --backward, or --model), the number of workers and the network.
    The prediction knows what collectives cost (the better of ring and tree), that a dense exchange
    overlaps with the backward pass while a sparse one cannot, and how long selection takes. Or let
    it measure network, latency and backward pass with --measure: on local workers, or on those that
    torchrun starts, as in torchrun --nproc-per-node 8 -m gradherd advise --params 25M --measure.

    Units: --bandwidth 1G, 100M or 2.5e9 is in bits per second, as networks are sold (50GB/s with a
    capital B is in bytes); times are in seconds, or 80ms, 50us; --params 25M, 7B or 7e9.

    Example: gradherd advise --params 25M --workers 8 --bandwidth 10G --backward 60ms
    Example: gradherd advise --model resnet50 --workers 8 --bandwidth 1G
    """

    params: Annotated[str | None, Arg(metavar="COUNT", default="that of --model")] = None
    """Number of parameters, such as 25M or 7e9."""
    model: Annotated[
        str | None,
        Arg(
            metavar="NAME",
            help=f"Instead of --params and --backward: {', '.join(MODELS)}, as measured on one "
            "H200.",
        ),
    ] = None
    workers: int = 4
    """Number of workers."""
    bandwidth: Annotated[str | None, Arg(metavar="BITS", default="10G")] = None
    """Speed of a worker's network link in bits per second."""
    latency: Annotated[str | None, Arg(metavar="TIME", default="50us")] = None
    """Time of a short message to another worker."""
    backward: Annotated[str | None, Arg(metavar="TIME", default="that of --model")] = None
    """Time of a backward pass of one worker. Decides more than anything else: time yours."""
    forward: Annotated[str | None, Arg(metavar="TIME", default="half the backward")] = None
    """Time of everything else in a step: forward pass, optimizer, data."""
    density: float = DEFAULT_DENSITY
    """Share of the gradient that a sparse exchange sends, in (0, 1]."""
    rank: int = 1
    """Rank of PowerSGD."""
    side: float = 1024
    """Typical number of rows and columns of the model's matrices, for PowerSGD."""
    device: str = "cuda"
    """cuda or cpu: where gradients are. Decides how long selection takes, and where to measure."""
    overlap: Annotated[float | None, Arg(metavar="SHARE", default="1; cpu: 0")] = None
    """Share of the backward pass that a dense exchange can overlap with, in [0, 1]."""
    overhead: Annotated[
        tuple[str, ...],
        Arg(
            metavar="NAME=TIME",
            help="Time per step that a method spends computing, if you have measured it; for "
            f"{', '.join(f'{name} ({what})' for name, what in OVERHEADS.items())}.",
            default="from --device",
        ),
    ] = ()
    measure: bool = False
    """Measure bandwidth, latency, backward and forward; options that you give take precedence."""
    json: bool = False
    """Print {"choices": [{"name", "step_seconds", "bytes", ...}], "break_even_bandwidth",
    "break_even_bandwidth_fp16", "pays", "recommended", "speedup", "speedup_range",
    "accuracy", "code", "advice", "assumed", "setting"}."""

    def run(self) -> None:
        """Measure if asked to, predict, and print the advice."""
        check_at_least("--workers", self.workers, 1)
        check_name("--device", self.device, DEVICES)
        if self.workers > _MAX_WORKERS:
            raise UsageError(f"--workers must be at most {_MAX_WORKERS:,}, got {self.workers}")
        params, given, assumed = self._params(), self._given(), list[str]()
        if self.measure:
            self._setting(params, _PLACEHOLDER | given)  # refuse bad options before measuring
            cluster = _measure_cluster(params, self.workers, self.device)
            if cluster is None:
                return  # rank 0 prints
            setting = self._setting(params, cluster.values | given, workers=cluster.workers)
        else:
            if "backward" not in given:
                given = self._model_times() | given
            assumed = [] if "bandwidth" in given else ["bandwidth"]
            setting = self._setting(params, {"bandwidth": _DEFAULT_BANDWIDTH} | given)
        self._print(setting, assumed)

    def _params(self) -> float:
        if self.model is not None:
            check_name("--model", self.model, MODELS)
            if self.params is not None:
                raise UsageError(f"--model {self.model} has its own --params: give one of the two")
            return MODELS[self.model].params
        if self.params is None:
            raise UsageError(
                f"--params is missing: the number of parameters, such as 25M; or --model, one of "
                f"{', '.join(MODELS)}"
            )
        return _parse("--params", self.params, units.parse_count)

    def _model_times(self) -> dict[str, float]:
        """Return the seconds of the passes of --model, which must be given then."""
        if self.model is None:
            # No guess: it would decide the answer, and one that is too short flatters sparse.
            raise UsageError(
                "--backward is missing: the time of a backward pass on one worker, such as 60ms; "
                f"or --measure, or --model, one of {', '.join(MODELS)}"
            )
        if self.device == "cpu":
            raise UsageError(
                f"--model {self.model} was measured on a GPU: with --device cpu give --backward"
            )
        figures = MODELS[self.model]
        return {"backward": figures.backward, "forward": figures.forward}

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

    def _overheads(self) -> dict[str, float | None]:
        """Return the seconds of --overhead by the field names of `Overheads`."""
        seconds: dict[str, float | None] = dict.fromkeys(OVERHEADS)
        for text in self.overhead:
            name, equals, value = text.partition("=")
            if not equals or name not in OVERHEADS:
                known = ", ".join(OVERHEADS)
                raise UsageError(f"--overhead must be NAME=TIME with one of {known}, got {text!r}")
            seconds[name] = _parse_time(f"--overhead {name}", value)
        return seconds

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
        overheads = typical_overheads(self.device, params).replaced_by(self._overheads())
        try:
            return Setting(
                params=params,
                workers=self.workers if workers is None else workers,
                link=link,
                backward=values["backward"],
                forward=values.get("forward", values["backward"] / 2),
                overheads=overheads,
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
        sentences = result.pop("sentences")
        assert isinstance(sentences, list)
        source = None
        if self.model is not None and self.backward is None and not self.measure:
            source = f"--model {self.model}: {MODELS[self.model].source}."
        if self.json:
            used = dataclasses.asdict(setting)
            if not math.isfinite(setting.link.bandwidth):
                used["link"]["bandwidth"] = None  # one worker has no link; JSON has no infinity
            print_json({**result, "model": source, "setting": used})
            return
        notes = [] if source is None else [source]
        if assumed:
            notes.append("--bandwidth was not given: assumed 10 Gb/s. Give yours, or --measure.")
        print_advice(setting, result, notes, sentences)


class _Cluster(NamedTuple):
    """What the workers have measured together."""

    workers: int
    values: dict[str, float]


def _measure_cluster(params: float, workers: int, device: str) -> _Cluster | None:
    """Measure on torchrun's ranks or on local ones; return None on all ranks but the first."""
    # Before ranks are started: all of them would run out of memory at once.
    if params > _MAX_MEASURED_PARAMS:
        raise UsageError(f"--measure builds a model of {params:.3g} parameters: at most 4e9")
    # Here, not above: predictions do without torch.
    from gradherd.advise.calibrate import measure_cluster
    from gradherd.cli.launch import measure_on_ranks, torchrun_group
    from gradherd.cli.options import usable_device
    from gradherd.comm.world import World
    from gradherd.lab.ranks import RankError

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
    with torchrun_group(device):
        world = World.detect()
        result = measure_cluster(int(params), device)
        return _as_cluster(world.size, result) if world.rank == 0 else None


def _as_cluster(workers: int, measured: "LinkMeasurement") -> _Cluster:
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
