"""The sparse hook on real ranks under DDP: nothing is lost, whatever the loop does."""

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradherd as gh
from gradherd.lab.ranks import run_ranks
from gradherd.sparsify.virtual_workers import VirtualWorkers
from tests.attach import ddp_work as work


def books_balance(ranks, tolerance=1e-12, given_by=0):
    """R times what was given, plus what all keep, is what all computed."""
    for name, given in ranks[given_by]["given"].items():
        kept = sum(rank["kept"][name].double() for rank in ranks)
        own = sum(rank["own"][name] for rank in ranks)
        torch.testing.assert_close(
            len(ranks) * given + kept, own, rtol=tolerance, atol=tolerance, msg=name
        )


def same_on_all(ranks):
    for rank in ranks[1:]:
        for name, grad in ranks[0]["last"].items():
            assert (grad is None and rank["last"][name] is None) or torch.equal(
                grad, rank["last"][name]
            )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("views", [False, True])
def test_nothing_is_lost_when_buckets_are_rebuilt(size, views):
    ranks = run_ranks(work.plain_steps, size, 5, torch.float64, work.SPARSE, views)
    books_balance(ranks)
    same_on_all(ranks)
    assert sum(kept.abs().sum() for kept in ranks[0]["kept"].values()) > 0
    metrics = ranks[0]["metrics"]
    sparse = 8 * 24 + 24 + 24 * 16 + 16 * 4  # weights and the bias of 24; 16 and 4 are small
    assert metrics["selected"] == int(0.05 * sparse)
    assert metrics["density"] == metrics["selected"] / sparse
    assert sum(metrics["per_rank"]) == metrics["selected"]
    assert len(metrics["per_rank"]) == size
    assert metrics["always_sent"] == 16 + 4
    assert metrics["steps"] == 5
    assert (metrics["bytes"] > 0) == (size > 1)
    assert metrics["residual_norm"] > 0 and metrics["threshold"] > 0 and metrics["padding"] >= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_full_density_is_plain_ddp(dtype):
    settings = gh.Sparsify(method=gh.ExDyna(density=1.0))
    ranks = run_ranks(work.plain_steps, 2, 4, dtype, settings)
    dense = run_ranks(work.dense_steps, 2, 4, dtype)
    for name, given in dense[0].items():
        close = 1e-12 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(ranks[0]["given"][name], given, rtol=close, atol=close)
        assert not ranks[0]["kept"][name].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_narrow_gradients_cannot_hold_stays(dtype):
    ranks = run_ranks(work.plain_steps, 2, 5, dtype, work.SPARSE)
    books_balance(ranks, 1e-5)
    same_on_all(ranks)
    assert all(kept.dtype == torch.float32 for kept in ranks[0]["kept"].values())


def test_a_static_graph_is_fine():
    ranks = run_ranks(work.plain_steps, 2, 5, torch.float64, work.SPARSE, False, True)
    books_balance(ranks)
    same_on_all(ranks)


def test_accumulated_batches_travel_once():
    ranks = run_ranks(work.accumulating, 2)
    books_balance(ranks)
    assert ranks[0]["steps"] == 4


def test_ranks_that_ran_out_of_data_shadow_the_others():
    ranks = run_ranks(work.joining, 3)
    books_balance(ranks, given_by=2)


def test_what_nobody_used_waits():
    ranks = run_ranks(work.branching, 2)
    books_balance(ranks)
    same_on_all(ranks)
    assert ranks[0]["seen"][1] == {
        "left.weight": True,
        "left.bias": True,
        "right.weight": False,
        "right.bias": False,
    }
    assert all(ranks[0]["seen"][4].values())


def test_a_changing_loss_scale_and_an_infinity_leave_residuals_right():
    ranks = run_ranks(work.scaled, 2)
    books_balance(ranks, 1e-5)
    for rank in ranks:
        assert rank["skipped"] == [False, False, False, True, False, False, False]
        assert set(rank["scales"]) == {64.0, 128.0}
        assert rank["metrics"]["skipped_steps"] == 1
        assert rank["metrics"]["steps"] == 6


