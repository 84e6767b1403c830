"""Let things happen to a training on local ranks, and compare it with one that nothing happened to.

    python -m benchmarks.chaos examples/my_task.py:Spirals --ranks 2 --seed 1
    python -m benchmarks.chaos digits-mlp --ways cd-grab,exdyna --faults kill,nan --out chaos.md

The task is trained in several ways of training; in each of them one fault after the other strikes
at a step, on a rank and after a delay that the seed chooses. A run that has ended goes on from its
checkpoints. Where that is promised, every number that decides anything must in the end be that of
the undisturbed run, to the bit; elsewhere the run must go on, or end in one sentence.
"""

import argparse
import contextlib
import logging
import math
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.comm.world import World
from gradherd.hooks.state import pack, unpack
from gradherd.lab.ranks import RankError, run_ranks
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.tasks.task import load_split
from gradherd.lab.train import rank_trainer
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.loop import Progress
from gradherd.lab.train.runner import CHECKPOINT_FOLDER, CheckpointOptions, run_all

WAYS: dict[str, dict[str, Any]] = {
    "cd-grab": {"order": "cd-grab"},
    "exdyna": {"sparsify": "exdyna", "density": 0.05},
    "local-1bit": {"local_steps": 4},
    "fsdp2": {"order": "cd-grab"},
}
"""Ways of training, as settings of a run; that of FSDP2 is a loop of one's own."""
NOT_FOR = {"fsdp2": ("damage",)}
"""Faults that no way promises anything about: torch's checkpoints have no checksums."""
PEER_TIMEOUT = 20.0
"""Seconds that a rank waits for its peers."""
STOPPED = 3.0
"""Seconds for which a rank is stopped."""


@dataclass(frozen=True)
class Fault:
    """What happens to a run, and what is promised then."""

    what: str
    promise: str
    """"through": the run comes to its end by itself, with the same bits; "resumed": it ends in a
    sentence and goes on with the same bits; "said": it goes on, or ends as diverged, and says why;
    "goes on": it is resumed and comes to its end, or refuses that in a sentence."""
    everywhere: bool = False
    """Whether it strikes all ranks."""


FAULTS = {
    "kill": Fault("SIGKILL of a rank", "resumed"),
    "kill-all": Fault("SIGKILL of all ranks", "resumed", everywhere=True),
    "stop": Fault(f"a rank is stopped, and continued after {STOPPED:g} s", "through"),
    "slow": Fault("a rank takes 50 ms more for each step", "through"),
    "cut": Fault("all connections of a rank are cut", "resumed"),
    "full-disk": Fault("no file may be longer than a part of a checkpoint", "resumed", True),
    "damage": Fault("all ranks are killed, and the newest checkpoint is damaged", "resumed", True),
    "nan": Fault("the loss of a rank is NaN in one step", "said"),
    "other-ranks": Fault("a rank is killed, and one more goes on", "goes on"),
}


@dataclass(frozen=True)
class Strike:
    """When and where a fault strikes."""

    fault: str
    step: int
    rank: int
    delay: float
    """Seconds after the step."""
    bytes: int
    """What a file may hold on a full disk."""


