"""Triton's count sketches: of columns, and of a whole gradient where it lies.

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
from gradherd.ordering import balance, device_signs
from gradherd.ordering import policy as policies
from gradherd.rows.settings import SketchRows
from gradherd.rows.sketch import CountSketch, count_sketch
from gradherd.rows.triton_sketches import GradientSketcher, sketch_columns
from tests.gpu import DEVICE, MARKS

pytestmark = MARKS

SHAPES = ((7, 3, 3, 3), (11,), (40, 5), (0, 3), (1,), (5, 6, 1, 1), (3, 4, 2, 2, 2), (200,))


def flat(parameters, grads):
    """The gradients as one vector, in the logical order of elements."""
    return torch.cat(
        [
            torch.zeros(p.numel(), device=DEVICE)
            if g is None
            else (g.to_dense() if g.is_sparse else g).reshape(-1).float()
            for p, g in zip(parameters, grads, strict=True)
        ]
    )


def untidy(grads, case):
    """The same gradients as a model might leave them."""
    if case == "channels last":
        grads[0] = grads[0].to(memory_format=torch.channels_last)
        grads[5] = grads[5].to(memory_format=torch.channels_last)
        grads[6] = grads[6].to(memory_format=torch.channels_last_3d)
    elif case == "transposed":
        grads[2] = grads[2].T.contiguous().T
    elif case == "missing":
        grads[0] = grads[4] = grads[-1] = None
    elif case == "sparse":
        grads[2] = grads[2].to_sparse()
    elif case == "sliced":
        grads[2] = torch.cat([grads[2], grads[2]])[3:43]
        grads[7] = torch.stack([grads[7], grads[7]], 1)[:, 1]
    return grads


CASES = ("plain", "channels last", "transposed", "missing", "sparse", "sliced", "plain")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "size"), [(1, 7), (90, 100), (1000, 64), (700, 600)])
def test_columns_are_sketched_as_elsewhere(width, size, kind):
    torch.manual_seed(0)
    table = torch.randn(3, width + 5, device=DEVICE).to(kind)
    columns = table[:, 2 : width + 2]  # elements of an example lie side by side, examples need not
    hashed = CountSketch(size, 3).hashes("w", 0, -(-width // size), columns.device)
    want = count_sketch(columns.float(), size, 3, name="w")
    torch.testing.assert_close(sketch_columns(columns, size, *hashed), want, atol=1e-4, rtol=1e-5)


def gradient_sketcher(parameters, size, seed):
    blocks = -(-sum(p.numel() for p in parameters) // size)
    hashed = CountSketch(size, seed).hashes("", 0, blocks, parameters[0].device)
    return GradientSketcher(parameters, hashed)


@pytest.mark.parametrize("size", [100, 1500])
def test_sketch_is_the_count_sketch_of_the_flat_gradient(size):
    torch.manual_seed(0)
    dtypes = [torch.float32] * len(SHAPES) + [torch.bfloat16, torch.float64]
    shapes = (*SHAPES, (20, 9), (4, 4))
    parameters = [
        torch.zeros(shape, dtype=dtype, device=DEVICE)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    sketcher = gradient_sketcher(parameters, size, 3)
    for case in CASES:  # one after the other: addresses and layouts change from step to step
        grads = untidy([torch.randn_like(p) for p in parameters], case)
        got = sketcher.sketch(grads)
        want = count_sketch(flat(parameters, grads), size, 3)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5, msg=lambda m, c=case: c + m)
        assert torch.equal(sketcher.sketch(grads), got)


def test_gradient_of_another_shape_is_refused():
    sketcher = gradient_sketcher([torch.zeros(4, 3, device=DEVICE)], 8, 0)
    with pytest.raises(RuntimeError, match=r"shape \(2, 3\), but its parameter had \(4, 3\)"):
        sketcher.sketch([torch.zeros(2, 3, device=DEVICE)])


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
    arriving = BatchGradientSource(model, SketchRows(size=32))
    monkeypatch.setattr(row_sources, "AT_END_DEVICES", {DEVICE})
    monkeypatch.setattr(row_sources, "has_kernels", lambda device: kernel)
    at_end = BatchGradientSource(model, SketchRows(size=32))
    assert (at_end._sketcher is not None) == kernel
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
            (device_signs, "SIGNING_DEVICES"),
            (transports, "SIGNING_DEVICES"),
            (balance, "KERNEL_DEVICES"),
        ):
            monkeypatch.setattr(module, name, here)
        monkeypatch.setattr(row_sources, "has_kernels", lambda device, here=here: bool(here))
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
