"""The contract of every registered sparsifier, on virtual and real ranks.

A new method needs no change here: it is tested as soon as it is in `SPARSIFIERS`. The cases also
run with a method of a user's own, which is not in the registry (`EveryNth`).
"""

import dataclasses
import functools
import math
import re
import warnings
from pathlib import Path

import pytest
import torch

import gradherd
from gradherd.lab.ranks import run_ranks
from gradherd.sparsify.registry import (
    SPARSIFIERS,
    setting_names,
    takes_density,
)
from gradherd.sparsify.selector import target_count
from gradherd.sparsify.settings import Sparsify, make_settings
from gradherd.sparsify.virtual_workers import VirtualWorkers
from tests.sparsify.example_sparsifier import EveryNth
from tests.sparsify.rank_work import (
    METHODS,
    Case,
    normal,
    same,
    trace_real,
    trace_virtual,
    undisturbed,
)

SIZES = [1, 2, 4]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Register the method of a user's own, so that names work as for all others."""
    for name, method in METHODS.items():
        monkeypatch.setitem(SPARSIFIERS, name, method)


def sends_all(name):
    """Whether a method knows no density but 1."""
    return METHODS[name]().density == 1


def densities(name):
    return [1.0] if sends_all(name) else [0.001, 0.05, 1.0]


def sparse(name):
    return densities(name)[-2:][0]


def heeds_values(name):
    """Whether it matters how values are sent; where it does not, asking for bf16 warns."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        Sparsify(method=METHODS[name](), values="bf16")
    return not heard


EXCLUSIVE = ("dense", "exdyna", "micro", "cltk", "deft", "randomk")
"""Methods with which a coordinate is selected by one worker at most."""


def transforms(name):
    """Whether a method selects in another basis, so that all coordinates receive something."""
    return name == "demo"


LAW = [
    Case(name, dim, density, steps=6)
    for name in METHODS
    for dim in (1, 3, 40, 5000)
    for density in densities(name)
]
# Values in two rounds, and indices of several pages.
LARGE = [Case(name, 5001, 1.0, torch.float32, steps=2) for name in METHODS]
LARGE += [Case(name, 70_000, densities(name)[0], torch.float32, steps=2) for name in METHODS]
NARROW = [
    Case(name, dim, density, torch.float32, "bf16", steps=steps)
    for name in filter(heeds_values, METHODS)
    for dim, density, steps in ((3, sparse(name), 8), (5000, sparse(name), 4), (5001, 1.0, 2))
]
# Values of a few bits, with indices of 12: those of several chunks, and of all coordinates.
NARROW += [
    Case(name, dim, density, torch.float32, values, steps=3)
    for name in filter(heeds_values, METHODS)
    for dim, density, values in (
        (20_000, sparse(name), "int2"),
        (5001, 1.0, "int4"),
        (40_003, 1.0, "int1"),
    )
    if not sends_all(name)  # what sends all in few bits are local steps
]
STOPPED = [
    Case(name, dim, sparse(name), torch.float32, steps=6, poisoned=poisoned, resumed=resumed)
    for name in METHODS
    for dim, poisoned, resumed in (
        (3, (0, math.nan), 1),
        (40, (3, -math.inf), None),
        (40, None, 4),
        (5000, (2, math.nan), 4),
    )
]
CASES = [*LAW, *LARGE, *NARROW, *STOPPED]
# Real ranks take their time, and are equal to those in one process to the bit: for them a choice.
SHAPES = [(3, 0.05), (5000, 0.001), (5000, 0.05)]
ON_RANKS = [
    *[case for case in LAW if (case.dim, case.density) in SHAPES],
    *[case for case in (*LARGE, *NARROW) if case.dim > 3],
    *[case for case in STOPPED if case.dim > 40],
]


@functools.cache
def real(size):
    """Every rank's story of every case: {case: [story of rank 0, ...]}."""
    cases = on_ranks(size)
    ranks = run_ranks(trace_real, size, cases)
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


@functools.cache
def on_ranks(size):
    """Return the cases that are run on that many real ranks: how values are packed shows on two."""
    return [case for case in ON_RANKS if size < 4 or case not in NARROW]


@functools.cache
def virtual(case, size):
    return trace_virtual(case, size)


def traces_of(case, size):
    return real(size)[case] if case in on_ranks(size) else virtual(case, size)


def of(cases):
    """Run a test on all cases of one method at a time."""
    return pytest.mark.parametrize(
        ("name", "cases"),
        [(name, [c for c in cases if c.name == name]) for name in METHODS],
        ids=list(METHODS),
    )


sizes = pytest.mark.parametrize("size", SIZES)


