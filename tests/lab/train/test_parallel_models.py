"""Tasks trained in shards on real ranks, beside DDP."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradherd.comm.world import World
from gradherd.lab.ranks import run_ranks
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.checkpoint import NoUsableCheckpoint
from gradherd.lab.train.rank_trainer import RankTrainer
from tests.lab.train import work

MEASURES = {"ddp": {}, "fsdp": {"parallel": "fsdp"}, "hsdp": {"parallel": "hsdp", "rows": "batch"}}
SPARSE = {"parallel": "hsdp", "sparsify": "exdyna", "density": 0.1}


def config(**chosen):
    small = {"workers": 4, "batch_size": 4, "unit": 4, "limit": 96, "epochs": 2, "order": "cd-grab"}
    return work.config_of("digits", **{**small, **chosen})


def weights(trainer):
    trainer.evaluate()
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()


def resumed(chosen):
    """Return weights of a run that went through and of one that was saved after an epoch."""
    world, found = World.detect(), []
    for resumes in (False, True):
        task = find_task("digits")
        trainer = RankTrainer(chosen, task, task.load(None, chosen.limit), world)
        trainer.train_epoch(1, work.no_callback)
        if resumes:
            shared, own = trainer.state(1, trainer.counters)
            saved = SimpleNamespace(shared=shared(), workers=4, part=lambda rank, own=own: own)
            trainer.close()
            trainer = RankTrainer(chosen, task, task.load(None, chosen.limit), world)
            try:
                other = SimpleNamespace(shared={}, workers=2)
                trainer.load(other)
            except NoUsableCheckpoint as error:
                found.append(str(error))
            trainer.load(saved)
        trainer.train_epoch(2, work.no_callback)
        found.append(weights(trainer))
        trainer.close()
    return found


def everything():
    results = dict(
        zip(MEASURES, work.on_ranks([config(**m) for m in MEASURES.values()]), strict=True)
    )
    (results["sparse"],) = work.on_ranks([config(**SPARSE)])
    results["resumed"] = [resumed(config(optimizer="adamw", momentum=0.0, **kind))
                          for kind in ({"parallel": "fsdp"}, SPARSE)]  # fmt: skip
    return results


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(everything, 4, timeout=500)


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
def test_shards_train_as_ddp_does(ranks, name):
    for rank in ranks:
        for (version, own, found, weights), (same, plain, expected, want) in zip(
            rank[name], rank["ddp"], strict=True
        ):
            assert version == same, "the same orders"
            assert found.loss == pytest.approx(expected.loss, rel=1e-5)
            assert found.metric == expected.metric
            assert torch.allclose(weights, want, atol=1e-5)
            assert 0 < own.bytes < plain.bytes if name == "fsdp" else own.bytes > 0


def test_replicas_that_exchange_sparsely_learn(ranks):
    for rank in ranks:
        first, last = rank["sparse"]
        assert last[2].loss < first[2].loss < 2.3
        assert torch.equal(last[3], ranks[0]["sparse"][-1][3])


@pytest.mark.parametrize("at", [0, 1], ids=["fsdp", "hsdp"])
def test_a_sharded_run_continues_from_its_state(ranks, at):
    for rank in ranks:
        straight, refused, loaded = rank["resumed"][at]
        assert torch.equal(straight, loaded)
        assert "saved by 2 workers, this run has 4" in refused