class Striker(Progress):
    """Counts the steps of this rank, and lets the fault happen."""

    def __init__(self, strike: Strike | None, rank: int) -> None:
        everywhere = strike is not None and FAULTS[strike.fault].everywhere
        self._strike = strike if strike and (everywhere or strike.rank == rank) else None
        self._steps = 0

    def step(self, steps: int = 1) -> None:
        """Strike after the step; a resumed run tells its first steps at once."""
        self._steps += steps
        strike = self._strike
        if strike is None:
            return
        if strike.fault == "slow":
            time.sleep(0.05)
        elif self._steps == strike.step:
            if strike.fault in ("full-disk", "nan"):
                self._happen(strike)
            else:
                threading.Timer(strike.delay, self._happen, [strike]).start()

    def _happen(self, strike: Strike) -> None:
        if strike.fault == "stop":
            wake = f"sleep {STOPPED}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif strike.fault == "cut":
            cut_connections()
        elif strike.fault == "full-disk":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as a full disk does: an error of write
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (strike.bytes, hard))
        elif strike.fault == "nan":
            spoil_next_loss()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def cut_connections() -> None:
    """Cut all TCP connections of this process, as a network that is gone does."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or not connected
            one = socket.socket(fileno=os.dup(int(name)))
            with one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    one.getpeername()  # gloo aborts if its listening socket is shut down
                    one.shutdown(socket.SHUT_RDWR)


def spoil_next_loss() -> None:
    """Make the next training loss of this process NaN."""
    plain = rank_trainer.training_loss

    def spoiled(*args: Any) -> Any:
        rank_trainer.training_loss = plain
        return plain(*args) * math.nan

    rank_trainer.training_loss = spoiled


def train(
    config: RunConfig, out: Path, every: int, resume: bool, strike: Strike | None = None
) -> tuple[str, float | None, list[str]]:
    """Train on this rank; return how it ended, its last loss, and what it said."""
    world, said = World.detect(), heard()
    saving = CheckpointOptions(every=every, resume=resume)
    (record,) = run_all(
        [config], world, out=out, saving=saving, progress=Striker(strike, world.rank)
    )
    return record.status, record.epochs[-1].train_loss if record.epochs else None, said


def train_sharded(
    config: RunConfig, out: Path, every: int, resume: bool, strike: Strike | None = None
) -> tuple[str, float | None, list[str]]:
    """Do what `train` does with a model in shards, whose checkpoints are torch's."""
    world, said, progress = World.detect(), heard(), Striker(strike, dist.get_rank())
    task = find_task(config.task)
    train = load_split(task, None, config.limit).train
    torch.manual_seed(config.seed)
    model, data = task.model(), TensorDataset(*train)
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    batch = config.batch_size
    sampler = gh.OrderedSampler(data, config.order, batch_size=batch, unit=batch, seed=config.seed)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    herd = gh.attach(model, order=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    at = torch.zeros(1, dtype=torch.long)
    folder, ranks = out / CHECKPOINT_FOLDER, torch.tensor([world.size])
    total = math.nan
    if resume:
        newest = newest_checkpoint(out)
        dcp.load({"at": at, "ranks": ranks}, checkpoint_id=newest)
        parts = state_of(model, optimizer)
        dcp.load({**parts, "herd": herd.stateful(saved_by=int(ranks))}, checkpoint_id=newest)
        set_state_dict(
            model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
        )
        ranks.fill_(world.size)
    step = int(at)
    # Not an epoch that the loop has counted: saved behind its last batch, it is over.
    for epoch in range(sampler.epoch, config.epochs):
        sampler.set_epoch(epoch)
        for examples in herd.batches(loader):
            loss = task.loss(model, *examples)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total, step = loss.item(), step + 1
            progress.step()
            if step % every == 0:
                at.fill_(step)
                parts = dict(
                    zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)
                )
                draft, saved = folder / f".step-{step:09d}", folder / f"step-{step:09d}"
                state = {**parts, "herd": herd.stateful(), "at": at, "ranks": ranks}
                dcp.save(state, checkpoint_id=draft)
                if world.rank == 0:
                    draft.rename(saved)
                dist.barrier()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    ended = {"model": get_model_state_dict(model, options=options), "herd": herd.state_dict()}
    if world.rank == 0:
        (newest_checkpoint(out) / "end.safetensors").write_bytes(pack(ended))
    return "done", total, said


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return both states by torch's names, for torch.distributed.checkpoint."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def heard() -> list[str]:
    """Return a list that receives all warnings of gradherd from now on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradherd").addHandler(handler)
    return said


def numbers(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return every number of a state that decides what comes next: no clocks."""
    if isinstance(state, dict):
        for key, value in state.items():
            if "seconds" not in str(key) and key != "record":
                yield from numbers(value, f"{path}/{key}")
    elif isinstance(state, list | tuple):
        for at, value in enumerate(state):
            yield from numbers(value, f"{path}/{at}")
    else:
        yield path, state


def last_state(out: Path) -> dict[str, Any]:
    """Return all numbers of the newest checkpoint, by name."""
    newest = newest_checkpoint(out)
    found: dict[str, Any] = {"step": newest.name}
    for path in sorted(newest.glob("*.safetensors")):
        found |= numbers(unpack(path.read_bytes()), path.stem)
    return found


