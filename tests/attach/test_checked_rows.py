"""Rows that are checked while a user's own loop runs: what is left out, on all ranks alike."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.lab.ranks import run_ranks

FEATURES, COUNT, BATCH = 3, 16, 4


class ClassToken(nn.Module):
    """Owns a parameter itself, as vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Parameter(torch.randn(1, FEATURES)), nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.token).tanh()).sum(1)


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(FEATURES, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[0].sum((1, 2))


class Outside(nn.Module):
    """Uses a weight outside its module if asked to."""

    def __init__(self, outside: bool = True) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 20)
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        y = self.small(x).tanh()
        if self.outside:
            y = F.linear(y, self.small.weight)
        return self.large(y).pow(2).sum(1)


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(COUNT, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, 0] * 100).long() % COUNT).pow(2).sum(1)


def train(model: nn.Module, *, unit: int = 1, closure: bool = False, rows="auto", epochs: int = 2):
    """Train and return the herd's metrics."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.rand(COUNT, FEATURES))
    sampler = gh.OrderedSampler(dataset, "cd-grab", batch_size=BATCH, unit=unit, seed=0)
    herd = gh.attach(model, order=sampler, rows=rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(dataset, batch_size=BATCH, sampler=sampler):

            def step(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).mean()
                loss.backward()
                return loss

            if closure:
                optimizer.step(step)
            else:
                step()
                optimizer.step()
    herd.finish()
    metrics = herd.metrics()
    herd.detach()
    return metrics


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("model", [ClassToken, Gru])
def test_looped_modules_in_plain_loops_and_with_a_closure(model, closure: bool) -> None:
    metrics = train(model(), closure=closure)
    assert (metrics["epoch"], "rows_left_out" in metrics) == (2, False)


def test_sparse_gradients_of_whole_batches() -> None:
    assert train(SparseTable(), unit=BATCH)["epoch"] == 2


@pytest.mark.parametrize("rows", ["exact", "sketch"])
def test_what_is_left_out_is_in_the_metrics(rows: str) -> None:
    assert train(Outside(), rows=rows)["rows_left_out"] == ["small.weight"]


@pytest.mark.parametrize("rows", [gh.ExactRows(strict=True), gh.SketchRows(strict=True)])
def test_strict_raises(rows) -> None:
    with pytest.raises(RuntimeError, match=r"small\.weight"):
        train(Outside(), rows=rows)


def on_ranks() -> tuple[list[str], str]:
    """Return what each rank leaves out though only the last has a reason to, and strict's error."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    metrics = train(DDP(Outside(outside=rank == size - 1)), rows="exact")
    try:
        train(DDP(Outside(outside=rank == size - 1)), rows=gh.ExactRows(strict=True))
    except RuntimeError as error:
        return metrics["rows_left_out"], str(error)
    return metrics["rows_left_out"], ""


def test_all_ranks_leave_out_the_same() -> None:
    for left_out, error in run_ranks(on_ranks, 2):
        assert left_out == ["small.weight"]
        assert "strict=True" in error
