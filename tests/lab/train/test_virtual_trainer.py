"""Workers in one process and real ranks: the same run, to the bit."""

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from gradherd.lab.ranks import run_ranks
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.stacked_trainer import why_not_stackable
from gradherd.lab.train.trainer import EpochExamples, passes
from gradherd.lab.train.virtual_trainer import VirtualTrainer
from tests.lab.tasks.fake_data import EVERY_TASK, OF_STUDIES
from tests.lab.train.work import HERE, config_of, in_one_process, on_ranks

REAL = os.environ.get("GRADHERD_DATA")


def same(real, virtual, *, bits=True):
    for (order, own, evaluation, weights), there in zip(real, virtual, strict=True):
        assert order == there[0]
        assert own.steps == there[1].steps
        assert own.ordering_bytes == there[1].ordering_bytes
        assert own.bytes == pytest.approx(there[1].bytes, rel=1e-5)
        if bits:
            assert torch.equal(weights, there[3])
            assert evaluation == there[2]
            assert own.herding_bound == there[1].herding_bound
            assert own.residual_norm == there[1].residual_norm
            assert (own.density, own.padding) == (there[1].density, there[1].padding)
        else:
            torch.testing.assert_close(weights, there[3], rtol=1e-3, atol=1e-4)
            assert evaluation.loss == pytest.approx(there[2].loss, rel=1e-3)


def arms(workers):
    """Runs of the small tasks: odd numbers of units, short last batches, every kind of row."""
    # A third epoch once: what the second order is made of.
    some = {"limit": 50, "epochs": 3 if workers == 3 else 2, "workers": workers}
    digits = [
        {"order": "d-rr"},
        {"order": "always-plus"},
        {"order": "cd-grab"},
        {"order": "cd-grab", "batch_size": 6, "unit": 2, "limit": 58},
        {"order": "id-pair-grab"},
        {"order": "grab", "rows": "sketch"},
        {"order": "grab", "rows": "sketch", "sketch_size": 8},
        {"order": "cd-grab", "unit": 4},
        {"order": "id-grab", "unit": 4, "rows": "sketch"},
    ]
    mlp = [
        {"order": "cd-grab"},
        {"sparsify": "exdyna", "density": 0.01},
        {"sparsify": "exdyna", "density": 0.01, "method": {"rotate": False, "blocks": 64}},
        {
            "sparsify": "exdyna",
            "density": 0.01,
            "momentum": 0.0,
            "clip": 0.5,
            "method": {"momentum": 0.9, "warmup_steps": 5, "dense_below": 12},
        },
        {"sparsify": "topk", "density": 0.02, "order": "cd-grab", "unit": 8},
        {"sparsify": "micro", "density": 0.01, "order": "pair-grab"},
    ]
    return [
        *(config_of("digits", **(some | one)) for one in digits),
        *(config_of("digits-mlp", **(some | one)) for one in mlp),
    ]


# With three workers all of them; what is special about one worker, or an even number of them,
# shows in half.
@pytest.mark.parametrize(
    ("workers", "which"), [(1, slice(0, None, 2)), (3, slice(None)), (4, slice(1, None, 2))]
)
def test_small_tasks(workers, which):
    configs = arms(workers)[which]
    ranks = run_ranks(on_ranks, workers, configs)
    for at, config in enumerate(configs):
        try:
            # Inner products of whole batches are added up in another order.
            whole = config.unit == config.batch_size and config.order != "d-rr"
            same(ranks[0][at], in_one_process(config), bits=workers == 1 or not whole)
        except AssertionError as error:
            raise AssertionError(f"{config}: {error}") from error
        for rank in ranks[1:]:
            for mine, first in zip(rank[at], ranks[0][at], strict=True):
                assert mine[0] == first[0] and torch.equal(mine[3], first[3])


def test_batch_statistics_dropout_and_augmentation_are_those_of_ranks():
    configs = [
        config_of(f"{HERE}:Awkward"),
        config_of(f"{HERE}:Augmented", augment=True),
    ]
    ranks = run_ranks(on_ranks, configs[0].workers, configs)
    for config, found in zip(configs, ranks[0], strict=True):
        same(found, in_one_process(config))