def newest_checkpoint(out: Path) -> Path:
    """Return the folder of a run's newest checkpoint."""
    return max((out / CHECKPOINT_FOLDER).glob("step-*"))


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of what is not equal to the bit."""
    names = set(one) ^ set(other)
    for name in set(one) & set(other):
        mine, theirs = one[name], other[name]
        same = torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
        if not same:
            names.add(name)
    return sorted(names)


def damage(folder: Path, chance: random.Random) -> str:
    """Damage a file of a checkpoint; return what was done to it."""
    path = chance.choice(sorted(path for path in folder.iterdir() if path.stat().st_size))
    data, how = bytearray(path.read_bytes()), chance.choice(("a bit", "the end", "the file"))
    if how == "the file":
        path.unlink()
    elif how == "the end":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    return f"{how} of {path.name}"


@dataclass(frozen=True)
class Row:
    """What a fault did to a way of training."""

    way: str
    fault: str
    happened: str
    kept: bool
    """Whether the promise was kept."""


class Chaos:
    """One way of training, its undisturbed run, and what faults do to others."""

    def __init__(self, way: str, config: RunConfig, every: int, folder: Path, seed: int) -> None:
        self._way, self._config, self._every = way, config, every
        self._folder, self._chance = folder, random.Random(f"{seed} {way}")
        status, self._loss, _ = self._run(folder / "undisturbed", config.workers, resume=False)
        if status != "done":
            raise SystemExit(f"{way}: the run that nothing happened to has {status}: no comparison")
        self._expected = last_state(folder / "undisturbed")
        newest = newest_checkpoint(folder / "undisturbed")
        self._steps = int(newest.name.removeprefix("step-"))
        self._bytes = max(path.stat().st_size for path in newest.iterdir()) // 2

    def _run(
        self, out: Path, ranks: int, *, resume: bool, strike: Strike | None = None
    ) -> tuple[str, float | None, list[str]]:
        config = self._config
        if ranks != config.workers:
            config = RunConfig(**{**vars(config), "workers": ranks})
        limits = {"timeout": 400.0, "collective_timeout": PEER_TIMEOUT}
        run = train_sharded if self._way == "fsdp2" else train
        results = run_ranks(run, ranks, config, out, self._every, resume, strike, **limits)
        return results[0][0], results[0][1], [line for _, _, said in results for line in said]

    def strike(self, name: str) -> Row:
        """Let a fault happen to a new run, and return what became of it."""
        fault, chance, workers = FAULTS[name], self._chance, self._config.workers
        first = min(2 * self._every, self._steps - 1)  # two checkpoints: one may be damaged
        strike = Strike(
            name,
            step=chance.randint(first, self._steps - 1),
            rank=chance.randrange(workers),
            delay=chance.uniform(0.0, 0.02),
            bytes=self._bytes,
        )
        out, where = self._folder / name, f"step {strike.step}, rank {strike.rank}"
        try:
            ended, loss, said = self._run(out, workers, resume=False, strike=strike)
            happened, died = f"{where}: {ended}", False
        except (RankError, TimeoutError) as error:
            reason = getattr(error, "reason", str(error))
            happened, died, ended, loss, said = f"{where}: {shortened(reason)}", True, "", None, []
        if fault.promise == "said":
            # What a loss of NaN does to the weights is up to the optimizer.
            told = [line for line in said if "not finite" in line]
            what = shortened(told[0]) if told else "silent"
            return self._row(name, f"{happened}; {what}", not died and bool(told))
        if died == (fault.promise == "through"):
            return self._row(name, f"{happened}, which was not expected", False)
        if name == "damage":
            happened = f"{happened}; {damage(newest_checkpoint(out), chance)} damaged"
        if died:
            ranks = workers + (name == "other-ranks")
            try:
                ended, loss, _ = self._run(out, ranks, resume=True)
                happened = f"{happened}; resumed on {ranks}: {ended}"
            except RankError as error:
                return self._row(
                    name,
                    f"{happened}; resumed on {ranks}: {shortened(error.reason)}",
                    fault.promise == "goes on" and "workers" in error.reason,
                )
        if fault.promise == "goes on":
            kept = ended == "done" and loss is not None
            return self._row(name, f"{happened}, loss {loss:.4g} ({self._loss:.4g})", kept)
        wrong = differences(last_state(out), self._expected)
        bits = f"{len(wrong)} numbers differ: {wrong[0]}" if wrong else "equal to the bit"
        return self._row(name, f"{happened}; {bits}", not wrong and ended == "done")

    def _row(self, name: str, happened: str, kept: bool) -> Row:
        shutil.rmtree(self._folder / name, ignore_errors=True)
        return Row(self._way, name, happened, kept)


def shortened(text: str, most: int = 150) -> str:
    """Return a text in one line, cut at some length."""
    line = " ".join(text.replace("|", "/").split())
    return line if len(line) <= most else f"{line[:most].rstrip()} ..."


def table(rows: list[Row]) -> str:
    """Return all rows as Markdown, and the verdict."""
    lines = ["| way | fault | what happened | as promised |", "|---|---|---|---|"]
    for row in rows:
        what, kept = FAULTS[row.fault].what, "yes" if row.kept else "**no**"
        lines.append(f"| {row.way} | {what} | {row.happened} | {kept} |")
    broken = sum(not row.kept for row in rows)
    verdict = f"{len(rows)} faults, {broken} of them with another outcome than promised."
    return "\n".join([*lines, "", verdict, ""])


def main() -> int:
    """Read the options, let all faults happen, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", help="a task's name, or path/to/file.py:ClassName")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", default=",".join(WAYS), help="of training, by commas")
    parser.add_argument("--faults", default=",".join(FAULTS), help="by commas")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int, default=203, help="examples of the training set")
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, help="file for the table")
    args = parser.parse_args()
    defaults, rows = find_task(args.task).defaults, list[Row]()
    with tempfile.TemporaryDirectory(prefix="gradherd-chaos-") as name:
        for way in args.ways.split(","):
            config = RunConfig.of(
                args.task,
                defaults,
                workers=args.ranks,
                epochs=args.epochs,
                limit=args.limit,
                **WAYS[way],
            )
            chaos = Chaos(way, config, args.every, Path(name) / way, args.seed)
            for fault in args.faults.split(","):
                if fault in NOT_FOR.get(way, ()):
                    continue
                rows.append(chaos.strike(fault))
                print(f"{'ok ' if rows[-1].kept else 'NOT'} {way}, {fault}: {rows[-1].happened}")
    if args.out is not None:
        args.out.write_text(table(rows))
    print(table(rows).splitlines()[-1])
    return int(any(not row.kept for row in rows))


if __name__ == "__main__":
    sys.exit(main())
