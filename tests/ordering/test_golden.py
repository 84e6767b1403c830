"""Numbers printed by the authors' notebook, or re-run from their recipe (facts 4.6)."""

import pytest
import torch

from gradherd.ordering.registry import make_policy
from gradherd.replay.recorded import random_vectors, replay_order
from tests.ordering import reference
from tests.ordering.helpers import lists, make, show, visited


@pytest.fixture(scope="module")
def paper():
    return random_vectors(workers=100, units=100, dim=16, seed=0)


@pytest.fixture(scope="module")
def central(paper):
    return paper.transpose(0, 1).reshape(1, 10_000, 16)  # (time, worker) order


def bounds(vectors, name, rounds):
    return replay_order(vectors, make_policy(name), rounds=rounds).bounds


def test_cd_grab(paper):
    # fmt: off
    expected = [
        38.1267, 19.7855, 10.3477, 4.7555, 3.0918, 2.3973, 2.2172, 1.7980,
        1.7722, 1.5565, 2.0633, 2.5393, 1.9716, 1.5154, 1.7713, 1.7001,
    ]
    # fmt: on
    assert bounds(paper, "cd-grab", 15) == pytest.approx(expected, abs=5.1e-5)


# The authors' printed digits.
ID_GRAB = [
    38.12667262741408,
    24.572691695425917,
    16.103769597642486,
    13.570759338621514,
    15.073761450355109,
    13.185696179917711,
]


@pytest.mark.parametrize("name", ["id-grab", "grab"])
def test_id_grab_to_the_last_digit_and_then_a_fixed_point(paper, name):
    # One more round after the fixed point was reached changes nothing.
    expected = [*ID_GRAB, ID_GRAB[-1], ID_GRAB[-1]]
    assert bounds(paper, name, 7) == pytest.approx(expected, rel=1e-12)


def test_cd_grab_from_the_fixed_point_of_id_grab(paper):
    # The bound stands still from round 5 on, the orders of seven workers only from round 7 on.
    orders = torch.tensor(replay_order(paper, make_policy("id-grab"), rounds=7).orders)
    found = bounds(paper[torch.arange(100).unsqueeze(1), orders], "cd-grab", 5)
    expected = [13.1857, 7.27105, 3.65211, 2.44022, 2.21581, 1.91512]
    assert found == pytest.approx(expected, abs=5.1e-5)


@pytest.mark.parametrize("name", ["id-pair-grab", "pair-grab"])
def test_id_pair_grab(paper, name):
    expected = [38.1267, 25.9036, 19.3161, 21.1246, 15.2493, 15.6218]
    found = bounds(paper, name, 15)
    assert found[:6] == pytest.approx(expected, abs=5.1e-5)
    assert found[-1] == pytest.approx(15.6542, abs=5.1e-5)


def test_centralised_grab(central):
    # fmt: off
    expected = [39.6806, 20.3840, 10.8128, 5.9320, 3.3746, 2.3949, 1.9385, 1.5407, 1.6738, 1.6738]
    # fmt: on
    assert bounds(central, "grab", 9) == pytest.approx(expected, abs=5.1e-5)


@pytest.mark.parametrize("name", ["pair-grab", "cd-grab"])
def test_centralised_pair_grab(central, name):
    expected = [39.6806, 20.0041, 10.6523, 6.2685, 3.9819, 2.7817, 2.4202]
    assert bounds(central, name, 6) == pytest.approx(expected, abs=5.1e-5)


def test_always_plus_stays_at_the_random_level(paper):
    assert bounds(paper, "always-plus", 4) == pytest.approx(
        [38.1, 36.3, 35.3, 36.0, 32.1], abs=0.05
    )


# Two workers, six units, whole numbers: every step can be checked by hand.

TINY = torch.tensor(
    [[[(3 * i + 5 * j) % 7 - 3, (2 * i + 3 * j) % 5 - 2] for j in range(6)] for i in range(2)],
    dtype=torch.float64,
)
ROUND_1 = [[0, 2, 4, 5, 3, 1], [0, 2, 5, 4, 3, 1]]
ROUND_2 = [[0, 4, 3, 1, 5, 2], [2, 5, 3, 1, 4, 0]]
SIGNS = [[1, 1], [1, 1], [1, -1]]  # by pair, then worker: + + + + + -


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tiny_cd_grab(dtype):
    ordering = make("cd-grab", [6, 6])
    show(ordering, list(TINY.to(dtype)))
    memory = ordering.state_dict()["balance"]
    assert memory["sides"][0::2].tolist() == SIGNS
    assert memory["sides"][1::2].tolist() == (-torch.tensor(SIGNS)).tolist()
    assert memory["running"].tolist() == [[1.0, -2.0]]
    ordering.end_epoch()
    assert lists(ordering.orders) == ROUND_1
    show(ordering, list(TINY.to(dtype)))
    ordering.end_epoch()
    assert lists(ordering.orders) == ROUND_2


def test_tiny_reference_agrees_with_the_sheet():
    start = [list(range(6))] * 2
    first = reference.pair_epoch(start, visited(list(TINY), start).numpy(), shared=True)
    assert first.orders == ROUND_1
    assert first.signs == [1, 1, 1, 1, 1, -1]
    assert first.inners == [0, -16, -3, -10, -2, 6]
    assert first.sums[-1].sum(0).tolist() == [1, -2]


def test_ties_go_to_plus_and_a_strict_rule_gives_another_order():
    start = [list(range(6))] * 2
    strict = reference.pair_epoch(
        start,
        visited(list(TINY), start).numpy(),
        shared=True,
        rule=reference.Greedy(strict=True),
    )
    assert strict.orders == [[1, 3, 5, 4, 2, 0], [1, 3, 4, 5, 2, 0]]
    ordering = make("cd-grab", [6, 6])
    show(ordering, list(TINY))
    ordering.end_epoch()
    assert lists(ordering.orders) == ROUND_1 != strict.orders


@pytest.mark.parametrize("name", ["id-pair-grab", "pair-grab"])
def test_tiny_pair_grab(name):
    ordering = make(name, [6, 6])
    show(ordering, list(TINY))
    ordering.end_epoch()
    assert lists(ordering.orders) == [[0, 2, 4, 5, 3, 1], [0, 3, 4, 5, 2, 1]]


def test_the_figure_of_the_repository():
    # 2 workers x 4 examples, signs (+,+) then (-,-): 1,4,3,2 on both workers, counted from 1.
    zero, x, y = [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]
    vectors = torch.tensor([[x, zero, x, zero], [y, zero, y, zero]])
    ordering = make("cd-grab", [4, 4])
    show(ordering, list(vectors))
    assert ordering.state_dict()["balance"]["sides"][0::2].tolist() == [[1, 1], [-1, -1]]
    ordering.end_epoch()
    assert lists(ordering.orders) == [[0, 3, 2, 1]] * 2
