"""Rows on a GPU equal those on the CPU; so do sketches, which a kernel of its own adds up."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradherd.rows.capture import Capture
from gradherd.rows.settings import ExactRows, SketchRows, TwoSidedRows
from tests.rows.zoo import ResNet, ViT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


class Net(nn.Module):
    """Linear layers on one and on several positions, biases, a norm, an embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.first = nn.Linear(24, 70)
        self.norm = nn.LayerNorm(70)
        self.last = nn.Linear(70, 3)

    def forward(self, tokens):
        return self.last(self.norm(self.first(self.words(tokens)).relu()).mean(1))


def on(device, model, tokens, labels, capture):
    """Return a copy of the model on a device, after a backward, and what has captured it."""
    own = copy.deepcopy(model).to(device)
    captured = capture(own)
    F.cross_entropy(own(tokens.to(device)), labels.to(device)).backward()
    return own, captured


@pytest.mark.parametrize("positions", [1, 6])
def test_products_are_those_of_the_cpu(positions):
    model, tokens, labels = Net(), torch.randint(50, (9, positions)), torch.randint(3, (9,))
    results = []
    for device in ("cpu", "cuda"):
        _, capture = on(device, model, tokens, labels, Capture)
        rows = capture.pop_rows(9)
        vector = torch.linspace(-1, 1, capture.spec.size, device=device).unsqueeze(0)
        products = [rows @ rows.T, rows @ vector[0], rows.sum(0)]
        results.append([tensor.cpu() for tensor in products])
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("positions", [1, 6])
@pytest.mark.parametrize("size", [17, 64, 4096])
def test_sketches_are_those_of_the_cpu(positions, size):
    model, tokens, labels = Net(), torch.randint(50, (9, positions)), torch.randint(3, (9,))
    results = []
    for device in ("cpu", "cuda"):
        settings = SketchRows(size=size, seed=3, strict=True)
        _, capture = on(device, model, tokens, labels, partial(Capture, settings=settings))
        results.append(capture.pop_rows(9).cpu())
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [ResNet, ViT])
def test_sketches_of_images_are_those_of_the_cpu(make):
    torch.manual_seed(0)
    model, images, labels = make(), torch.randn(9, 3, 8, 8), torch.randint(5, (9,))
    results = []
    for device in ("cpu", "cuda"):
        settings = TwoSidedRows(size=512, rank=4, strict=True)
        _, capture = on(device, model, images, labels, partial(Capture, settings=settings))
        results.append(capture.pop_rows(9).cpu())
    # Convolutions round to TF32.
    assert float((results[1] - results[0]).norm() / results[0].norm()) < 0.02


class Recurrent(nn.Module):
    """Modules without a rule, one of them called twice in a row."""

    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(50, 24), nn.LSTM(24, 16, batch_first=True)
        self.act, self.last = nn.PReLU(16), nn.Linear(16, 3)

    def forward(self, tokens):
        return self.last(self.act(self.act(self.layer(self.words(tokens))[0].mean(1)) - 0.1))


@pytest.mark.parametrize("settings", [ExactRows(strict=True), SketchRows(size=64, strict=True)])
def test_modules_without_a_rule_have_the_rows_of_the_cpu(settings):
    torch.manual_seed(0)
    model, tokens, labels = Recurrent(), torch.randint(50, (9, 6)), torch.randint(3, (9,))
    results = []
    for device in ("cpu", "cuda"):
        _, capture = on(device, model, tokens, labels, partial(Capture, settings=settings))
        results.append(capture.pop_rows(9).cpu())
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def test_a_model_that_moves_after_it_was_tapped_is_refused():
    model = Net()
    Capture(model, SketchRows())
    with pytest.raises(RuntimeError, match="move it first, then attach"):
        model.to("cuda")(torch.zeros(9, 2, dtype=torch.int64, device="cuda"))
