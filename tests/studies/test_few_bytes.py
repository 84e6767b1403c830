"""Peers of local steps as `benchmarks/few_bytes.py` has them: they send few bytes, and train."""

import copy
import math

import pytest
import torch
from benchmarks.few_bytes import Run, Shape, arm_of
from benchmarks.few_bytes_peers import DeMo, TopK, cosines, frozen_root
from benchmarks.few_bytes_tasks import compiled, config_of
from torch import nn

from gradherd.comm.sliced_mean import mean_bytes
from gradherd.lab.tasks.task import Classifier, Defaults

CPU = torch.device("cpu")


def test_top_k_sends_the_largest_of_each_worker_and_loses_nothing():
    topk = TopK(0.5, 4, 2, CPU)
    grads = torch.tensor([[4.0, 3.0, 1.0, 0.0], [0.0, 2.0, 0.1, -6.0]])
    assert topk.step(grads).tolist() == [2.0, 2.5, 0.0, -3.0]
    left = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.1, 0.0]])
    assert torch.equal(topk.residuals, left)
    # bf16 and an offset of 16 bits, two of each to one other worker; a count of one page.
    assert topk.metrics["bytes"] == 2 * (2 + 2) + 2
    torch.manual_seed(0)
    topk, total, sent = TopK(0.01, 1000, 3, CPU), torch.zeros(1000), torch.zeros(1000)
    for _ in range(20):
        grads = torch.randn(3, 1000)
        total, sent = total + grads.sum(0), sent + 3 * topk.step(grads)
    torch.testing.assert_close(sent + topk.residuals.sum(0), total, atol=1e-4, rtol=1e-4)


def test_demo_sends_the_largest_coefficients_of_each_chunk():
    basis = cosines(29, CPU)
    torch.testing.assert_close(basis @ basis.T, torch.eye(29), atol=1e-5, rtol=0)
    # A vocabulary that 64 does not divide, as GPT-2's, a square matrix and a vector.
    shapes = [(87, 64), (128, 64), (192,)]
    demo = DeMo(2, shapes, 3, CPU)
    assert demo.metrics["bytes"] == 2 * 2 * (3 + 2 + 3) * 28 // 8  # two to two others
    # One wave over a chunk is one coefficient: all of it arrives, on its side of the mean.
    wave = torch.outer(cosines(64, CPU)[3], cosines(64, CPU)[5])
    grads = torch.zeros(3, 87 * 64 + 128 * 64 + 192)
    grads[1, 87 * 64 : 87 * 64 + 64 * 64] = 6 * wave.flatten()
    mean = demo.step(grads)
    torch.testing.assert_close(mean, grads.mean(0), atol=1e-5, rtol=0.01)
    assert demo.momenta.abs().max() < 1e-3
    # What is left decays and is sent later.
    torch.manual_seed(0)
    grads = torch.randn_like(grads)
    demo = DeMo(2, shapes, 3, CPU)
    sent = demo.step(grads)
    torch.testing.assert_close(demo.momenta.mean(0) + sent, grads.mean(0), atol=1e-4, rtol=0)
    left = demo.momenta.clone()
    sent = demo.step(torch.zeros_like(grads))
    expected = 0.999 * left.mean(0)
    torch.testing.assert_close(demo.momenta.mean(0) + sent, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["topk", "demo"])
def test_a_peer_finds_the_minimum_that_workers_have_together(name):
    torch.manual_seed(0)
    aims = torch.randn(64 * 64) + 0.2 * torch.randn(4, 64 * 64)  # of each worker
    peer = TopK(0.02, 64 * 64, 4, CPU) if name == "topk" else DeMo(40, [(64, 64)], 4, CPU)
    weights, steps = torch.zeros(64 * 64), 600
    for step in range(steps):
        mean = peer.step(weights - aims)
        rate = 1 - step / steps
        weights -= 0.02 * rate * mean.sign() if name == "demo" else 0.2 * rate * mean
    assert (weights - aims.mean(0)).norm() < 0.1 * aims.mean(0).norm()


def test_a_frozen_second_moment_has_a_floor_in_each_group():
    v = torch.zeros(1, 300)
    v[0, 0] = 256.0**2
    assert frozen_root(v, 0.5)[0, [0, 1, 255, 256]].tolist() == [
        256.0,
        0.5,
        0.5,
        pytest.approx(1e-8),
    ]
    assert frozen_root(v, 0)[0, 1] == pytest.approx(1e-8)


