"""Rows against gradients: no false alarm, every wrong row named, and what follows from it."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradherd.rows.capture import Capture
from gradherd.rows.row_check import CHECK_EVERY, FIRST_CHECKS
from gradherd.rows.settings import ExactRows, SketchRows
from tests.rows.reference import close, loop_over_examples
from tests.rows.test_capture import BATCH, MODELS, per_example, values


class TiedByFunction(nn.Module):
    """Uses the weight of its embedding a second time, outside the embedding's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(7, 3), nn.Linear(3, 3)
        self.wide = nn.Linear(3, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(self.embed(tokens)).tanh()
        return torch.cat([F.linear(hidden, self.embed.weight), self.wide(hidden)], -1)


def step(model: nn.Module, x: Tensor) -> None:
    per_example(model(x)).mean().backward()


def tokens_of_batch() -> Tensor:
    return torch.randint(7, (BATCH, 5), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_no_false_alarm(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, x = MODELS[kind]
    autocast = dtype == torch.bfloat16
    if autocast and kind.startswith("lstm"):
        pytest.skip("not every CPU has LSTMs in bfloat16")
    model = make().to(torch.float32 if autocast else dtype)
    capture = Capture(model, ExactRows(strict=True))
    other = copy.deepcopy(model)  # of one capture, the other would see twice
    sketch = Capture(other, SketchRows(size=16), batch_size=BATCH)
    x = x.to(torch.float32 if autocast else dtype) if x.is_floating_point() else x
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = [per_example(one(x)).mean() for one in (model, other)]
        for loss in losses:
            loss.backward()
        capture.pop_rows(BATCH)
        sketch.pop_rows(BATCH)
    assert capture.left_out == {}
    # No layer knows of parameters in a list.
    assert set(sketch.left_out) == ({"scales.0", "scales.1"} if kind == "own" else set())


@given(
    examples=st.integers(1, 9),
    positions=st.integers(1, 9),
    width=st.integers(1, 40),
    scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_no_false_alarm_at_any_size(
    examples: int, positions: int, width: int, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width), nn.PReLU(), nn.Linear(width, 2))
    capture = Capture(model, ExactRows(batch_dim=0, strict=True))
    (per_example(model(torch.randn(examples, positions, 3))).mean() * scale).backward()
    capture.pop_rows(examples)


def test_rows_that_cancel_before_batch_norm_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    capture = Capture(model, ExactRows(strict=True))
    step(model, torch.randn(16, 3, 8, 8))
    capture.pop_rows(16)


def test_a_weight_used_outside_its_module_is_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model, x = TiedByFunction().double(), tokens_of_batch()
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    expected[:, : 7 * 3] = 0
    capture = Capture(model)
    for _ in range(5):
        step(model, x)
        close(capture.pop_rows(BATCH), expected)
    assert list(capture.left_out) == ["embed.weight"]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("gradherd", logging.WARNING)
    assert record.getMessage().startswith(
        "1 of 5 parameters, 18.6% of the elements, have no usable"
    )
    assert "embed.weight (they do not add up" in record.getMessage()


def test_sketches_leave_out_the_same() -> None:
    torch.manual_seed(0)
    model, x = TiedByFunction().double(), tokens_of_batch()
    capture = Capture(model, SketchRows(size=64), batch_size=BATCH)
    step(model, x)
    first = capture.pop_rows(BATCH)
    with torch.no_grad():
        before = model.embed.weight.clone()
    step(model, x)
    close(capture.pop_rows(BATCH), first)
    assert torch.equal(before, model.embed.weight)
    assert list(capture.left_out) == ["embed.weight"]


def test_strict_raises() -> None:
    model = TiedByFunction()
    capture = Capture(model, ExactRows(strict=True))
    step(model, tokens_of_batch())
    with pytest.raises(RuntimeError, match=r"embed.weight .*strict=True"):
        capture.pop_rows(BATCH)
    assert not capture.waiting


class SharedByFunction(nn.Module):
    """A linear layer whose weight a module without a rule owns, too."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(3, 3), nn.Module()
        self.own.weight = self.layer.weight
        self.own.forward = lambda x: F.linear(x, self.own.weight)
        self.wide, self.scale = nn.Linear(3, 20), scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.own(checkpoint(self.layer, x, use_reentrant=False).tanh())
        return self.wide(y + F.linear(x, self.layer.weight) * self.scale)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_rows_of_a_rule_and_of_a_loop_are_added(scale: float) -> None:
    model, x = SharedByFunction(scale).double(), values(BATCH, 20, 3)
    capture = Capture(model, batch_size=BATCH)
    for _ in range(3):
        step(model, x)
        rows = capture.pop_rows(BATCH)
    if not scale:
        close(rows, loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH))
    # With a third use that no module owns, they do not add up.
    assert list(capture.left_out) == (["layer.weight"] if scale else [])


def test_a_gradient_penalty_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    capture = Capture(model)
    x = torch.randn(BATCH, 3, requires_grad=True)
    loss = per_example(model(x)).mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.pow(2).sum()).backward()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*order whole batches"):
        capture.pop_rows(BATCH)


def test_gradients_of_inputs_alone_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = values(BATCH, 3).requires_grad_()
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    capture = Capture(model, ExactRows(strict=True))
    loss = per_example(model(x)).mean()
    torch.autograd.grad(loss, x, retain_graph=True)
    assert not capture.waiting
    loss.backward()
    assert capture.waiting
    close(capture.pop_rows(BATCH), expected)


def test_a_user_s_hook_on_a_parameter_is_no_mismatch() -> None:
    model = nn.Linear(3, 2)
    model.weight.register_hook(lambda grad: grad * 0)
    capture = Capture(model, ExactRows(strict=True))
    step(model, torch.randn(BATCH, 3))
    assert capture.pop_rows(BATCH)[:, :6].any()
    assert not model.weight.grad.any()


def test_a_gradient_that_is_not_finite_is_no_mismatch() -> None:
    model = nn.Linear(3, 2)
    capture = Capture(model, ExactRows(strict=True))
    (per_example(model(torch.randn(BATCH, 3))).mean() * float("inf")).backward()
    capture.pop_rows(BATCH)


def test_sparse_gradients_are_compared() -> None:
    model = nn.Embedding(7, 3, sparse=True)
    capture = Capture(model, ExactRows(strict=True))
    step(model, tokens_of_batch())
    capture.pop_rows(BATCH)


def test_checks_come_at_the_start_then_rarely_and_after_a_change_of_mode() -> None:
    model = nn.Linear(1, 1)
    capture = Capture(model)
    checked = []
    for batch in range(CHECK_EVERY + 10):
        if batch == 20:
            model.eval()
        step(model, torch.ones(2, 1))
        if capture.check_bitmask(2) is not None:
            checked.append(batch)
        capture.pop_rows(2)
    assert checked == [*range(FIRST_CHECKS), 21, 22, 23, CHECK_EVERY]
    capture.restart_checks()
    assert capture.check_bitmask(2) is not None


def test_what_other_ranks_leave_out_is_left_out_here() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    capture = Capture(model)
    step(model, torch.randn(BATCH, 3))
    mask = capture.check_bitmask(BATCH)
    assert mask is not None
    assert mask.tolist() == [0, 0, 0, 0]
    mask[1] = 1
    capture.leave_out(mask)
    assert capture.left_out == {"0.bias": "on another rank"}
    assert not capture.pop_rows(BATCH)[:, 6:8].any()
