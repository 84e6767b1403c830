"""`gradherd advise`: predict whether a sparse exchange pays on a given cluster."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from gradherd.advise.choices import DEVICES, GOODPUT, NetworkLink, Setting, typical_overheads
from gradherd.advise.decide import advise
from gradherd.advise.measured import MODELS
from gradherd.advise.units import (
    format_rate,
    format_seconds,
    parse_count,
    parse_rate,
    parse_seconds,
)
from gradherd.cli.parser import Arg, UsageError, usage_errors, whole
from gradherd.cli.terminal import print_json, print_table, say, terminal_width, under_torchrun
from gradherd.comm.message_sizes import DEFAULT_DENSITY
from gradherd.lab.text import in_bytes

# Largest model that --measure builds: parameters and gradients take 8 bytes each.
_MAX_MEASURED_PARAMS = 4_000_000_000
# Bits per second and seconds: what rented machines usually have.
_DEFAULTS = {"bandwidth": 10e9, "latency": 50e-6, "goodput": GOODPUT}
_PLACEHOLDER = {"backward": 1.0}
"""Stands for what is still to be measured, so that all others are checked first."""
_WIDE = 70
"""Characters that all columns take."""


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

    params: Annotated[
        float | None, Arg(metavar="COUNT", default="that of --model", parse=parse_count)
    ] = None
    """Number of parameters, such as 25M or 7e9."""
    model: Annotated[str | None, Arg(known=MODELS)] = None
    """Instead of --params and --backward: {known}, as measured on one H200."""
    workers: Annotated[int, Arg(parse=whole(1, 1 << 24))] = 4
    """Number of workers."""
    bandwidth: Annotated[float | None, Arg(metavar="BITS", default="10G", parse=parse_rate)] = None
    """Speed of a worker's network link in bits per second."""
    latency: Annotated[float | None, Arg(metavar="TIME", default="50us", parse=parse_seconds)] = (
        None
    )
    """Time of a short message to another worker."""
    backward: Annotated[
        float | None, Arg(metavar="TIME", default="that of --model", parse=parse_seconds)
    ] = None
    """Time of a backward pass of one worker. Decides more than anything else: time yours."""
    forward: Annotated[
        float | None, Arg(metavar="TIME", default="half the backward", parse=parse_seconds)
    ] = None
    """Time of everything else in a step: forward pass, optimizer, data."""
    density: float = DEFAULT_DENSITY
    """Share of the gradient that a sparse exchange sends, in (0, 1]."""
    rank: int = 1
    """Rank of PowerSGD."""
    side: float = 1024
    """Typical number of rows and columns of the model's matrices, for PowerSGD."""
    device: Annotated[str, Arg(known=DEVICES)] = "cuda"
    """cuda or cpu: where gradients are. Decides how long selection takes, and where to measure."""
    overlap: Annotated[float | None, Arg(metavar="SHARE", default="1; cpu: 0")] = None
    """Share of the backward pass that a dense exchange can overlap with, in [0, 1]."""
    measure: bool = False
    """Measure bandwidth, latency, backward and forward; options that you give take precedence."""
    json: bool = False
    """Print {"choices": [{"name", "step_seconds", "bytes", ...}], "break_even_bandwidth",
    "break_even_bandwidth_fp16", "pays", "recommended", "speedup", "speedup_range",
    "accuracy", "code", "advice", "assumed", "setting"}."""

    def run(self) -> None:
        """Measure if asked to, predict, and print the advice."""
        params = self._params()
        names = ("bandwidth", "latency", "backward", "forward")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        values, workers, notes, source = {**_DEFAULTS}, self.workers, [], None
        if self.measure:
            # Refuse bad options before measuring.
            self._setting(params, workers, _DEFAULTS | _PLACEHOLDER | given)
            measured = _measure_cluster(int(params), workers, self.device)
            if measured is None:
                return  # rank 0 prints
            workers, found = measured
            # A bandwidth that is given is that of the link, headers included.
            values |= found if self.bandwidth is None else found | {"goodput": GOODPUT}
        else:
            if "backward" not in given:
                values |= self._model_times()
                source = f"--model {self.model}: {MODELS[str(self.model)].source}."
                notes.append(source)
            if "bandwidth" not in given:
                rest = "assumed 10 Gb/s. Give yours, or --measure."
                notes.append(f"--bandwidth was not given: {rest}")
        setting = self._setting(params, workers, values | given)
        result = advise(setting)
        sentences = result.pop("sentences")
        if not self.json:
            _print(setting, result, notes, sentences)
            return
        assumed = ["bandwidth"] if "bandwidth" not in given and not self.measure else []
        used = dataclasses.asdict(setting)
        if not math.isfinite(setting.link.bandwidth):
            used["link"]["bandwidth"] = None  # one worker has no link; JSON has no infinity
        print_json({**result, "assumed": assumed, "model": source, "setting": used})

    def _params(self) -> float:
        if self.model is not None and self.params is not None:
            raise UsageError(f"--model {self.model} has its own --params: give one of the two")
        params = self.params if self.model is None else MODELS[self.model].params
        if params is None:
            raise UsageError(
                f"--params is missing: the number of parameters, such as 25M; or --model, one of "
                f"{', '.join(MODELS)}"
            )
        # Before ranks are started: all of them would run out of memory at once.
        if self.measure and params > _MAX_MEASURED_PARAMS:
            raise UsageError(f"--measure builds a model of {params:.3g} parameters: at most 4e9")
        return params

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

    def _setting(self, params: float, workers: int, values: dict[str, float]) -> Setting:
        link = {name: values[name] for name in ("bandwidth", "latency", "goodput")}
        # Fields of Setting are called like the options, and its errors begin with the name.
        with usage_errors([one.name for one in dataclasses.fields(Setting)]):
            return Setting(
                params=params,
                workers=workers,
                link=NetworkLink(**link),
                backward=values["backward"],
                forward=values.get("forward", values["backward"] / 2),
                overheads=typical_overheads(self.device, params),
                density=self.density,
                rank=self.rank,
                side=self.side,
                # On a CPU the cores that exchange are those that compute: nothing overlaps.
                overlap=float(self.device != "cpu") if self.overlap is None else self.overlap,
            )


