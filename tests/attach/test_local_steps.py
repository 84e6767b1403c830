"""Local steps on real ranks: against a slow reference, saved, resumed, resized, broken."""

import re

import pytest
import torch

import gradherd as gh
from gradherd.lab.ranks import RankError, run_ranks
from tests.attach.local_work import (
    CASES,
    OPTIMIZERS,
    batches,
    continued,
    everything,
    goes_on_alone,
    kept_after_one_exchange,
    last_common_step,
    model,
    one_bit,
    one_bit_net,
    read_saved,
    saved,
    step,
    trains_until_killed,
    under_way,
    vector,
)
from tests.local.reference import Reference

RANKS = 2


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(everything, RANKS, timeout=500)


def exchanged(settings, size):
    """Return a function that exchanges (R, D) differences: their mean, and the new residuals."""
    shapes = [p.numel() for p in model().parameters()]
    small = torch.cat([torch.full((n,), n < settings.dense_below) for n in shapes])
    few = Reference(int((~small).sum()), size, settings.values)
    residuals = torch.zeros(size, len(small))

    def exchange(moved):
        nonlocal residuals
        acc = residuals + moved
        mean, residuals = acc.mean(0), torch.zeros_like(acc)
        mean[~small], residuals[:, ~small] = few.mean(acc[:, ~small])
        return mean, residuals

    return exchange


def reference(settings, steps, size=RANKS):
    """Return (R, steps + 2, D) weights of all ranks, by the definition and one worker at a time."""
    nets = [model() for _ in range(size)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5) for net in nets]
    feeds = [batches(rank) for rank in range(size)]
    shared = vector(nets[0])
    exchange = exchanged(settings, size)
    outer = torch.nn.Parameter(shared.clone())
    momentum = settings.outer_momentum
    sgd = torch.optim.SGD(
        [outer],
        lr=settings.outer_lr,
        momentum=momentum,
        nesterov=momentum > 0,
    )
    starts = shared.repeat(size, 1)
    pending, paths = None, [[vector(net)] for net in nets]

    def begin():
        own = torch.stack([vector(net) for net in nets])
        return own, *exchange(starts - own)

    def apply(pending, synced=False):
        nonlocal starts
        then, outer.grad, residuals = pending
        sgd.step()
        starts = outer.detach().repeat(size, 1)
        if settings.keep_residual and not synced:
            starts -= residuals
        for rank, net in enumerate(nets):
            new = starts[rank] + (vector(net) - then[rank])
            torch.nn.utils.vector_to_parameters(new.clone(), net.parameters())

    taken = 0
    for _ in range(steps):
        for net, optimizer, feed in zip(nets, optimizers, feeds, strict=True):
            step(net, optimizer, next(feed))
        taken += 1
        if pending is not None and taken == settings.steps_until_applied:
            apply(pending)
            pending = None
        if taken == settings.every:
            pending, taken = begin(), 0
            if not settings.overlap:
                apply(pending)
                pending = None
        for path, net in zip(paths, nets, strict=True):
            path.append(vector(net))
    if pending is not None:
        apply(pending)
    if taken:
        apply(begin(), synced=True)
    for path, net in zip(paths, nets, strict=True):
        path.append(vector(net))
    return torch.stack([torch.stack(path) for path in paths])


@pytest.mark.parametrize(
    "case", ["diloco", "overlap", "two bits", "one bit", "one bit, not kept", "one bit, overlap"]
)
def test_it_is_what_the_definition_says(ranks, case):
    expected = reference(CASES[case], 11)
    for rank, result in enumerate(ranks):
        path, _ = result["paths"][case]
        torch.testing.assert_close(path, expected[rank], rtol=1e-4, atol=1e-6)
    assert not torch.equal(expected[0, 1], expected[1, 1]), "ranks drift apart within a phase"


@pytest.mark.parametrize("case", CASES)
def test_weights_are_equal_to_the_bit_after_an_exchange(ranks, case):
    one, other = (result["paths"][case][0] for result in ranks)
    assert torch.equal(one[-1], other[-1])
    assert torch.equal(one[0], other[0]), "attach gives all ranks rank 0's weights"
    settings = CASES[case]
    if not settings.overlap:
        after = one[settings.every], other[settings.every]
        assert torch.equal(*after) != settings.keep_residual
    assert not torch.equal(one[1], other[1])


