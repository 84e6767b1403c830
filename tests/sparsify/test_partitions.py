"""Partitions tile the vector whatever happens, and their borders move to equal loads."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradherd.sparsify.partitions import Blocks, apart, diffuse, even_cuts, recut
from gradherd.sparsify.selecting import padding
from tests.sparsify.reference import bounds, published_moves

dims, many_parts = st.integers(1, 40_000), st.integers(1, 40)
wishes = st.integers(1, 3_000)


@given(dim=dims, wanted=wishes)
@example(dim=32_767, wanted=1024)
@example(dim=33_792, wanted=1024)
@example(dim=11_173_962, wanted=1024)
def test_blocks_cover_the_vector(dim, wanted):
    blocks = Blocks.of(dim, wanted)
    assert (blocks.count - 1) * blocks.size < dim <= blocks.count * blocks.size
    share = dim // wanted
    if share <= 32:
        assert blocks.size == max(1, share)
    else:
        assert blocks.size % 32 == 0
        assert share - 32 < blocks.size <= share


@given(dim=dims, wanted=wishes, parts=many_parts, data=st.data())
@settings(max_examples=200)
def test_partitions_tile_the_vector_for_any_cuts(dim, wanted, parts, data):
    blocks = Blocks.of(dim, wanted)
    inner = st.lists(st.integers(0, blocks.count), min_size=parts - 1, max_size=parts - 1)
    for cuts in ([0, *sorted(data.draw(inner)), blocks.count], even_cuts(blocks.count, parts)):
        found = bounds(blocks, cuts)
        assert len(found) == parts + 1
        assert (found[0], found[-1]) == (0, dim)
        assert found == sorted(found)
        # Only the end of the vector may cut through a block.
        assert all(bound % blocks.size == 0 or bound == dim for bound in found)


@given(blocks=st.integers(1, 5_000), parts=many_parts)
def test_even_cuts_differ_by_one_block(blocks, parts):
    widths = np.diff(even_cuts(blocks, parts))
    assert len(widths) == parts
    assert widths.sum() == blocks
    assert widths.max() - widths.min() <= 1
    assert all(widths[:-1] >= widths[1:])


def distance(loads, border, part, parts):
    """How far a border is from its share of the load, in whole numbers."""
    return abs(parts * sum(loads[:border]) - part * sum(loads))


@given(loads=st.lists(st.integers(0, 9), min_size=1, max_size=14), parts=st.integers(1, 6))
@settings(max_examples=300)
@example(loads=[8, 1, 1, 1, 1], parts=3)
@example(loads=[0, 0, 0, 9], parts=4)
@example(loads=[9, 0, 0, 0], parts=3)
@example(loads=[0, 5, 0, 0, 5, 0], parts=2)
def test_new_borders_are_the_nearest_that_leave_everybody_a_block(loads, parts):
    blocks = len(loads)
    cuts = apart(recut(torch.tensor(loads, dtype=torch.float64), parts), min(1, blocks // parts))
    cuts = cuts.tolist()
    assert (len(cuts), cuts[0], cuts[-1]) == (parts + 1, 0, blocks)
    assert cuts == sorted(cuts)
    if not sum(loads):
        assert cuts == even_cuts(blocks, parts)
    if blocks < parts or not sum(loads):
        return
    assert all(width >= 1 for width in np.diff(cuts))
    for part in range(1, parts):
        allowed = range(cuts[part - 1] + 1, blocks - parts + part + 1)
        assert cuts[part] in allowed
        best = min(distance(loads, border, part, parts) for border in allowed)
        assert distance(loads, cuts[part], part, parts) == best


@given(
    loads=st.lists(st.integers(0, 3), min_size=200, max_size=400).filter(sum),
    parts=st.integers(1, 8),
)
@settings(max_examples=50)
def test_a_part_is_off_by_no_more_than_a_block_where_blocks_are_many(loads, parts):
    loads = np.array(loads) + 1  # no long runs of nothing: nobody is short of blocks
    cuts = recut(torch.from_numpy(loads.astype(float)), parts).tolist()
    for begin, end in pairwise(cuts):
        assert abs(loads[begin:end].sum() - loads.sum() / parts) <= loads.max()


@pytest.mark.parametrize("parts", [2, 5, 16])
@pytest.mark.parametrize("shape", ["slope", "decay", "peak"])
def test_skewed_loads_become_equal(shape, parts):
    block = torch.arange(1024, dtype=torch.float64)
    loads = {
        "slope": block,
        "decay": torch.exp(-block / 200),
        "peak": 1 + 400 * torch.exp(-(((block - 700) / 60) ** 2)),
    }[shape]

    def by_part(cuts):
        return [float(loads[a:b].sum()) for a, b in pairwise(cuts)]

    assert padding(by_part(even_cuts(1024, parts))) > 1.4
    after = padding(by_part(recut(loads, parts).tolist()))
    assert after <= 1 + float(loads.max()) * parts / float(loads.sum())
    assert after < 1.1


@given(
    widths=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(sum),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=300)
def test_diffusion_tiles_and_empties_nobody(widths, seed):
    draw = np.random.RandomState(seed)
    cuts = np.cumsum([0, *widths]).tolist()
    # Nothing is selected where there is no block.
    loads = [int(draw.randint(0, 1000) * draw.randint(0, 2)) * (w > 0) for w in widths]
    before = list(cuts)
    after = diffuse(cuts, loads)
    assert cuts == before
    assert len(after) == len(cuts)
    assert (after[0], after[-1]) == (0, cuts[-1])
    assert after == sorted(after)
    assert all(new >= 1 for new, old in zip(np.diff(after), widths, strict=True) if old)


def test_diffusion_moves_blocks_from_heavy_to_light():
    assert diffuse([0, 10, 20], [300, 100])[1] < 10
    assert diffuse([0, 10, 20], [100, 300])[1] > 10
    assert diffuse([0, 10, 20], [100, 100]) == [0, 10, 20]
    assert diffuse([0, 10, 20], [0, 0]) == [0, 10, 20]
    # A difference within a tenth of the mean is none.
    assert diffuse([0, 10, 20], [104, 96]) == [0, 10, 20]
    assert diffuse([0, 10, 20], [106, 94]) == [0, 9, 20]


class Slope:
    """A world whose blocks have fixed loads: 4 partitions of 32 blocks, loads as given."""

    def __init__(self, loads):
        self.per_block = np.repeat(loads, 32) * 10
        self.cuts = even_cuts(128, 4)

    def loads(self):
        return [int(self.per_block[a:b].sum()) for a, b in pairwise(self.cuts)]

    @property
    def excess(self):
        return padding(self.loads()) - 1


def test_diffusion_does_not_stall_on_a_plateau():
    world = Slope([1.5, 1.0, 1.0, 0.5])
    assert world.excess == pytest.approx(0.5)
    for _ in range(60):
        world.cuts = diffuse(world.cuts, world.loads())
    assert world.excess < 0.15  # three borders, each within a tenth
    settled = world.cuts
    for _ in range(20):  # and it comes to rest
        world.cuts = diffuse(world.cuts, world.loads())
    assert world.cuts == settled


@pytest.mark.parametrize("loads", [[4, 1, 1, 1], [1, 1, 1, 9], [1, 5, 1, 5], [0, 0, 0, 1]], ids=str)
def test_diffusion_settles_from_any_start(loads):
    world = Slope(loads)
    before = world.excess
    for _ in range(120):
        world.cuts = diffuse(world.cuts, world.loads())
    assert world.excess < 0.2 < before
    # Neighbours are within the slack, or within what one block weighs.
    now = world.loads()
    for left, right in pairwise(now):
        assert abs(left - right) <= 0.1 * np.mean(now) + 2 * world.per_block.max()


def test_the_published_rule_stalls_on_a_plateau():
    world = Slope([1.5, 1.0, 1.0, 0.5])
    for _ in range(60):
        world.cuts = published_moves(world.cuts, world.loads(), per_block=sum(world.loads()) / 128)
    assert world.cuts == even_cuts(128, 4)
    assert world.excess == pytest.approx(0.5)
    # The same rule does move borders where heavy and light are neighbours.
    other = Slope([1.5, 0.5, 1.5, 0.5])
    for _ in range(60):
        other.cuts = published_moves(other.cuts, other.loads(), per_block=sum(other.loads()) / 128)
    assert other.excess < 0.3
