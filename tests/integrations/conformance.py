"""What gradherd demands of itself in every framework, and the table of docs/frameworks.md.

python -m tests.integrations.conformance runs all frameworks and writes the table: no cell of it is
typed by hand.
"""

import importlib
import importlib.metadata
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.integrations.task import DENSITY, EPOCHS, EXAMPLES, RANKS, STEPS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "frameworks.md"
BEGIN, END = "<!-- conformance: made by tests.integrations.conformance -->", "<!-- end -->"
# Those in `make test-all`, which are small; then those that `make integrations` adds.
SMALL = ("plain", "stateful", "accelerate", "transformers")
ALL = (*SMALL, "accelerate_fsdp", "lightning", "lightning_fsdp", "fabric", "ray")
SPARSE = "sparse exchange: density and bits"
LOCAL = "local steps in one bit, also resumed"


class Results:
    """What a framework's runs have left behind."""

    def __init__(
        self, folder: Path, without: Sequence[str] = (), *, reduces_each: bool = False
    ) -> None:
        """Read a folder.

        Args:
            folder: One file per plan and rank.
            without: Demands that the framework refuses to meet.
            reduces_each: Whether gradients that are accumulated have been reduced before, so that
                their sum is rounded in another way than the plain loop's.
        """
        self.folder, self.without, self.reduces_each = folder, without, reduces_each
        # Single examples are trained together with a sparsifier.
        self.plans = ("whole",) if SPARSE in without else ("whole", "both")
        self.refused: dict[str, str | None] = torch.load(folder / "refused.pt")

    def __call__(self, plan: str, rank: int) -> dict[str, Any]:
        return torch.load(self.folder / f"{plan}-rank{rank}.pt", weights_only=False)


def visits(own: Results, plain: Results) -> bool:
    """Check that all ranks together visit each example once in every epoch."""
    for plan in own.plans:
        for epoch in range(EPOCHS):
            steps = slice(epoch * STEPS, (epoch + 1) * STEPS)
            seen = [i for r in range(RANKS) for b in own(plan, r)["batches"][steps] for i in b]
            if sorted(seen) != list(range(EXAMPLES)):
                return False
    return True


def same_orders(own: Results, plain: Results) -> bool:
    """Check batches, next order and parameters against the plain loop, to the bit."""
    return all(_same(own(plan, r), plain(plan, r)) for plan in own.plans for r in _ranks())


def credited(own: Results, plain: Results) -> bool:
    """Check that each gradient was credited to the examples of its backward."""
    accumulates = not any(DEMANDS[name] is accumulated for name in own.without)
    for plan in (*own.plans, *(["accumulated"] if accumulates else [])):
        for rank in _ranks():
            credits = own(plan, rank)["credits"]
            if len(credits) != EPOCHS * STEPS or any(claimed != seen for claimed, seen in credits):
                return False
    return True


def with_workers(own: Results, plain: Results) -> bool:
    """Check a loader whose worker processes fetch ahead: they change nothing."""
    ranks = [(own("workers", r), own("whole", r)) for r in _ranks()]
    return all(_same(one, other) and one["credits"] == other["credits"] for one, other in ranks)


def cut_short(own: Results, plain: Results) -> bool:
    """Check epochs that end half-way: two of them visit every example once."""
    for rank in _ranks():
        if not _same(own("short", rank), plain("short", rank)):
            return False
    seen = [i for r in _ranks() for b in own("short", r)["batches"][:STEPS] for i in b]
    return sorted(seen) == list(range(EXAMPLES))


def resumed(own: Results, plain: Results) -> bool:
    """Check that stopping in mid-epoch and resuming changes nothing."""
    return all(_resumes(own, plan) for plan in own.plans)


def _resumes(own: Results, plan: str) -> bool:
    for rank in _ranks():
        first, rest = own(f"{plan}-first", rank), own(f"{plan}-rest", rank)
        rest["batches"] = first["batches"] + rest["batches"]
        if not _same(rest, own(plan, rank)) or len(first["batches"]) % STEPS == 0:
            return False
    return True


def accumulated(own: Results, plain: Results) -> bool:
    """Check two batches to an optimizer step against the plain loop."""
    ranks = [(own("accumulated", r), plain("accumulated", r)) for r in _ranks()]
    return all(_same(*pair, tolerance=1e-6 if own.reduces_each else 0.0) for pair in ranks)


