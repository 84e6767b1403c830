"""Stop a training in mid-epoch and let other numbers of ranks go on; count what they visit.

    python -m tests.stress.resizes --chains 20

Ranks train with cd-grab and a sparsifier, stop at a random step, and another number of ranks goes
on, a few times over. Every unit of an epoch must be visited once (the last round of an epoch may
repeat a few, as it always does), orders must stay permutations, and every new rank must start from
the mean of all residuals there were, rounded once.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from gradherd.comm.world import World
from gradherd.hooks.state import unpack
from gradherd.lab.ranks import run_ranks
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.loop import Progress
from gradherd.lab.train.rank_trainer import RankTrainer
from gradherd.lab.train.runner import CHECKPOINT_FOLDER, CheckpointOptions, run_all

TASK = f"{Path(__file__).parents[2] / 'examples' / 'my_task.py'}:Spirals"
EXAMPLES, BATCH, EPOCHS = 203, 8, 3


class Enough(Exception):
    """So many steps were wanted."""


class Stop(Progress):
    """Breaks off after so many steps of this process, when they have been saved."""

    def __init__(self, steps: int | None, resumed: bool) -> None:
        self.left = -1 if steps is None else steps + 1
        self.resumed = resumed

    def step(self, steps: int = 1) -> None:
        """Count; a resumed run first tells at once what was done before, maybe one step."""
        if self.resumed:
            self.resumed = False
            return
        self.left -= 1
        if self.left == 0:
            raise Enough


def config(workers: int, sparsify: str, unit: int) -> RunConfig:
    """An odd number of examples; with a sparsifier, or with whole batches on the dense exchange."""
    return RunConfig.of(
        TASK,
        find_task(TASK).defaults,
        order="cd-grab",
        sparsify=sparsify,
        density=None if sparsify == "dense" else 0.05,
        unit=unit,
        rows="batch" if unit == BATCH else "exact",  # "auto" depends on the number of ranks
        workers=workers,
        epochs=EPOCHS,
        limit=EXAMPLES,
        batch_size=BATCH,
    )


def train(out: Path, sparsify: str, unit: int, steps: int | None) -> tuple[list[list[int]], Any]:
    """Train on this rank; return the batches it visited and the residuals it began with."""
    world, began = World.detect(), dict[str, Any]()
    batches: list[list[int]] = []
    fetch, load = TensorDataset.__getitem__, RankTrainer.load

    def noted(self: TensorDataset, indices: list[int]) -> Any:
        batches.append(list(indices))
        return fetch(self, indices)

    def watched(self: RankTrainer, loaded: Any) -> int:
        number = load(self, loaded)
        began.update(self._herd.state_dict().get("sparsify", {}).get("residual", {}))
        return number

    TensorDataset.__getitem__, RankTrainer.load = noted, watched  # type: ignore[method-assign]
    saving = CheckpointOptions(every=1, resume=True)
    resumed = any((out / CHECKPOINT_FOLDER).glob("step-*"))
    try:
        run_all(
            [config(world.size, sparsify, unit)],
            world,
            out=out,
            saving=saving,
            progress=Stop(steps, resumed),
        )
    except Enough:
        batches = batches[:steps]  # one more was begun, and is lost with the process
    finally:
        TensorDataset.__getitem__, RankTrainer.load = fetch, load  # type: ignore[method-assign]
    return batches, began


def mean_residuals(out: Path) -> dict[str, torch.Tensor]:
    """Return the mean of all ranks' residuals in the newest checkpoint."""
    parts = sorted(max((out / CHECKPOINT_FOLDER).glob("step-*")).glob("rank-*.safetensors"))
    states = [unpack(part.read_bytes())["sparsify"] for part in parts]
    kept = [{} if state is None else state["residual"] for state in states]
    return {
        name: torch.stack([one[name].double() for one in kept]).mean(0).to(kept[0][name])
        for name in kept[0]
    }


def steps_of(worlds: list[int], chance: random.Random) -> list[int | None]:
    """Return how many steps each world does, all within the first two epochs; the last all."""
    return [*(chance.randint(1, 6) for _ in worlds[:-1]), None]


def chain(worlds: list[int], sparsify: str, unit: int, chance: random.Random) -> int:
    """Let one world after the other train; return how many visits of a unit were repeated."""
    units = -(-EXAMPLES // unit)
    with tempfile.TemporaryDirectory(prefix="gradherd-resize-") as name:
        out, visits = Path(name) / "run", []
        for at, (workers, steps) in enumerate(zip(worlds, steps_of(worlds, chance), strict=True)):
            expected = mean_residuals(out) if at else {}
            ranks = run_ranks(train, workers, out, sparsify, unit, steps, timeout=500)
            if at and workers != worlds[at - 1]:
                for _, began in ranks:
                    same = [torch.equal(began[key], expected[key]) for key in expected]
                    assert all(same), f"{worlds} {at}: residuals are not the mean"
                assert bool(expected) == (sparsify != "dense")
            for together in zip(*(batches for batches, _ in ranks), strict=True):
                visits += [
                    batch[i] // unit for batch in together for i in range(0, len(batch), unit)
                ]
        # Epochs follow each other: each unit comes EPOCHS times but for rounds that are filled.
        times = Counter(visits)
        assert times.keys() == set(range(units)), f"{worlds}: some were never visited"
        assert min(times.values()) == EPOCHS, f"{worlds}: {min(times.values())} of {EPOCHS}"
        repeated = sum(times.values()) - EPOCHS * units
        most = EPOCHS * (max(worlds) - 1)  # an epoch's last round is filled
        assert repeated <= most, f"{worlds}: {repeated} visits too many"
        state = unpack(
            (max((out / CHECKPOINT_FOLDER).glob("step-*")) / "shared.safetensors").read_bytes()
        )
        ordering = state["herd"]["ordering"]
        sizes = ordering["balance"]["sizes"]
        for order in ordering["orders"].split(sizes):
            assert torch.equal(order.sort().values, torch.arange(len(order))), f"{worlds}: order"
        return repeated


def main() -> None:
    """Read the options and stress."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance, begin, changes = random.Random(args.seed), time.monotonic(), 0
    for number in range(args.chains):
        worlds = [4, 2, 3] if number == 0 else [chance.randint(1, 5) for _ in range(4)]
        sparsify, unit = chance.choice([("exdyna", 1), ("topk", 1), ("micro", 4), ("dense", BATCH)])
        chain(worlds, sparsify, unit, chance)
        changes += sum(a != b for a, b in itertools.pairwise(worlds))
        print(f"{number + 1} chains, {changes} changes of world size", flush=True)
    print(f"every unit visited, residual means exact, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