def test_exchanges_are_few_and_small(ranks):
    _, few = ranks[0]["paths"]["two bits"]
    # 11 steps: after 2, 4, 6, 8 and 10, and by sync().
    assert (few["local_steps"], few["exchanges"]) == (11, 6)
    assert few["total_bytes"] == 6 * few["bytes"] > 0
    _, dense = ranks[0]["paths"]["diloco"]
    assert few["bytes"] < dense["bytes"]


@pytest.mark.parametrize(
    "case",
    [
        ("diloco", 5),
        ("overlap", 5),
        ("overlap", 8),
        ("one bit", 3),
        ("one bit", 5),
        ("one bit, not kept", 4),
        ("one bit, not kept", 6),
        ("one bit, overlap", 5),
        ("one bit, overlap", 8),
    ],
)
def test_a_run_resumed_within_a_phase_has_the_same_bits(ranks, case):
    for result in ranks:
        straight, stopped = result["resumed"][case]
        assert torch.equal(straight[0], stopped[0])
        for at in (1, 2):
            assert all(torch.equal(straight[at][name], stopped[at][name]) for name in stopped[at])
        assert all(map(torch.equal, straight[3], stopped[3]))


@pytest.mark.parametrize("used_by", [0, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_layer_that_one_rank_has_used_is_resumed_with_its_moments(ranks, optimizer, used_by):
    for result in ranks:
        assert torch.equal(*result["branched"][optimizer, used_by])


def test_a_state_gathered_before_the_first_step_is_loaded(ranks):
    for result in ranks:
        assert torch.equal(result["gathered early"], vector(model()))


def test_steps_of_another_optimizer_are_said_and_not_lost(ranks):
    results = [result["another optimizer"] for result in ranks]
    mean = torch.stack([own for _, own, *_ in results]).mean(0)
    for before, own, end, _ in results:
        assert not torch.equal(own, before)
        torch.testing.assert_close(end, mean)
    said = [
        [line for line in told if "nothing was exchanged for 30 steps" in line]
        for *_, told in results
    ]
    assert [len(lines) for lines in said] == [1, 0]


def test_sync_between_two_phases_leaves_equal_weights_and_loses_nothing(ranks):
    (one, exchanges, residual), (other, *_) = (result["synced"] for result in ranks)
    assert exchanges == 2, "there was nothing to exchange"
    for at in (0, 2):
        assert not torch.equal(one[at], other[at])
        assert torch.equal(one[at + 1], other[at + 1])
    # What rounding took of this rank's difference was in its weights, and waits in its residual.
    kept = torch.cat([part.flatten() for part in residual.values()])
    torch.testing.assert_close(one[3] - one[2], kept, rtol=1e-5, atol=1e-7)
    assert kept.any()


def test_sync_of_an_exchange_that_has_just_begun_leaves_equal_weights(ranks):
    """What arrives is added to weights, which rounds."""
    (one, exchanges, _), (other, *_) = (result["synced at once"] for result in ranks)
    assert exchanges == 2
    assert torch.equal(one[1], other[1]) and torch.equal(one[3], other[3])


def test_buffers_are_averaged(ranks):
    expected = torch.stack([result["buffers"][0] for result in ranks]).mean(0)
    for result in ranks:
        torch.testing.assert_close(result["buffers"][1], expected)
    assert torch.equal(ranks[0]["buffers"][1], ranks[1]["buffers"][1])
    assert not torch.equal(ranks[0]["buffers"][0], ranks[1]["buffers"][0])


def test_weights_that_are_not_finite_call_an_exchange_off(ranks):
    for rank, result in enumerate(ranks):
        states, skipped, end, error = result["broken once"]
        assert not error and skipped == 1
        before, at_nan, after, _ = states
        shared = torch.cat([before[1][name].flatten() for name in before[1]])
        for _, own in (at_nan, after):
            assert torch.equal(torch.cat([own[name].flatten() for name in own]), shared)
        # Rank 1 starts again from the shared weights, rank 0 keeps what it has learned.
        assert torch.equal(after[0], shared) == (rank == 1)
        assert end.isfinite().all()
        assert "3 exchanges in a row" in result["broken for good"][3]
        assert "lower learning rate" in result["broken for good"][3]
    assert torch.equal(ranks[0]["broken once"][2], ranks[1]["broken once"][2])


def test_a_model_in_ddp_takes_the_same_steps(ranks):
    for result in ranks:
        found, grads, broadcasts = result["in ddp"]
        half = len(found) // 2
        for plain, wrapped in zip(found[:half], found[half:], strict=True):
            assert torch.equal(torch.as_tensor(plain), torch.as_tensor(wrapped))
        assert torch.equal(grads, ranks[0]["in ddp"][1]), "after detach, DDP averages"
        assert broadcasts


def test_what_does_not_fit_is_refused_in_a_sentence(ranks):
    needles = {
        "taken": "communication hook of DDP",
        "scaler": "bfloat16",
        "both": "give local or sparsify, not both",
        "no optimizer": "optimizer=",
        "other optimizer": "not trainable parameters of the model",
        "no local": "optimizer goes with local",
        "not settings": "got 30",
        "differ": "every=2",
        "a part": "model is attached already",
        "around it": "model is attached already",
        "loaded after attach": "was changed after attach()",
        "order of loading": "load the model and the optimizer first",
        "optimizer last": "momentum_buffer was changed after",
        "out of step": "[[2, 0], [1, 1]]",
        "late parameter": "late.weight was frozen or missing",
    }
    for result in ranks:
        assert result["refusals"].keys() == needles.keys()
        for name, needle in needles.items():
            assert needle in result["refusals"][name], result["refusals"][name]
            assert "\n" not in result["refusals"][name]


def test_what_was_not_sent_is_kept_and_states_are_named():
    for kept, errors in run_ranks(kept_after_one_exchange, 3):
        kind, alone = errors
        assert kind.startswith("local state has kind 'int4', expected 'int1'")
        assert alone.startswith("local state has rank")
        assert all(vector.any() for vector in kept.values())


def test_an_order_learns_from_all_ranks_beside_local_steps(ranks):
    one, other = (result["ordered"] for result in ranks)
    assert torch.equal(torch.stack(list(one[0])), torch.stack(list(other[0])))
    assert one[1] > 0
    assert torch.equal(one[2], other[2])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_another_number_of_ranks_goes_on_without_loss(tmp_path, size):
    before = run_ranks(saved, 2, tmp_path)
    after = run_ranks(continued, size, tmp_path, False)
    states = [state for _, state in before]
    for rank, (weights, state, end) in enumerate(after):
        for name, shared in state["shared"].items():
            assert torch.equal(shared, states[0]["shared"][name])
        if size == 2:
            assert torch.equal(weights, before[rank][0])
        else:
            mean = torch.stack([one for one, _ in before]).mean(0)
            torch.testing.assert_close(weights, mean, rtol=1e-6, atol=1e-7)
            for name, residual in state["residual"].items():
                # What owners have lost is sent with what each rank has not.
                kept = [one["residual"][name] + one["owner_error"][name] for one in states]
                torch.testing.assert_close(residual, torch.stack(kept).mean(0))
        assert torch.equal(end, after[0][2])
    if size == 3:
        for (weights, _, end), own in zip(
            run_ranks(continued, size, tmp_path, True), after, strict=True
        ):
            assert torch.equal(weights, own[0]) and torch.equal(end, own[2])


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run_ranks(trains_until_killed, 2, tmp_path_factory.mktemp("straight"), "", None)


@pytest.mark.parametrize("how", ["die", "sleep", "phase"])
def test_killed_in_an_exchange_or_between(tmp_path, straight, how):
    with pytest.raises(RankError):
        run_ranks(
            trains_until_killed, 2, tmp_path, how, 4 if how == "phase" else 5, collective_timeout=4
        )
    if how != "phase":  # there, all ranks are stopped before the next exchange may come
        error = (tmp_path / "error").read_text()
        assert "the exchange after local step 6 failed" in error
        assert "timeout of 4 s" in error
    assert last_common_step(tmp_path) == (4 if how == "phase" else 5)
    if how != "sleep":
        check_goes_on_alone(tmp_path)
    for one, other in zip(
        run_ranks(trains_until_killed, 2, tmp_path, how, None), straight, strict=True
    ):
        assert torch.equal(one, other), "resumed within the phase that was cut short"


def check_goes_on_alone(folder):
    """One rank takes over what both had learned since the last exchange, and what they owed."""
    saved_states = [read_saved(folder, rank, last_common_step(folder)) for rank in (0, 1)]
    weights, state, end = goes_on_alone(folder)
    flat = [torch.cat([p.flatten() for p in one[0].values()]) for one in saved_states]
    torch.testing.assert_close(weights, torch.stack(flat).mean(0), rtol=1e-6, atol=1e-7)
    for name, residual in state["residual"].items():
        local = [one[2]["local"] for one in saved_states]
        kept = [one["residual"][name] + one["owner_error"][name] for one in local]
        torch.testing.assert_close(residual, torch.stack(kept).mean(0))
    assert end.isfinite().all() and not torch.equal(end, weights)


def test_one_worker_needs_no_process_group():
    settings = CASES["one bit"]
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
    herd = gh.attach(net, optimizer=optimizer, local=settings)
    path = [vector(net)]
    for _, batch in zip(range(7), batches(0), strict=False):
        step(net, optimizer, batch)
        path.append(vector(net))
    herd.sync()
    path.append(vector(net))
    torch.testing.assert_close(torch.stack(path), reference(settings, 7, 1)[0])


def test_half_precision_weights_keep_what_they_cannot_hold():
    net = model().bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    herd = gh.attach(
        net,
        optimizer=optimizer,
        local=gh.LocalSteps(every=1, values="fp32", outer_lr=0.1),
    )
    # Each outer step is a tenth of a unit in the last place: ten of them move the weight.
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0)
    herd.detach()
    herd = gh.attach(
        net, optimizer=optimizer, local=gh.LocalSteps(every=1, values="fp32", outer_lr=0.1)
    )
    for _ in range(16):
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, -8.0)  # one unit in the last place
        optimizer.step()
    assert all((p > 1).all() for p in net.parameters())
    herd.detach()


