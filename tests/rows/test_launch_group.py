"""Kernels that serve many layers at once: the same columns as the layers' own products.

Run in a process with TRITON_INTERPRET=1 (see tests/test_interpreted.py), or on a GPU.
"""

import copy
import os

import pytest
import torch
from torch import nn

from gradherd.rows import launch_group, launch_plan, projected_weight, row_check
from gradherd.rows.column_table import ColumnTable
from gradherd.rows.settings import TwoSidedRows
from gradherd.rows.two_sided import TwoSidedCapture

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="there is no GPU"),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
# On a GPU the kernels multiply in TF32.
TOLERANCE = 1e-4 if INTERPRETED else 5e-3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.out = nn.Linear(24, 5, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return self.out(self.attention(x, x, x, need_weights=False)[0])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(17, 17), nn.LayerNorm(17)

    def forward(self, x):
        return self.norm(self.layer(self.norm(self.layer(x))))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 18, 5, padding=2),
        nn.BatchNorm2d(18),
        nn.Conv2d(18, 40, 3, stride=2, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(40, 33, 1, stride=2),
        nn.BatchNorm2d(33),
        nn.Conv2d(33, 16, (3, 2), dilation=(1, 2), padding=(2, 0), padding_mode="circular"),
        nn.ConvTranspose2d(16, 17, 3, stride=2),
    )


CASES = {
    "linear": (lambda: nn.Sequential(nn.Linear(70, 40), nn.GELU(), nn.Linear(40, 3)), (9, 70)),
    "attention": (Attention, (7, 24)),
    "twice": (Twice, (5, 17)),
    "convolutions": (convolutions, (3, 13, 12)),
    "signals": (
        lambda: nn.Sequential(nn.Conv1d(16, 20, 3, padding=1), nn.BatchNorm1d(20)),
        (16, 11),
    ),
    "many outputs": (lambda: nn.Linear(20, 150), (3, 20)),
    "a vocabulary": (lambda: nn.Linear(20, 500), (3, 20)),
    # Lengths and strides that are multiples of 8 are loaded in another way.
    "multiples of 8": (
        lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(192, 512)),
        (40, 64),
    ),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.Conv2d(24, 80, 1)
        ),
        (16, 12, 12),
    ),
    "many channels": (lambda: nn.Conv1d(20, 70, 1), (20, 3)),
}


def sketches(model, inputs, weights, *, kernels, monkeypatch, rank=16):
    with monkeypatch.context() as patch:
        patch.setattr(launch_group, "KERNEL_DEVICES", {DEVICE} if kernels else set())
        capture = TwoSidedCapture(model, TwoSidedRows(rank=rank, size=512, strict=True))
        for _ in range(2):  # some layers decide by the first batch
            model.zero_grad()
            (model(inputs) * weights).sum().backward()
            rows = capture.pop_sketch(len(inputs), reduction="sum")
        capture.remove_hooks()
    return rows


@pytest.fixture(autouse=True)
def few_outputs_are_many(monkeypatch):
    """More than 64 outputs are folded: real models have thousands."""
    monkeypatch.setattr(projected_weight, "_FEWEST_OUTPUTS", 64)


RANKS = [*((name, 16) for name in CASES), ("linear", 5), ("linear", 40), ("convolutions", 20)]


@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_kernels_give_what_layers_give(name, rank, monkeypatch):
    torch.manual_seed(0)
    make, shape = CASES[name]
    model = make().to(DEVICE)
    inputs = torch.randn(4, *shape, device=DEVICE)
    weights = torch.randn_like(model(inputs))
    expected = sketches(model, inputs, weights, kernels=False, monkeypatch=monkeypatch, rank=rank)
    rows = sketches(model, inputs, weights, kernels=True, monkeypatch=monkeypatch, rank=rank)
    assert (rows - expected).norm() <= TOLERANCE * expected.norm()


def test_channels_last(monkeypatch):
    layout = torch.channels_last
    torch.manual_seed(0)
    model = convolutions().to(DEVICE, memory_format=layout)
    inputs = torch.randn(2, 3, 12, 12, device=DEVICE).to(memory_format=layout)
    weights = torch.randn_like(model(inputs))
    expected = sketches(model, inputs, weights, kernels=False, monkeypatch=monkeypatch)
    rows = sketches(model, inputs, weights, kernels=True, monkeypatch=monkeypatch)
    assert (rows - expected).norm() <= TOLERANCE * expected.norm()


def test_lengths_that_change_from_batch_to_batch(monkeypatch):
    monkeypatch.setattr(launch_group, "_MOST_PLANS", 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 7)).to(DEVICE)
    batches = [torch.randn(2, length, 6, device=DEVICE) for length in (3, 4, 5, 3, 4, 6)]
    rows = {}
    for kernels in (False, True):
        monkeypatch.setattr(launch_group, "KERNEL_DEVICES", {DEVICE} if kernels else set())
        capture = TwoSidedCapture(model, TwoSidedRows(size=64, strict=True))
        rows[kernels] = []
        for inputs in batches:
            model(inputs).square().mean().backward()
            rows[kernels].append(capture.pop_sketch(2))
        capture.remove_hooks()
    for one, other in zip(rows[True], rows[False], strict=True):
        assert (one - other).norm() <= TOLERANCE * other.norm()


