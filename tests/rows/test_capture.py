"""Whole models: shared and tied weights, attention, recurrence, checkpointing, autocast, DDP."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradherd.lab.ranks import run_ranks
from gradherd.rows.capture import Capture
from gradherd.rows.settings import ExactRows, TwoSidedRows
from tests.rows.reference import batch_gradient, close, loop_over_examples

BATCH = 4


class Shared(nn.Module):
    """One linear and one convolution, each called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.conv(x).tanh())
        return self.linear(self.linear(y).tanh())


class Tied(nn.Module):
    """A language model whose output weight is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)))


class OwnParameters(nn.Module):
    """Parameters of its own, in a list too, around a child with a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, 3))
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(2)])
        self.child = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = torch.cat([self.start.expand(len(x), 1, 3), x], 1)
        y = self.child(y * self.scales[0])
        return {"out": y * self.scales[1], "norm": (y * self.scales[0]).sum((1, 2))}


class TiedAcrossKinds(nn.Module):
    """A weight used by a linear layer and by a module of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.cell = nn.RNNCell(3, 3)
        self.cell.weight_hh = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x[:, 0], self.linear(x[:, 1]))


class Recurrent(nn.Module):
    """A recurrent layer with all outputs used, time-major or batch-first."""

    def __init__(self, layer: nn.RNNBase):
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(layer.hidden_size * (1 + layer.bidirectional), 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.layer.batch_first else x.transpose(0, 1)
        out, state = self.layer(x)
        out = out if self.layer.batch_first else out.transpose(0, 1)
        hidden = torch.cat(state) if isinstance(state, tuple) else state
        return self.head(out).flatten(1).sum(1) + hidden.pow(2).sum((0, 2))


class Attention(nn.Module):
    def __init__(self, batch_first: bool):
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.layer.batch_first else x.transpose(0, 1)
        out, weights = self.layer(x, x.flip(-1), value=x)
        return (out if self.layer.batch_first else out.transpose(0, 1)) + weights.sum((1, 2))[
            :, None, None
        ]


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def tokens(*shape: int) -> Tensor:
    return torch.randint(7, shape, generator=torch.Generator().manual_seed(8))


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "shared": (Shared, values(BATCH, 2, 3, 5)),
    "tied": (Tied, tokens(BATCH, 6)),
    "tied-short": (Tied, tokens(BATCH, 1)),
    "own": (OwnParameters, values(BATCH, 2, 3)),
    "tied-across-kinds": (TiedAcrossKinds, values(BATCH, 2, 3)),
    "weight-norm": (weight_normed, values(BATCH, 5, 3)),
    "lstm": (lambda: Recurrent(nn.LSTM(3, 2, num_layers=2)), values(BATCH, 5, 3)),
    "lstm-batch-first": (
        lambda: Recurrent(nn.LSTM(3, 2, num_layers=BATCH, batch_first=True)),
        values(BATCH, 5, 3),
    ),
    "lstm-square": (lambda: Recurrent(nn.LSTM(3, 2)), values(BATCH, 5, 3)),
    "gru": (
        lambda: Recurrent(nn.GRU(3, 2, bidirectional=True, batch_first=True)),
        values(BATCH, 5, 3),
    ),
    "rnn": (lambda: Recurrent(nn.RNN(3, 2)), values(BATCH, 5, 3)),
    "attention": (lambda: Attention(True), values(BATCH, 3, 4)),
    "attention-time-major": (lambda: Attention(False), values(BATCH, 3, 4)),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        values(BATCH, 3, 4),
    ),
    "relu-in-place": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(27, 2)
        ),
        values(BATCH, 2, 5, 5),
    ),
}


def per_example(out: object) -> Tensor:
    parts = out.values() if isinstance(out, dict) else [out]
    return sum(((p.sin() + p * p).reshape(len(p), -1).sum(1) for p in parts), torch.zeros(()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", MODELS)
def test_rows_equal_a_loop_over_examples(kind: str, reduction: str) -> None:
    torch.manual_seed(0)
    make, x = MODELS[kind]
    model = make().double()
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    capture = Capture(model, ExactRows(reduction=reduction))
    getattr(per_example(model(x)), reduction)().backward()
    close(capture.pop_rows(BATCH), expected)
    assert not capture.waiting


@pytest.mark.parametrize(
    "model",
    [
        nn.TransformerEncoderLayer(4, 2, 6, dropout=0.4, batch_first=True),
        Recurrent(nn.LSTM(3, 2, num_layers=2, dropout=0.5, batch_first=True)),
        nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv1d(5, 4, 2), nn.BatchNorm1d(4), nn.ReLU(), nn.PReLU(4)),
    ],
    ids=["transformer", "lstm", "mlp", "batch-norm"],
)
def test_with_dropout_or_batch_statistics_rows_add_up_to_the_batch_gradient(
    model: nn.Module,
) -> None:
    model = model.double().train()
    width = 4 if isinstance(model, nn.TransformerEncoderLayer) else 3
    x = values(BATCH, 5, width)
    capture = Capture(model)
    per_example(model(x)).mean().backward()
    state = torch.get_rng_state()
    rows = capture.pop_rows(BATCH)
    assert torch.equal(state, torch.get_rng_state())
    close(rows.mean(0), batch_gradient(model))
    assert len(rows.unique(dim=0)) == BATCH


@pytest.mark.parametrize("settings", [ExactRows(), TwoSidedRows()])
def test_gradients_and_random_state_are_untouched(settings: ExactRows | TwoSidedRows) -> None:
    def run(watch: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Flatten(1),
            nn.Dropout(0.3),
            nn.Linear(36, 12),
            nn.Unflatten(1, (3, 4)),
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True),
        )
        capture = Capture(model, settings) if watch else None
        for _ in range(2):
            per_example(model(torch.randn(6, 1, 5, 5))).mean().backward()
            if capture:
                capture.pop_rows(6)
        buffers = torch.cat([b.flatten().double() for b in model.buffers()])
        return torch.cat([p.grad.flatten() for p in model.parameters()]), torch.cat(
            [buffers, torch.get_rng_state().double()]
        )

    plain, watched = run(False), run(True)
    if isinstance(settings, ExactRows):
        assert torch.equal(plain[0], watched[0])
    else:  # attention is computed step by step, but what is dropped is the same
        torch.testing.assert_close(plain[0], watched[0])
    assert torch.equal(plain[1], watched[1])


def test_frozen_and_unused_parameters() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(3, 3)
            self.partly = nn.Linear(3, 3)
            self.unused = nn.Linear(2, 2)
            self.frozen.requires_grad_(False)
            self.partly.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.partly(self.frozen(x).tanh()).tanh()

    model = Net().double()
    x = values(BATCH, 3)
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    capture = Capture(model)
    per_example(model(x)).mean().backward()
    rows = capture.pop_rows(BATCH)
    assert rows.shape == (BATCH, 9)
    assert not rows[:, 3:].any()
    close(rows, expected)


def test_forwards_without_backward_leave_nothing() -> None:
    model = Tied().double()
    capture = Capture(model)
    with torch.no_grad():
        model(tokens(BATCH, 6))
    model(tokens(9, 2))
    assert not capture.waiting
    per_example(model(tokens(BATCH, 6))).mean().backward()
    assert capture.waiting
    with torch.no_grad():
        model(tokens(3, 6))
    close(capture.pop_rows(BATCH).mean(0), batch_gradient(model))


def test_several_backwards_add_up() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.PReLU(4), nn.Linear(4, 2)).double()
    x, y = values(BATCH, 3), values(BATCH, 2, 3)[:, 1]
    expected = loop_over_examples(
        model, lambda part: per_example(model(x[part])) + per_example(model(y[part])), BATCH
    )
    capture = Capture(model)
    per_example(model(x)).mean().backward()
    per_example(model(y)).mean().backward()
    close(capture.pop_rows(BATCH), expected)


def test_two_backwards_of_one_graph_count_twice() -> None:
    model = nn.Linear(3, 2).double()
    capture = Capture(model)
    loss = per_example(model(values(BATCH, 3))).mean()
    loss.backward(retain_graph=True)
    once = capture.pop_rows(BATCH)
    loss.backward(retain_graph=True)
    close(capture.pop_rows(BATCH), once)
    loss.backward(retain_graph=True)
    loss.backward()
    close(capture.pop_rows(BATCH), 2 * once)


@pytest.mark.parametrize("layer", [nn.Linear(3, 3), nn.PReLU(3)])
def test_hooks_that_change_inputs_and_outputs(layer: nn.Module) -> None:
    layer = layer.double()
    layer.register_forward_pre_hook(lambda module, args: (args[0] ** 3,))
    layer.register_forward_hook(lambda module, args, out: out.exp())
    x = values(BATCH, 3)
    expected = loop_over_examples(layer, lambda part: per_example(layer(x[part])), BATCH)
    capture = Capture(layer)
    per_example(layer(x)).mean().backward()
    close(capture.pop_rows(BATCH), expected)


def test_clear_and_detach_forget() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.PReLU(2)).double()
    capture = Capture(model)
    per_example(model(values(BATCH, 3))).mean().backward()
    assert capture.waiting
    capture.clear()
    assert not capture.waiting
    assert not capture.pop_rows(BATCH).any()
    capture.remove_hooks()
    per_example(model(values(BATCH, 3))).mean().backward()
    assert not capture.waiting
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_rows_are_divided_by_the_loss_scale() -> None:
    model = nn.Linear(3, 2).double()
    capture = Capture(model)
    per_example(model(values(BATCH, 3))).mean().backward()
    plain = capture.pop_rows(BATCH)
    (1024.0 * per_example(model(values(BATCH, 3))).mean()).backward()
    close(capture.pop_rows(BATCH, loss_scale=1024.0), plain)


def test_autocast_rows_are_float32_and_close() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(24, 8), nn.PReLU(8), nn.LayerNorm(8)
    )
    x = torch.randn(BATCH, 2, 8)
    capture = Capture(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = per_example(model(x)).mean()
    loss.backward()
    rows = capture.pop_rows(BATCH)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.mean(0), batch_gradient(model), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.PReLU(4)).double()
    head = nn.Linear(4, 2).double()
    model = nn.Sequential(block, head)
    x = values(BATCH, 3).requires_grad_()
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    # The loop calls parts of the model, not the model.
    capture = Capture(model, ExactRows(batch_dim=0))
    out = head(checkpoint(block, x, use_reentrant=reentrant))
    per_example(out).mean().backward()
    close(capture.pop_rows(BATCH), expected)


def test_inputs_inside_a_checkpoint_are_not_held() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    seen: list[weakref.ref[Tensor]] = []

    def held() -> int:
        return sum(ref() is not None for ref in seen)

    torch.manual_seed(0)
    model = Net().double()
    model.block[2].register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    capture = Capture(model, ExactRows(strict=True))
    for _ in range(5):
        x = torch.randn(BATCH, 20, 3, dtype=torch.float64)
        loss = per_example(model(x)).mean()
        assert held() == 0
        loss.backward()
        assert held() == 0
        rows = capture.pop_rows(BATCH)
    capture.remove_hooks()
    close(rows, loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH))


class PositionsInTheLoop(nn.Module):
    """A model whose parts a loop calls itself, with as many positions as examples."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(BATCH, 3)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.double()

    def encode(self, x: Tensor) -> Tensor:
        return self.net(x + self.positions(torch.arange(BATCH)))