def test_two_models_do_not_meet():
    for together, apart in run_ranks(work.two_models, 2):
        for number in (0, 1):
            for kind in ("given", "kept"):
                for name, value in together[number][kind].items():
                    assert torch.equal(value, apart[number][kind][name])


def test_memory_order_does_not_matter():
    last, first = (run_ranks(work.images, 2, layout) for layout in (True, False))
    books_balance(last)
    books_balance(first)
    total = {"last": 0.0, "first": 0.0}
    for name in last[0]["kept"]:
        assert last[0]["kept"][name].shape == first[0]["kept"][name].shape
        total["last"] += float(last[0]["kept"][name].square().sum())
        total["first"] += float(first[0]["kept"][name].square().sum())
    # Partitions differ, as numbers lie in another order; how much is kept does not, by much.
    assert total["last"] == pytest.approx(total["first"], rel=0.5)


@pytest.mark.parametrize(
    "settings",
    [
        gh.Sparsify(method=gh.ExDyna(density=0.05), dense_below=20),
        gh.Sparsify(method=gh.ExDyna(density=0.05, rotate=False), dense_below=20),
        gh.Sparsify(method=gh.ExDyna(density=0.05, threshold="online"), momentum=0.9),
        gh.Sparsify(method=gh.Micro(density=0.05), values="bf16", warmup_steps=5),
    ],
    ids=["exdyna", "still", "momentum", "bf16"],
)
def test_a_run_stopped_and_resumed_is_the_same_to_the_bit(settings):
    whole = run_ranks(work.interrupted, 2, settings, 99, 7)
    resumed = run_ranks(work.interrupted, 2, settings, 3, 7)
    for (weights, state), (weights2, state2) in zip(whole, resumed, strict=True):
        assert all(torch.equal(weights[name], weights2[name]) for name in weights)
        assert all(
            torch.equal(kept, state2["residual"][n]) for n, kept in state["residual"].items()
        )
        assert state["step"] == state2["step"] == 7


@pytest.mark.parametrize(
    "settings",
    [
        gh.Sparsify(method=gh.ExDyna(density=0.02), dense_below=0),
        gh.Sparsify(method=gh.ExDyna(density=0.02, rotate=False), dense_below=0),
        gh.Sparsify(method=gh.TopK(density=0.02), dense_below=0, values="bf16"),
        gh.Sparsify(method=gh.ExDyna(density=0.02), dense_below=0, momentum=0.7),
    ],
    ids=["exdyna", "still", "topk", "momentum"],
)
def test_the_hook_does_what_workers_in_one_process_do(settings):
    ranks = run_ranks(work.flat_steps, 4, settings, 6)
    own = [rank[0] for rank in ranks]
    virtual = VirtualWorkers(settings, len(own[0][0]), 4)
    for step in range(6):
        mean = virtual.step(torch.stack([grads[step] for grads in own]))
        for rank in ranks:
            assert torch.equal(mean, rank[1][step])
    for rank, kept in zip(ranks, virtual.residuals(), strict=True):
        assert torch.equal(rank[2], kept)


def test_groups_keep_to_themselves():
    ranks = run_ranks(work.subgroup, 4)
    books_balance(ranks[:2])
    books_balance(ranks[2:])


def test_detach_leaves_plain_averages():
    ranks = run_ranks(work.detached, 2)
    for name, given in ranks[0]["given"].items():
        mean = sum(rank["own"][name] for rank in ranks) / 2
        torch.testing.assert_close(given, mean, rtol=1e-12, atol=1e-12)


def test_both_halves_in_one_loop():
    """A sparsifier changes what travels, not the raw gradients that ordering sees."""
    alone = run_ranks(work.both_halves, 2, False)
    both = run_ranks(work.both_halves, 2, True)
    for (orders, _), (orders2, metrics) in zip(alone, both, strict=True):
        assert orders == orders2
        assert orders[0] != orders[2]
        assert metrics["examples_fed_back"] >= 0 and metrics["density"] > 0
        assert metrics["bytes_for_ordering"] > 0 and metrics["total_bytes"] > 0


