"""What users get wrong is refused or said in one sentence, and metrics leave nothing out."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from gradherd import OrderedSampler, attach
from gradherd.comm import checks
from gradherd.lab.ranks import run_ranks
from tests.attach import mistake_work

DATA = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(0)))


def train(epochs, unit, rows, spoiled):
    """Train with batches of 4; `spoiled` are the numbers of steps whose loss is NaN."""
    model, order = nn.Linear(3, 1), OrderedSampler(DATA, "cd-grab", batch_size=4, unit=unit)
    herd, step = attach(model, order=order, rows=rows), 0
    for _ in range(epochs):
        for (x,) in DataLoader(DATA, batch_size=4, sampler=order):
            loss = model(x).square().mean()
            (loss * torch.nan if step in spoiled else loss).backward()
            herd.finish()
            model.zero_grad()
            step += 1
    return herd


KINDS = pytest.mark.parametrize(
    ("unit", "rows"), [(1, "exact"), (1, "sketch"), (4, "batch"), (4, "sketch")]
)


@KINDS
def test_gradients_that_are_not_finite_are_said_once(unit, rows, caplog):
    with caplog.at_level(logging.WARNING):
        train(2, unit, rows, spoiled={2, 3, 8, 9})
    said = [one for one in caplog.messages if "not finite" in one]
    (line,) = said
    assert line.startswith("gradients are not finite: no order is learned from such batches")


@KINDS
def test_many_of_them_in_a_row_end_the_run(unit, rows, monkeypatch):
    monkeypatch.setattr(checks, "MOST_BROKEN", 8)
    train(3, unit, rows, spoiled={0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15})
    with pytest.raises(RuntimeError, match="gradients were not finite in 8 batches in a row"):
        train(2, unit, rows, spoiled=range(2, 12))


@pytest.mark.parametrize("unit", [1, 4])
def test_one_batch_of_an_epoch_on_one_of_two_ranks_is_said(unit):
    """Rows of many batches travel together, and most of them are finite."""
    first, second = run_ranks(mistake_work.said_of_an_epoch, 2, unit)
    (line,) = first
    assert line.startswith("gradients are not finite: no order is learned from such batches")
    assert second == []


@pytest.mark.parametrize("how", ["zeros", "none", "kept", "accumulated under no_sync"])
def test_zeros_in_place_of_no_gradients_are_said_to_cost_bytes(how):
    first, second = run_ranks(mistake_work.zeroed_gradients, 2, how)
    assert second == []
    if how == "zeros":
        (line,) = first
        assert "zero_grad(set_to_none=False)" in line and "leave set_to_none out" in line
    else:
        assert first == []


def test_finite_gradients_are_not_called_otherwise(caplog):
    with caplog.at_level(logging.WARNING):
        train(3, 1, "exact", spoiled=())
        train(3, 4, "batch", spoiled=())
    assert not caplog.messages


def first_step(order, model, *, named=True, **loader):
    herd, loader = attach(model, order=order), DataLoader(sampler=order, **loader)
    (x,) = next(iter(herd.batches(loader) if named else loader))
    model(x).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("policy", ["cd-grab", "d-rr"])
@pytest.mark.parametrize(("batch", "unit"), [(2, 1), (2, 4), (3, 4), (8, 4), (8, 1)])
def test_a_loader_with_other_batches_is_refused_before_the_first(batch, unit, policy):
    model, order = nn.Linear(3, 1), OrderedSampler(DATA, policy, batch_size=4, unit=unit)
    with pytest.raises(ValueError, match=f"makes batches of {batch}, but .* batch_size=4: give "):
        first_step(order, model, dataset=DATA, batch_size=batch)


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (2, "asked for 2 examples, .* batch_size=4; give the loader the same"),
        (3, "asked for 3 examples, .* batch_size=4; give the loader the same"),
        (8, "received 2 batches before the first forward .of 4 examples each"),
    ],
)
def test_without_a_name_they_are_refused_by_what_they_ask_for(batch, says, unit):
    model, order = nn.Linear(3, 1), OrderedSampler(DATA, "cd-grab", batch_size=4, unit=unit)
    with pytest.raises((ValueError, RuntimeError), match=says):
        first_step(order, model, named=False, dataset=DATA, batch_size=batch)


@KINDS
def test_batches_that_grow_after_an_epoch_are_refused_at_the_first(unit, rows):
    """As many forwards as before would be half an epoch, and gradients of the wrong examples."""
    model, order = nn.Linear(3, 1), OrderedSampler(DATA, "cd-grab", batch_size=4, unit=unit)
    herd = attach(model, order=order, rows=rows)

    def epoch(size):
        for (x,) in DataLoader(DATA, batch_size=size, sampler=order):
            model(x).square().mean().backward()

    epoch(4)
    epoch(4)
    with pytest.raises(RuntimeError, match=r"received 2 batches .* both the same batch_size"):
        epoch(8)
    herd.finish()
    assert herd.metrics()["total_examples_fed_back"] == 48


@pytest.mark.parametrize("policy", ["cd-grab", "d-rr"])
@pytest.mark.parametrize("count", [12, 48])
def test_a_loader_of_another_data_set_is_refused_before_the_first_batch(count, policy):
    other = TensorDataset(torch.randn(count, 3))
    model, order = nn.Linear(3, 1), OrderedSampler(DATA, policy, batch_size=4)
    with pytest.raises(
        ValueError, match=f"the loader's data set has {count} examples, but the sampler's has 24"
    ):
        first_step(order, model, dataset=other, batch_size=4)


def test_other_batches_may_be_looked_at():
    model, order = nn.Linear(3, 1), OrderedSampler(DATA, "cd-grab", batch_size=4)
    herd = attach(model, order=order)
    large = DataLoader(DATA, batch_size=24, sampler=order)
    with torch.no_grad():
        for (x,) in large:
            model(x)
    assert herd.metrics()["examples_fed_back"] == 0
    loader = DataLoader(DATA, batch_size=4, sampler=order)
    for (x,) in loader:
        model(x).square().mean().backward()
    herd.finish()
    assert herd.metrics()["total_examples_fed_back"] == 24


@pytest.mark.parametrize("unit", [1, 4])
def test_layers_that_are_unfrozen_are_named(unit):
    for said in run_ranks(mistake_work.unfrozen, 2, unit):
        assert [one.split(" after ")[0] for one in said] == [
            "0.weight was unfrozen",
            "0.bias was unfrozen",
        ]


@pytest.mark.parametrize("unit", [1, 4])
def test_join_is_refused(unit):
    for said in run_ranks(mistake_work.joins, 2, unit, collective_timeout=20.0):
        assert said.startswith("join() lets a rank stop before the others")


class Parts(BatchSampler):
    """Batches of one's own: those of the sampler, in as many parts."""

    count = 1

    def __iter__(self):
        for batch in super().__iter__():
            size = len(batch) // self.count
            yield from (batch[at : at + size] for at in range(0, len(batch), size))