def _measure_cluster(params: int, workers: int, device: str) -> tuple[int, dict[str, float]] | None:
    """Measure on torchrun's ranks or on local ones; return None on all ranks but the first."""
    # Here, not above: predictions do without torch.
    from gradherd.cli.launch import measure_on_ranks, torchrun_group
    from gradherd.cli.options import usable_device
    from gradherd.comm.world import World
    from gradherd.lab.bench.calibrate import measure_cluster

    if not under_torchrun():
        if device != "cpu":
            raise UsageError(
                "--measure on a GPU needs torchrun, with one worker per GPU; or add --device cpu"
            )
        measured = measure_on_ranks(measure_cluster, workers, params, device)
    else:
        usable_device(device)
        with torchrun_group(device):
            world = World.detect()
            measured = measure_cluster(params, device)
        workers = world.size
        if world.rank > 0:
            return None
    # The bandwidth was measured as data that arrived, so no share of it is headers. One rank has
    # measured none.
    alone = {"latency": 0.0} if math.isinf(measured["bandwidth"]) else {}
    return workers, {**measured, "goodput": 1.0, **alone}


def _print(
    setting: Setting, result: dict[str, Any], notes: list[str], sentences: list[str]
) -> None:
    """Print the predicted steps, the advice, whose last sentence counts, and the code to paste."""
    link = setting.link
    say(
        f"{setting.params:,.0f} parameters, {setting.workers} workers, "
        f"{format_rate(link.bandwidth)}, latency {format_seconds(link.latency)}, "
        f"backward {format_seconds(setting.backward)}"
    )
    for note in notes:
        say(note)
    steps = {(one["exchange"], one["order"]): one for one in result["choices"]}
    dense = steps["dense", "d-rr"]["step_seconds"]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "step": lambda one: format_seconds(one["step_seconds"]),
        "of dense": lambda one: f"{one['step_seconds'] / dense:.3g}" if dense else "",
        "sent": lambda one: in_bytes(one["bytes"]),
    }
    if terminal_width() >= _WIDE:
        columns |= {
            "waits": lambda one: format_seconds(one["exchange_seconds"]),
            "computes": lambda one: format_seconds(one["overhead_seconds"]),
            "with cd-grab": lambda one: format_seconds(
                steps[one["exchange"], "cd-grab"]["step_seconds"]
            ),
        }
    rows = []
    for (exchange, order), one in steps.items():
        if order == "d-rr":
            name = "fp16, bf16" if exchange == "fp16" else exchange
            star = "*" * (exchange == result["recommended"])
            rows.append([name + star, *(cell(one) for cell in columns.values())])
    local = "take 4 steps alone, then exchange all of the difference in one bit"
    caption = f"*: recommended; local-4: {local}"
    print_table(rows, ["exchange", *columns], caption=caption)
    *reasons, advice = sentences
    for sentence in reasons:
        say(sentence)
    say(advice, "bold")
    if result["code"] is not None:
        # Not broken anywhere: code that is cannot be pasted.
        print(f"\n{result['code']}")