def test_what_cannot_work_is_refused_with_a_sentence():
    found = run_ranks(work.complaints, 2)[0]
    assert "wrap the model in DDP" in found["bare"]
    assert "nothing to attach" in found["nothing"]
    assert "'best'" in found["name"] and "exdyna" in found["name"]
    assert "3.0" in found["object"]
    assert "model is attached already" in found["taken"]
    assert "there is one already" in found["hooked"]
    assert "leave sparsify out" in found["sparse"]
    assert "another model" in found["model"]
    assert "rows='batch'" in found["rows"]


def test_a_model_of_small_parameters_only_warns():
    for messages, grad, metrics in run_ranks(work.small_only, 2):
        assert len(messages) == 1 and "nothing is sparsified" in messages[0]
        assert torch.equal(grad, torch.full((2, 3), 1.5))
        assert metrics["density"] == 1 and metrics["selected"] == 0


def test_only_what_the_exchanged_backward_used_travels():
    plan = ["left+right", "left+right", "left+right", "right", "right"]
    books_balance(run_ranks(work.side_backwards, 2, plan))


def test_what_was_frozen_at_first_travels_whole():
    ranks = run_ranks(work.unfrozen, 2)
    mean = sum(own for own, _ in ranks) / 2
    for _, given in ranks:
        torch.testing.assert_close(given, mean, rtol=1e-12, atol=1e-12)


def test_what_was_frozen_when_ddp_was_made_is_refused():
    for message, steps in run_ranks(work.unfrozen_too_late, 2):
        assert message.startswith("0.weight was frozen when DDP was made (2 such parameters)")
        assert "make DDP after unfreezing" in message and steps == 0


def test_parameters_without_numbers_are_fine():
    books_balance(run_ranks(work.with_empty, 2))


def test_foreign_states_are_refused_and_change_nothing():
    for found in run_ranks(work.foreign_states, 2):
        assert "rank 7, expected" in found["rank"]
        assert "workers 9, expected 2" in found["workers"]
        assert "kind 'TopK', expected 'ExDyna'" in found["kind"]
        assert "dim 3, expected" in found["dim"]


def two_momenta():
    """Step with momentum in both, then after detaching; return the error."""
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(30, 20))
    herd = gh.attach(ddp, sparsify=gh.Sparsify(method=gh.TopK(density=0.1), momentum=0.9))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)
    other = nn.Linear(2, 2)
    torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5).step()  # not this model's
    ddp(torch.randn(2, 30)).sum().backward()
    try:
        optimizer.step()
    except ValueError as error:
        raised = str(error)
    herd.detach()
    optimizer.step()
    return raised


def optimizers_beside_methods():
    """Return what is said while some optimizers step beside some methods."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("gradherd").addHandler(handler)
    heard = {}
    kinds = {
        "sgd": partial(torch.optim.SGD, lr=0.1),
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adamw": torch.optim.AdamW,
    }
    for name, method in (("topk", gh.TopK(density=0.1)), ("dense", gh.Dense())):
        for kind, make in kinds.items():
            ddp = DDP(nn.Linear(30, 20))
            herd = gh.attach(ddp, sparsify=method)
            optimizer = make(ddp.parameters())
            for _ in range(2):
                ddp(torch.ones(2, 30)).sum().backward()
                optimizer.step()
            make(ddp.parameters()).step()  # a second one, of which no word is said
            heard[name, kind], said[:] = list(said), []
            herd.detach()
    return heard


def test_what_optimizers_cost_is_said_once_on_one_rank():
    first, second = run_ranks(optimizers_beside_methods, 2)
    (momentum,), (adamw,) = first.pop(("topk", "momentum")), first.pop(("topk", "adamw"))
    assert "SGD has momentum 0.9" in momentum and "lr / (1 - momentum)" in momentum
    assert "AdamW steps with the sparse mean" in adamw and "local steps" in adamw
    assert len(first) == 4 and not any(first.values()) and not any(second.values())


def test_momentum_in_optimizer_and_sparsifier_is_refused():
    for raised in run_ranks(two_momenta, 1):
        assert "SGD has momentum 0.5 and the sparsifier 0.9" in raised
