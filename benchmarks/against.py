"""Is this tree slower than another commit? A fixed list of measurements, in turns with that commit.

    python -m benchmarks.against COMMIT [--only rows,hmda] [--limit 1.05] [--json]

The commit's source is unpacked into a temporary folder and runs with the same interpreter. Each
case is measured here, there, here, there, ..., so that both see the same machine; the least time of
each side counts. What a commit lacks is shown as missing. The exit code is 1 if something is slower
here than `--limit` times its time there, beyond noise: the least time here is then above the
median there, too. Packages that only the other commit needs are found by PYTHONPATH.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Case:
    """Something to measure: a command, whose time is taken or which prints rows with times."""

    command: tuple[str, ...]
    """Arguments of Python; {out} is a folder that does not exist, {this} is this file."""
    prints_rows: bool = False
    """Whether it prints {"rows": [{"case", "seconds", "peak_bytes"}, ...]}."""
    alone: bool = False
    """Whether it needs one process with one thread: its CPU time is taken, which others on the
    machine change least."""


def _bench(name: str, *options: str) -> Case:
    return Case(("-m", "gradherd", "bench", name, *options, "--json"), prints_rows=True)


def _compare(task: str, orders: str, *options: str) -> Case:
    shared = ("--virtual", "--workers", "4", "--quiet", "--out", "{out}")
    command = ("-m", "gradherd", "compare", task, "--orders", orders, *shared, *options)
    return Case(command, alone=True)


CASES: dict[str, Case] = {
    "rows": _bench("rows"),
    "step": _bench("step", "--workers", "2"),
    "coordination": _bench("coordination", "--workers", "2"),
    "sparsify": _bench("sparsify", "--workers", "2"),
    "one-bit": Case(("{this}", "--one-bit-ranks", "{out}"), prints_rows=True),
    "hmda": _compare("hmda", "d-rr,cd-grab,always-plus", "--seeds", "3", "--epochs", "2"),
    "lenet": _compare(
        "fashion-lenet",
        "d-rr,cd-grab",
        "--seeds",
        "1",
        "--epochs",
        "1",
        "--limit",
        "2000",
        "--batch-size",
        "16",
    ),
    "demo": Case(("-m", "gradherd", "demo", "--seeds", "2", "--quiet", "--out", "{out}")),
}


class Measured(NamedTuple):
    """One measurement."""

    seconds: float
    peak_bytes: int | None


Run = Callable[[Case, Path], dict[str, Measured]]
"""Measures a case in a tree; what it measured by name, nothing if it cannot run there."""


def run_case(case: Case, tree: Path) -> dict[str, Measured]:
    """Measure a case once, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        named = {"{out}": f"{folder}/out", "{this}": str(Path(__file__).resolve())}
        paths = [str(tree / "src"), str(tree), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        env |= {"OMP_NUM_THREADS": "1"} if case.alone else {}
        command = [sys.executable, *(named.get(word, word) for word in case.command)]
        begin = time.perf_counter()
        with Path(folder, "log").open("w+b") as log, Path(folder, "found").open("w+b") as found:
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=found, stderr=log)
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - begin
            if case.alone:
                seconds = usage.ru_utime + usage.ru_stime
            process.returncode = os.waitstatus_to_exitcode(status)
            for one in (log, found):
                one.seek(0)
            output, said = found.read(), log.read().decode(errors="replace").strip()
        if process.returncode:
            told = said.splitlines()[-1] if said else f"exit code {process.returncode}"
            print(f"  cannot run: {told}", file=sys.stderr)
            return {}
        if not case.prints_rows:
            return {"": Measured(seconds, usage.ru_maxrss * 1024)}
    rows = json.loads(output)["rows"]
    return {_row_name(row): Measured(row["seconds"], row.get("peak_bytes")) for row in rows}


def _row_name(row: Mapping[str, Any]) -> str:
    workers = row.get("workers", 1)
    return row["case"] if workers == 1 else f"{row['case']}, {workers} workers"


@contextmanager
def tree_of(commit: str, root: Path = ROOT) -> Iterator[Path]:
    """Unpack a commit into a folder that is removed afterwards."""
    packed = subprocess.run(["git", "archive", commit], cwd=root, capture_output=True)
    if packed.returncode:
        raise SystemExit(f"{commit} cannot be read: {packed.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def measure(
    cases: Mapping[str, Case], here: Path, there: Path, repeats: int, run: Run = run_case
) -> list[dict[str, Any]]:
    """Measure all cases in turns; return a row for each of what they measured."""
    rows = []
    for name, case in cases.items():
        found: dict[str, tuple[list[Measured], list[Measured]]] = {}
        for at in range(repeats):
            for side, tree in enumerate((here, there)):
                where = ("here", "there")[side]
                print(f"{name}: {at + 1} of {repeats}, {where}", file=sys.stderr, flush=True)
                for part, measured in run(case, tree).items():
                    found.setdefault(part, ([], []))[side].append(measured)
        # A case that runs nowhere is shown, too.
        for part, (own, other) in (found or {"": ([], [])}).items():
            rows.append(_row(f"{name}: {part}" if part else name, own, other))
    return rows


