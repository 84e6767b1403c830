"""Triton's kernels for single layers, against torch's own operations.

How they run here: see `gpu`.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from gradherd.rows import triton_layers
from gradherd.rows.capture import Capture
from gradherd.rows.settings import TwoSidedRows
from tests.gpu import DEVICE, MARKS, only_gpu
from tests.rows.zoo import ResNet, ViT

pytestmark = MARKS
ALLOWED = 5e-3 if DEVICE == "cuda" else 1e-5  # convolutions round to TF32 on a GPU


class Blocks(nn.Module):
    """Blocks of equal layers on several positions, with and without biases."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(30, width)
        self.wide = nn.ModuleList(nn.Linear(width, 40) for _ in range(3))
        self.thin = nn.ModuleList(nn.Linear(40, width, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.head = nn.Linear(width, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for wide, thin, norm in zip(self.wide, self.thin, self.norms, strict=True):
            x = x + thin(wide(norm(x)).relu())
        return self.head(x.mean(1))


class Convolutions(nn.Module):
    """Windows of several kinds, strides, paddings and dilations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        kinds: list[dict[str, Any]] = [
            {"kernel_size": 3, "padding": 1}, {"kernel_size": 3, "padding": 1}, {"kernel_size": 1},
            {"kernel_size": 1, "stride": 2}, {"kernel_size": (3, 2), "padding": (0, 1)},
            {"kernel_size": 3, "dilation": 2, "padding": 2, "stride": (2, 1)},
        ]  # fmt: skip
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, bias=False, **one), nn.BatchNorm2d(8)) for one in kinds)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(images).relu()).mean((2, 3)))


class Summed(nn.Module):
    """The sum over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


def rows_of(
    model: nn.Module, inputs: Tensor, *, kernels: bool, rank: int = 4, autocast: bool = False
) -> Tensor:
    capture = Capture(model, TwoSidedRows(size=4096, rank=rank, strict=True), batch_size=9)
    capture._pool.has_kernels = kernels
    capture._check._remaining = 1
    rows = []
    for _ in range(2):  # one batch is checked, with sinks of its own
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(inputs).float(), torch.arange(len(inputs)).to(DEVICE) % 5)
        loss.backward()
        rows.append(capture.pop_rows(len(inputs)))
    capture.remove_hooks()
    torch.testing.assert_close(rows[0], rows[-1], rtol=1e-2, atol=1e-4)
    return rows[-1]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List launches by the streams that they are on."""
    found: list[int] = []
    plan = triton_layers.plan_product

    def counted(*args: Any) -> triton_layers.KernelPlan | None:
        made = plan(*args)
        if made is None:
            return None

        def run(*addresses: int) -> None:
            found.append(addresses[0])
            made.run(*addresses)

        return made._replace(run=run)

    monkeypatch.setattr(triton_layers, "plan_product", counted)
    return found


def error(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 8, 8, device=DEVICE)


def tokens(count: int = 3) -> Tensor:
    return torch.randint(30, (count, 5), device=DEVICE)


def test_blocks_of_layers(served: list[int]) -> None:
    torch.manual_seed(0)
    model, words = Blocks().to(DEVICE), tokens()
    expected = rows_of(model, words, kernels=False)
    assert not served
    assert error(rows_of(model, words, kernels=True), expected) < 1e-5
    assert len(served) == 2 * 6  # two batches: six weights each; the head has one position


def test_a_head_whose_outputs_are_not_projected(served: list[int]) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Flatten(), nn.Linear(192, 5)).to(DEVICE), images()
    expected = rows_of(model, inputs, kernels=False, rank=8)
    assert error(rows_of(model, inputs, kernels=True, rank=8), expected) < 1e-5
    assert len(served) == 2


def test_sides_that_are_folded() -> None:
    torch.manual_seed(0)
    # Just more than is kept in one piece, and an odd number: the second fold is padded.
    layers = nn.Embedding(30, 8), nn.Linear(8, 1101), nn.Linear(1101, 5), Summed()
    model, words = nn.Sequential(*layers).to(DEVICE), tokens()
    expected = rows_of(model, words, kernels=False)
    assert error(rows_of(model, words, kernels=True), expected) < 1e-5


@pytest.mark.parametrize("rank", [2, 20])
def test_columns_of_any_number(rank: int) -> None:
    torch.manual_seed(0)
    model, words = Blocks(width=22).to(DEVICE), tokens()
    expected = rows_of(model, words, kernels=False, rank=rank)
    assert error(rows_of(model, words, kernels=True, rank=rank), expected) < 1e-5


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions(layout: torch.memory_format, served: list[int]) -> None:
    torch.manual_seed(0)
    model = Convolutions().to(DEVICE).to(memory_format=layout)
    inputs = images(2).to(memory_format=layout)
    expected = rows_of(model, inputs, kernels=False)
    assert error(rows_of(model, inputs, kernels=True), expected) < ALLOWED
    assert len(served) == 2 * 6  # the stem has too few channels


@pytest.mark.parametrize(("make", "count"), [(ResNet, 2), (ViT, 3)])
def test_models_and_short_batches(make: type[nn.Module], count: int) -> None:
    torch.manual_seed(0)
    model, inputs = make().to(DEVICE), images(count)
    expected = rows_of(model, inputs, kernels=False)
    assert error(rows_of(model, inputs, kernels=True), expected) < ALLOWED


@only_gpu  # Triton's interpreter multiplies the bits of bfloat16
@pytest.mark.parametrize("make", [Blocks, Convolutions])
def test_half_precision(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, inputs = make().to(DEVICE), images() if make is Convolutions else tokens()
    expected = rows_of(model, inputs, kernels=False, autocast=True)
    assert error(rows_of(model, inputs, kernels=True, autocast=True), expected) < 0.02


def test_rows_do_not_depend_on_chance() -> None:
    torch.manual_seed(0)
    model, words = Blocks().to(DEVICE), tokens()
    assert torch.equal(*(rows_of(model, words, kernels=True) for _ in range(2)))


def test_gradients_that_are_changed_in_place_later() -> None:
    """Kernels have read them by then, as autograd has."""
    torch.manual_seed(0)
    model, words = Blocks().to(DEVICE), tokens()

    def scale(module: Any, given: Any, grads: tuple[Tensor, ...]) -> None:
        grads[0].mul_(2)

    model.norms[1].register_full_backward_hook(scale)
    expected = rows_of(model, words, kernels=False)
    assert error(rows_of(model, words, kernels=True), expected) < 1e-5


class OnStream(nn.Module):
    """Runs a layer on a stream."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.stream = layer, torch.cuda.current_stream()

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cuda.current_stream()
        self.stream.wait_stream(before)
        with torch.cuda.stream(self.stream):
            found: Tensor = self.layer(x)
        before.wait_stream(self.stream)
        return found


@only_gpu
def test_layers_on_another_stream() -> None:
    torch.manual_seed(0)
    model, words = Blocks().to(DEVICE), tokens()
    model.wide[1], model.thin[2] = layers = OnStream(model.wide[1]), OnStream(model.thin[2])
    expected = rows_of(model, words, kernels=True)
    for layer in layers:
        layer.stream = torch.cuda.Stream()
    assert error(rows_of(model, words, kernels=True), expected) < 1e-6