@pytest.fixture(scope="module")
def text():
    """Sequences in which every word but the first follows from the one before."""
    torch.manual_seed(0)
    start = torch.randint(40, (64, 1))
    words = (start + 7 * torch.arange(8)) % 40
    return words[:48], words[48:]


@pytest.mark.parametrize(
    "arm",
    [
        "topk:density=0.05:lr=1e-2",
        "demo:k=64:lr=1e-2",
        "onebit-adam:warm=0.25:lr=1e-2",
        "onebit-adam:kind=preconditioned:lr=1e-2",
        "local-4:lr=2e-2",
    ],
)
def test_a_peer_trains_a_language_model_and_counts_its_bytes(arm, text):
    shape = Shape(16, 1, 8, vocabulary=64, length=8)
    dim = sum(map(math.prod, shape.sizes().values()))
    run = Run(arm_of(arm)[1], shape, 2, 4, 0, text)
    record = run.train(10)
    steps = record["steps"]
    assert steps == 60 and record["perplexity"][-1] < 0.5 * 64
    dense = mean_bytes(dim, 2)
    exchange = run._exchange
    one_bit = exchange.bytes if "local" in arm else exchange.metrics["bytes"]
    expected = {
        "topk:density=0.05": steps * 1 * (4 * int(0.05 * dim) + 2),
        "demo:k=64": steps * one_bit,
        # The dense exchanges at the beginning count.
        "onebit-adam:warm=0.25": 15 * dense + 45 * one_bit,
        # Half of the precision for the second moment, every 50th step.
        "onebit-adam:kind=preconditioned": steps * (one_bit + dense // 100),
        "local-4": 15 * one_bit,
    }[arm.partition(":lr=")[0]]
    assert record["bytes"] == expected and record["fewer"] == round(steps * dense / expected, 1)
    # One bit both ways, and a level of 2 bytes for each 256.
    if arm.startswith(("onebit", "local")):
        assert one_bit == pytest.approx(dense / 32, rel=0.2)


class WithNorm(nn.Module):
    """Two classes of images, with statistics that a training pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))

    def forward(self, images):
        return self.layers(self.norm(images))


class NormTask(Classifier):
    name = "norm"
    defaults = Defaults(workers=2, epochs=1, batch_size=8, lr=0.1, seeds=1, source="ours")

    def model(self):
        return WithNorm()

    def prepare(self, inputs):
        return inputs


def test_compiled_passes_of_all_workers_are_one_graph_and_change_their_own_statistics():
    torch.manual_seed(0)
    task, images, labels = NormTask(), torch.randn(3, 8, 3, 4, 4), torch.randint(2, (3, 8))
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    fast = compiled(task, backend=backend)
    model = task.model()
    plain = copy.deepcopy(model)
    workers = [model, copy.deepcopy(model), task.model()]
    same = [plain, copy.deepcopy(plain), copy.deepcopy(workers[2])]
    for own, slow, x, y in zip(workers, same, images, labels, strict=True):
        parameters = list(own.parameters())
        loss, expected = fast.loss(own, x, y), task.loss(slow, x, y)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            torch.autograd.grad(loss, parameters),
            torch.autograd.grad(expected, [*slow.parameters()]),
        )
    assert len(graphs) == 1
    for own, slow in zip(workers, same, strict=True):
        torch.testing.assert_close(dict(own.named_buffers()), dict(slow.named_buffers()))
    assert not torch.equal(model.norm.running_mean, workers[1].norm.running_mean)


def test_an_arm_of_a_task_is_a_run_with_the_settings_of_its_study():
    study = {"settings": {"workers": 4, "epochs": 7}}
    low_rank = config_of("powersgd:density=0.1:lr=0.2", study, NormTask())
    assert (low_rank.sparsify, low_rank.density, low_rank.lr) == ("powersgd", 0.1, 0.2)
    assert (low_rank.workers, low_rank.epochs, low_rank.local_steps) == (4, 7, None)
    local = config_of("local-3:outer_lr=0.8", study, NormTask(), epochs=2)
    assert (local.local().every, local.local().outer_lr, local.epochs) == (3, 0.8, 2)
    assert config_of("dense", study, NormTask()).density is None
