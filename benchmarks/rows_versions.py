"""Steps with two-sided rows under several versions of gradherd, in turns on one machine.

    git worktree add ../before COMMIT
    python benchmarks/rows_versions.py resnet18,llama-160m:reduce-overhead ../before .

Hosts differ, and steps that are not compiled are bound by them. So every model and version has a
process of its own; all of them prepare at the same time, then one is timed after the other, three
times over: medians of plain and ordered steps that take turns.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

_REPEATS, _TURNS, _STEPS = 3, 6, 4
_WARMUP = 30  # steps, more than it takes until layers are chosen


def worker(model: str, mode: str) -> None:
    """Prepare both loops; then answer each line with ratio and times, in milliseconds."""
    import torch
    from model_steps import ModelTraining

    loops = []
    for case in ("plain", "two-sided"):
        loop = ModelTraining(model, None, torch.device("cuda"), mode or None)
        loop.attach(case)
        loop.steps(_WARMUP)
        loops.append(loop)
    plain, rows = loops
    print("{}", flush=True)
    for _ in sys.stdin:
        turns = [(plain.timed(_STEPS), rows.timed(_STEPS)) for _ in range(_TURNS)]
        found = {
            "ratio": statistics.median(own / other for other, own in turns),
            "plain_ms": 1e3 * statistics.median(one for one, _ in turns),
            "rows_ms": 1e3 * statistics.median(one for _, one in turns),
            "host_ms": [host_times(loop) for loop in loops],
        }
        print(json.dumps(found), flush=True)


def host_times(loop: Any) -> list[float]:
    """Return until when forward, backward and update return, without waiting for the device."""
    import torch

    parts = []
    for _ in range(5):
        torch.cuda.synchronize()
        next(loop._indices, None)
        loop.optimizer.zero_grad()
        times = [time.perf_counter()]
        loss = loop.loss(loop.inputs, loop.targets)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        loop.optimizer.step()
        times.append(time.perf_counter())
        parts.append([1e3 * (b - a) for a, b in pairwise(times)])
    return [statistics.median(part) for part in zip(*parts, strict=True)]


def main(models: str, versions: list[str]) -> None:
    """Print a line of JSON for each model and version."""
    running = {}
    for job in models.split(","):
        model, _, mode = job.partition(":")
        for version in versions:
            root = Path(version).resolve()
            env = os.environ | {"PYTHONPATH": f"{root}/src:{root}/benchmarks"}
            command = [sys.executable, __file__, "--worker", model, mode]
            running[model, mode, version] = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
    results: dict[Any, list[Any]] = {job: [] for job in running}
    for process in running.values():
        assert process.stdout is not None
        process.stdout.readline()
    for _ in range(_REPEATS):
        for job, process in running.items():
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            results[job].append(json.loads(process.stdout.readline()))
    for (model, mode, version), found in results.items():
        print(json.dumps({"model": model, "mode": mode, "version": version, "repeats": found}))
    for process in running.values():
        process.communicate()


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(*sys.argv[2:4])
    else:
        main(sys.argv[1], sys.argv[2:])
