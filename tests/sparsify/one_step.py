"""One step of a method, on real ranks or together. Importable by name, so ranks can unpickle it."""

import torch

from gradherd.comm.script import AllGather, run, run_together
from gradherd.comm.world import World
from gradherd.sparsify.selector import Step


def propose(method, acc, k, state, number=1, rank=0, size=1):
    """What one worker proposes."""
    return method.propose(Step(number, rank, size, acc=acc, k=k, state=state))


def agree(method, acc, k, layers, number, rank, size):
    """The script of one worker: show the header, then agree."""
    state = method.begin(len(acc), size, layers)
    step = Step(number, rank, size, acc=acc, k=k, state=state)
    proposal = method.propose(step)
    flag = torch.ones(1, dtype=torch.int32)
    headers = yield AllGather(torch.cat([flag, proposal.header]))
    return (yield from method.agree(step, proposal.own, headers[:, 1:]))


def results(result, header):
    """What came of it, and the bytes without those of the header."""
    chosen = result.value
    return {
        "indices": chosen.indices,
        "counts": chosen.counts,
        "sums": chosen.sums,
        "kept": chosen.kept,
        "bytes": result.bytes - header,
    }


def header_bytes(method, acc, k, layers, size):
    state = method.begin(len(acc), size, layers)
    header = propose(method, acc, k, state, 0, 0, size).header
    return 4 * (1 + len(header)) * (size - 1)


def together(method, accs, k, *, layers=None, step=0):
    """All workers in this process, from (R, D)."""
    size, layers = len(accs), layers or [accs.shape[1]]
    scripts = [agree(method, accs[r], k, layers, step, r, size) for r in range(size)]
    header = header_bytes(method, accs[0], k, layers, size)
    return [results(result, header) for result in run_together(scripts)]


def on_rank(method, accs, k, layers, step):
    """This rank's part of it."""
    world = World.detect()
    own = accs[world.rank]
    header = header_bytes(method, own, k, layers, world.size)
    script = agree(method, own, k, layers, step, world.rank, world.size)
    return results(run(script, world), header)


def several(cases):
    """This rank's part of several methods: (method, accs, k, layers, step) each."""
    return [on_rank(*case) for case in cases]
