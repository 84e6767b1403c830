"""Triton's count sketches: of columns, and of a whole gradient.

How they run here: see `gpu`.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("triton")

from gradherd import OrderedSampler, attach
from gradherd.hooks import row_sources, transports
from gradherd.hooks.row_sources import BatchGradientSource
from gradherd.ordering import balance
from gradherd.ordering import policy as policies
from gradherd.rows import sketch
from gradherd.rows.settings import SketchRows
from gradherd.rows.sketch import CountSketch
from gradherd.rows.triton_sketches import sketch_vectors
from tests.gpu import DEVICE, MARKS

pytestmark = MARKS


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [0, 3])
@pytest.mark.parametrize(("width", "size"), [(1, 7), (90, 100), (1000, 64), (700, 600)])
def test_vectors_are_sketched_as_elsewhere(width, size, lead, kind):
    torch.manual_seed(0)
    table = torch.randn(3, width + 5, device=DEVICE).to(kind)
    vectors = table[:, 2 : width + 2]  # elements of a vector lie side by side, vectors need not
    hashed = CountSketch(size, 3).hashes("w", 0, -(-(lead + width) // size), vectors.device)
    want = CountSketch(size, 3)(vectors.float(), name="w", offset=lead)
    got = sketch_vectors(vectors, lead, *hashed)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
    assert torch.equal(sketch_vectors(vectors, lead, *hashed), got)


def test_slices_of_one_vector_add_up(monkeypatch):
    vector = torch.randn(1000, device=DEVICE)
    want = CountSketch(30, 1)(vector)
    monkeypatch.setattr(sketch, "has_kernels", lambda device: True)
    made = CountSketch(30, 1)
    got = made(vector[:333]) + made(vector[333:], offset=333)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


class Parts(nn.Module):
    """A model of which a part is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)
        self.always, self.sometimes = nn.Conv1d(4, 4, 3), nn.Linear(4, 4)

    def forward(self, x, both):
        out = self.always(self.table(x).transpose(1, 2)).mean(2)
        return self.sometimes(out) if both else out


@pytest.mark.parametrize("kernel", [True, False])
def test_batches_are_sketched_at_the_end_of_their_backwards(kernel, monkeypatch):
    torch.manual_seed(0)
    model, x = Parts().to(DEVICE), torch.randint(9, (6, 5), device=DEVICE)
    monkeypatch.setattr(row_sources, "AT_END_DEVICES", set())
    arriving = BatchGradientSource(model, CountSketch(32, 0))
    monkeypatch.setattr(row_sources, "AT_END_DEVICES", {DEVICE})
    monkeypatch.setattr(row_sources, "_MOST_COPIED", 40)  # several chunks
    at_end = BatchGradientSource(model, CountSketch(32, 0))
    monkeypatch.setattr(sketch, "has_kernels", lambda device: kernel)
    for both, accumulate in ((True, False), (False, False), (True, True), (False, True)):
        if not accumulate:
            model.zero_grad()
        model(x, both).square().mean().backward()
        row = at_end.take(6, 2.0)
        assert row.shape == (1, 32)
        torch.testing.assert_close(row, arriving.take(6, 2.0), atol=1e-6, rtol=1e-4)
        model.always.weight.grad.mul_(0.5)  # clipping must not change what was read
    model(x, True).square().mean().backward()
    model(x + 0, True).square().sum().backward()
    torch.testing.assert_close(at_end.take(6, 1.0), arriving.take(6, 1.0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("policy", ["grab", "cd-grab"])
def test_whole_batches_are_ordered_without_waiting_for_the_device(policy, monkeypatch):
    """Sketched and signed where they are, they give the order of sketches signed by the host."""
    data = TensorDataset(torch.arange(40))
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    orders = []
    for here in (set(), {DEVICE}):
        for module, name in (
            (row_sources, "AT_END_DEVICES"),
            (balance, "KERNEL_DEVICES"),
            (transports, "KERNEL_DEVICES"),
        ):
            monkeypatch.setattr(module, name, here)
        monkeypatch.setattr(sketch, "has_kernels", lambda device, here=here: bool(here))
        if here:
            monkeypatch.setattr(policies, "balance", None)  # what the host would sign with
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(DEVICE)
        sampler = OrderedSampler(data, policy, batch_size=4, unit=4)
        herd = attach(model, order=sampler, rows=SketchRows(size=100))
        for _ in range(2):
            for (indices,) in DataLoader(data, batch_size=4, sampler=sampler):
                model.zero_grad()
                model(inputs[indices]).square().sum(1).mean().backward()
        herd.detach()
        orders.append(sampler.indices())
    assert orders[0] == orders[1] != list(range(40))
