"""What local steps refuse, hold and leave alone."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import gradherd as gh
from gradherd.hooks.local_steps import LocalExchange
from gradherd.lab.ranks import run_ranks
from gradherd.sparsify import worker
from tests.attach import limit_work as work


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(work.everything, 2)


def test_an_optimizer_that_steps_each_parameter_on_one_rank_is_refused(ranks):
    for result in ranks:
        assert "give local steps the optimizer that it wraps" in result["refused"]
        assert "\n" not in result["refused"]


def test_a_parameter_without_dimensions_is_resumed(ranks):
    for result in ranks:
        (straight, again), steps, moments = result["resumed"]
        assert torch.equal(straight, again)
        assert steps == [8, 8, 8]
        # AdamW's two moments of each parameter; its count of steps is not one.
        assert {name.rsplit("/", 1)[1] for name in moments} == {"exp_avg", "exp_avg_sq"}
        assert moments["logit_scale/exp_avg"] == () and len(moments) == 2 * 3


def test_no_copy_of_the_model_is_held_beside_the_shared_weights(ranks):
    for result in ranks:
        for large, models, fingerprints in result["memory"]:
            assert large == 2, "shared weights and their momentum"
            # And what an owner has lost of its half, messages in one bit, room for a few blocks.
            assert models < 3
            assert fingerprints < 50


def one_worker(make=torch.optim.AdamW, **local):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20))
    optimizer = make(net.parameters(), lr=0.01)
    return net, optimizer, gh.attach(net, optimizer=optimizer, local=gh.LocalSteps(**local))


def backward(net, at):
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(at))
    net(x).square().mean().backward()


def test_tensors_that_an_optimizer_takes_on_later_are_refused_when_it_steps():
    net, optimizer, herd = one_worker()
    backward(net, 0)
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3)) for _ in range(2)]})
    backward(net, 1)
    with pytest.raises(ValueError, match="steps 2 tensors that are not trainable") as error:
        optimizer.step()
    assert "\n" not in str(error.value)
    herd.detach()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_exchanges_as_it_is():
    """None of the exchange is traced: it would be compiled anew for every step that it counts."""
    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        counters.clear()
        net, optimizer, herd = one_worker(torch.optim.SGD, every=2)
        step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for at in range(12):
            optimizer.zero_grad()
            backward(net, at)
            step()
            if at == 5:
                before = counters["stats"]["unique_graphs"]
        graphs = counters["stats"]["unique_graphs"]
        herd.sync()
        found.append((nn.utils.parameters_to_vector(net.parameters()), herd.metrics()))
        herd.detach()
    assert 0 < graphs <= 4 and graphs == before, "no graph for every exchange"
    (eager, counted), (compiled, again) = found
    assert torch.equal(eager, compiled)
    assert counted["exchanges"] == again["exchanges"] == 6
    assert counted["local_steps"] == again["local_steps"] == 12
    torch._dynamo.reset()


def test_the_error_of_the_last_exchange_is_not_lost(monkeypatch):
    net, optimizer, herd = one_worker(every=2, overlap=True)

    def fails(*given):
        raise RuntimeError("the exchange after local step 2 failed: a rank has died")

    monkeypatch.setattr(LocalExchange, "_exchange", fails)
    for at in range(2):
        backward(net, at)
        optimizer.step()
    assert herd.metrics()["exchanges"] == 0, "metrics are for a rank that logs alone"
    with pytest.raises(RuntimeError, match="after local step 2 failed"):
        herd.detach()
    # All the same it is detached: the model can be attached again.
    gh.attach(net, optimizer=optimizer, local=gh.LocalSteps()).detach()


def test_there_is_no_limit_to_the_elements_of_a_model(monkeypatch):
    """Indices of a sparse exchange have 32 bits; all coordinates need none."""
    monkeypatch.setattr(worker, "MAX_COORDINATES", 100)
    *_, herd = one_worker()
    herd.detach()
    with pytest.raises(ValueError, match="100"):
        worker.Worker(gh.Sparsify(method="exdyna"), 101, rank=0, size=1)
