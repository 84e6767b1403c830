"""The private names of torch that FSDP needs, and what gradherd repeats of torch's arithmetic."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradherd.comm.sliced_mean import ColumnLayout, ShardSpan
from gradherd.hooks import fsdp
from gradherd.hooks.fsdp import check_parameters
from gradherd.lab.ranks import run_ranks


def on_one_rank():
    """Return what this torch lacks, what attach would say, and factors beside torch's own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    model = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
    lacks, said = fsdp.missing_fsdp_names(model), ""
    names = fsdp.GROUP_NAMES
    fsdp.GROUP_NAMES = {**names, "from_the_future": "not yet"}
    try:
        check_parameters(model)
    except ValueError as error:
        said = str(error)
    fsdp.GROUP_NAMES = names
    (group,) = fsdp.sharded_groups(model)
    factors = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for divide in (None, 1.0, 3.0, 64.0):
            for forced in (False, True):
                group._group.gradient_divide_factor = divide
                group._group.force_sum_reduction_for_comms = forced
                shard = group.shard_world.group
                before, after, *_ = _fsdp_collectives._get_gradient_divide_factors(
                    shard, None, dtype, "cpu", divide, forced
                )
                factors.append((group.divide_factors(dtype), (before or 1.0, after or 1.0)))
    return lacks, said, factors


@pytest.fixture(scope="module")
def rank():
    return run_ranks(on_one_rank, 1)[0]


def test_this_torch_has_every_private_name(rank):
    lacks, _, _ = rank
    assert not lacks, (
        f"torch {torch.__version__} has no {', '.join(lacks)}: find out what has taken their "
        "place, and change src/gradherd/hooks/fsdp.py"
    )


def test_a_torch_without_one_is_refused_by_name(rank):
    _, said, _ = rank
    assert f"torch {torch.__version__} has no FSDPParamGroup.from_the_future" in said
    assert "DistributedDataParallel" in said


def test_gradients_are_divided_as_torch_does(rank):
    for ours, torchs in rank[2]:
        assert ours == torchs


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(1, 6), st.data())
def test_shards_are_torchs_chunks_and_join_again(shape, ranks, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    span = ShardSpan("w", tuple(shape), dim)
    whole = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
    shards = span.cut({"w": whole}, ranks)
    assert shards.shape == (ranks, span.width(ranks))
    for shard, chunk in zip(shards, torch.chunk(whole, ranks, dim), strict=False):
        if dim == 0:  # FSDP pads behind the rows of a chunk; along others it shards evenly only
            assert torch.equal(shard[: chunk.numel()], chunk.flatten())
            assert not shard[chunk.numel() :].any()
        assert shard[shard > 0].sum() == chunk.sum()
    assert torch.equal(span.join(shards)["w"], whole.flatten())


def test_a_layout_fills_what_is_missing_with_zeros():
    layout = ColumnLayout((ShardSpan("a", (3,), 0), ShardSpan("b", (2, 2), 1)))
    rows = layout.cut({"b": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, 2)
    assert rows.tolist() == [[0, 0, 1, 3], [0, 0, 2, 4]]
