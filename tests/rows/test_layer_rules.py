"""Every layer type against a loop over single examples, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradherd.rows.batch_dims import BatchDims
from gradherd.rows.capture import Capture
from gradherd.rows.settings import ExactRows
from gradherd.rows.sink import SinkPool
from tests.rows.reference import batch_gradient, close, loop_over_examples

BATCH = 5


class TimeMajor(nn.Module):
    """Feeds its input (B, T, ...) to a layer as (T, B, ...)."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear-no-bias": (lambda: nn.Linear(4, 3, bias=False), (4,)),
    "linear-long": (lambda: nn.Linear(3, 2), (40, 3)),
    "linear-sequence": (lambda: nn.Linear(40, 30), (3, 40)),
    "linear-two-leading": (lambda: nn.Linear(4, 7), (2, 3, 4)),
    "linear-time-major": (lambda: TimeMajor(nn.Linear(4, 3)), (3, 4)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), (3, 7, 6)),
    "conv2d-few-positions": (lambda: nn.Conv2d(2, 9, 3), (2, 4, 4)),
    "conv2d-strided": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=(1, 2)), (2, 8, 7)),
    "conv2d-dilated": (lambda: nn.Conv2d(2, 3, 3, dilation=2, padding=1, bias=False), (2, 8, 9)),
    "conv2d-same": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)), (2, 6, 5)),
    "conv2d-reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 6, 5)),
    "conv2d-circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 6, 5)),
    "conv2d-grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 5)),
    "conv2d-depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, stride=2), (4, 7, 7)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1, stride=2), (3, 9)),
    "conv1d-same": (lambda: nn.Conv1d(3, 4, 4, padding="same", dilation=2), (3, 9)),
    "conv1d-grouped": (lambda: nn.Conv1d(4, 4, 3, groups=4, dilation=2), (4, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 3, 4, 3)),
    "conv-transpose": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), (2, 4, 3)),
    "layer-norm": (lambda: nn.LayerNorm(6), (6,)),
    "layer-norm-sequence": (lambda: nn.LayerNorm((4, 6)), (3, 4, 6)),
    "layer-norm-no-bias": (lambda: nn.LayerNorm(6, bias=False), (3, 6)),
    "rms-norm": (lambda: nn.RMSNorm(6), (3, 6)),
    "group-norm": (lambda: nn.GroupNorm(2, 6), (6, 4, 3)),
    "group-norm-flat": (lambda: nn.GroupNorm(2, 6), (6,)),
    "instance-norm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 5)),
    "batch-norm-eval": (lambda: nn.BatchNorm2d(3).eval(), (3, 4, 2)),
    "batch-norm-1d-eval": (lambda: nn.BatchNorm1d(3).eval(), (3,)),
    "prelu": (lambda: nn.PReLU(4), (4, 3)),
    "rnn-cell": (lambda: nn.RNNCell(4, 3), (4,)),
}


def randomised(module: nn.Module) -> nn.Module:
    """Return the module in float64 with no parameter left at a special value such as 1 or 0."""
    generator = torch.Generator().manual_seed(1)
    module = module.double()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator).double() + 0.3)
                tensor[..., 1::2] *= -1 if tensor.dim() > 1 else 1
    return module


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", LAYERS)
def test_rows_equal_a_loop_over_examples(kind: str, reduction: str) -> None:
    make, shape = LAYERS[kind]
    layer = randomised(make())
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)

    def losses(part: slice) -> Tensor:
        out = layer(x[part])
        return (out.sin() * out).flatten(1).sum(1)

    expected = loop_over_examples(layer, losses, BATCH)
    capture = Capture(layer, ExactRows(reduction=reduction))
    whole = losses(slice(None))
    (whole.mean() if reduction == "mean" else whole.sum()).backward()
    close(capture.pop_rows(BATCH), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3)])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}])
def test_embedding(shape: tuple[int, ...], options: dict[str, object], reduction: str) -> None:
    layer = nn.Embedding(6, 4, **options).double()
    tokens = torch.randint(6, (BATCH, *shape), generator=torch.Generator().manual_seed(3))
    factor = torch.randn(BATCH, *shape, 4, dtype=torch.float64)

    def losses(part: slice) -> Tensor:
        return (layer(tokens[part]).exp() * factor[part]).flatten(1).sum(1)

    expected = loop_over_examples(layer, losses, BATCH)
    capture = Capture(layer, ExactRows(reduction=reduction))
    getattr(losses(slice(None)), reduction)().backward()
    close(capture.pop_rows(BATCH), expected)


