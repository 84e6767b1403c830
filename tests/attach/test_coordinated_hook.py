"""Ranks under DDP: batches that ride in its hook, and examples that are gathered beside it."""

from dataclasses import replace

import pytest
import torch

from gradherd.lab.ranks import run_ranks
from tests.attach import attach_work
from tests.attach.attach_work import Loop
from tests.ordering.helpers import same

SMALL = (("bucket_cap_mb", 1e-4),)  # several buckets, of lengths that ranks do not divide
UNUSED = (("find_unused_parameters", True),)
LOOPS = {
    "unnamed epochs": Loop(named=False),
    "accumulate": Loop(accumulate=2),
    "accumulate under no_sync": Loop(accumulate=2, no_sync=True),
    "accumulate three under no_sync": Loop(accumulate=3, no_sync=True, named=False),
    "micro-batches": Loop(parts=2),
    "micro-batches under no_sync": Loop(parts=2, no_sync=True),
    "micro-batches, accumulated": Loop(parts=2, accumulate=2, no_sync=True, named=False),
    "micro-batches and a scaler": Loop(parts=2, scale=64.0, bad=((0, 1, 1), (1, 2, 0))),
    "zeros instead of None": Loop(to_none=False),
    "clip": Loop(clip=True),
    "eval": Loop(look="eval"),
    "look at the loader": Loop(look="loader"),
    "scaler": Loop(scale=64.0),
    "scaler and a skipped step": Loop(scale=64.0, bad=((0, 1, 1), (1, 2, 0))),
    "bucket views": Loop(options=(("gradient_as_bucket_view", True),)),
    "find unused": Loop(options=UNUSED),
    "static graph": Loop(options=(("static_graph", True),)),
}
KINDS = {
    "frozen": Loop(),
    "frozen late": Loop(options=UNUSED),
    "unused": Loop(options=UNUSED),
    "ignored": Loop(accumulate=2, no_sync=True),
}


def check(ranks):
    for found, want in ranks:
        assert found == want
        assert want == ranks[0][1]


def each(size, calls):
    """Return, by name, what `learned` gives on every rank."""
    ranks = run_ranks(attach_work.learned_each, size, *calls.values())
    return dict(zip(calls, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("together", [True, False])
def test_four_ranks_find_the_orders_of_their_batches(together):
    # 27 units: 7, 7, 7 and 6, the last one short
    loop, policies = Loop(options=SMALL, together=together), ("cd-grab", "id-pair-grab", "id-grab")
    for ranks in each(4, {name: (name, 80, 3, 3, "batch", loop) for name in policies}).values():
        check(ranks)


def test_four_ranks_find_the_orders_of_their_examples():
    # 11, 11, 11 and 10 examples in batches of 4; then 27 units of two, the last one short
    one, two = ("cd-grab", 43, 4, 1, "exact"), ("cd-grab", 53, 4, 2, "exact", Loop(named=False))
    for ranks in each(4, {"one": one, "two": two}).values():
        check(ranks)


def test_ranks_that_scatter_columns_find_the_orders_of_their_examples():
    # 119 columns: 40, 40 and 39 with one of padding
    bad = Loop(epochs=2, scale=64.0, bad=((0, 1, 1), (1, 0, 0)))
    calls = [
        ("cd-grab", 31, 4, 1, "exact"),
        ("grab", 31, 4, 2, "exact"),
        ("id-pair-grab", 31, 4, 1, "exact", Loop(epochs=2, named=False)),
        ("cd-grab", 31, 4, 1, "exact", bad),
    ]
    ranks = run_ranks(attach_work.scattered, 3, calls, (1, 1))
    for histories, again, states, by_index in ranks:
        assert all(found == want for found, want in histories)
        assert histories[0][0][:2] != histories[-1][0]
        for straight, elsewhere, back in again:
            assert elsewhere == back == straight
        found, want = by_index
        assert found == want
        # What is saved does not tell how rows came, so any number of ranks can load it.
        (gathered, sent), (scattered, sent_scattered) = states
        assert sent_scattered < 0.6 * sent
        ours, theirs = scattered["ordering"].pop("balance"), gathered["ordering"].pop("balance")
        assert same(scattered["ordering"], gathered["ordering"])
        assert {"running", "sides"} <= ours.keys() == theirs.keys()
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key])


@pytest.fixture(scope="module", params=[True, False], ids=["together", "by bucket"])
def batches(request):
    calls = {}
    for name, loop in LOOPS.items():
        loop = replace(loop, options=loop.options + SMALL, together=request.param)
        calls[name] = ("cd-grab", 30, 3, 3, "batch", loop)
    return each(2, calls)


@pytest.mark.parametrize("name", LOOPS)
def test_batches_in_every_kind_of_loop(batches, name):
    check(batches[name])


@pytest.fixture(scope="module")
def singles():
    return each(2, {name: ("cd-grab", 22, 3, 1, "exact", loop) for name, loop in LOOPS.items()})


@pytest.mark.parametrize("name", LOOPS)
def test_examples_in_every_kind_of_loop(singles, name):
    check(singles[name])