def sparse(own: Results, plain: Results) -> bool:
    """Check the density that was logged, and parameters to the bit."""
    logged = [own("both", rank)["logged"]["herd/density"] for rank in _ranks()]
    same = all(_same(own("both", rank), plain("both", rank)) for rank in _ranks())
    return same and all(math.isclose(d, DENSITY, rel_tol=1e-5) for d in logged)


def local(own: Results, plain: Results) -> bool:
    """Check local steps against those of a plain module, straight and resumed within a phase."""
    if own("local", 0)["weights"].equal(own("local", 1)["weights"]):
        return False  # ranks stop within a phase
    return _resumes(own, "local") and all(
        _same(own("local", rank), plain("local", rank)) for rank in _ranks()
    )


def metrics(own: Results, plain: Results) -> bool:
    """Check that all numbers have arrived in the framework's log of rank 0."""
    plan = own.plans[-1]
    logged = {k: v for k, v in own(plan, 0)["logged"].items() if k.startswith("herd/")}
    return logged.keys() == plain(plan, 0)["logged"].keys() and all(
        math.isfinite(value) for value in logged.values()
    )


def refused(own: Results, plain: Results) -> bool:
    """Check that every wrong set-up was refused in one sentence."""
    sentences = own.refused.values()
    return bool(sentences) and all(text and "\n" not in text for text in sentences)


DEMANDS: dict[str, Callable[[Results, Results], bool]] = {
    "each example once per epoch": visits,
    "orders and parameters of the plain loop": same_orders,
    "gradients credited to their examples": credited,
    "two batches to a step": accumulated,
    "loader with worker processes": with_workers,
    "epochs cut short starve no example": cut_short,
    "resumed in mid-epoch, to the bit": resumed,
    SPARSE: sparse,
    LOCAL: local,
    "metrics arrive": metrics,
    "wrong set-ups refused": refused,
}


def _ranks() -> range:
    return range(RANKS)


def _same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.0) -> bool:
    close = torch.allclose(one["weights"], other["weights"], rtol=tolerance, atol=tolerance)
    return close and all(one[key] == other[key] for key in ("batches", "next_order"))


def module_of(name: str) -> Any:
    return importlib.import_module(f"tests.integrations.{name}_run")


def results_of(name: str, folder: Path) -> Results:
    module = module_of(name)
    each = getattr(module, "REDUCES_EACH", False)
    return Results(folder / name, getattr(module, "REFUSED", ()), reduces_each=each)


def run(names: Sequence[str], folder: Path) -> None:
    """Run frameworks at two ranks; those under torchrun in the same processes."""
    together = [name for name in names if name != "ray"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    work = "tests.integrations.run"
    if together:
        start([*launch, "-m", work, ",".join(together), str(folder)])
    if "ray" in names:
        start(["-m", work, "ray", str(folder)])


def start(command: list[str]) -> None:
    """Run a program of the suite with this Python; raise with its output if it fails."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}
    ran = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-8000:]


def table(names: Sequence[str], folder: Path) -> str:
    """Return the table of frameworks and demands, with what marks its place."""
    plain = Results(folder / "plain")
    columns, rows = [], [["demand"]]
    for name in names:
        module, own = module_of(name), results_of(name, folder)
        version = importlib.metadata.version(module.PACKAGE).split("+")[0]
        rows[0].append(f"{module.NAME} {version}")
        columns.append(
            [
                "refused" if what in own.without else "yes" if demand(own, plain) else "**no**"
                for what, demand in DEMANDS.items()
            ]
        )
    rows.append(["---"] * len(rows[0]))
    rows += [[name, *cells] for name, *cells in zip(DEMANDS, *columns, strict=True)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    where = f"Python {platform.python_version()}, torch {torch.__version__.split('+')[0]}"
    made = f"Made by `make integrations` at {RANKS} gloo ranks on the CPU ({where})."
    return "\n".join([BEGIN, "", *lines, "", made, "", END])


def section(title: str) -> str:
    """Return the part of the page below a framework's title."""
    return re.split(rf"^## {title}\b.*$", PAGE.read_text(), flags=re.M)[1].split("\n## ")[0]


def programs(title: str) -> list[str]:
    """Return the programs in the section of a framework."""
    return re.findall(r"^```py\w*\n(.*?)^```", section(title), re.S | re.M)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(ALL, Path(folder))
        made = table(ALL, Path(folder))
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + made + rest.split(END, 1)[1])
    print(made)
    sys.exit("**no**" in made)


if __name__ == "__main__":
    main()