def law(case, stories, size):
    """Largest error of R sum out + sum of residuals = sum of gradients, as part of the largest."""
    grads = case.grads(size).double()
    actual = size * stories[0].sent.double() + sum(story.residual.double() for story in stories)
    return float((actual - grads.sum((0, 1))).abs().max() / grads.abs().sum((0, 1)).max())


@sizes
@of(LAW)
def test_nothing_is_lost(name, cases, size):
    for case in cases:
        stories = traces_of(case, size)
        assert law(case, stories, size) < 1e-12, case


@sizes
@of(NARROW)
def test_nothing_is_lost_to_narrow_values(name, cases, size):
    for case in cases:
        assert law(case, traces_of(case, size), size) < 1e-6, case


@sizes
@of(CASES)
def test_all_ranks_hold_the_same_bits(name, cases, size):
    for case in cases:
        first, *others = traces_of(case, size)
        for other in others:
            for mine, theirs in zip(first.steps, other.steps, strict=True):
                assert same(mine.indices, theirs.indices), case
                assert same(mine.mean, theirs.mean), case
                assert mine.counts == theirs.counts, case


@sizes
@of(ON_RANKS)
def test_workers_in_one_process_do_the_same_to_the_bit_and_to_the_byte(name, cases, size):
    for case in cases:
        for mine, theirs in zip(traces_of(case, size), virtual(case, size), strict=True):
            assert len(mine.steps) == len(theirs.steps) == case.steps
            for one, other in zip(mine.steps, theirs.steps, strict=True):
                assert same(dataclasses.astuple(one), dataclasses.astuple(other)), case
            assert same(mine.residual, theirs.residual), case
            assert same(mine.state, theirs.state), case
            assert mine.called_off == theirs.called_off, case


@sizes
@of(CASES)
def test_each_coordinate_is_sent_once(name, cases, size):
    for case in cases:
        for step in traces_of(case, size)[0].steps:
            assert step.indices.dtype == torch.int64
            assert len(step.indices.unique()) == len(step.indices) == len(step.mean), case
            inside = (step.indices >= 0) & (step.indices < case.dim)
            assert bool(inside.all()), case
            assert len(step.counts) == size, case
            if name in EXCLUSIVE and case.density < 1:
                assert sum(step.counts) == len(step.indices), case
            else:
                assert max(step.counts) <= case.dim, case
                assert transforms(name) or sum(step.counts) >= len(step.indices), case


@sizes
@of([case for case in CASES if case.density == 1 and case.values == "fp32" and not case.poisoned])
def test_density_one_is_the_plain_mean(name, cases, size):
    for case in cases:
        story = traces_of(case, size)[0]
        for step, grads in zip(story.steps, case.grads(size).double(), strict=True):
            assert step.indices.sort().values.tolist() == list(range(case.dim)), case
            out = torch.zeros(case.dim, dtype=torch.float64)
            out[step.indices] = step.mean.double()
            error = (out - grads.mean(0)).abs()
            precision = torch.finfo(case.dtype).eps
            assert bool((error <= 2 * precision * grads.abs().sum(0)).all()), case
        assert not any(bool(story.residual.any()) for story in traces_of(case, size)), case


@sizes
@of(STOPPED)
def test_steps_called_off_and_resuming_leave_no_trace(name, cases, size):
    for case in cases:
        straight = virtual(undisturbed(case), size)
        for mine, theirs in zip(traces_of(case, size), straight, strict=True):
            # What is not finite on one rank calls the step off on all.
            assert mine.called_off == ([True] if case.poisoned else []), case
            for one, other in zip(mine.steps, theirs.steps, strict=True):
                assert same(dataclasses.astuple(one), dataclasses.astuple(other)), case
            counted = theirs.state | {"skipped": len(mine.called_off)}
            assert same((mine.residual, mine.state), (theirs.residual, counted)), case


def test_the_cases_are_no_idle_ones():
    """Residuals fill up, steps differ, ranks differ, narrow values round."""
    for name in METHODS:
        if sends_all(name):
            continue
        (case,) = [c for c in LAW if (c.name, c.dim, c.density) == (name, 5000, 0.05)]
        stories = traces_of(case, 4)
        assert all(bool(story.residual.any()) for story in stories), name
        assert not same(stories[0].residual, stories[1].residual), name
        assert transforms(name) or 0 < len(stories[0].steps[-1].indices) < 5000, name
        # A rank alone sends nothing.
        assert all(step.bytes == 0 for step in traces_of(case, 1)[0].steps), name
        assert all(step.bytes > 0 for step in stories[0].steps), name