def test_a_state_is_carried_by_each_worker_in_the_order_of_its_visits():
    """Against a loop that a reader of the published code would write, with a weight that counts."""
    config = config_of(f"{HERE}:Carrying", order="always-plus", virtual=True, momentum=0.0)
    task = find_task(config.task)
    words, _ = task.load().train
    trainer = VirtualTrainer(config, task, task.load())
    model = copy.deepcopy(trainer.model)
    for epoch in (1, 2):
        orders = [order.tolist() for order in trainer.ordering.orders]
        trainer.train_epoch(epoch, lambda steps=1: None)
        states = [None] * 4
        for step in range(4):
            grads = []
            for worker, order in enumerate(orders):
                unit = 4 * order[step] + worker  # unit j of worker w is unit 4 j + w of the text
                batch = words[4 * unit : 4 * unit + 4]
                out, after = model.lstm(model.embedding(batch[:, :-1]), states[worker])
                states[worker] = tuple(one.detach() for one in after)
                logits = model.head(out).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
                grads.append(torch.autograd.grad(loss, list(model.parameters())))
            for parameter, *own in zip(model.parameters(), *grads, strict=True):
                parameter.grad = torch.stack(own).mean(0)
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= config.lr * parameter.grad
        for found, expected in zip(trainer.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_state_needs_whole_batches_and_runs_alone():
    task = find_task(f"{HERE}:Carrying")
    config = config_of(f"{HERE}:Carrying", virtual=True, unit=2)
    trainer = VirtualTrainer(config, task, task.load())
    with pytest.raises(ValueError, match=r"carrying carries a state.*: unit must be batch_size"):
        trainer.train_epoch(1, lambda steps=1: None)
    assert "recurrent" in why_not_stackable(config, trainer.model)


# Of the two LSTMs the one that carries no state; the other is above, with fewer words.
LARGE = [name for name in EVERY_TASK if not name.startswith("digits")]
# Few examples of a step: three steps in a second or two.
BATCH = {"cifar10-resnet18": 2, "sst2-transformer": 2}
# Two steps of the large ones: the second starts from weights that the first has changed.
STEPS = {"cifar10-resnet18": 2, "wikitext2-gpt2": 2}


@pytest.mark.parametrize("name", LARGE)
def test_the_first_steps_of_every_other_task(name):
    if not REAL:
        pytest.skip("needs the real data sets: set GRADHERD_DATA to their folder")
    steps = STEPS.get(name, 3)
    batch, task = BATCH.get(name), OF_STUDIES.get(name, name)
    config = config_of(task, order="cd-grab", workers=2, epochs=1, batch_size=batch)
    config = config_of(
        task,
        order="cd-grab",
        workers=2,
        epochs=1,
        batch_size=config.batch_size,
        limit=2 * steps * config.batch_size,
    )
    split = find_task(task).load(Path(REAL), config.limit)  # once, not on every rank
    ranks = run_ranks(on_ranks, 2, [config], split)
    assert ranks[0][0][0][1].steps == steps
    same(ranks[0][0], in_one_process(config, split), bits=False)


def test_exchanges_that_are_called_off_cost_what_they_cost_ranks():
    some = {"limit": 48, "epochs": 1, "workers": 2}
    arms = [
        {"sparsify": "topk", "density": 0.1},
        {"sparsify": "exdyna", "density": 0.1},
        {"local_steps": 2},
    ]
    configs = [config_of(f"{HERE}:Overflowing", **some, **arm) for arm in arms]
    ranks = run_ranks(on_ranks, 2, configs)[0]
    for config, [(_, real, _, _)] in zip(configs, ranks, strict=True):
        [(_, virtual, _, _)] = in_one_process(config)
        assert real.skipped_steps > 0
        assert (virtual.skipped_steps, virtual.bytes) == (real.skipped_steps, real.bytes)


def test_examples_are_transformed_before_every_epoch():
    config = config_of(f"{HERE}:Augmented", workers=1, augment=True)
    plain = in_one_process(config_of(f"{HERE}:Augmented", workers=1))
    assert not torch.equal(in_one_process(config)[0][3], plain[0][3])

    task = find_task(f"{HERE}:Augmented")
    original = task.load().train
    examples = EpochExamples(config, task, original)
    seen = []
    for epoch in (1, 2, 1):
        examples.begin_epoch(epoch)
        seen.append(examples.tensors[0].clone())
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0].abs(), original[0].abs())
    other = EpochExamples(config_of(f"{HERE}:Augmented", augment=True, seed=1), task, original)
    other.begin_epoch(1)
    assert not torch.equal(other.tensors[0], seen[0])
    with pytest.raises(ValueError, match="task 'digits' has no augmentation"):
        EpochExamples(config_of("digits", augment=True), find_task("digits"), original)


@pytest.mark.filterwarnings("ignore")  # of processors without bf16
def test_autocast_is_for_simulated_workers():
    with pytest.raises(ValueError, match="unknown autocast 'fp8'; known are bf16"):
        config_of("digits", autocast="fp8", virtual=True)
    with pytest.raises(ValueError, match="autocast 'bf16' works with simulated workers"):
        config_of("digits", autocast="bf16")
    config = config_of("digits", autocast="bf16", workers=1, limit=20, virtual=True)
    low, full = in_one_process(config), in_one_process(config_of("digits", workers=1, limit=20))
    assert not torch.equal(low[-1][3], full[-1][3])
    torch.testing.assert_close(low[-1][3], full[-1][3], rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore")  # of processors without bf16
def test_low_precision_leaves_out_cudnns_attention():
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    assert enabled()
    with passes(config_of("digits", autocast="bf16", virtual=True)):
        assert torch.is_autocast_enabled("cpu")
        assert not enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    assert enabled()
    with passes(config_of("digits")):
        assert enabled()