def test_steps_that_are_alike(monkeypatch):
    """Launches that are known from the step before, with other steps in between."""
    monkeypatch.setattr(row_check, "FIRST_CHECKS", 1)
    known = []
    again = ColumnTable.launch_again

    def spy(*args):
        known.append(again(*args))
        return known[-1]

    monkeypatch.setattr(ColumnTable, "launch_again", spy)
    torch.manual_seed(0)
    start = nn.Sequential(
        nn.Conv2d(16, 18, 3, padding=1), nn.BatchNorm2d(18), nn.Flatten(2), nn.Linear(12, 5)
    ).to(DEVICE)
    # Examples, train or evaluation, forwards before the backward.
    steps = [(3, True, 1)] * 6 + [(2, True, 1), (3, True, 1), (3, True, 2), (3, True, 1)]
    steps += [(3, False, 1)] * 3 + [(3, True, 1)] * 3
    batches = [torch.randn(n, 16, 3, 4, device=DEVICE) for n, _, _ in steps]
    rows = {}
    for kernels in (False, True):
        monkeypatch.setattr(launch_group, "KERNEL_DEVICES", {DEVICE} if kernels else set())
        model = copy.deepcopy(start)
        capture = TwoSidedCapture(model, TwoSidedRows(size=64, strict=True))
        rows[kernels] = []
        for inputs, (examples, training, forwards) in zip(batches, steps, strict=True):
            model.train(training)
            losses = [model(inputs * (1 + at)).square().mean() for at in range(forwards)]
            torch.stack(losses).sum().backward()
            rows[kernels].append(capture.pop_sketch(examples))
        capture.remove_hooks()
        assert sum(known) == 0 or kernels
    assert sum(known) >= 15 and not all(known)
    for one, other in zip(rows[True], rows[False], strict=True):
        assert (one - other).norm() <= TOLERANCE * other.norm()


def test_autocast_in_another_layout(monkeypatch):
    """An input that autocast has copied, and that the layer's own filters project first."""
    torch.manual_seed(0)
    layout = torch.channels_last
    model = nn.Sequential(nn.Conv2d(3, 18, 3, padding=1), nn.ReLU(), nn.Conv2d(18, 9, 3))
    model.to(DEVICE, memory_format=layout)
    inputs = torch.randn(2, 3, 8, 8, device=DEVICE).to(memory_format=layout)
    rows = {}
    for kernels in (False, True):
        monkeypatch.setattr(launch_group, "KERNEL_DEVICES", {DEVICE} if kernels else set())
        capture = TwoSidedCapture(model, TwoSidedRows(size=512, strict=True))
        for _ in range(2):
            with torch.autocast(DEVICE, torch.float16):
                loss = model(inputs).square().mean()
            loss.backward()
            rows[kernels] = capture.pop_sketch(2)
        capture.remove_hooks()
    assert (rows[True] - rows[False]).norm() <= 0.01 * rows[False].norm()


def test_more_columns_than_a_program_has(monkeypatch):
    monkeypatch.setattr(launch_plan, "_MOST_COLUMNS", 16)
    for name, rank in (("linear", 36), ("convolutions", 18)):
        test_kernels_give_what_layers_give(name, rank, monkeypatch)


def test_projections_inside_attention_are_known_from_the_step_before(monkeypatch):
    """All layers of a second step, with queries apart from keys and values in between."""
    monkeypatch.setattr(row_check, "FIRST_CHECKS", 1)
    known = []
    again = ColumnTable.launch_again
    monkeypatch.setattr(
        ColumnTable, "launch_again", lambda *args: again(*args) and (known.append(args[1]) or True)
    )
    torch.manual_seed(0)
    start = Attention().to(DEVICE)
    batches = [torch.randn(3, 5, 24, device=DEVICE) for _ in range(4)]

    def apart(model, x):
        # Other queries than keys: torch projects them apart, with parts of the weight.
        x = model.norm(x)
        return model.out(model.attention(2 * x, x, x, need_weights=False)[0])

    rows = {}
    for kernels in (False, True):
        monkeypatch.setattr(launch_group, "KERNEL_DEVICES", {DEVICE} if kernels else set())
        model = copy.deepcopy(start)
        capture = TwoSidedCapture(model, TwoSidedRows(size=64, strict=True))
        rows[kernels] = []
        for at, inputs in enumerate(batches):
            known.clear()
            out = apart(model, inputs) if at == 2 else model(inputs)
            out.square().mean().backward()
            rows[kernels].append(capture.pop_sketch(3))
        capture.remove_hooks()
        layers = {layer.name: layer.known for layer in capture._watcher._layers}
    served = {name for name, use in layers.items() if use in known}
    assert any("in_proj" in name or name == "attention" for name in served), served
    for one, other in zip(rows[True], rows[False], strict=True):
        assert (one - other).norm() <= TOLERANCE * other.norm()


def test_an_input_that_changes_before_kernels_have_read_it(monkeypatch):
    """A buffer that the loop fills again after the backward, before rows are read."""
    monkeypatch.setattr(row_check, "FIRST_CHECKS", 1)
    monkeypatch.setattr(launch_group, "KERNEL_DEVICES", {DEVICE})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 7)).to(DEVICE)
    capture = TwoSidedCapture(model, TwoSidedRows(size=64))
    buffer = torch.randn(2, 3, 6, device=DEVICE)
    first = rows = None
    for step in range(4):
        model(buffer).square().mean().backward()
        if step == 2:
            buffer.mul_(2)
            with pytest.raises(RuntimeError, match="module '0' was changed in place"):
                capture.pop_sketch(2)
            buffer.div_(2)
            continue
        rows = capture.pop_sketch(2)
        first = rows if first is None else first
    # The batch after that is read as ever.
    assert (rows - first).norm() <= TOLERANCE * first.norm()
