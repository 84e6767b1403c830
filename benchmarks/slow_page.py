"""The page about a record of slow_network.py: what was measured, what was predicted, and how."""

from typing import Any

from gradherd.advise.units import format_rate

_FAR = 0.25  # off by so much, a prediction has failed


def page(record: dict[str, Any]) -> str:
    """Return it as Markdown."""
    parts = [
        _head(record),
        _shown(record),
        _links(record),
        _steps(record),
        _bytes(record),
        _predictions(record),
        _training(record),
        _HOW + _delay(record["config"]["delay"]),
    ]
    return "\n".join(part for part in parts if part)


def _head(record: dict[str, Any]) -> str:
    hardware, versions, config = record["hardware"], record["versions"], record["config"]
    step, backward = (record["compute"][f"{what}_seconds"] for what in ("step", "backward"))
    memory = (hardware["memory_bytes"] or 0) / 2**30
    return f"""# A slow network, for real, {record["started"][:10]}

{hardware["cores"]} cores of a {hardware["cpu"]}, {memory:.0f} GiB, {hardware["system"]}; Python \
{versions["python"]}, torch {versions["torch"]}, gradherd {versions["gradherd"]}.

    {record["command"]}

{config["workers"]} ranks, each in a network namespace of its own, gloo over TCP through veth pairs
and a bridge, with a token bucket (`tc tbf`) on what each rank sends and on what it receives. Six
linear layers, {record["model"]["parameters"]:,} parameters, {config["batch"]} examples a rank and
step: {step * 1e3:.0f} ms a step without any exchange, {backward * 1e3:.0f} ms of it backward.
Density {config["density"]:g}, PowerSGD of rank {config["rank"]}. It took {record["seconds"]:.0f} s;
the load of the machine was {record["load_before"]:.1f} before. The record is beside this page.
"""


def _shown(record: dict[str, Any]) -> str:
    shown = record["shown"]
    lines = ["| what | aim | measured |", "|---|---|---|"]
    ratio = shown.get("exdyna_over_dense_communication_1G")
    if ratio is not None:
        lines.append(f"| exdyna's communication time / dense's, 1 Gb/s | 0.1 | {ratio:.3f} |")
    low, high = shown["counted_over_payload"]
    lines.append(
        f"| our byte counts / the kernel's, less headers | 0.95 to 1.05 | {low:.3f} to \
{high:.3f} |"
    )
    if "cd_grab_over_d_rr_bytes" in shown:
        more = shown["cd_grab_over_d_rr_bytes"]
        lines.append(f"| bytes of cd-grab / of d-rr, dense, whole batches | 1.02 | {more:.4f} |")
    if shown["largest_prediction_error"] is not None:
        worst = 100 * shown["largest_prediction_error"]
        lines.append(f"| `gradherd advise` off by, at most, limited rates | 25 % | {worst:.0f} % |")
    return "\n".join([*lines, ""])


def _links(record: dict[str, Any]) -> str:
    lines = [
        "## Links",
        "",
        "From each rank to the next, all at once, measured with gloo:",
        "",
        "| limit | arrives | a short message takes | share of it that an all-to-all reaches |",
        "|---|---|---|---|",
    ]
    for link in record["links"]:
        arrives, hop = format_rate(link["goodput"]), 1e3 * link["latency"]
        lines.append(f"| {_rate(link['rate'])} | {arrives} | {hop:.2f} ms | {link['deal']:.2f} |")
    free = next(link["goodput"] for link in record["links"] if link["rate"] is None)
    cores, ranks = record["hardware"]["cores"], record["config"]["workers"]
    fast = [link for link in record["links"] if link["rate"] and link["rate"] > free]
    if fast:
        lines += [
            "",
            f"{ranks} ranks and the kernel's TCP share {cores} cores, so no more than "
            f"{format_rate(free)} arrives without any limit: the rows of "
            f"{' and '.join(_rate(link['rate']) for link in fast)} show this machine's cores, not "
            "such a network.",
        ]
    return "\n".join([*lines, ""])


def _steps(record: dict[str, Any]) -> str:
    rates = [link["rate"] for link in record["links"]]
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    found = {(row["case"], row["rate"]): row for row in record["rows"]}
    heads = " | ".join(_rate(rate) for rate in rates)
    lines = [
        "## Time",
        "",
        "Milliseconds of a step; in brackets, of communication: the step less the step without",
        "exchange. It holds the method's own work (picking, converting) as well.",
        "",
        f"| exchange, order | {heads} |",
        "|---" * (1 + len(rates)) + "|",
    ]
    for case in cases:
        cells = []
        for rate in rates:
            row = found[case, rate]
            step, comm = 1e3 * row["step_seconds"], 1e3 * row["communication_seconds"]
            cells.append(f"{step:,.0f} ({comm:,.0f})")
        lines.append(f"| {_case(case)} | {' | '.join(cells)} |")
    alone = record["compute"]["cpu_seconds"]
    work = [f"{_case(c)} {1e3 * (found[c, None]['cpu_seconds'] - alone):.0f}" for c in cases]
    lines += [
        "",
        "Processor time of a rank on top of the step's own, ms, without a limit: "
        f"{'; '.join(work)}.",
    ]
    ratios = [
        found["dense+cd-grab", rate]["step_seconds"] / found["dense", rate]["step_seconds"]
        for rate in rates
        if ("dense+cd-grab", rate) in found and ("dense", rate) in found
    ]
    if ratios:
        told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        lines += [
            "",
            f"A dense step with cd-grab / the one with d-rr, by limits: {told}.",
            "The first half of its exchange is an all-to-all (see above).",
        ]
    return "\n".join([*lines, ""])


