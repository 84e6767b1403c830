"""Run the example and README's loop hundreds of times: how do their processes end?

    python -m tests.stress.examples --runs 500 --jobs 4

Each is run on 2 and on 4 ranks, with and without `detach`, with and without
`destroy_process_group`. Ranks are forks of a process that has imported torch, and end as a script
does, through the interpreter's own shutdown; every tenth run starts fresh interpreters instead, as
torchrun does. All must end with 0 and without a word of C++. Of a process that dies of a signal,
the stacks of its Python threads are shown, and those of gdb where there is one and a core.
"""

import argparse
import faulthandler
import itertools
import json
import os
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 180
"""Seconds after which a process counts as hanging."""
LOOPS = {
    "order": "gh.attach(model, order=sampler)",
    "sparse": "gh.attach(model, sparsify=gh.ExDyna(density=0.01))",
}
# What README's loop leans on.
BEFORE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(512, 64), torch.arange(512) % 10)
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loss_fn, epochs = nn.CrossEntropyLoss(), 3
"""
# Where scikit-learn is missing: random digits.
STAND_IN = """
import numpy

def load_digits(return_X_y=True):
    draw = numpy.random.default_rng(0)
    return draw.integers(0, 17, (1797, 64)).astype(float), draw.integers(0, 10, 1797)
