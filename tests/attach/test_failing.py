"""What fails says so in a sentence and leaves nothing behind."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradherd as gh
from gradherd.hooks.attach import check_device
from gradherd.hooks.local_steps import FlatWeights
from gradherd.lab.ranks import RankError, run_ranks
from tests.attach import failing_work as work


@pytest.mark.parametrize("rows", ["exact", "sketch"])
def test_an_error_while_attaching_leaves_nothing_in_the_model(rows):
    for said, left, steps in run_ranks(work.attach_after_an_error, 2, rows):
        assert len(said) == 2
        assert all("its module has no rule" in one for one in said)
        assert (left, steps) == (0, 2)


@pytest.mark.parametrize("name", ["exdyna", "topk", "dense"])
def test_replicas_that_use_different_branches_stay_equal(name):
    ranks = run_ranks(work.replicas_on_other_branches, 2, name)
    for before, after, unused, steps in ranks:
        assert torch.equal(after, ranks[0][1])
        assert not torch.equal(before, after)
        assert unused
        assert steps == 4


def test_gradients_cleared_on_some_ranks_only_are_named(tmp_path):
    with pytest.raises(RankError):  # a group in which a collective has failed cannot end in order
        run_ranks(work.cleared_on_some_ranks, 2, tmp_path, collective_timeout=4)
    for rank in range(2):
        said = (tmp_path / str(rank)).read_text()
        assert "call zero_grad() on all ranks or on none" in said
        assert "timeout of 4 s" in said


def test_a_group_that_chose_its_backends_is_asked_for_that_of_the_device():
    for named, rows in run_ranks(work.without_a_backend, 2):
        assert named == "undefined"
        assert rows.value.tolist() == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("config", "cpu", "cuda"),
    [
        ("cpu:gloo,cuda:nccl", True, True),
        ("cuda:nccl", False, True),
        ("cpu:gloo,cuda:gloo", True, False),
        ("cpu:gloo", True, False),
    ],
)
def test_which_devices_a_group_exchanges(monkeypatch, config, cpu, cuda):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "undefined")
    world = gh.World(rank=0, size=2)
    for kind, fits in (("cpu", cpu), ("cuda", cuda)):
        model = SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device(kind))])  # noqa: B023
        if fits:
            check_device(model, world)
        else:
            with pytest.raises(ValueError, match="use nccl for a GPU, gloo for the CPU"):
                check_device(model, world)
    assert world.exchanges(torch.device("cpu")) == cpu
    assert world.exchanges(torch.device("cuda", 1)) == cuda
    assert gh.World.single().exchanges(torch.device("cuda"))


def test_weights_come_back_where_others_could_not_be_written():
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    weights = FlatWeights(net, 0, torch.device("cpu"))
    before, write = weights.read(), weights.write

    def fails_once(flat):
        write(flat)
        weights.write = write
        raise RuntimeError("out of memory")

    weights.write = fails_once
    with pytest.raises(RuntimeError, match="out of memory"), weights.replaced_by(before * 0):
        raise AssertionError("the weights were not written")
    assert torch.equal(weights.read(), before)


def test_a_rank_that_died_keeps_no_exchange_in_a_model_that_is_detached():
    net, data = nn.Linear(6, 3), [(torch.ones(6), 0)] * 8
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sampler = gh.OrderedSampler(data, "grab", batch_size=4, unit=4)
    local = gh.LocalSteps(every=1)
    herd = gh.attach(net, order=sampler, optimizer=optimizer, local=local)
    transport = herd._feedback._transport

    def fails():
        raise RuntimeError("a rank has died")

    transport.finish = fails
    with pytest.raises(RuntimeError, match="a rank has died"):
        herd.detach()
    optimizer.step()
    assert herd.metrics()["local_steps"] == 0
    gh.attach(net, optimizer=optimizer, local=local).detach()


def test_a_group_that_cannot_be_made_leaves_ddp_as_it_was():
    for said, own, averaged, learned in run_ranks(work.attach_without_sockets, 2):
        assert said == "no sockets left"
        assert not torch.equal(own, averaged)
        assert learned == 8


def test_metrics_tell_of_a_run_whose_other_ranks_have_left():
    for metrics, said in run_ranks(work.metrics_after_a_failed_exchange, 2):
        assert (metrics["epoch"], metrics["examples_fed_back"]) == (0, 8)
        assert said == "connection closed by peer"  # an order that was not learned is no secret
