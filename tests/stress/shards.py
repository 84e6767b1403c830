"""Sharded models for longer than the tests: replicas after 200 steps, and runs that are killed.

python -m tests.stress.shards --steps 200 --kills 5
"""

import argparse
import os
import random
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import gradherd as gh
from gradherd.lab.ranks import RankError, run_ranks
from tests.attach import fsdp_sparse_work as work
from tests.attach.fsdp_work import mesh_of

STEPS = 12


def replicas(steps):
    return {name: work.replicas_after((2, 2), name, steps) for name in work.METHODS}


def train(folder, dies_at):
    """Train with a checkpoint after every step; one rank may be killed before one of them."""
    mesh = mesh_of((2, 2))
    model = work.model_of(mesh)
    herd = gh.attach(model, sparsify=work.settings("exdyna", momentum=0.5), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = sorted(Path(folder).glob("*/.metadata"))
    first = 0
    if saved:
        state = model.state_dict()
        dcp.load({"model": state, "herd": herd.stateful()}, checkpoint_id=saved[-1].parent)
        model.load_state_dict(state)
        first = int(saved[-1].parent.name) + 1
    for step in range(first, STEPS):
        if step == dies_at and dist.get_rank() == step % 4:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        work.backward(model, step)
        optimizer.step()
        state = {"model": model.state_dict(), "herd": herd.stateful()}
        dcp.save(state, checkpoint_id=Path(folder) / f"{step:04d}")
    return torch.cat([p.to_local().detach().flatten() for p in model.parameters()])


def killed(random_state):
    """Return whether a run that was killed and started again ends with the same bits."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        straight = run_ranks(train, 4, one, None)
        try:
            run_ranks(train, 4, other, random_state.randrange(1, STEPS), collective_timeout=20.0)
            raise AssertionError("nobody was killed")
        except RankError:
            pass
        resumed = run_ranks(train, 4, other, None)
    return all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=5)
    args = parser.parse_args()
    for rank, found in enumerate(run_ranks(replicas, 4, args.steps, timeout=900)):
        wrong = [name for name, (equal, _) in found.items() if not equal]
        assert not wrong, f"replicas of rank {rank} differ: {wrong}"
    print(f"{len(work.METHODS)} methods: replicas are equal to the bit after {args.steps} steps")
    draw = random.Random(0)
    for number in range(args.kills):
        assert killed(draw), f"kill {number} changed the result"
    print(f"{args.kills} runs that were killed and resumed: equal to the bit")


if __name__ == "__main__":
    main()
