"""Kill trainings again and again, let them go on, and compare them with one that was left alone.

    python -m tests.stress.kills --kills 200
    python -m tests.stress.kills --kills 1000 --ways cd-grab,exdyna,local-1bit,fsdp2 --jobs 4

Four ranks train and save themselves every few steps. At a random moment one rank, or all of them,
get SIGKILL, also in the middle of a checkpoint; then the run goes on with what is there. Whenever
it comes to its end, every number that decides anything must be that of the run that was never
stopped, to the bit.
"""

import argparse
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos import WAYS, differences, last_state, train, train_sharded

from gradherd.lab.ranks import RankError, in_pool, process_pool, run_ranks
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.runner import CHECKPOINT_FOLDER

WORKERS = 4
KILLS_OF_A_RUN = 5
"""So often one run is killed at most, or a slow machine would never see its end."""
# Both halves at once: example units, an odd number of them, and a short last batch.
KILLED = {"both": {"order": "cd-grab", "sparsify": "exdyna", "density": 0.01}} | WAYS


@dataclass(frozen=True)
class Training:
    """What is killed."""

    way: str = "both"
    task: str = "digits-mlp"
    epochs: int = 6
    every: int = 3
    """Steps between checkpoints."""
    limit: int = 203

    def run(self, out: Path, **options: Any) -> None:
        """Train on ranks, from the newest checkpoint if there is one."""
        config = RunConfig.of(
            self.task,
            find_task(self.task).defaults,
            workers=WORKERS,
            epochs=self.epochs,
            limit=self.limit,
            **KILLED[self.way],
        )
        fn, resume = (train_sharded, saved(out)) if self.way == "fsdp2" else (train, True)
        # Long: what waits for a busy machine is no hang.
        run_ranks(fn, WORKERS, config, out, self.every, resume, timeout=1500, **options)

    def undisturbed(self, out: Path) -> float:
        """Train without a fault; return the seconds that it took."""
        warm()
        begin = time.monotonic()
        self.run(out)
        return time.monotonic() - begin


@functools.cache  # once in a process
def warm() -> None:
    """Start the server that ranks are forked from: its imports are no part of a training."""
    run_ranks(time.monotonic, 1)


def saved(out: Path) -> bool:
    """Return whether a run has a checkpoint."""
    return any((out / CHECKPOINT_FOLDER).glob("step-*"))


def attempt(training: Training, out: Path, delay: float | None, chance: random.Random) -> bool:
    """Go on until the end (True), or until killed after `delay` seconds (False)."""
    if delay is None:
        training.run(out)
        return True
    alone, victim = chance.random() < 0.5, chance.randrange(WORKERS)
    timers: list[threading.Timer] = []

    def started(pids: list[int]) -> None:
        def kill() -> None:
            for pid in [pids[victim]] if alone else pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # It had ended by itself.

        timers.append(threading.Timer(delay, kill))
        timers[0].start()

    try:
        training.run(out, on_start=started)
    except RankError as error:
        if "SIGKILL" not in error.reason and not timers[0].finished.is_set():
            raise  # before anyone was killed
        return False
    finally:
        timers[0].cancel()
    return True


def killed(training: Training, kills: int, longest: float, reference: Path, seed: int) -> Counter:
    """Kill one run so often; count kills, those after a checkpoint, and what differs in the end."""
    chance, found = random.Random(f"{seed} {training.way}"), Counter(runs=1)
    warm()
    with tempfile.TemporaryDirectory(prefix="gradherd-kills-") as name:
        out = Path(name) / "run"
        while True:
            done = found["kills"] == kills
            delay = None if done else chance.uniform(0.25, 0.75) * longest
            if attempt(training, out, delay, chance):
                break
            found["kills"] += 1
            found["kills_after_a_checkpoint"] += saved(out)
        expected = last_state(reference)
        wrong = differences(last_state(out), expected)
        found["numbers"] = len(expected)
        if wrong:
            found["differing_runs"] += 1
            print(f"{training.way}, seed {seed}: {len(wrong)} differ, first {wrong[:5]}")
            kept = Path(os.environ.get("OUT", ".")) / f"differs-{training.way}-{seed}"
            shutil.copytree(out, kept, dirs_exist_ok=True)
    return found


def stress(
    trainings: list[Training], kills: int, seed: int, jobs: int = 1, minutes: float = 60.0
) -> dict[str, Counter]:
    """Kill all ways of training so often in all; return the counts of each way.

    Args:
        trainings: What is killed.
        kills: How often, over all of them.
        seed: Of the moments.
        jobs: Trainings side by side, each on four ranks.
        minutes: After these no run is begun.
    """
    found = {training.way: Counter() for training in trainings}
    begin, runs = time.monotonic(), 0
    # Ranks meet in files, so runs side by side need no ports.
    with tempfile.TemporaryDirectory(prefix="gradherd-stress-") as name:
        with process_pool(jobs, "spawn") as pool:
            folders = [Path(name) / training.way for training in trainings]
            longest = list(pool.map(Training.undisturbed, trainings, folders))
            waiting = set()
            while True:
                left = kills - sum(one["kills"] for one in found.values())
                late = time.monotonic() - begin > 60 * minutes
                while left > KILLS_OF_A_RUN * len(waiting) and len(waiting) < jobs and not late:
                    at, most = runs % len(trainings), min(KILLS_OF_A_RUN, left)
                    task = (trainings[at], most, longest[at], folders[at], seed + runs)
                    future = pool.submit(in_pool, killed, *task)
                    future.way = trainings[at].way  # type: ignore[attr-defined]
                    waiting.add(future)
                    runs += 1
                if not waiting:
                    break
                done = next(as_completed(waiting))
                waiting.remove(done)
                counts = done.result()
                numbers = counts.pop("numbers")
                found[done.way] += counts  # type: ignore[attr-defined]
                found[done.way]["numbers"] = numbers  # type: ignore[attr-defined]
                total = sum(one["kills"] for one in found.values())
                print(f"{total} kills, {time.monotonic() - begin:.0f} s", flush=True)
    return found


def main() -> int:
    """Read the options and stress."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ways", default="both", help=f"of {', '.join(KILLED)}, by commas")
    parser.add_argument("--task", default="digits-mlp", help="a name, or path/to/file.py:ClassName")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--limit", type=int, default=203, help="examples of the training set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="trainings side by side")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run after these")
    args = parser.parse_args()
    trainings = [
        Training(way, args.task, args.epochs, args.every, args.limit)
        for way in args.ways.split(",")
    ]
    begin = time.monotonic()
    found = stress(trainings, args.kills, args.seed, args.jobs, args.minutes)
    total = sum(found.values(), Counter())
    names = ("kills", "kills_after_a_checkpoint", "runs", "differing_runs")
    summary: dict[str, Any] = {name: total[name] for name in names}
    summary |= {"ways": found, "seconds": round(time.monotonic() - begin)}
    print(json.dumps(summary))
    return int(total["differing_runs"] > 0)


if __name__ == "__main__":
    sys.exit(main())