def run_one_bit():
    return one_bit(torch.distributed.get_rank())


def test_one_bit_is_resumed_and_resized_with_all_its_errors():
    """Three ranks: each rounds a third of the sum for all, and keeps what that took."""
    results = run_ranks(run_one_bit, 3)
    for ends, _, metrics, _ in results:
        (straight, *kept), (resumed, *again) = ends
        assert torch.equal(straight, resumed)
        for one, other in zip(kept, again, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
        assert metrics["density"] == 1 and metrics["exchanges"] == 2
        # Two ways of a bit and of a level for each 256, and small parameters as float32.
        assert metrics["bytes"] < 1.2 * 2 * 2 * (20_000 * (1 + 16 / 256) / 8 + 800) / 3
    weights = [ends[0][0] for ends, *_ in results]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    states = [state for _, state, *_ in results]
    owned = [
        torch.cat([one.flatten() for one in state["owner_error"].values()]) for state in states
    ]
    assert all(one.any() for one in owned)
    assert not ((owned[0] != 0) & (owned[1] != 0)).any(), "every rank has a slice of its own"
    merged = gh.merge_states([{"local": state} for state in states])["local"]
    for name, residual in merged["residual"].items():
        means = torch.stack([state["residual"][name] for state in states]).double().mean(0)
        torch.testing.assert_close(residual.double(), means, rtol=1e-5, atol=1e-9)
        lost = torch.stack([state["owner_error"][name] for state in states]).double().mean(0)
        torch.testing.assert_close(merged["owner_error"][name].double(), lost)
    # Slices of another number of ranks are other ones: what their owners have lost is sent by all.
    net, _, herd = one_bit_net()
    herd.load_state_dict({"local": merged})
    weights = torch.stack([own for *_, own in results]).mean(0)
    torch.testing.assert_close(vector(net), weights, rtol=1e-6, atol=1e-7)
    owed = herd.state_dict()["local"]["residual"]
    for name, lost in merged["owner_error"].items():
        torch.testing.assert_close(owed[name], lost + merged["residual"][name])
    assert max(lost.abs().max() for lost in merged["owner_error"].values()) > 1e-5
    herd.detach()


def test_long_phases_have_momentum_and_a_lower_rate():
    found = {every: gh.LocalSteps(every=every) for every in (1, 2, 4, 8, 32)}
    momenta = {every: round(local.outer_momentum, 3) for every, local in found.items()}
    assert momenta == {1: 0, 2: 0, 4: 0.293, 8: 0.5, 32: 0.75}
    # In the long run a change counts 1 / (1 - momentum) times.
    for local in found.values():
        factor = local.lr_factor(9) / (1 - local.outer_momentum)
        assert factor == pytest.approx(3) and local.outer_lr == 1
    assert gh.LocalSteps(every=8, outer_momentum=0).outer_momentum == 0


def test_residuals_stay_in_weights_where_rounding_makes_them():
    keeps = {"values": "int1"}, {"values": "int4"}
    assert all(gh.LocalSteps(**given).keep_residual for given in keeps)
    not_all = {"values": "fp32"}, {"keep_residual": False}
    assert not any(gh.LocalSteps(**given).keep_residual for given in not_all)


@pytest.mark.parametrize(
    ("settings", "needle"),
    [
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"every": 2.0}, "every must be"),
        ({"outer_lr": 0}, "outer_lr must be in (0, inf), got 0"),
        ({"outer_momentum": 1.0}, "outer_momentum must be in [0, 1)"),
        ({"overlap": 1}, "overlap must be True or False"),
        ({"keep_residual": 0}, "keep_residual must be True or False"),
        ({"keep_residual": True, "values": "fp32"}, "keep_residual needs values of few bits"),
        ({"values": "int3"}, "values must be"),
    ],
)
def test_bad_settings(settings, needle):
    with pytest.raises(ValueError, match="(?s)" + re.escape(needle)):
        gh.LocalSteps(**settings)


