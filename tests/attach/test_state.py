"""Both halves in a loop of one's own: stopped, saved by torch, and with a worthless gradient."""

import pytest
import torch

from gradherd.comm.world import World
from gradherd.hooks.state import HerdState, part_of_rank, unpack
from gradherd.lab.ranks import RankError, run_ranks
from tests.attach.stateful_work import (
    bare_herd,
    continued_elsewhere,
    in_an_own_stateful,
    load_elsewhere,
    one_bad_gradient,
    save_and_load,
    saved_by_rank_0,
    stopped_twice,
)


def test_a_run_goes_on_after_dcp(tmp_path):
    ranks = run_ranks(save_and_load, 2, tmp_path)
    kept = []
    for straight, loaded in ranks:
        assert torch.equal(straight[0], loaded[0])
        assert torch.equal(straight[1], loaded[1])
        assert straight[2].keys() == loaded[2].keys()
        assert all(torch.equal(straight[2][name], loaded[2][name]) for name in straight[2])
        kept.append(torch.cat([straight[2][name].flatten() for name in straight[2]]))
    assert not torch.equal(*kept), "ranks keep different residuals, or this test shows nothing"
    with pytest.raises(RankError, match="rank-0-of-3"):
        run_ranks(load_elsewhere, 3, tmp_path)
    merged = [residual for residual, _ in run_ranks(load_elsewhere, 3, tmp_path, 2)]
    assert len(merged) == 3
    assert all(torch.equal(merged[0][name], one[name]) for one in merged for name in one)


def same(one, other):
    return (
        torch.equal(one[0], other[0])
        and torch.equal(one[1], other[1])
        and all(torch.equal(one[2][name], other[2][name]) for name in one[2])
    )


def test_twice_within_an_epoch_with_other_loader_workers():
    # Epochs have seven steps. The state is taken at the same steps without other workers, too.
    stops = (9, 12)
    straight = run_ranks(stopped_twice, 2, (0, 0, 0), stops)
    # Loader workers of ranks are fresh interpreters, which take seconds to start: one is enough.
    for one, other in zip(run_ranks(stopped_twice, 2, (0, 1, 0), stops), straight, strict=True):
        assert same(one, other)
    unbroken = run_ranks(stopped_twice, 2, (0,), ())
    for one, other in zip(straight, unbroken, strict=True):
        assert same(one, other)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_worthless_gradient_on_one_rank(value):
    ranks = run_ranks(one_bad_gradient, 2, 10, value)
    for around, skipped, told, counts, orders in ranks:
        before, after = around
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert skipped == told == 1, "every rank notices, once"
        assert counts[0].isfinite().all()
        assert all(torch.equal(o.sort().values, torch.arange(len(o))) for o in orders)
    assert torch.equal(ranks[0][3][0], ranks[1][3][0])
    assert torch.equal(ranks[0][3][1], ranks[1][3][1])


def test_rank_0_saves_for_all_ranks(tmp_path):
    ranks = run_ranks(saved_by_rank_0, 2, tmp_path)
    for straight, loaded, errors in ranks:
        assert same(straight, loaded)
        assert "saved with momentum" in errors["momentum"]
        assert "was it saved with other settings than ExDyna" in errors["blocks"]
        assert "was it saved with rows of another kind" in errors["rows"]
        assert all("\n" not in error for error in errors.values())
    assert "rank 0 alone, expected 1" in ranks[1][2]["rank"]
    residuals = [torch.cat([r.flatten() for r in straight[2].values()]) for straight, *_ in ranks]
    assert not torch.equal(*residuals), "ranks keep different residuals, or this test shows nothing"
    # Three ranks continue from the same file, each with the mean of all residuals.
    saved = torch.load(tmp_path / "herd.pt")["sparsify"]
    parts = [saved["residual"], saved["other_ranks"][0]["residual"]]
    for loaded in run_ranks(continued_elsewhere, 3, tmp_path):
        for name, residual in loaded.items():
            mean = (parts[0][name].double() + parts[1][name].double()) / 2
            assert torch.equal(residual, mean.to(residual))


def test_what_one_rank_has_saved_is_the_state_of_all():
    residual = {"w": torch.tensor([1.0, 2.0])}
    alone = {"rank": 0, "workers": 1, "step": 3, "residual": residual, "method": {"threshold": 1.0}}
    for rank in (0, 1):
        part = part_of_rank(alone, World(rank, 2), "sparsify")
        assert torch.equal(part["residual"]["w"], residual["w"])
        assert part["rank"] is None and part["method"] is None  # as merged from several ranks
    assert part_of_rank(alone, World(0, 1), "sparsify") is alone


def test_a_herd_itself_is_refused_by_dcp(tmp_path):
    for refusals, missing in run_ranks(bare_herd, 2, tmp_path):
        assert len(refusals) == 3 and len(missing) == 2
        assert all("give it herd.stateful()" in error for error in refusals)
        assert "Missing key in checkpoint state_dict: herd.dcp_needs_stateful" in missing[0]


def test_a_stateful_of_one_s_own(tmp_path):
    for want, found in run_ranks(in_an_own_stateful, 2, tmp_path):
        assert found == want


class Stub:
    """A herd of which only the state counts."""

    world = World(0, 2)
    state = None

    def state_dict(self, *, gather=True):
        return {"sampler": {"position": 7}}

    def load_state_dict(self, state):
        self.state = state


def test_what_was_loaded_from_other_ranks_can_be_saved_again():
    herd, stub = HerdState(Stub(), saved_by=3), Stub()
    empty = herd.state_dict()
    assert list(empty) == ["rank-0-of-3", "rank-1-of-3", "rank-2-of-3"]
    with pytest.raises(ValueError, match="rank-0-of-3 is empty"):
        herd.load_state_dict(empty)
    herd.load_state_dict(dict.fromkeys(empty, HerdState(stub).state_dict()["rank-0-of-2"]))
    assert unpack(herd.state_dict()["rank-0-of-2"]) == stub.state_dict()
