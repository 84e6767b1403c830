"""Write a record of slow_network.py as a page: measurements, predictions, and the method."""

from typing import Any

from gradherd.advise.units import format_rate

_FAILED = 0.25  # relative error from which on a prediction counts as failed


def page(record: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    parts = [
        _head(record),
        _summary(record),
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
    return f"""# Measurements on a slow network, {record["started"][:10]}

{hardware["cores"]} cores of a {hardware["cpu"]}, {memory:.0f} GiB, {hardware["system"]}; Python \
{versions["python"]}, torch {versions["torch"]}, gradherd {versions["gradherd"]}.

    {record["command"]}

{config["workers"]} ranks, each in its own network namespace, gloo over TCP through veth pairs and a
bridge, with a token bucket (`tc tbf`) on what each rank sends and on what it receives. Six linear
layers, {record["model"]["parameters"]:,} parameters, {config["batch"]} examples per rank and step:
{step * 1e3:.0f} ms per step without any exchange, {backward * 1e3:.0f} ms of it backward. Density
{config["density"]:g}, PowerSGD of rank {config["rank"]}. It took {record["seconds"]:.0f} s; the
load of the machine was {record["load_before"]:.1f} before. The record is next to this page.
"""


def _summary(record: dict[str, Any]) -> str:
    summary = record["shown"]
    lines = ["| what | target | measured |", "|---|---|---|"]
    ratio = summary.get("exdyna_over_dense_communication_1G")
    if ratio is not None:
        lines.append(f"| exdyna's communication time / dense's, 1 Gb/s | 0.1 | {ratio:.3f} |")
    low, high = summary["counted_over_payload"]
    lines.append(
        f"| gradherd's byte counts / the kernel's, less headers | 0.95 to 1.05 | {low:.3f} to \
{high:.3f} |"
    )
    if "cd_grab_over_d_rr_bytes" in summary:
        more = summary["cd_grab_over_d_rr_bytes"]
        lines.append(f"| bytes of cd-grab / of d-rr, dense, whole batches | 1.02 | {more:.4f} |")
    if summary["largest_prediction_error"] is not None:
        worst = 100 * summary["largest_prediction_error"]
        lines.append(
            f"| largest error of `gradherd advise`, limited rates | 25 % | {worst:.0f} % |"
        )
    return "\n".join([*lines, ""])


def _links(record: dict[str, Any]) -> str:
    lines = [
        "## Links",
        "",
        "Every rank sends to the next one at the same time, measured with gloo. Goodput is that of "
        "the\nfastest of seven rounds: other work on the cores slows down computing, not the link.",
        "",
        "| limit | goodput | latency | share of the goodput that an all-to-all reaches |",
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
    rows = {(row["case"], row["rate"]): row for row in record["rows"]}
    heads = " | ".join(_rate(rate) for rate in rates)
    lines = [
        "## Time",
        "",
        "Milliseconds per step; in brackets communication, which is the step less the step without",
        "exchange. It includes what the method computes (selecting, converting).",
        "",
        f"| exchange, order | {heads} |",
        "|---" * (1 + len(rates)) + "|",
    ]
    for case in cases:
        cells = []
        for rate in rates:
            row = rows[case, rate]
            step, comm = 1e3 * row["step_seconds"], 1e3 * row["communication_seconds"]
            cells.append(f"{step:,.0f} ({comm:,.0f})")
        lines.append(f"| {_case(case)} | {' | '.join(cells)} |")
    alone = record["compute"]["cpu_seconds"]
    work = [f"{_case(c)} {1e3 * (rows[c, None]['cpu_seconds'] - alone):.0f}" for c in cases]
    lines += [
        "",
        f"Extra processor time per rank and step without a limit, ms: {'; '.join(work)}.",
    ]
    ratios = [
        rows["dense+cd-grab", rate]["step_seconds"] / rows["dense", rate]["step_seconds"]
        for rate in rates
        if ("dense+cd-grab", rate) in rows and ("dense", rate) in rows
    ]
    if ratios:
        listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        lines += [
            "",
            f"Dense step with cd-grab / with d-rr, for each limit: {listed}.",
            "The first half of its exchange is an all-to-all (see above).",
        ]
    return "\n".join([*lines, ""])


def _bytes(record: dict[str, Any]) -> str:
    rates = [link["rate"] for link in record["links"] if link["rate"] is not None]
    rate = 1e9 if 1e9 in rates else (rates or [None])[0]
    lines = [
        "## Bytes",
        "",
        f"Sent per rank and step at {_rate(rate)}, mean over ranks and steps.",
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
        "What `gradherd advise` predicts for the same step from measured numbers: goodput and",
        "latency of each link, the step without exchange, and what each method computes (its step",
        "without a limit, less the predicted rest; those rows test nothing and are left out).",
        "",
        "| exchange, order | limit | measured, ms | predicted, ms | error | bytes, predicted / "
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
    lines += ["", f"Computing time of each method per step, ms: {own}."]
    limited = [row for row in record["rows"] if row["rate"] is not None]
    far = [row for row in limited if abs(row["prediction_error"]) > _FAILED]
    if far:
        listed = "; ".join(f"{_case(row['case'])} at {_rate(row['rate'])}" for row in far)
        lines += ["", f"Wrong by more than {100 * _FAILED:.0f} %: {listed}."]
    return "\n".join([*lines, ""])


def _delay(seconds: float) -> str:
    if not seconds:
        return "No delay was added (that needs netem in the kernel).\n"
    return f"Everything a rank sends was delayed by {1e3 * seconds:g} ms (netem).\n"


def _training(record: dict[str, Any]) -> str:
    training = record.get("training")
    if not training:
        return ""
    lines = [
        "## Time to a loss",
        "",
        f"Scikit-learn's digits at {_rate(training['rate'])}: a multi-layer perceptron of 301,066",
        "parameters, batches of 16 per rank, SGD with momentum, until the loss over all data is at",
        f"most {training['target']:g} (at most {training['epochs']} epochs; one seed). topk and",
        f"exdyna have density {training['density']:g}.",
        "",
        "| exchange, order | seconds | epochs | final loss | sent per rank, MB |",
        "|---|---|---|---|---|",
    ]
    for row in training["rows"]:
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


_COUNTERS = """The kernel's numbers are `/sys/class/net/eth0/statistics/{tx,rx}_bytes` of the
namespace between two barriers, less what a barrier alone costs. They include everything TCP adds:
66 bytes of Ethernet, IP and TCP headers per packet, also of acknowledgements, which are packets
without data. "Sent less headers" subtracts those, but not gloo's own message headers. Packets are
up to 32 KiB here: veth passes them on whole and counts their headers once. On a wire with
1,500-byte frames the same data would have 4.6 % more headers, which the token bucket does charge
for. For torch's own hooks "counted" is what their algorithm must send, 2 (R - 1) / R of the tensor;
for all others it is what `herd.metrics()` reports.
"""

_HOW = """## How it was measured

Steps are measured in blocks of two, or of 32 where cd-grab gathers rows beside another exchange,
because rows of 32 steps are sent together. All ranks start a block together, and its time is that
of the slowest rank; the result is the median over blocks. In each of four rounds of a case, the
step without exchange (torch's `noop_hook`, all ranks computing) and every rate have their turn, and
a row is compared with the step without exchange of its own case.
Ranks have one thread each and rendezvous through a file, so
only training crosses the links. The model is built and takes its first steps without a limit.
PowerSGD has a single bucket: with more, the order of its second all-reduces would differ between
ranks, and gloo would hang. Token buckets hold 64 KiB or 50 microseconds of the rate, so that short
messages are limited too.
"""
