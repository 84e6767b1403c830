"""One small training that every framework runs: data, model, what to do, and what is recorded."""

import multiprocessing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import gradherd as gh

EXAMPLES, BATCH, EPOCHS, RANKS = 48, 4, 3, 2
STEPS = EXAMPLES // BATCH // RANKS  # of one rank in one epoch
STOP = STEPS + 2  # in the middle of the second epoch
DENSITY = 0.1


def use_forkserver() -> None:
    """Start loader workers from a server that has no threads.

    A rank has those of gloo, autograd and gradherd. A fork copies their locks, held or not, and
    now and then a worker dies of it.
    """
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload([__name__])  # or each worker imports torch


@dataclass(frozen=True)
class Plan:
    """What to train: which halves, and where to stop or continue."""

    name: str
    folder: str
    options: dict[str, Any]
    """Arguments of the integration."""
    stop: int | None = None
    """Steps after which to save a checkpoint and stop."""
    resume: bool = False
    """Whether to continue from that checkpoint."""
    accumulate: int = 1
    """Batches of one optimizer step."""
    workers: int = 0
    """Worker processes of the loader, which fetch ahead."""
    limit: int | None = None
    """Batches after which every epoch is cut short."""


def plans(folder: str) -> list[Plan]:
    """Return the trainings of the suite, in order."""
    sparse = gh.Sparsify(method=gh.ExDyna(density=DENSITY), dense_below=16)
    whole = {"order": "cd-grab"}
    both = {"order": "cd-grab", "unit": 1, "sparsify": sparse}
    local = {"order": "cd-grab", "local": gh.LocalSteps(every=5, dense_below=16)}
    found = []
    for name, options in (("whole", whole), ("both", both), ("local", local)):
        found += [
            Plan(name, folder, options),
            Plan(f"{name}-first", folder, options, stop=STOP),
            Plan(f"{name}-rest", folder, options, resume=True),
        ]
    return [
        *found,
        Plan("accumulated", folder, whole, accumulate=2),
        Plan("workers", folder, whole, workers=1),
        Plan("short", folder, whole, limit=STEPS // 2),
    ]


@dataclass
class Trace:
    """What one rank saw."""

    batches: list[list[int]] = field(default_factory=list)
    """Examples of each backward."""
    credits: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Examples that a gradient was credited to, and those that it was computed from."""
    next_order: list[int] = field(default_factory=list)
    """Examples of the epoch after the last, in order."""
    weights: torch.Tensor | None = None
    """All parameters after the last step."""
    logged: dict[str, float] = field(default_factory=dict)
    """What arrived in the framework's own log."""

    def finish(self, model: "Net", herd: gh.Herd) -> "Trace":
        """Note the end of a training."""
        self.batches = list(model.seen)
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        self.weights = torch.cat([p.detach().flatten() for p in whole]).clone()
        self.next_order = herd.sampler.indices()
        return self


class Points(Dataset):
    """Points with labels, and their own index."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(EXAMPLES, 6, generator=generator)
        self.labels = torch.randint(3, (EXAMPLES,), generator=generator)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "labels": self.labels[index], "index": index}


class Net(nn.Module):
    """Returns a loss, and notes the examples of each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
        self.seen: list[list[int]] = []

    def forward(self, x, labels, index):
        loss = nn.functional.cross_entropy(self.net(x), labels)
        if loss.requires_grad:
            examples = index.tolist()
            # Not here: the model also runs forward where rows are checked, without a backward.
            loss.register_hook(lambda grad: self.seen.append(examples))
        return {"loss": loss}


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_loader(kind: type = DataLoader, **options: Any) -> Any:
    return kind(Points(), batch_size=BATCH, **options)


def record_credits(trace: Trace, model: Net) -> None:
    """Have every claim of a gradient noted, beside the examples of the last backward."""
    original = _original_claim

    def claim(self, *args: Any, **kwargs: Any):
        claimed = original(self, *args, **kwargs)
        if claimed is not None:
            order = self.sharding.indices(self.world.rank, self.ordering.orders[self.world.rank])
            first = claimed.step * self.unit
            examples = order[first : first + claimed.examples].tolist()
            trace.credits.append((examples, model.seen[-1]))
        return claimed

    gh.OrderedSampler.claim = claim


_original_claim = gh.OrderedSampler.claim


def checkpoint_file(plan: Plan) -> Path:
    return Path(plan.folder) / f"{plan.name.split('-')[0]}.pt"