def test_a_state_with_an_exchange_under_way_needs_overlap():
    def attached(overlap):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        local = gh.LocalSteps(every=2, overlap=overlap)
        return net, optimizer, gh.attach(net, optimizer=optimizer, local=local)

    net, optimizer, herd = attached(overlap=True)
    feed = batches(0)
    for _ in range(2):
        step(net, optimizer, next(feed))
    state, following = herd.state_dict(), next(feed)
    herd.detach()
    assert {"arrived", "arrival"} <= state["local"].keys()
    *_, plain = attached(overlap=False)
    with pytest.raises(ValueError, match=r"has an exchange under way.* attach with overlap=True"):
        plain.load_state_dict(state)
    plain.detach()
    other, other_optimizer, again = attached(overlap=True)
    again.load_state_dict(state)
    step(other, other_optimizer, following)
    assert again.metrics()["exchanges"] == 1
    again.detach()


def test_metrics_leave_the_error_of_an_exchange_to_the_next_step(monkeypatch):
    net, optimizer, herd = one_bit_net(overlap=True)

    def fails(*_):
        raise RuntimeError("a peer is gone")

    monkeypatch.setattr(herd._exchange, "_exchange", fails)
    for _ in range(4):
        step(net, optimizer, (torch.randn(2, 100), torch.randn(2, 100)))
    assert herd.metrics()["local_steps"] == 4
    with pytest.raises(RuntimeError, match="a peer is gone"):
        herd.sync()
    herd.detach()


def test_states_of_an_exchange_under_way_are_merged():
    states = run_ranks(under_way, 2)
    merged = gh.merge_states([{"local": state} for state in states])["local"]
    for key in ("weights", "arrival"):
        for name, mean in merged[key].items():
            own = [state[key][name] for state in states]
            assert not torch.equal(*own)
            torch.testing.assert_close(mean, sum(own) / 2)
    assert merged["arrived"] == states[1]["arrived"] == {"counts": True, "buffers": None}


def test_a_state_that_lacks_something_is_refused_as_a_whole():
    net = model()
    herd = gh.attach(net, optimizer=torch.optim.AdamW(net.parameters()), local=gh.LocalSteps())
    state, before = herd.state_dict(), vector(net)
    for key in ("step", "taken", "local_steps", "called_off", "synced", "used"):
        local = {name: one for name, one in state["local"].items() if name != key}
        local["shared"] = {name: one + 1 for name, one in local["shared"].items()}
        with pytest.raises(ValueError, match=f"local state has no '{key}': another version"):
            herd.load_state_dict(state | {"local": local})
        assert torch.equal(vector(net), before)
    herd.load_state_dict(state)
    herd.detach()
