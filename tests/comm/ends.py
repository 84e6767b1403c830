"""README's loop on two ranks that never call detach(), many times: how do the processes end?

python -m tests.comm.ends [RUNS]

Ranks are forks that end as a script does, through the interpreter's own shutdown. Those of
`run_ranks` do not: multiprocessing leaves by `os._exit`.
"""

import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile

RANKS = 2


def count_exit_codes(runs: int) -> dict[int, int]:
    """Return how many processes ended with which exit code."""
    command = [sys.executable, "-m", "tests.comm.ends", str(runs)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    last = ended.stdout.strip().splitlines()[-1]
    return {int(code): count for code, count in json.loads(last).items()}


def _train(rank: int, file: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, TensorDataset

    import gradherd as gh

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(file, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    data = TensorDataset(torch.randn(128, 64), torch.randint(0, 10, (128,)))
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler = gh.OrderedSampler(data, "cd-grab", batch_size=32, unit=32)
    gh.attach(model, order=sampler)
    for x, y in DataLoader(data, batch_size=32, sampler=sampler):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def _main() -> None:
    # Once, before the forks. Neither starts a thread.
    import torch._dynamo  # noqa: F401

    import gradherd.hooks.attach  # noqa: F401

    codes: collections.Counter[int] = collections.Counter()
    folder = tempfile.mkdtemp()
    for run in range(int(sys.argv[1]) if len(sys.argv) > 1 else 30):
        processes = []
        for rank in range(RANKS):
            processes.append(os.fork())
            if processes[-1] == 0:
                return _train(rank, f"{folder}/{run}")
        codes.update(os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in processes)
    shutil.rmtree(folder)
    print(json.dumps(codes))


if __name__ == "__main__":
    _main()