def test_loops_that_call_parts_of_the_model() -> None:
    torch.manual_seed(0)
    model, x = PositionsInTheLoop(), values(BATCH, BATCH, 3)
    expected = loop_over_examples(model.net, lambda part: per_example(model.encode(x[part])), BATCH)
    capture = Capture(model)
    model.encode(x).mean().backward()
    with pytest.raises(ValueError, match=r"calls parts .*\(positions, .*net.2\).* batch_dim=0"):
        capture.pop_rows(BATCH)
    capture.remove_hooks()
    capture = Capture(model, ExactRows(batch_dim=0))
    for _ in range(5):  # also after the last check
        per_example(model.encode(x)).mean().backward()
        rows = capture.pop_rows(BATCH)
        torch.testing.assert_close(rows[:, model.positions.weight.numel() :], expected)
    # They may be examples or positions: left out.
    assert list(capture.left_out) == ["positions.weight"]


def test_time_major_model_with_as_many_steps_as_examples() -> None:
    model = Recurrent(nn.LSTM(3, 2)).double()
    x = values(BATCH, BATCH, 3)
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)

    class TimeHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.transpose(0, 1)).transpose(0, 1)

    capture = Capture(model)
    per_example(model(x)).mean().backward()
    close(capture.pop_rows(BATCH), expected)
    head = TimeHead().double()
    expected = loop_over_examples(head, lambda part: per_example(head(x[part])), BATCH)
    capture = Capture(head)
    per_example(head(x)).mean().backward()
    close(capture.pop_rows(BATCH), expected)
    capture.remove_hooks()
    capture = Capture(head.inner, ExactRows(batch_dim=1))
    per_example(head(x)).mean().backward()
    close(capture.pop_rows(BATCH), expected)