@pytest.mark.parametrize(
    ("unit", "rows", "together"), [(1, "exact", True), (3, "batch", True), (3, "batch", False)]
)
def test_parameters_without_gradient(unit, rows, together):
    calls = {}
    for kind, loop in KINDS.items():
        if kind == "ignored" and unit == 1:
            continue  # single examples have rows of it
        loop = replace(loop, together=together)
        calls[kind] = ("cd-grab", 30, 3, unit, rows, loop, kind)
    for ranks in each(2, calls).values():
        check(ranks)


@pytest.mark.parametrize("together", [True, False])
def test_half_precision_and_a_parameter_that_one_rank_does_not_use(together):
    ranks = run_ranks(attach_work.half_precision_without_some_gradients, 2, together)
    assert ranks[0] == ranks[1] and ranks[0][0] == 2


def test_compiled_model():
    check(run_ranks(attach_work.learned, 2, "cd-grab", 30, 3, 3, "auto", Loop(compiled=True)))


def test_policy_without_rows():
    check(run_ranks(attach_work.learned, 2, "d-rr", 30, 3, 1, "auto", Loop(named=False)))


@pytest.mark.parametrize(
    ("unit", "rows", "together", "layouts"),
    [(1, "exact", True, 1), (4, "batch", True, 1), (4, "batch", False, 2)],
)
def test_average_is_that_of_plain_ddp_to_the_bit_on_all_ranks(unit, rows, together, layouts):
    ranks = run_ranks(attach_work.averages, 4, 4, unit, rows, 4, SMALL, together)
    for ours, theirs, found, metrics in ranks:
        for step, (own, plain) in enumerate(zip(ours, theirs, strict=True)):
            torch.testing.assert_close(own, plain)
            assert torch.equal(own, ranks[0][0][step])
        assert len(found) == layouts  # DDP did rebuild its buckets
        assert metrics["examples_fed_back"] == 12  # the last batch waits for a step
        if rows == "batch":  # one pair: 4 products with the sum, 10 of each two
            assert metrics["bytes_for_ordering"] == 8 * 14 * 3


@pytest.mark.parametrize(
    ("size", "policy", "unit", "rows", "at", "together"),
    [
        (2, "cd-grab", 3, "batch", (0, 0), False),
        (4, "cd-grab", 3, "batch", (1, 2), True),
        (4, "id-grab", 3, "batch", (1, 1), False),
        (2, "id-grab", 3, "batch", (1, 2), True),
        (4, "cd-grab", 1, "exact", (1, 1), True),
    ],
)
def test_state_in_mid_epoch(size, policy, unit, rows, at, together):
    ranks = run_ranks(attach_work.resumed, size, policy, 11 * size, 3, unit, rows, at, together)
    for straight, elsewhere, back in ranks:
        assert elsewhere == straight
        assert back == straight


@pytest.mark.parametrize("together", [True, False])
def test_state_in_mid_epoch_with_parameters_that_ddp_ignores(together):
    settings = ("cd-grab", 22, 3, 3, "batch", (0, 0), together, "ignored")
    for straight, elsewhere, back in run_ranks(attach_work.resumed, 2, *settings):
        assert elsewhere == back == straight


def test_pause():
    check(run_ranks(attach_work.pause_on_ranks, 2))


def test_detach_leaves_plain_ddp():
    for grad, want, kept, hooks in run_ranks(attach_work.detached, 2):
        torch.testing.assert_close(grad, want)
        assert kept and not hooks


@pytest.mark.parametrize(
    ("rows", "unit", "hooked", "says"),
    [
        ("auto", 2, False, "BatchRows"),
        ("auto", 2, True, "whole gradients would be sent for it alone"),
        ("auto", 1, False, "ExactRows"),
        ("batch", 2, True, "needs the communication hook of DDP"),
    ],
)
def test_choice(rows, unit, hooked, says):
    for said in run_ranks(attach_work.log_line, 2, rows, unit, hooked):
        assert len(said) == 1 and says in said[0]


def test_row_sparse_gradients_are_sketched():
    for by_rows, whole in run_ranks(attach_work.row_sparse_embedding, 2, "auto"):
        assert by_rows == whole
        assert by_rows[0] != by_rows[1]


def test_whole_gradients_of_a_row_sparse_embedding_are_refused():
    for said in run_ranks(attach_work.row_sparse_embedding, 2, "batch"):
        assert said.startswith("rows='batch' needs whole gradients from DDP, which averages")


def test_parameters_of_two_kinds_are_averaged_as_ddp_does():
    for ours, theirs in run_ranks(attach_work.mixed_precision, 2):
        for own, plain in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, plain, rtol=0, atol=0)


def test_gradients_may_be_cleared_anywhere_before_the_backward():
    sent = {
        where: run_ranks(attach_work.bytes_for_ordering, 2, where)
        for where in ("before the forward", "before the backward", "after the step")
    }
    few = 4 * 8 * (2 + 3)  # four pairs: products of two vectors with the sum and each other
    assert sent == {where: [few, few] for where in sent}


def test_signs_are_computed_on_the_stream_of_the_loop():
    """Slices are written there: on another one they could be read before."""
    for found in run_ranks(attach_work.where_batches_are_signed, 2):
        assert found == [("MainThread", "gradherd-signs"), "learned", "left"] * 2