@pytest.mark.parametrize("count", [1, 2])
def test_batches_of_ones_own_are_those_of_the_sampler(count):
    """Their loader has no batch size, so what it asks for is counted."""
    model, order = nn.Linear(3, 1), OrderedSampler(DATA, "cd-grab", batch_size=4)
    herd, batches = attach(model, order=order), Parts(order, 4, False)
    batches.count, optimizer = count, torch.optim.SGD(model.parameters())

    def epoch():
        for (x,) in DataLoader(DATA, batch_sampler=batches):
            model(x).square().mean().backward()
            optimizer.step()
        herd.finish()

    if count == 1:
        epoch()
        assert herd.metrics()["total_examples_fed_back"] == 24
    else:
        with pytest.raises(
            RuntimeError, match="given 2 examples, but the batch has 4: give the model"
        ):
            epoch()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_sparsifier_says_once_that_gradients_are_not_finite_and_ends_the_run(sharded):
    """On one rank only: the other could not know, and no rank must go on alone."""
    first, second = run_ranks(mistake_work.spoiled_run, 2, sharded)
    assert first["said"] == [
        "gradients are not finite: all ranks get NaN from the exchange, and residuals stay "
        "(a few at the start are normal with a GradScaler)"
    ]
    assert second["said"] == []
    for one in (first, second):
        # Two in a row, a finite one, then so many that it is enough.
        assert (one["error"], one["step"]) == ("TrainingDiverged", 3 + mistake_work.MOST - 1)
        assert one["text"].startswith(
            f"gradients were not finite in {mistake_work.MOST} batches in a row (all ranks get "
        )


def test_metrics_tell_what_was_fed_back_in_all():
    metrics = train(2, 1, "exact", spoiled=()).metrics()
    assert (metrics["epoch"], metrics["examples_fed_back"]) == (2, 0)
    assert metrics["total_examples_fed_back"] == 48


def test_a_plain_module_on_two_ranks_is_named():
    plain, wrapped = (run_ranks(mistake_work.warnings_of_attaching, 2, one) for one in (0, 1))
    assert wrapped == [[], []] and plain[1] == []
    (said,) = plain[0]
    assert said.startswith("model is a plain module on 2 ranks, so gradherd averages no gradients")


@pytest.mark.parametrize("unit", [1, 4])
def test_bytes_in_all_count_the_comparison_of_batches(unit):
    for metrics in run_ranks(mistake_work.metrics_of_an_epoch, 2, unit):
        # Five integers to the other rank at both steps; before rows are sent, once more.
        assert metrics["bytes_for_comparing"] in (80, 120)
        parts = ("total_bytes", "bytes_for_ordering", "bytes_for_comparing")
        assert metrics["bytes_in_all"] == sum(metrics.get(name, 0) for name in parts)
        assert metrics["bytes_for_ordering"] > 0 and metrics["examples_fed_back"] == 0
        assert metrics["total_examples_fed_back"] == 8
