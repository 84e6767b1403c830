"""Rows are read from the layers in which the gradients of examples differ most."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.lab.ranks import run_ranks
from gradherd.rows import layer_choice, row_check
from gradherd.rows.capture import Capture
from gradherd.rows.layer_choice import (
    CHOSEN_AFTER,
    CHOSEN_AGAIN,
    LayerChoice,
    centred_gram,
)
from gradherd.rows.settings import SketchRows, TwoSidedRows

LAYERS, WIDTH, BATCH = 12, 6, 8
QUIET = (2, 5, 7, 8, 9)
"""Layers with small gradients."""


class Net(nn.Module):
    """Layers side by side; what comes from some of them hardly counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("weights", torch.ones(LAYERS))
        self.weights[list(QUIET)] = 0.01

    def forward(self, x):
        return sum(w * one(x).tanh() for w, one in zip(self.weights, self.layers, strict=True))


def step(model, capture, seed):
    """Return the rows of a batch."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model(x).square().sum(1).mean().backward()
    return capture.pop_rows(BATCH)


def make(settings=None):
    torch.manual_seed(0)
    model = Net()
    return model, Capture(model, settings or TwoSidedRows(layers=7), batch_size=BATCH)


def idle_layers(capture):
    return [int(name.rpartition(".")[2]) for name in capture.state_dict()["idle"] or ()]


def projected(model, capture, skipped=()):
    """Return the row that the gradients of all layers but some amount to."""
    total = 0
    for name, parameter in model.named_parameters():
        if int(name.split(".")[1]) not in skipped:
            total = total + capture.project_rows(name, parameter.grad[None])
    return total[0]


@pytest.mark.parametrize("settings", [TwoSidedRows(layers=7), SketchRows(layers=7)])
def test_quiet_layers_are_not_read_any_more(settings):
    model, capture = make(settings)
    for seed in range(CHOSEN_AFTER + 4):
        mean = step(model, capture, seed).mean(0)
        skipped = QUIET if seed >= CHOSEN_AFTER else ()
        torch.testing.assert_close(mean, projected(model, capture, skipped))
        assert idle_layers(capture) == list(skipped)
    assert not torch.allclose(mean, projected(model, capture), rtol=1e-4)


def test_layers_below_the_least_share_are_not_read_even_if_there_is_room():
    model, capture = make(TwoSidedRows(layers=10))
    for seed in range(CHOSEN_AFTER + 1):
        step(model, capture, seed)
    assert idle_layers(capture) == list(QUIET)


@pytest.mark.parametrize("most", [None, LAYERS])
def test_all_layers_are_read_where_there_are_no_more_than_asked_for(most):
    model, capture = make(TwoSidedRows(layers=most))
    for seed in range(CHOSEN_AFTER + 2):
        mean = step(model, capture, seed).mean(0)
    torch.testing.assert_close(mean, projected(model, capture))
    assert idle_layers(capture) == []


def test_layers_are_chosen_anew_at_regular_checks(monkeypatch):
    monkeypatch.setattr(row_check, "CHECK_EVERY", 40)
    model, capture = make()
    for seed in range(41):
        if seed == 30:
            model.weights.fill_(1)
            model.weights[list(range(5))] = 0.01
        step(model, capture, seed)
        if seed == 39:
            assert idle_layers(capture) == list(QUIET)
    assert idle_layers(capture) == [0, 1, 2, 3, 4]


def test_a_batch_that_is_not_finite_chooses_nothing(monkeypatch):
    monkeypatch.setattr(row_check, "CHECK_EVERY", 40)
    model, capture = make()
    for seed in range(41):
        if seed == CHOSEN_AFTER:
            model(torch.full((BATCH, WIDTH), torch.nan)).square().sum(1).mean().backward()
            capture.pop_rows(BATCH)
        else:
            step(model, capture, seed)
        if seed < 40:
            assert idle_layers(capture) == []
    assert idle_layers(capture) == list(QUIET)


def test_a_weight_that_is_used_twice_is_always_read():
    torch.manual_seed(0)
    model = Net()
    model.layers[5].weight = model.layers[2].weight
    capture = Capture(model, TwoSidedRows(layers=3), batch_size=BATCH)
    for seed in range(CHOSEN_AFTER + 1):
        step(model, capture, seed)
    assert {2, 5}.isdisjoint(idle_layers(capture))
    assert len(idle_layers(capture)) == LAYERS - 2 - 3


@pytest.mark.parametrize("saved_after", [10, CHOSEN_AFTER, CHOSEN_AFTER + 1, CHOSEN_AFTER + 3])
def test_a_capture_that_goes_on_reads_the_same_rows(saved_after):
    model, capture = make()
    straight, state = [], {}
    for seed in range(CHOSEN_AFTER + 8):
        if seed == saved_after:
            state = copy.deepcopy(capture.state_dict())
        straight.append(step(model, capture, seed))
    again, later = make()
    later.load_state_dict(state)
    for seed in range(saved_after, CHOSEN_AFTER + 8):
        assert torch.equal(step(again, later, seed), straight[seed])


# dynamo's own, about how it traces autograd functions
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_compiled_model_is_compiled_once_more_and_then_stays():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, compiled = Net(), 0

    def backend(graph, inputs):
        nonlocal compiled
        compiled += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    fast = torch.compile(model, backend=backend, fullgraph=True)
    capture = Capture(fast, TwoSidedRows(layers=7), batch_size=BATCH)
    for seed in range(CHOSEN_AFTER + 4):
        mean = step(fast, capture, seed).mean(0)
        skipped = QUIET if seed >= CHOSEN_AFTER else ()
        torch.testing.assert_close(mean, projected(model, capture, skipped))
        assert compiled == 1 + (seed > CHOSEN_AFTER)
    assert idle_layers(capture) == list(QUIET)
    # What is checked later are the layers that are read.
    capture.restart_checks()
    for seed in range(5):
        step(fast, capture, seed)
    assert not capture.left_out and compiled == 2
    capture.load_state_dict(capture.state_dict() | {"batches": CHOSEN_AGAIN})
    for seed in range(3):
        step(fast, capture, seed)
    assert idle_layers(capture) == list(QUIET) and compiled == 2


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_blocks_that_are_compiled_alike_are_all_read():
    torch._dynamo.reset()
    model, capture = make()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    for seed in range(CHOSEN_AFTER + 2):
        mean = step(model, capture, seed).mean(0)
    torch.testing.assert_close(mean, projected(model, capture))
    assert idle_layers(capture) == []


def trained(shards, layers, steps):
    """Train on ranks on which other layers are quiet; return those that are idle."""
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    model = Net()
    data = TensorDataset(torch.randn(2 * BATCH * steps, WIDTH))
    order = gh.OrderedSampler(data, "cd-grab", batch_size=BATCH)
    if shards:
        for layer in model.layers:
            fully_shard(layer)
        wrapped = fully_shard(model)
    else:
        wrapped = DDP(model)
    herd = gh.attach(wrapped, order=order, rows=TwoSidedRows(layers=layers))
    model.weights.fill_(1)
    model.weights[[rank, rank + 2]] = 0.01
    for (x,) in DataLoader(data, batch_size=BATCH, sampler=order):
        wrapped(x).square().sum(1).mean().backward()
        wrapped.zero_grad()
    state = herd.state_dict()
    assert "rows_left_out" not in herd.metrics()
    herd.detach()
    return state["rows"]["idle"]


@pytest.mark.parametrize("shards", [False, True])
def test_ranks_read_the_same_layers(shards):
    one, other = run_ranks(trained, 2, shards, 8, CHOSEN_AFTER + 4)
    assert one == other
    assert len(one) == LAYERS - 8


def test_layers_of_large_batches_are_compared_by_some_of_their_examples():
    torch.manual_seed(0)
    layer = Net().layers[0]
    capture = Capture(layer, SketchRows(), batch_size=300)
    layer(torch.randn(300, WIDTH)).square().mean().backward()
    (tapped,) = capture._pool.layers
    grams = []

    def noted(*args):
        grams.append(centred_gram(*args))
        return grams[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_choice, "centred_gram", noted)
        LayerChoice(capture._pool, [tapped], 1).levels(300)
    assert [gram.shape for gram in grams] == [(64, 64)]


def test_the_log_says_how_many_layers_are_read(caplog):
    model, capture = make()
    with caplog.at_level(logging.INFO, "gradherd"):
        for seed in range(CHOSEN_AFTER + 1):
            step(model, capture, seed)
    assert "rows are read from 7 of 12 layers" in caplog.text


def test_wrong_numbers_of_layers_are_refused():
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="layers must be"):
            TwoSidedRows(layers=wrong)
