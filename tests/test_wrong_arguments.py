"""Wrong arguments of public functions: one sentence with the name and the value, nothing else."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh

DATA = TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 300), nn.ReLU(), nn.Linear(300, 2))


def sampler(policy="cd-grab", **settings):
    return gh.OrderedSampler(DATA, policy, **{"batch_size": 4, **settings})


def attached():
    return gh.attach(net(), order=sampler())


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def twice():
    model, order = net(), sampler()
    gh.attach(model, order=order)
    gh.attach(model, order=order)


def another_batch_size():
    model, order = net(), sampler()
    herd = gh.attach(model, order=order)
    for x, y in herd.batches(DataLoader(DATA, batch_size=8, sampler=order)):
        nn.functional.cross_entropy(model(x), y).backward()


WRONG = [
    (lambda: gh.attach("resnet50", order=sampler()), "model must be a .*Module, got 'resnet50'"),
    (lambda: gh.attach(None, order=sampler()), "model must be a torch.nn.Module, got None"),
    (lambda: gh.attach(nn.Linear, order=sampler()), "model must be a torch.nn.Module, got <class"),
    (lambda: gh.attach(net(), order=sampler(), scaler="amp"), "scaler must be .* got 'amp'"),
    (lambda: gh.ExactRows(strict="no"), "strict must be True or False, got 'no'"),
    (lambda: gh.ExactRows(reduction="none"), "reduction must be 'mean' or 'sum', got 'none'"),
    (lambda: gh.SketchRows(batch_dim="x"), "batch_dim must be a whole number, got 'x'"),
    (lambda: gh.attach(net()), "nothing to attach"),
    (lambda: gh.attach(net(), order="grab"), "order must be the OrderedSampler .* got 'grab'"),
    (lambda: gh.attach(net(), order=gh.CDGraB()), "order must be the OrderedSampler"),
    (lambda: gh.attach(net(), order=DataLoader(DATA)), "order must be the OrderedSampler"),
    (lambda: gh.attach(net(), sparsify="exdyna"), "wrap the model in DDP first"),
    (lambda: gh.attach(net(), order=sampler(), rows="all"), "rows must be one of .* got 'all'"),
    (lambda: gh.attach(net(), order=sampler(), rows=3), "rows must be one of .* got 3"),
    (lambda: gh.attach(net(), local=30, optimizer=optimizer(net())), "local must be .* got 30"),
    (lambda: gh.attach(net(), local=gh.LocalSteps()), "need optimizer=.* got None"),
    (lambda: gh.attach(net(), local=gh.LocalSteps(), optimizer="sgd"), "got 'sgd'"),
    (lambda: gh.attach(net(), order=sampler(), optimizer="sgd"), "optimizer goes with local="),
    (twice, "attached already: call detach"),
    (another_batch_size, "batches of 8, .* batch_size=4: give both the same"),
    (lambda: attached().load_state_dict(None), "state must be what .* got NoneType"),
    (lambda: attached().load_state_dict({}), "state has no 'ordering'"),
    (lambda: sampler().load_state_dict([]), "state must be what .* got list"),
    (lambda: sampler().load_state_dict({}), "it has no 'epoch'"),
    (lambda: gh.OrderedSampler(5, "grab", batch_size=2), "dataset must be map-style"),
    (lambda: sampler("grub"), "unknown order 'grub'; known are d-rr"),
    (lambda: sampler(3), "policy must be the name of an order .* got 3"),
    (lambda: sampler(gh.CDGraB), "policy must be the name of an order .* got CDGraB"),
    (lambda: gh.CDGraB(rule="greedy"), "rule must be a sign rule .* got 'greedy'"),
    (lambda: gh.GraB(rule=gh.Greedy), "rule must be a sign rule .* got Greedy"),
    (lambda: gh.PairGraB(rule=None), "rule must be a sign rule .* got None"),
    (lambda: sampler(drop_last="no"), "drop_last must be True or False, got 'no'"),
    (lambda: sampler(drop_last=None), "drop_last must be True or False, got None"),
    (lambda: sampler(batch_size=0), "batch_size must be at least 1, got 0"),
    (lambda: sampler(batch_size="4"), "batch_size must be a whole number, got '4'"),
    (lambda: sampler(batch_size=4.5), "batch_size must be a whole number, got 4.5"),
    (lambda: sampler(batch_size=None), "batch_size must be a whole number, got None"),
    (lambda: sampler(batch_size=True), "batch_size must be a whole number, got True"),
    (lambda: sampler(unit=3), "unit must divide batch_size 4, got 3"),
    (lambda: sampler(unit="a"), "unit must divide batch_size 4, got 'a'"),
    (lambda: sampler(seed="a"), "seed must be a whole number, got 'a'"),
    (lambda: sampler(seed=-1), "seed must be at least 0, got -1"),
    (lambda: sampler(world=4), "world must be World.* got 4"),
    (lambda: sampler(skips="x"), "skips must be True or False, got 'x'"),
    (lambda: sampler().set_epoch("a"), "epoch must be a whole number, got 'a'"),
    (lambda: gh.ExDyna(density="0.1"), "density must be a number, got '0.1'"),
    (lambda: gh.ExDyna(blocks="a"), "blocks must be a whole number, got 'a'"),
    (lambda: gh.ExDyna(memory="a"), "memory must be a number, got 'a'"),
    (lambda: gh.ExDyna(threshold="x"), "threshold must be consensus or online, got 'x'"),
    (lambda: gh.Micro(density=[1]), "density must be a number, got \\[1\\]"),
    (lambda: gh.Sparsify(method="exdyna", values="int3"), "values must be .* got 'int3'"),
    (lambda: gh.Sparsify(method=3), "method must be a sparsifier .* got 3"),
    (lambda: gh.Sparsify(method="exdyna", momentum="a"), "momentum must be a number, got 'a'"),
    (lambda: gh.Sparsify(method="exdyna", warmup_from="a"), "warmup_from must be a number"),
    (lambda: gh.Sparsify(method="exdyna", warmup_steps=1.5), "warmup_steps must be a whole number"),
    (lambda: gh.LocalSteps(every="30"), "every must be a whole number, got '30'"),
    (lambda: gh.LocalSteps(outer_lr=None), "outer_lr must be a number, got None"),
    (lambda: gh.LocalSteps(outer_momentum=1), "outer_momentum must be in .0, 1., got 1"),
    (lambda: gh.LocalSteps(values="int3"), "values must be .* got 'int3'"),
    (lambda: gh.LocalSteps(overlap="x"), "overlap must be True or False, got 'x'"),
    (lambda: gh.LocalSteps(values="fp32", keep_residual=True), "fp32 leaves no residual"),
    (lambda: gh.LocalSteps(dense_below=-1), "dense_below must be at least 0, got -1"),
    (lambda: gh.Sparsify(method="dense", values="int1"), "local=gh.LocalSteps.every=1"),
    (lambda: gh.SketchRows(size="a"), "size must be a whole number, got 'a'"),
    (lambda: gh.TwoSidedRows(rank="a"), "rank must be a whole number, got 'a'"),
    (lambda: gh.Walk(c="a"), "c must be a number, got 'a'"),
    (lambda: gh.Kernel(epochs="x"), "epochs must be a whole number, got 'x'"),
    (lambda: gh.World(rank="a", size=2), "rank must be a number, got 'a'"),
    (lambda: gh.World(rank=3, size=2), "rank must be in"),
    (lambda: gh.merge_states(None), "states must be a list of states, got NoneType"),
    (lambda: gh.merge_states([]), "states must be what .* got none"),
    (lambda: gh.merge_states([1, 2]), "state must be what .* got int"),
]


def test_wrong_arguments_are_named_with_their_value():
    for call, says in WRONG:
        with pytest.raises(ValueError, match=says) as error:
            call()
        text = str(error.value)
        assert "\n" not in text and "not supported between" not in text and "object at" not in text


def test_numbers_of_other_libraries_are_numbers():
    assert len(sampler(batch_size=np.int64(4), seed=np.int32(3))) == 32
    assert gh.LocalSteps(outer_momentum=np.float32(0.5), outer_lr=1).outer_momentum == 0.5