def _bytes(record: dict[str, Any]) -> str:
    rates = [link["rate"] for link in record["links"] if link["rate"] is not None]
    rate = 1e9 if 1e9 in rates else (rates or [None])[0]
    lines = [
        "## Bytes",
        "",
        f"Sent by a rank in a step, at {_rate(rate)} (mean over ranks and steps).",
        "",
        "| exchange, order | counted by gradherd | kernel, sent | kernel, received | packets | "
        "sent less headers | counted / that | dropped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        if row["rate"] == rate:
            lines.append(
                f"| {_case(row['case'])} | {row['counted_bytes']:,.0f} | "
                f"{row['kernel_tx_bytes']:,.0f} | {row['kernel_rx_bytes']:,.0f} | "
                f"{row['packets']:,.0f} | {row['payload_bytes']:,.0f} | "
                f"{row['counted_over_payload']:.3f} | {row['dropped_packets']} |"
            )
    return "\n".join([*lines, "", _COUNTERS])


def _predictions(record: dict[str, Any]) -> str:
    lines = [
        "## Predictions",
        "",
        "What `gradherd advise` says of the same step, from measured numbers: goodput and latency",
        "of each link, the step without exchange, and what each method computes (its step without",
        "a limit, less what the model says of the rest; those rows are no test, so left out).",
        "",
        "| exchange, order | limit | measured, ms | predicted, ms | off by | bytes, predicted / "
        "counted |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        if row["rate"] is not None:
            lines.append(
                f"| {_case(row['case'])} | {_rate(row['rate'])} | "
                f"{1e3 * row['step_seconds']:,.0f} | {1e3 * row['predicted_seconds']:,.0f} | "
                f"{100 * row['prediction_error']:+.0f} % | "
                f"{row['predicted_bytes'] / row['counted_bytes']:.3f} |"
            )
    own = ", ".join(f"{name} {1e3 * value:.0f}" for name, value in record["overheads"].items())
    lines += ["", f"Computed by a method in a step, ms: {own}."]
    limited = [row for row in record["rows"] if row["rate"] is not None]
    far = [row for row in limited if abs(row["prediction_error"]) > _FAR]
    if far:
        told = "; ".join(f"{_case(row['case'])} at {_rate(row['rate'])}" for row in far)
        lines += ["", f"Off by more than {100 * _FAR:.0f} %: {told}."]
    return "\n".join([*lines, ""])


def _delay(seconds: float) -> str:
    if not seconds:
        return "No delay was added (that needs netem in the kernel).\n"
    return f"What a rank sends was delayed by {1e3 * seconds:g} ms (netem).\n"


def _training(record: dict[str, Any]) -> str:
    found = record.get("training")
    if not found:
        return ""
    lines = [
        "## Time to a loss",
        "",
        f"Scikit-learn's digits at {_rate(found['rate'])}: a multi-layer perceptron of 301,066",
        "parameters, batches of 16 a rank, SGD with momentum, until the loss over all data is at",
        f"most {found['target']:g} (at most {found['epochs']} epochs; one seed). topk and exdyna",
        f"have density {found['density']:g}.",
        "",
        "| exchange, order | seconds | epochs | loss then | sent by a rank, MB |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        lines.append(
            f"| {_case(row['case'])} | {row['seconds']:.1f}{'' if row['reached'] else ' (not)'} | "
            f"{row['epochs']} | {row['losses'][-1]:.3f} | {row['kernel_tx_bytes'] / 1e6:.1f} |"
        )
    return "\n".join([*lines, ""])


def _rate(rate: float | None) -> str:
    return "no limit" if rate is None else format_rate(rate)


def _case(case: str) -> str:
    exchange, _, order = case.partition("+")
    return f"{exchange}, {order or 'd-rr'}"


_COUNTERS = """The kernel's figures are `/sys/class/net/eth0/statistics/{tx,rx}_bytes` of the
namespace, from a moment at which all ranks stand still to the next, less what standing still costs.
They hold all that TCP adds: 66 bytes of Ethernet, IP and TCP headers for each packet,
acknowledgements too, which are packets without data. Those are taken off in "sent less headers";
gloo's own message headers are not. Packets are large here, up to 32 KiB: veth hands them on whole
and counts their headers once. On a wire with 1,500-byte frames the same data would have 4.6 % more
in headers, which the token bucket does charge for. For torch's own hooks "counted" is what their
algorithm must send, 2 (R - 1) / R of the tensor; for all others it is what `herd.metrics()` says.
"""

_HOW = """## How it was measured

Blocks of two steps (32 where cd-grab gathers rows beside an exchange, as rows of 32 steps travel
together), all ranks starting together; the slowest rank counts; the median over blocks, three or
more of them unless a block takes long. The step without exchange (torch's `noop_hook`, all ranks at
work) was taken before every third case, and the fastest of these is used. Ranks have one thread
each and meet in a file, so nothing but training crosses the links. The model is built and takes its
first steps without a limit. PowerSGD has a single bucket: with more, its second all-reduces start
in any order and gloo would hang. Token buckets hold 64 KiB or 50 microseconds of the rate, so that
short messages feel the limit too.
"""
