"""A herd in torch.distributed.checkpoint: every rank gets its own part back, to the bit."""

import pytest
import torch

from gradherd.comm.ranks import RankError, run_ranks
from tests.stateful_work import load_elsewhere, save_and_load


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
