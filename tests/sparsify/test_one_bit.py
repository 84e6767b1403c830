"""All coordinates in few bits at every step: what both roundings take is sent later."""

import pytest
import torch

from gradherd.comm.script import run_together
from gradherd.hooks.state import merge_parts
from gradherd.sparsify.basics import Dense
from gradherd.comm.message_sizes import VALUE_BITS, value_bytes
from gradherd.sparsify.selector import StepContext
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.value_sums import no_owner_error, owned_spans, sum_values
from gradherd.sparsify.virtual_workers import VirtualWorkers
from gradherd.sparsify.worker import Worker
from tests.sparsify.rank_work import normal, same

ROUNDED = ["bf16", *VALUE_BITS]


def signs(values, length):
    """One bit by hand: the sign, and the mean magnitude of each 256 as bf16, slice by slice."""
    out = torch.empty_like(values)
    for begin in range(0, len(values), length):
        row = torch.zeros(length)
        row[: len(values[begin : begin + length])] = values[begin : begin + length]
        for at in range(0, length, 256):
            group = row[at : at + 256]
            level = group.abs().mean().bfloat16().float()
            row[at : at + 256] = torch.where(group < 0, -level, level)
        out[begin : begin + length] = row[: len(out[begin : begin + length])]
    return out


def test_both_ways_in_one_bit_as_a_loop_would_do_it():
    """Three workers, five steps: residuals of each worker, and of the owner of each slice."""
    count, size = 9001, 3
    length = -(-count // size)
    settings = Sparsify(method="dense", values="int1", dense_below=0)
    workers = VirtualWorkers(settings, count, size)
    left, lost = torch.zeros(size, count), torch.zeros(count)
    for step in range(5):
        grads = normal(step, size, count)
        sums = grads + left
        sent = torch.stack([signs(row, length) for row in sums])
        left = sums - sent
        total = sent[0] + sent[1] + sent[2] + lost
        rounded = signs(total, length)
        lost = total - rounded
        torch.testing.assert_close(workers.step(grads), rounded / size, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(workers.residuals(), left, rtol=1e-4, atol=1e-5)
    owned = torch.cat([worker.owner_error for worker in workers.workers])[:count]
    torch.testing.assert_close(owned, lost, rtol=1e-4, atol=1e-5)
    # Two ways of a bit and of a level for each 256.
    assert workers.metrics["bytes"] == 2 * (size - 1) * value_bytes(length, 1) + 4 * (size - 1)


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(("count", "always"), [(9001, 0), (40_001, 77), (0, 9000)])
def test_what_was_sent_and_what_is_left_is_all_there_was(form, size, count, always):
    total, given = torch.zeros(count + always), torch.zeros(count + always)
    rows = torch.zeros(size, count + always)
    owned = [no_owner_error(row, always, size, form) for row in rows]
    for step in range(6):
        grads = normal(step, size, count + always)
        given += grads.sum(0)
        rows += grads
        scripts = [
            sum_values(row, always, StepContext(0, rank, size), form, owned[rank])
            for rank, row in enumerate(rows)
        ]
        results = [one.value for one in run_together(scripts)]
        assert all(same(one.total, results[0].total) for one in results)
        total += results[0].total
        owned = [one.owner_error for one in results]
        if owned[0] is None:  # in one round
            rows = torch.stack([one.error for one in results])
    waiting = rows.sum(0)
    for rank, one in enumerate(owned):
        for span, at in owned_spans(rows[0], always, StepContext(0, rank, size), form):
            if one is not None:
                waiting[span] += one[at]
    torch.testing.assert_close(total + waiting, given, rtol=1e-4, atol=1e-4)


def worker_of(rank, size, dim, values="int1"):
    settings = Sparsify(method="dense", values=values, dense_below=0)
    return Worker(settings, dim, rank=rank, size=size)


def exchange(workers, grads):
    for worker, grad in zip(workers, grads, strict=True):
        worker.begin(1.0)
        worker.add(0, grad)
    results = run_together([worker.script() for worker in workers])
    for worker, result in zip(workers, results, strict=True):
        worker.commit(result.value)
    return results[0].value.mean


def saved(worker):
    vectors = {"residual": worker.feedback.residual, "owner_error": worker.owner_errors()}
    return worker.state_dict() | {key: {"w": flat.clone()} for key, flat in vectors.items()}


def load(worker, state):
    worker.feedback.residual.copy_(state["residual"]["w"])
    worker.load_owner_errors(state["owner_error"]["w"], merged=state["rank"] is None)
    worker.load_state_dict(state)


@pytest.mark.parametrize("values", ["int1", "int4"])
def test_a_resumed_worker_continues_with_the_same_bits(values):
    dim, size = 30_011, 3
    workers = [worker_of(rank, size, dim, values) for rank in range(size)]
    for step in range(3):
        exchange(workers, normal(step, size, dim))
    resumed = [worker_of(rank, size, dim, values) for rank in range(size)]
    for worker, state in zip(resumed, [saved(worker) for worker in workers], strict=True):
        load(worker, state)
    for step in range(3, 6):
        grads = normal(step, size, dim)
        assert same(exchange(resumed, grads), exchange(workers, grads))


@pytest.mark.parametrize("then", [1, 2, 5])
def test_another_number_of_workers_loses_nothing(then):
    dim, size = 30_011, 3
    workers = [worker_of(rank, size, dim) for rank in range(size)]
    sent = given = torch.zeros(dim)
    for step in range(4):
        grads = normal(step, size, dim)
        given = given + grads.mean(0)
        sent = sent + exchange(workers, grads)
    merged = merge_parts([saved(worker) for worker in workers])
    others = [worker_of(rank, then, dim) for rank in range(then)]
    for worker in others:
        load(worker, merged)
    waiting = torch.stack([worker.feedback.residual for worker in others]).mean(0)
    torch.testing.assert_close(sent + waiting, given, rtol=1e-4, atol=1e-5)


def test_a_step_that_is_called_off_leaves_no_trace():
    dim, size = 20_000, 3
    workers = [worker_of(rank, size, dim) for rank in range(size)]
    exchange(workers, normal(0, size, dim))
    before = [saved(worker) for worker in workers]
    grads = normal(1, size, dim)
    grads[1, 5] = torch.nan
    for worker, grad in zip(workers, grads, strict=True):
        worker.begin(1.0)
        worker.add(0, grad)
    results = run_together([worker.script() for worker in workers])
    assert all(result.value is None for result in results)
    for worker, result, state in zip(workers, results, before, strict=True):
        worker.commit(result.value)
        assert same(worker.feedback.residual, state["residual"]["w"])
        assert same(worker.owner_errors(), state["owner_error"]["w"])


def test_what_nobody_used_keeps_its_errors():
    """Parameters that no worker used: their mean is dropped, so nothing of theirs was sent."""
    dim, size = 20_000, 3
    workers = [worker_of(rank, size, dim) for rank in range(size)]
    for step in range(2):
        exchange(workers, normal(step, size, dim))
    before = [saved(worker) for worker in workers]
    unused = (6_000, 13_000)  # something of every slice
    for worker, grad in zip(workers, normal(2, size, dim), strict=True):
        worker.begin(1.0)
        worker.add(0, grad)
        worker.feedback.exclude(*unused)
    results = run_together([worker.script() for worker in workers])
    for worker, result, state in zip(workers, results, before, strict=True):
        worker.commit(result.value)
        for own, key in (
            (worker.feedback.residual, "residual"),
            (worker.owner_errors(), "owner_error"),
        ):
            assert same(own[slice(*unused)], state[key]["w"][slice(*unused)])
            assert not same(own, state[key]["w"])


def test_all_coordinates_take_no_indices():
    worker = worker_of(0, 1, 5000)
    worker.begin(1.0)
    worker.add(0, torch.ones(5000))
    outcome = run_together([worker.script()])[0].value
    assert outcome.indices is None and outcome.metrics(5000)["density"] == 1
    assert Dense.sends_all