def test_a_model_that_cannot_run_without_gradients() -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3, 4), nn.PReLU(4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            y = self.layer(x)
            self.slope = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
            return self.head(y.tanh())

    model, x = Watched().double(), values(BATCH + 1, 3)
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH + 1)
    capture = Capture(model, ExactRows(strict=True))
    per_example(model(x)).mean().backward()
    close(capture.pop_rows(BATCH + 1), expected)


def test_errors_say_what_is_wrong() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.PReLU(2))
    capture = Capture(model)
    model(torch.randn(BATCH, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="given 4 examples, but the batch has 7"):
        capture.pop_rows(7)


@pytest.mark.parametrize("closure", [True, False])
def test_rows_are_right_after_a_step(closure: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.PReLU(2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = values(BATCH, 3)
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    capture = Capture(model)

    def step() -> Tensor:
        loss = per_example(model(x)).mean()
        loss.backward()
        return loss

    if closure:
        optimizer.step(step)
    else:
        step()
        optimizer.step()
    close(capture.pop_rows(BATCH), expected)


def test_an_input_overwritten_before_rows_are_read_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 2)).double()
    x = values(BATCH, 3)
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    capture = Capture(model)
    buffer = x.clone()
    per_example(model(buffer)).mean().backward()
    buffer.normal_()
    close(capture.pop_rows(BATCH), expected)


def test_an_input_of_a_looped_module_may_be_changed_in_place() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    model, x = Shift().double(), values(BATCH, 3)
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    capture = Capture(model, ExactRows(strict=True))
    used = x.clone()
    out = model(used)
    used.zero_()
    per_example(out).mean().backward()
    close(capture.pop_rows(BATCH), expected)


class Chained(nn.Module):
    """One module without a rule, called twice in a row, with hooks, inside another one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.linear, self.act = nn.Linear(4, 4), nn.PReLU(5)
        self.act.register_full_backward_hook(lambda module, grads, outs: None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.linear(x * self.scale))
        return self.act(self.linear(x)) * self.scale


@pytest.mark.parametrize("way", ["plain", "reentrant", "not reentrant", "twice", "changed"])
def test_modules_without_a_rule_in_a_row_and_in_each_other(way: str) -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Chained(), nn.LSTM(4, 3, batch_first=True)
            self.checkpoints = False

        def forward(self, x: Tensor) -> Tensor:
            if self.checkpoints:
                x = checkpoint(self.body, x.requires_grad_(), use_reentrant=way == "reentrant")
            else:
                x = self.body(x)
            x = self.body(x) if way == "twice" else x
            x = x.mul_(2) if way == "changed" else x
            return self.head(x)[0]

    model, x = Net().double(), values(BATCH, 5, 4)
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    capture = Capture(model, ExactRows(strict=True))
    model.checkpoints = "reentrant" in way
    for _ in range(2):
        per_example(model(x)).mean().backward()
        close(capture.pop_rows(BATCH), expected)


def test_packed_sequences_and_compiled_models_raise() -> None:
    layer = nn.LSTM(3, 2)
    Capture(layer)
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 3), torch.randn(2, 3)])
    with pytest.raises(ValueError, match="PackedSequence"):
        layer(packed)
    inner = nn.Sequential(nn.Linear(3, 2), nn.RNN(2, 2))  # the second is looped over
    inner[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"module '0' is compiled.* before compiling"):
        Capture(inner)


# dynamo's own, about how it traces autograd functions
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("first", ["compile", "attach"])
@pytest.mark.parametrize("kind", ["linear", "conv", "tokens"])
def test_compiled_models(kind: str, first: str) -> None:
    torch.manual_seed(0)
    model, x = {
        "linear": (nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)), values(4, 3)),
        "conv": (
            nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.ConvTranspose2d(4, 2, 2)),
            values(4, 2, 5, 3),
        ),
        "tokens": (nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)), tokens(4, 5)),
    }[kind]
    model.double()
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    called = torch.compile(model, backend="aot_eager") if first == "compile" else model
    capture = Capture(called, ExactRows(strict=True), batch_size=BATCH)
    called = torch.compile(model, backend="aot_eager") if first == "attach" else called
    for _ in range(5):  # also after the last check
        per_example(called(x)).mean().backward()
        close(capture.pop_rows(BATCH), expected)


def test_modules_that_are_looped_over_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "gradherd"):
        Capture(OwnParameters())
        Capture(Tied())
    assert caplog.messages == ["looped over, which is slow: the model itself (OwnParameters)"]


def inside_ddp() -> None:
    """Run on a rank: DDP must be gone before its group, or their destructors may deadlock."""
    model = Tied().double()
    x = tokens(BATCH, 6)
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    wrapped = nn.parallel.DistributedDataParallel(model)
    capture = Capture(wrapped)
    per_example(wrapped(x)).mean().backward()
    close(capture.pop_rows(BATCH), expected)
    close(batch_gradient(model), expected.mean(0))


def test_inside_ddp() -> None:
    run_ranks(inside_ddp, 1)


def test_a_time_major_lstm_of_which_only_the_state_is_used() -> None:
    class LastState(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1))[1][0][-1]

    model = LastState().double()
    x = values(BATCH, 5, 3)
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    capture = Capture(model)
    per_example(model(x)).mean().backward()
    close(capture.pop_rows(BATCH), expected)


def test_layers_called_with_a_keyword() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 3), nn.RMSNorm(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x=self.linear(input=x))

    model = Keywords().double()
    x = values(BATCH, 3)
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    capture = Capture(model)
    per_example(model(x)).mean().backward()
    close(capture.pop_rows(BATCH), expected)


def test_a_loop_runs_no_hooks_of_parameters_and_the_forward_once() -> None:
    model = nn.Sequential(nn.PReLU(3)).double()
    gradients: list[Tensor] = []
    forwards: list[nn.Module] = []

    def after(module: nn.Module, args: object, out: object) -> None:
        forwards.append(module)

    model[0].weight.register_hook(gradients.append)
    capture = Capture(model)
    per_example(model(values(BATCH, 3))).mean().backward()  # batch dimensions are found
    capture.pop_rows(BATCH)
    model[0].register_forward_hook(after)
    for seen in (1, 2):
        per_example(model(values(BATCH, 3))).mean().backward()
        capture.pop_rows(BATCH)
        assert len(gradients) - 1 == len(forwards) == seen
