"""Kill a training again and again, let it go on, and compare it with one that was left alone.

    python -m tests.stress.kills --kills 200

Four ranks train with cd-grab and exdyna and save themselves every few steps. At a random moment
one rank, or all of them, get SIGKILL, also in the middle of a checkpoint; then the run goes on with
what is there. Whenever it comes to its end, every number that decides anything must be that of the
run that was never stopped, to the bit.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos import differences, last_state, train

from gradherd.lab.ranks import RankError, run_ranks
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.config import RunConfig

WORKERS = 4
KILLS_OF_A_RUN = 5
"""So often one run is killed at most, or a slow machine would never see its end."""


def config(epochs: int) -> RunConfig:
    """Both halves: example units, an odd number of them, and a short last batch."""
    return RunConfig.of(
        "digits-mlp",
        find_task("digits-mlp").defaults,
        order="cd-grab",
        sparsify="exdyna",
        density=0.01,
        workers=WORKERS,
        epochs=epochs,
        limit=203,
    )


def attempt(out: Path, epochs: int, every: int, delay: float | None, chance: random.Random) -> bool:
    """Go on until the end (True), or until killed after `delay` seconds (False)."""
    if delay is None:
        run_ranks(train, WORKERS, config(epochs), out, every, True, timeout=500)
        return True
    alone = chance.random() < 0.5
    victim = chance.randrange(WORKERS)
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
        run_ranks(train, WORKERS, config(epochs), out, every, True, timeout=500, on_start=started)
    except RankError:
        return False
    finally:
        timers[0].cancel()
    return True


def stress(kills: int, epochs: int, every: int, seed: int, tell: Any = print) -> dict[str, int]:
    """Kill so often; raise AssertionError at the first run that ends otherwise."""
    chance, done, runs = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory(prefix="gradherd-stress-") as name:
        reference = Path(name) / "reference"
        begin = time.monotonic()
        run_ranks(train, WORKERS, config(epochs), reference, every, False, timeout=600)
        longest = time.monotonic() - begin
        expected = last_state(reference)
        while done < kills:
            out, end = Path(name) / f"run-{runs}", min(kills, done + KILLS_OF_A_RUN)
            delay: float | None = chance.uniform(0.25, 0.75) * longest
            while not attempt(out, epochs, every, delay, chance):
                done += 1
                delay = chance.uniform(0.25, 0.75) * longest if done < end else None
                if done % 10 == 0:
                    tell(f"{done} kills, {runs} runs came to their end", flush=True)
            wrong = differences(last_state(out), expected)
            assert not wrong, f"run {runs}, seed {seed}: {len(wrong)} differ, first {wrong[:5]}"
            shutil.rmtree(out)
            runs += 1
    return {"kills": done, "runs": runs, "numbers": len(expected)}


def main() -> None:
    """Read the options and stress."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin = time.monotonic()
    found = stress(args.kills, args.epochs, args.every, args.seed)
    print(f"{found}: all equal to the bit, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