def _row(name: str, here: Sequence[Measured], there: Sequence[Measured]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": name, "ratio": None, "memory_ratio": None}
    for side, found in (("here", here), ("there", there)):
        times = [one.seconds for one in found]
        peaks = [one.peak_bytes for one in found if one.peak_bytes is not None]
        row[f"seconds_{side}"] = min(times, default=None)
        row[f"median_{side}"] = statistics.median(times) if times else None
        row[f"spread_{side}"] = max(times) / min(times) - 1 if times else None
        row[f"bytes_{side}"] = min(peaks, default=None)
    if here and there:
        row["ratio"] = row["seconds_here"] / row["seconds_there"]
        if row["bytes_here"] is not None and row["bytes_there"]:
            row["memory_ratio"] = row["bytes_here"] / row["bytes_there"]
    return row


def is_slower(row: Mapping[str, Any], limit: float) -> bool:
    """Say whether a row is slower here than the limit allows, beyond noise."""
    if row["ratio"] is None:
        return False
    return bool(row["ratio"] > limit and row["seconds_here"] > row["median_there"])


def print_rows(rows: Sequence[Mapping[str, Any]], commit: str, limit: float) -> None:
    """Print the table."""
    from gradherd.cli.terminal import print_table

    def seconds(row: Mapping[str, Any], side: str) -> str:
        least, spread = row[f"seconds_{side}"], row[f"spread_{side}"]
        return "missing" if least is None else f"{least:.4g} (+{spread:.0%})"

    def ratio(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    def megabytes(value: int | None) -> str:
        return "" if value is None else f"{value / 1e6:,.0f}"

    table = [
        [
            row["case"], seconds(row, "here"), seconds(row, "there"),
            ratio(row["ratio"]) + ("!" if is_slower(row, limit) else ""),
            megabytes(row["bytes_here"]), megabytes(row["bytes_there"]),
            ratio(row["memory_ratio"]),
        ]
        for row in rows
    ]  # fmt: skip
    headings = ("case", "s here", "s there", "ratio", "MB here", "MB there", "ratio")
    told = "seconds: the least, and in brackets how far the most is above it; !: slower here"
    print_table(table, headings, title=f"this tree against {commit}", caption=told)


# --- The exchange of local steps, on two ranks of the tree that PYTHONPATH names ----------------


def _one_bit_rank(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    import gradherd as gh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(10)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    gh.attach(net, optimizer=optimizer, local=gh.LocalSteps(every=1))
    times = []
    for _ in range(8):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        begin = time.process_time()
        optimizer.step()
        times.append(time.process_time() - begin)
    if rank == 0:
        status = Path("/proc/self/status")
        peak = None
        if status.exists():
            (line,) = (one for one in status.read_text().splitlines() if one.startswith("VmHWM"))
            peak = int(line.split()[1]) * 1024
        row = {"case": "CPU of a rank", "seconds": min(times), "peak_bytes": peak}
        print(json.dumps({"rows": [row]}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def one_bit_ranks(folder: str) -> None:
    """Print what an exchange of 10 M weights in one bit takes a rank, with an SGD step."""
    from torch import multiprocessing

    os.makedirs(folder)
    multiprocessing.spawn(_one_bit_rank, (folder,), nprocs=2)


def main(arguments: Sequence[str] | None = None, run: Run = run_case) -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.against", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("commit")
    parser.add_argument("--only", help=f"cases, separated by commas, of {', '.join(CASES)}")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each side")
    parser.add_argument("--limit", type=float, default=1.05, help="ratio from which it is slower")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args(arguments)
    names = given.only.split(",") if given.only else list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--only: {', '.join(unknown)} is not among {', '.join(CASES)}")
    with tree_of(given.commit) as there:
        rows = measure({name: CASES[name] for name in names}, ROOT, there, given.repeats, run)
    slower = [row["case"] for row in rows if is_slower(row, given.limit)]
    if given.json:
        from gradherd.cli.terminal import print_json

        print_json({"commit": given.commit, "limit": given.limit, "rows": rows, "slower": slower})
    else:
        print_rows(rows, given.commit, given.limit)
    return 1 if slower else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one-bit-ranks"]:
        one_bit_ranks(sys.argv[2])
    else:
        sys.exit(main())
