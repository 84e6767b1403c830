import numpy as np
import pytest
import torch

from gradherd.lab.ranks import run_ranks
from studies.methods import cltk
from studies.methods.cltk import CLTK
from tests.sparsify import one_step
from tests.sparsify.reference_error_feedback import (
    actual,
    assert_conserved,
    assert_same,
    expected,
    gradients,
    number,
)


def chooser(k):
    def choose(acc, step):
        leader = acc[step % len(acc)]
        sent_indices = sorted(range(len(leader)), key=lambda c: -abs(leader[c]))[:k]
        sent = np.zeros_like(acc)
        sent[:, sent_indices] = acc[:, sent_indices]
        return sent

    return choose


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("dim", "density"), [(1, 1.0), (2, 0.5), (31, 0.1), (31, 1.0), (1000, 0.05)]
)
def test_all_send_what_is_largest_for_the_leader(size, dim, density):
    grads, k = gradients(size, dim, steps=6), number(density, dim)
    means, residual, metrics = actual(grads, CLTK(density))
    assert_same((means, residual), expected(grads, chooser(k)))
    assert_conserved(grads, means, residual)
    for step, one in enumerate(metrics):
        assert one["selected"] == k
        assert one["per_rank"] == [k * (rank == step % size) for rank in range(size)]


def test_density_one_is_the_mean():
    grads = gradients(3, 31, steps=1)
    means, residual, _ = actual(grads, CLTK(1.0))
    np.testing.assert_allclose(means[0], grads[0].mean(0), rtol=1e-14)
    assert not residual.any()


def test_only_the_leader_searches(monkeypatch):
    searched = []

    def counted(values, k):
        searched.append(values)
        return torch.arange(k)

    monkeypatch.setattr(cltk, "topk_indices", counted)
    accs = torch.from_numpy(gradients(4, 31)[0])
    for rank in range(4):
        one_step.propose(CLTK(0.1), accs[rank], 3, None, number=6, rank=rank, size=4)
    assert len(searched) == 1 and torch.equal(searched[0], accs[2])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_k_are_sent_where_all_are_equal(value):
    grads = np.full((4, 3, 20), value)
    means, residual, metrics = actual(grads, CLTK(0.25))
    assert {one["selected"] for one in metrics} == {5}
    assert_conserved(grads, means, residual)
    assert (means != 0).sum(1).tolist() == [5 * (value != 0)] * 4


def test_indices_are_sent_once_as_int32_and_not_at_all_at_density_one():
    accs = torch.from_numpy(gradients(3, 31)[0])
    assert [one["bytes"] for one in one_step.together(CLTK(0.2), accs, 6)] == [24] * 3
    assert [one["bytes"] for one in one_step.together(CLTK(1.0), accs, 31)] == [0] * 3


def test_real_ranks_hear_the_leader():
    accs = torch.randn(3, 200)
    cases = [(CLTK(0.1), accs, 20, [200], step) for step in (0, 1, 5)]
    ranks = run_ranks(one_step.several, 3, cases)
    for at, (_, _, k, _, step) in enumerate(cases):
        want = accs[step % 3].abs().topk(k).indices.sort().values
        for rank in ranks:
            assert torch.equal(rank[at]["indices"], want)


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got -1"):
        CLTK(-1)
