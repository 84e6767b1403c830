"""Rows on a GPU equal those on the CPU; so do sketches, which the GPU computes another way."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradherd.rows.capture import Capture

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


@pytest.mark.parametrize("positions", [1, 6])
@pytest.mark.parametrize("k", [17, 64, 256])
def test_sketches_and_products_are_those_of_the_cpu(positions, k):
    model, tokens, labels = Net(), torch.randint(50, (9, positions)), torch.randint(3, (9,))
    results = []
    for device in ("cpu", "cuda"):
        own = copy.deepcopy(model).to(device)
        capture = Capture(own)
        F.cross_entropy(own(tokens.to(device)), labels.to(device)).backward()
        sketch = capture.pop_sketch(9, k, seed=3)
        F.cross_entropy(own(tokens.to(device)), labels.to(device)).backward()
        rows = capture.pop_rows(9)
        vector = torch.linspace(-1, 1, capture.spec.size).unsqueeze(0)
        products = [rows.gram(), rows.dot(vector), rows.combine(torch.ones(1, 9))]
        results.append([tensor.cpu() for tensor in (sketch, *products)])
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-4, atol=1e-4)