"""
BAD = ("terminate called", "Fatal Python", "Exception ignored", "Segmentation", "Traceback")
KINDS = [
    "-".join(parts)
    for parts in itertools.product(
        ("example", "example_sparse", "readme", "readme_sparse"),
        ("2", "4"),
        ("detach", "left"),
        ("destroy", "kept"),
    )
]
"""Program, ranks, whether it detaches, whether it destroys the process group."""


def program(kind: str) -> str:
    """Return the text of a program."""
    which, _, detach, destroy = kind.split("-")
    if which.startswith("example"):
        text = (ROOT / "examples" / "train_ddp.py").read_text()
    else:
        page = (ROOT / "README.md").read_text()
        (block,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
        text = f"{BEFORE}{block}dist.destroy_process_group()\n"
        plain = LOOPS["order"]
        assert plain in text
        text = text.replace(plain, LOOPS["sparse" if which.endswith("sparse") else "order"])
    for name, keep in (("herd.detach()", detach), ("dist.destroy_process_group()", destroy)):
        assert len(re.findall(rf"^ *{re.escape(name)}", text, re.M)) == 1, f"{kind}: {name}"
        if keep not in ("detach", "destroy"):
            text = re.sub(rf"^( *){re.escape(name)}.*\n", "", text, flags=re.M)
    return text


def arguments(kind: str) -> list[str]:
    """Return what the program is called with."""
    if kind.startswith("readme"):
        return []
    sparse = ["--sparsify", "exdyna"] if kind.startswith("example_sparse") else []
    return ["--epochs", "1", *sparse]


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return torchrun's variables."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    own = {name: str(value) for name, value in names.items()}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    own |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"}
    # The modules of this worktree, not those that are installed.
    return own | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def free_port(ports: "itertools.count[int]") -> int:
    """Return the next port that nobody listens at; each share has a range of its own."""
    for port in ports:
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise AssertionError


def run_fork(folder: Path, kind: str, rank: int, port: int) -> int:
    """Start a rank as a fork; return its process id, or 0 in the rank once its program is over."""
    if pid := os.fork():
        return pid
    out = os.open(folder / f"{rank}.out", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(environment(rank, int(kind.split("-")[1]), port))
    faulthandler.enable()
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    os.chdir(folder)  # for a core
    sys.argv = [kind, *arguments(kind)]
    import torch

    torch.set_num_threads(1)
    # As a script, its names live until the interpreter ends.
    names = runpy.run_path(str(folder / "program.py"), run_name="__main__")
    vars(sys.modules["__main__"]).update(names)
    return 0


def run_fresh(folder: Path, kind: str, port: int) -> list[int]:
    """Run all ranks as fresh interpreters; return their exit codes."""
    size, ranks = int(kind.split("-")[1]), []
    for rank in range(size):
        with (folder / f"{rank}.out").open("w") as out:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "program.py", *arguments(kind)],
                    env=os.environ | environment(rank, size, port),
                    cwd=folder,
                    stdout=out,
                    stderr=out,
                    stdin=subprocess.DEVNULL,
                )
            )
    codes = []
    for one in ranks:
        try:
            codes.append(one.wait(LONGEST))
        except subprocess.TimeoutExpired:
            one.kill()
            codes.append(one.wait())
    return codes


def judged(folder: Path, codes: list[int]) -> str:
    """Return what is wrong with a run, with stacks; "" if nothing is."""
    wrong = []
    for rank, code in enumerate(codes):
        text = (folder / f"{rank}.out").read_text(errors="replace")
        said = [bad for bad in BAD if bad in text]
        if code or said:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            wrong.append(f"rank {rank}: {name}, {said}\n{text[-4000:]}")
    if wrong and shutil.which("gdb"):
        for core in folder.glob("core*"):
            command = ["gdb", "-batch", "-ex", "thread apply all bt", sys.executable, str(core)]
            stacks = subprocess.run(command, capture_output=True, text=True, check=False)
            wrong.append(f"{core.name}\n{stacks.stdout[-8000:]}")
    return "\n".join(wrong)


def share(number: int, of: int, runs: int, seed: int, fresh_every: int, minutes: float) -> int:
    """Run every `of`-th run here, and print what came of them as a line of JSON."""
    # Once, before the forks. None of them starts a thread.
    import torch._dynamo  # noqa: F401

    import gradherd.hooks.attach  # noqa: F401

    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    parent = os.getppid()
    top, begin = Path(tempfile.mkdtemp(prefix="gradherd-examples-")), time.monotonic()
    try:
        from sklearn import datasets  # noqa: F401
    except ImportError:
        (top / "sklearn").mkdir()
        (top / "sklearn" / "__init__.py").touch()
        (top / "sklearn" / "datasets.py").write_text(STAND_IN)
        sys.path.append(str(top))
    ports = itertools.cycle(range(11000 + 400 * number, 11400 + 400 * number))
    counts: dict[str, Counter[str]] = {}
    for run in range(number, runs, of):
        if time.monotonic() - begin > 60 * minutes or os.getppid() != parent:
            break
        kind = KINDS[(run + seed) % len(KINDS)]
        folder, port = top / str(run), free_port(ports)
        folder.mkdir()
        (folder / "program.py").write_text(program(kind))
        fresh = fresh_every > 0 and (run // of) % fresh_every == 0
        if fresh:
            codes = run_fresh(folder, kind, port)
        else:
            pids = []
            for rank in range(int(kind.split("-")[1])):
                pids.append(run_fork(folder, kind, rank, port))
                if pids[-1] == 0:
                    return 0
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        wrong = judged(folder, codes)
        if wrong:
            print(f"run {run}, {kind}, {'fresh' if fresh else 'forked'}: {codes}\n{wrong}")
        count = counts.setdefault(kind, Counter())
        count["runs"] += 1
        count["fresh"] += fresh
        count["wrong"] += bool(wrong)
        count.update(f"exit {code}" for code in codes)
        shutil.rmtree(folder)
    shutil.rmtree(top)
    print(json.dumps(counts), flush=True)
    return 0


def main() -> int:
    """Run all shares side by side and sum up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=len(KINDS))
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--fresh", type=int, default=10, help="each so many-th is fresh; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="which kind comes first")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run after these")
    parser.add_argument("--share", type=int, help="run this share alone, as `main` lets others do")
    args = parser.parse_args()
    if args.share is not None:
        return share(args.share, args.jobs, args.runs, args.seed, args.fresh, args.minutes)
    begin = time.monotonic()
    command = [sys.executable, "-m", "tests.stress.examples", *sys.argv[1:]]
    shares = [
        subprocess.Popen([*command, "--share", str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(args.jobs)
    ]
    found: dict[str, Counter[str]] = {}
    ended = []
    for one in shares:
        printed, _ = one.communicate()
        *wrong, last = printed.strip().splitlines() or [""]
        ended.append(one.returncode)
        if wrong:
            print("\n".join(wrong))
        for kind, counts in (json.loads(last) if last.startswith("{") else {}).items():
            found.setdefault(kind, Counter()).update(counts)
    total = sum(found.values(), Counter())
    lost = sum(code != 0 for code in ended)
    summary = {"runs": total["runs"], "wrong": total["wrong"], "fresh": total["fresh"]}
    summary |= {"exits": {name: n for name, n in total.items() if name.startswith("exit")}}
    summary |= {"shares_that_died": lost, "seconds": round(time.monotonic() - begin)}
    print(json.dumps(summary | {"kinds": {kind: found[kind] for kind in sorted(found)}}))
    return int(bool(total["wrong"] or lost))


if __name__ == "__main__":
    sys.exit(main())
