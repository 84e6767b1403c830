"""Modules that are tapped for rows train, copy and print as they did, and are restored."""

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradherd.rows.capture import Capture
from gradherd.rows.settings import TwoSidedRows
from tests.rows.zoo import BATCH, ResNet, ViT

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), (BATCH, 3, 6)),
    "resnet": (ResNet, (BATCH, 3, 8, 8)),
    "vit": (ViT, (BATCH, 3, 8, 8)),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.LSTM(8, 4)),
        (BATCH, 3, 6),
    ),
}


def make(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[kind]
    return build(), torch.randn(shape)


def step(model: nn.Module, x: Tensor) -> None:
    out = model(x)
    (out if isinstance(out, Tensor) else out[0]).square().mean().backward()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind", MODELS)
def test_training_is_what_it_was(kind: str) -> None:
    def train(tapped: bool) -> tuple[list[Tensor | None], list[Tensor], Tensor]:
        model, x = make(kind)
        capture = Capture(model, TwoSidedRows()) if tapped else None
        for _ in range(3):
            step(model, x)
            if capture:
                capture.pop_rows(BATCH)
        return gradients(model), list(model.buffers()), torch.get_rng_state()

    plain, tapped = train(False), train(True)
    for own, found in zip(plain[0], tapped[0], strict=True):
        torch.testing.assert_close(found, own)
    # Not only close: the model must not see one batch more, nor advance a generator.
    assert all(map(torch.equal, plain[1], tapped[1]))
    assert torch.equal(plain[2], tapped[2])


def test_evaluation_and_inference_mode_work() -> None:
    model, x = make("vit")
    model.eval()
    expected = model(x)
    capture = Capture(model, TwoSidedRows())
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x), expected)
    assert not capture.waiting


def snapshot(model: nn.Module) -> dict[str, tuple[type, set[str]]]:
    return {name: (type(one), set(one.__dict__)) for name, one in model.named_modules()}


@pytest.mark.parametrize("kind", MODELS)
def test_nothing_is_left_behind(kind: str) -> None:
    model, x = make(kind)
    before = snapshot(model)
    step(model, x)
    expected = [None if grad is None else grad.clone() for grad in gradients(model)]
    capture = Capture(model, TwoSidedRows())
    step(model, x)
    capture.pop_rows(BATCH)
    assert snapshot(model) != before, "nothing was tapped"
    capture.remove_hooks()
    assert snapshot(model) == before
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert not any(p._backward_hooks for p in model.parameters())
    model.zero_grad()
    if kind != "dropout":
        step(model, x)
        for own, found in zip(expected, gradients(model), strict=True):
            torch.testing.assert_close(found, own)
    assert not capture.waiting


def test_a_model_can_be_tapped_again() -> None:
    model, x = make("vit")
    found = []
    for _ in range(2):
        capture = Capture(model, TwoSidedRows())
        step(model, x)
        found.append(capture.pop_rows(BATCH))
        capture.remove_hooks()
    assert torch.equal(*found)


def test_tapped_modules_look_like_what_they_are() -> None:
    model, _ = make("vit")
    shown, names = repr(model), list(model.state_dict())
    Capture(model, TwoSidedRows())
    assert repr(model) == shown
    assert list(model.state_dict()) == names
    assert isinstance(model.head, nn.Linear)
    assert isinstance(model.token, nn.Parameter)
    with torch.no_grad():
        model.token.fill_(3)
    assert model.state_dict()["token"].eq(3).all()
    model.token = nn.Parameter(torch.zeros(1, 1, 8))
    assert model.state_dict()["token"].eq(0).all()


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "oldest pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "torch.save": saved_and_loaded,
    "averaged": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", ["mlp", "resnet", "vit"])
def test_copies_are_plain_modules(kind: str, way: str) -> None:
    model, x = make(kind)
    types = [type(one) for one in model.modules()]
    capture = Capture(model, TwoSidedRows())
    step(model, x)
    rows = capture.pop_rows(BATCH)
    other = COPIES[way](model)
    assert [type(one) for one in other.modules()] == types
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine is not theirs
    other.zero_grad()
    step(other, x)
    assert not capture.waiting, "the copy has reached the sinks of the original"
    for mine, theirs in zip(gradients(model), gradients(other), strict=True):
        torch.testing.assert_close(theirs, mine)
    step(model, x)
    torch.testing.assert_close(capture.pop_rows(BATCH), rows)
    Capture(other, TwoSidedRows())  # may be tapped as well


class Locked(nn.Module):
    """A model that says itself what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.randn(1, 6)), nn.Linear(6, 5)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            out: Tensor = self.layer(x + self.token)
        return out

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.lock = threading.Lock()


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_are_made_as_the_model_says(way: str) -> None:
    model, x = Locked(), torch.randn(BATCH, 6)
    assert COPIES[way](model).lock is not model.lock
    Capture(model, TwoSidedRows())
    other = COPIES[way](model)
    assert type(other) is Locked
    torch.testing.assert_close(other(x), model(x))
    assert other.lock is not model.lock


class Upsampling(nn.Module):
    """Asks a layer for outputs of a size, which is a second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ConvTranspose1d(3, 2, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, output_size=[12])
        return out


def test_arguments_besides_the_input_reach_the_layer() -> None:
    torch.manual_seed(0)
    model, x = Upsampling(), torch.randn(BATCH, 3, 5)
    expected = model(x)
    capture = Capture(model, TwoSidedRows(strict=True))
    out = model(x)
    torch.testing.assert_close(out, expected)
    out.square().mean().backward()
    capture.pop_rows(BATCH)


def test_inputs_may_come_by_name() -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(6, 6), nn.RMSNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(x=self.layer(input=x))
            return out

    model, x = Names(), torch.randn(BATCH, 6)
    capture = Capture(model, TwoSidedRows(strict=True))
    step(model, x)
    assert capture.pop_rows(BATCH).any()


def test_hooks_of_the_user_see_and_change_what_they_did() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), torch.randn(BATCH, 6)
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, out: 2 * out)
    model[2].register_full_backward_hook(lambda module, grads, outs: seen.append(outs[0]))
    step(model, x)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    capture = Capture(model, TwoSidedRows(strict=True))
    step(model, x)
    capture.pop_rows(BATCH)
    torch.testing.assert_close(gradients(model), expected)
    torch.testing.assert_close(*seen)


def test_a_layer_replaced_by_the_user_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 40))
    capture = Capture(model, TwoSidedRows())
    model[0] = nn.Linear(6, 8)
    step(model, torch.randn(BATCH, 6))
    rows = capture.pop_rows(BATCH)  # of what is left
    assert rows.any()
    capture.remove_hooks()
    assert type(model[2]) is nn.Linear


@pytest.mark.parametrize("restored", [True, False])
def test_what_was_attached_is_freed_with_its_tensors(restored: bool) -> None:
    def attach() -> weakref.ref[Any]:
        model = nn.Sequential(nn.Linear(6, 5), nn.PReLU(5))
        capture = Capture(model, TwoSidedRows(), batch_size=4)
        model(torch.randn(4, 6)).sum().backward()
        capture.pop_rows(4)
        if restored:
            capture.remove_hooks()
        return weakref.ref(capture)

    freed = attach()
    gc.collect()
    assert freed() is None