def test_embedding_of_a_large_vocabulary() -> None:
    layer = nn.Embedding(100_000, 3).double()
    tokens = torch.tensor([[1, 99_999, 1], [5, 1, 99_999]])
    capture = Capture(layer, ExactRows(reduction="sum"))
    layer(tokens).pow(2).sum().backward()
    rows = capture.pop_rows(2)
    close(rows.sum(0), batch_gradient(layer))
    assert (rows != 0).sum() == 2 * 2 * 3 + 3


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (3,)),
        (nn.BatchNorm1d(3), (3, 4)),
        (nn.BatchNorm2d(3), (3, 4, 2)),
        (nn.BatchNorm2d(3, track_running_stats=False).eval(), (3, 4, 2)),
    ],
)
def test_batch_norm_rows_are_shares_of_the_batch_gradient(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    layer = randomised(layer)
    x = torch.randn(BATCH, *shape, dtype=torch.float64)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    capture = Capture(layer)
    out = layer(x)
    out.pow(3).flatten(1).sum(1).mean().backward()
    after = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    rows = capture.pop_rows(BATCH)
    normal = x - x.transpose(0, 1).flatten(1).mean(1).view(1, 3, *[1] * (x.dim() - 2))
    var = normal.transpose(0, 1).flatten(1).pow(2).mean(1).view(1, 3, *[1] * (x.dim() - 2))
    share = 3 * out.detach() ** 2
    weight = (share * normal / (var + layer.eps).sqrt()).reshape(BATCH, 3, -1).sum(2)
    bias = share.reshape(BATCH, 3, -1).sum(2)
    close(rows, torch.cat([weight, bias], 1))
    close(rows.mean(0), batch_gradient(layer))
    if before:
        assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(after[name], buffer) for name, buffer in layer.named_buffers())


def test_batch_norm_in_evaluation_uses_the_statistics_of_its_forward() -> None:
    layer = randomised(nn.BatchNorm1d(3)).eval()
    x = torch.randn(BATCH, 3, dtype=torch.float64)
    expected = loop_over_examples(layer, lambda part: layer(x[part]).pow(2).sum(1), BATCH)
    capture = Capture(layer, ExactRows(reduction="sum"))
    layer(x).pow(2).sum().backward()
    layer.train()(x * 7)
    close(capture.pop_rows(BATCH), expected)


@given(
    examples=st.integers(1, 5),
    positions=st.integers(1, 6),
    inputs=st.integers(1, 5),
    outputs=st.integers(1, 5),
)
@settings(max_examples=30, deadline=None)
def test_linear_of_any_size(examples: int, positions: int, inputs: int, outputs: int) -> None:
    layer = nn.Linear(inputs, outputs).double()
    x = torch.randn(examples, positions, inputs, dtype=torch.float64)

    def losses(part: slice) -> Tensor:
        return layer(x[part]).pow(2).flatten(1).sum(1)

    expected = loop_over_examples(layer, losses, examples)
    capture = Capture(layer, ExactRows(batch_dim=0))
    losses(slice(None)).mean().backward()
    close(capture.pop_rows(examples), expected)


def test_a_subclass_with_another_forward_has_no_rule(caplog: pytest.LogCaptureFixture) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Named(nn.Linear):
        pass

    with caplog.at_level("INFO", "gradherd"):
        Capture(Doubled(2, 2))
        Capture(Named(2, 2))
    assert caplog.messages == ["looped over, which is slow: the model itself (Doubled)"]


def test_sizes_decide_where_the_model_was_not_run_with_one_more_example() -> None:
    def find(*shape: int, given: int | None = None, batch: int | None = 4) -> int | None:
        pool = SinkPool(torch.empty(0), None)
        pool.given_dim, pool.batch = given, batch
        return BatchDims(nn.Module(), pool).of_output("x", 0, torch.Size(shape))

    assert find(4, 5, 3) == 0
    assert find(5, 4, 3) == 1
    assert find(5, 2, 3) is None
    assert find(4, 4, 3) is None  # either may hold the examples
    assert find(1, 4, 3) is None  # broadcast over the examples
    assert find(4, 4, 3, given=1) == 1
    assert find(4, 5, 3, given=1) == 0
    assert find(4, 5, 3, given=1, batch=None) == 1  # a part of the model is called by itself
    assert find(4, 5, 3, batch=None) is None
