"""Rows keep what activation checkpointing saves, also on batches on which they are checked."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.rows.row_check import FIRST_CHECKS

WIDTH, POSITIONS, BATCH, BLOCKS, WORDS = 16, 160, 3, 4, 11


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that were made inside and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(made):
            if storage._cdata not in given:  # else a view, perhaps of what was there before
                self._count(storage)
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self._alive:
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            self._alive[key] = weakref.ref(storage, lambda _: self._free(key, size))

    def _free(self, key: int, size: int) -> None:
        self.bytes -= size
        del self._alive[key]


def storages(tree) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(1, 2), -1) @ v
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x.mean(1))


def peaks(rows, reentrant: bool | None, steps: int = FIRST_CHECKS + 1) -> list[int]:
    """Return the peak of each step; the last one is not checked."""
    torch.manual_seed(0)
    count = steps * BATCH
    data = TensorDataset(torch.randint(WORDS, (count, POSITIONS)), torch.arange(count) % WORDS)
    net, sampler = Transformer(reentrant), None
    if rows is not None:
        sampler = gh.OrderedSampler(data, "cd-grab", batch_size=BATCH)
        herd = gh.attach(net, order=sampler, rows=rows)
    found = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for x, y in DataLoader(data, batch_size=BATCH, sampler=sampler):
        with LiveBytes() as live:
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(live.peak)
    if rows is not None:
        assert "rows_left_out" not in herd.metrics()
        assert herd.metrics()["examples_fed_back"] or herd.sampler.epoch == 1
    return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_rows_add_little_to_the_peak_of_a_checkpointed_model(reentrant: bool) -> None:
    plain, whole = peaks(None, reentrant, 2)[-1], peaks(None, None, 2)[-1]
    assert whole > 1.8 * plain  # there is something to lose
    for rows in (gh.SketchRows(size=4), gh.ExactRows(), gh.TwoSidedRows(rank=2, size=64)):
        ratios = [peak / plain for peak in peaks(rows, reentrant)]
        assert max(ratios) < 1.15, (rows, ratios)
