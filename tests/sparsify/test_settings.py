"""Every setting is checked when it is built: the error names the argument and shows the value."""

import dataclasses
import math
from itertools import pairwise

import pytest

from gradherd.sparsify.partitioned import ExDyna, Micro
from gradherd.sparsify.registry import SPARSIFIERS
from gradherd.sparsify.selector import target_count
from gradherd.sparsify.settings import Sparsify, make_settings
from studies.methods.demo import DeMo


def refuses(make, **setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError) as caught:
        make(**setting)
    assert name in str(caught.value)
    assert str(value) in str(caught.value)


@pytest.mark.parametrize("name", SPARSIFIERS)
@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.0001, 2, math.nan, math.inf])
def test_the_density_of_every_method(name, density):
    refuses(SPARSIFIERS[name], density=density)
    with pytest.raises(ValueError, match="density"):
        make_settings(name, density)


def senseless(default):
    """Values that no setting with such a default can mean."""
    match default:
        case bool():
            return []
        case str():
            return ["nonsense", ""]
        case int():
            return [-1, -7]
        case float():
            return [math.nan, -1.0, -math.inf]
        case _:
            return [-1.0, math.nan]


SETTINGS = [
    pytest.param(name, field.name, value, id=f"{name} {field.name}={value}")
    for name, make in SPARSIFIERS.items()
    for field in dataclasses.fields(make)
    if field.name != "density"
    for value in senseless(field.default)
]


@pytest.mark.parametrize(("name", "field", "value"), SETTINGS)
def test_every_other_setting_of_every_method(name, field, value):
    refuses(SPARSIFIERS[name], **{field: value})


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (ExDyna, {"threshold": "median"}),
        (ExDyna, {"threshold": 0.1}),
        (ExDyna, {"threshold": None}),
        (ExDyna, {"balance": "recuts"}),
        (ExDyna, {"blocks": 0}),
        (ExDyna, {"memory": 1.0}),
        (ExDyna, {"memory": -0.1}),
        (Micro, {"threshold": "median"}),
    ],
    ids=str,
)
def test_settings_of_partitions(make, setting):
    refuses(make, **setting)


@pytest.mark.parametrize(
    "setting",
    [
        {"values": "fp16"},
        {"values": ""},
        {"dense_below": -1},
        {"dense_below": 1.5},
        {"momentum": -0.1},
        {"momentum": 1.0},
        {"momentum": math.nan},
        {"clip": 0.0},
        {"clip": math.inf},
        {"clip": True},
        {"warmup_steps": -1},
        {"warmup_steps": 2.5},
        {"warmup_steps": True},
        {"warmup_from": 0.0},
        {"warmup_from": 1.5},
        {"warmup_from": math.nan},
    ],
    ids=str,
)
def test_settings_of_the_exchange(setting):
    refuses(lambda **one: Sparsify(method="exdyna", **one), **setting)


def test_values_that_make_no_difference_warn():
    with pytest.warns(UserWarning, match="values='bf16' has no effect on DeMo"):
        Sparsify(method=DeMo(), values="bf16")


def test_an_unknown_name_lists_the_known_ones():
    for make in (make_settings, lambda name: Sparsify(method=name)):
        with pytest.raises(ValueError) as caught:
            make("exdina")
        assert "'exdina'" in str(caught.value)
        assert all(name in str(caught.value) for name in SPARSIFIERS)
        with pytest.raises(ValueError, match=r"known are .*; sage is now in studies/methods"):
            make("sage")


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("exdyna", {"odd": 1}, "unknown setting 'odd' of exdyna; known are threshold, capacity"),
        ("exdyna", {"density": 0.1}, "unknown setting 'density' of exdyna; known are threshold"),
        ("exdyna", {"name": "x"}, "unknown setting 'name' of exdyna"),
        ("topk", {"blocks": 3}, "unknown setting 'blocks' of topk; it has none but its density"),
        ("exdyna", {"blocks": "many"}, "blocks must be a whole number, got 'many'"),
        ("exdyna", {"rotate": 0}, "rotate must be True or False, got 0"),
    ],
)
def test_settings_of_a_method_are_named_if_it_has_none_such(name, settings, says):
    with pytest.raises(ValueError, match=says):
        make_settings(name, 0.01, **settings)


def test_a_name_is_the_method_with_its_defaults():
    for name, make in SPARSIFIERS.items():
        assert Sparsify(method=name).method == make() == make_settings(name).method


@pytest.mark.parametrize(
    ("density", "dim", "k"),
    [
        (1e-3, 1, 1),
        (1e-3, 999, 1),
        (1e-3, 2_999, 2),
        (0.29, 100, 29),  # 28.999999999999996 in floating point
        (0.07, 100, 7),
        (1.0, 1, 1),
        (1.0, 12_345_678, 12_345_678),
        (0.999999, 1000, 999),
        (1e-3, 1_000_000_000, 1_000_000),
    ],
)
def test_a_density_means_that_many(density, dim, k):
    assert target_count(density, dim) == k


def test_warm_up_falls_by_equal_factors_and_then_stays():
    settings = Sparsify(method=ExDyna(0.001), warmup_steps=5, warmup_from=0.25)
    actual = [settings.density(step) for step in range(8)]
    assert actual[0] == 0.25
    assert actual[5:] == [0.001] * 3
    factors = [after / before for before, after in pairwise(actual[:6])]
    assert factors == pytest.approx([(0.001 / 0.25) ** 0.2] * 5)
    # Nothing to warm up from, or no steps to do it in.
    with pytest.warns(UserWarning, match=r"a warm-up from 0.25 has no effect: the density is 0.5"):
        assert Sparsify(method=ExDyna(0.5), warmup_steps=5).density(0) == 0.5
    assert Sparsify(method=ExDyna(0.001), warmup_from=0.25).density(0) == 0.001
