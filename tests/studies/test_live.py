"""cd-grab-live: CD-GraB on predicted gradients, on one stream, in shards and on real ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.comm.script import run_together
from gradherd.lab.ranks import run_ranks
from gradherd.ordering.bounds import parallel_herding_bound
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.pair_grab import CDGraB
from gradherd.ordering.policy import ShardedRows
from studies.methods.live import CDGraBLive
from tests.ordering.helpers import lists, visited, whole_vectors


@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3).filter(any),
    weight=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    missing=st.floats(0, 0.5),
)
@settings(max_examples=60, deadline=None)
def test_it_is_cd_grab_on_gradients_plus_their_last_change(seed, sizes, weight, missing):
    live = Ordering(CDGraBLive(weight=weight), sizes, seed=seed)
    plain = Ordering(CDGraB(), sizes, seed=seed)
    last: dict[tuple[int, int], torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(4):
        assert lists(live.orders) == lists(plain.orders)
        vectors = whole_vectors(seed + 31 * epoch, sizes)
        rows = visited(vectors, live.orders)
        seen = torch.rand(rows.shape[:2], generator=generator) >= missing
        predicted, new = rows.clone(), dict(last)
        for step, worker in torch.nonzero(seen).tolist():
            if step < sizes[worker]:
                unit = worker, int(live.orders[worker][step])
                row = rows[step, worker]
                if unit in last:
                    predicted[step, worker] = row + weight * (row - last[unit])
                new[unit] = row
        last = new
        half = len(rows) // 2
        for part in (slice(0, half), slice(half, None)):
            live.observe(rows[part], seen[part])
        plain.observe(predicted, seen)
        live.end_epoch()
        plain.end_epoch()


def test_it_keeps_balance_where_gradients_change_steadily():
    """Each gradient moves along a line of its own, so predictions are exact."""
    generator = torch.Generator().manual_seed(0)
    start, change = torch.randn(2, 2, 200, 16, generator=generator, dtype=torch.float64)
    bounds = {}
    for name, policy in (("cd-grab", CDGraB()), ("cd-grab-live", CDGraBLive())):
        ordering = Ordering(policy, [200, 200], seed=1)
        for epoch in range(30):
            vectors = list(start + epoch * change)
            bounds[name] = parallel_herding_bound(vectors, ordering.orders) / (1 + epoch)
            ordering.observe(visited(vectors, ordering.orders))
            ordering.end_epoch()
    assert bounds["cd-grab-live"] < 0.9 * bounds["cd-grab"]


def test_shards_of_columns_give_the_same_orders():
    whole = Ordering(CDGraBLive(), [6, 6])
    shards = [Ordering(CDGraBLive(), [6, 6]) for _ in range(2)]
    for epoch in range(4):
        rows = visited(whole_vectors(epoch, [6, 6], dim=5), whole.orders)
        whole.observe(rows)
        run_together(
            [s.learn(ShardedRows((rows[..., c],))) for s, c in zip(shards, COLUMNS, strict=True)]
        )
        for ordering in (whole, *shards):
            ordering.end_epoch()
        assert [lists(s.orders) for s in shards] == [lists(whole.orders)] * 2


COLUMNS = (slice(0, 3), slice(3, 5))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_are_checked(weight):
    with pytest.raises(ValueError, match="weight must be a finite number, at least 0, got"):
        CDGraBLive(weight=weight)
    with pytest.raises(ValueError, match="weight must be a number, got 'a'"):
        CDGraBLive(weight="a")


def train(policy, steps, state=None):
    """Train on whole batches, whose columns are sharded; return next order and state."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)  # gradients change much
    sampler = gh.OrderedSampler(data, policy, batch_size=4, unit=4)
    herd = gh.attach(model, order=sampler)
    if state is not None:
        model.load_state_dict(state["model"])
        herd.load_state_dict(state["herd"])
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    while steps:
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps -= 1
            if not steps:
                break
    saved = {"model": model.state_dict(), "herd": herd.state_dict()}
    orders = lists(sampler.ordering.orders)
    herd.detach()
    return orders, saved


def on_ranks():
    straight, _ = train(CDGraBLive(), 25)
    _, saved = train(CDGraBLive(), 15)  # in the middle of the third epoch
    resumed, _ = train(CDGraBLive(), 10, saved)
    plain, _ = train("cd-grab", 25)
    return straight, resumed, plain


def test_real_ranks_agree_and_resume():
    ranks = run_ranks(on_ranks, 2)
    assert ranks[0] == ranks[1]
    straight, resumed, plain = ranks[0]
    assert straight == resumed != plain