class Spy:
    """A method that records how many coordinates it was asked for."""

    def __init__(self, method):
        self._method, self.asked = method, []

    def __getattr__(self, name):
        return getattr(self._method, name)

    def propose(self, step):
        self.asked.append(step.k)
        return self._method.propose(step)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("start", [1.0, 0.5])
def test_warm_up_asks_for_fewer_from_step_to_step(name, start):
    if sends_all(name):
        pytest.skip("sends everything at every step")
    spy, dim, last = Spy(make_settings(name, 0.01).method), 2000, 0.01
    settings = Sparsify(method=spy, warmup_steps=4, warmup_from=start)
    workers = VirtualWorkers(settings, dim, 2)
    selected = []
    for step in range(7):
        workers.step(normal(step, 2, dim))
        selected.append(workers.metrics["selected"])
        if step == 2:  # A step that is called off is no step of the warm-up.
            assert workers.step(torch.full((2, dim), math.nan)).isnan().all()
    wanted = [start * (last / start) ** (min(step, 4) / 4) for step in (0, 1, 2, 3, 3, 4, 5, 6)]
    assert spy.asked[::2] == spy.asked[1::2]
    assert spy.asked[::2] == [target_count(density, dim) for density in wanted]
    assert spy.asked[0] == start * dim and spy.asked[-1] == 20
    assert selected[0] > selected[-1]
    if start == 1:
        assert selected[0] == dim


@pytest.mark.parametrize("name", METHODS)
def test_a_method_prints_itself_and_equals_its_like(name):
    assert make_settings(name).method == make_settings(name).method
    assert hash(make_settings(name).method) == hash(make_settings(name).method)
    assert "0x" not in repr(make_settings(name).method)


@pytest.mark.parametrize("name", METHODS)
def test_gradients_of_zero_lose_nothing_either(name):
    workers = VirtualWorkers(make_settings(name, sparse(name)), 300, 3)
    sent, computed = torch.zeros(300), torch.zeros(300)
    for step in range(5):
        grads = torch.zeros(3, 300) if step in (0, 2, 3) else normal(step, 3, 300)
        computed += grads.sum(0)
        sent += 3 * workers.step(grads)
    torch.testing.assert_close(sent + workers.residuals().sum(0), computed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("scale", [1e-36, 1e30])
def test_any_scale_will_do(name, scale):
    workers = VirtualWorkers(make_settings(name, sparse(name)), 3000, 2)
    sent, computed = torch.zeros(3000).double(), torch.zeros(3000).double()
    for step in range(4):
        grads = scale * normal(step, 2, 3000)
        computed += grads.double().sum(0)
        sent += 2 * workers.step(grads).double()
    actual = (sent + workers.residuals().double().sum(0)) / scale
    torch.testing.assert_close(actual, computed / scale, rtol=1e-5, atol=1e-4)


# --- The registry ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_registry_describes_a_method(name):
    """What help texts, tables and charts read is there, without a list of names anywhere."""
    assert name in SPARSIFIERS
    summary = METHODS[name].__doc__.partition("\n")[0]
    assert summary.endswith(".") and "\n" not in summary and len(summary) <= 100
    assert takes_density(name) is not sends_all(name)
    known = {field.name for field in dataclasses.fields(METHODS[name])}
    assert {*setting_names(name), "density"} == known
    settings = make_settings(name, None, values="fp32")
    assert settings.method == Sparsify(method=name).method == METHODS[name]()


def test_a_method_of_ones_own_is_one_line():
    assert list(SPARSIFIERS)[-1] == "every-nth"
    assert make_settings("every-nth", 0.5, stride_factor=2).method == EveryNth(0.5, 2)
    with pytest.raises(ValueError, match=r"known are .*, every-nth"):
        make_settings("every-mth")
    with pytest.raises(ValueError, match="unknown setting 'stride' of every-nth; known are stride"):
        make_settings("every-nth", 0.5, stride=2)


@pytest.mark.parametrize("ask", [takes_density, setting_names])
def test_the_registry_names_what_it_knows(ask):
    with pytest.raises(ValueError, match="unknown sparsifier 'odd'; known are dense, exdyna"):
        ask("odd")


def test_every_registered_method_has_its_rows_in_the_page():
    page = Path(gradherd.__file__).parents[2] / "docs" / "few_bytes.md"
    if not page.is_file():
        pytest.skip("an installed package has no docs")
    rows = re.findall(r"^\| `([\w-]+)` \|", page.read_text(), re.M)
    count = {name: rows.count(name) for name in METHODS}
    # What it does, and what differs from the published code; the baseline has none.
    assert {name for name in count if count[name] == 2} == set(METHODS) - {"dense", "every-nth"}
    assert (count["dense"], count["every-nth"]) == (1, 0)
