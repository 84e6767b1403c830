"""The same rows however the model runs: compiled, checkpointed, in lower precision, step by step.

Compiled models are slow to test, so models are as small as they can be, and each way to compile
is tried with the model that asks most of it. All kinds of layers are in one of them.
"""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradherd.rows.capture import Capture
from gradherd.rows.row_check import FIRST_CHECKS
from gradherd.rows.settings import TwoSidedRows

pytestmark = [  # not ours: torch's compiler warns of what it does itself
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

BATCH, SHORT = 6, 4
EPOCHS = 2
OPTIONS: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
Step = Callable[[Callable[..., Tensor], Tensor], None]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what other tests have compiled."""
    torch._dynamo.reset()
    counters().clear()
    yield
    torch._dynamo.reset()


def counters() -> dict[str, dict[str, int]]:
    """Return what the compiler counts."""
    # Not when tests are collected, by all processes: it takes seconds to load.
    from torch._dynamo.utils import counters

    return counters


class Images(nn.Module):
    """Convolutions of all kinds and norms of channels, changed in place between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, groups=2, padding=1, padding_mode="reflect"), nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True), nn.ConvTranspose2d(4, 3, 2),
        )  # fmt: skip
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).mean((2, 3)))
        return out


class Block(nn.Module):
    """A token of its own, attention to what is before, a feed-forward layer, both norms."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 1, 8))
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.rms, self.wide, self.narrow = nn.RMSNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x + self.shift)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.narrow(F.gelu(self.wide(self.rms(x))))
        return out


class Tokens(nn.Module):
    """A language model: a table of positions, and a head that shares its weight with the tokens."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(9, 8)
        self.block, self.head = Block(), nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        if self.way == "plain":
            y = self.block(y)
        else:
            y = checkpoint(self.block, y, use_reentrant=self.way == "reentrant")
        out: Tensor = self.head(y)
        return out


class Mlp(nn.Module):
    """Layers with one position, the first of which is sketched as an outer product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(192, 96), nn.BatchNorm1d(96), nn.Linear(96, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.relu_(self.norm(self.first(x))))
        return out


def transposed_linear() -> nn.Module:
    """Return the linear layers of GPT-2, whose weights are transposed."""
    utilities = pytest.importorskip("transformers.pytorch_utils")
    return nn.Sequential(utilities.Conv1D(12, 8), nn.Tanh(), utilities.Conv1D(5, 12))


def images() -> Tensor:
    return torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def tokens() -> Tensor:
    return torch.randint(11, (BATCH, 5), generator=torch.Generator().manual_seed(3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (Mlp, lambda: images().flatten(1)),
    "images": (Images, images),
    "tokens": (Tokens, tokens),
    # With as many positions as examples: sizes do not tell which is which.
    "square": (Tokens, lambda: tokens()[:, torch.arange(BATCH) % 5]),
    "transposed": (transposed_linear, lambda: images().flatten(2)[:, :, :40].reshape(BATCH, 15, 8)),
}


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().flatten(1).mean(1).mean()


def one_backward(model: Callable[..., Tensor], x: Tensor) -> None:
    loss_of(model(x)).backward()


def two_backwards(model: Callable[..., Tensor], x: Tensor) -> None:
    one_backward(model, x)
    one_backward(model, x.flip(-1))


def two_forwards(model: Callable[..., Tensor], x: Tensor) -> None:
    (loss_of(model(x)) + loss_of(model(x.flip(-1)))).backward()


def in_half(model: Callable[..., Tensor], x: Tensor, device: str = "cpu") -> None:
    with torch.autocast(device, torch.bfloat16):
        loss = loss_of(model(x))
    loss.backward()


class Ran:
    """Rows of each batch of a few epochs, and what the compiler has done for them."""

    def __init__(
        self, kind: str, way: str = "eager", step: Step = one_backward, model: Any = None,
        options: dict[str, Any] | None = None, accumulate: bool = False,
        sizes: tuple[int, ...] = (BATCH, BATCH, SHORT),
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        make, inputs = MODELS[kind]
        self.model = net = (model or make)()
        x, options = inputs(), OPTIONS if options is None else options
        called: Any = net
        if way in ("compiled before", "has run before"):
            called = torch.compile(net, **options)
        if way == "has run before":
            state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            step(called, x)
            net.load_state_dict(state)
            net.zero_grad()
        if way == "module.compile()":
            net.compile(**options)
        if way == "blocks":
            net.block.compile(**options)
        self.capture = Capture(called, TwoSidedRows(rank=4, size=2048), batch_size=BATCH)
        if way == "compiled after":
            called = torch.compile(net, **options)
        self.rows: list[Tensor] = []
        self.graphs: list[int] = []
        for _ in range(EPOCHS):
            for examples in sizes:
                step(called, x[:examples])
                self.rows.append(self.capture.pop_rows(examples))
                if not accumulate:
                    net.zero_grad()
            self.graphs.append(counters()["stats"]["unique_graphs"])
        assert len(self.rows) > FIRST_CHECKS  # some batches are not checked
        self.left_out = set(self.capture.left_out)
        self.capture.remove_hooks()
        assert not counters()["graph_break"]

    def error(self, other: "Ran") -> float:
        """Return the largest difference between rows, relative to the others' rows."""
        pairs = zip(self.rows, other.rows, strict=True)
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def check_compiled(
    kind: str, way: str, step: Step = one_backward, allowed: float = 1e-5, **settings: Any
) -> Ran:
    """Compare the rows of a compiled model with those of the model itself."""
    expected = Ran(kind, step=step, **{**settings, "options": None})
    assert counters()["stats"]["unique_graphs"] == 0
    found = Ran(kind, way, step, **settings)
    assert found.error(expected) < allowed
    assert found.left_out == expected.left_out == set()
    assert found.graphs[0] > 0, "nothing was compiled"
    assert found.graphs[1] == found.graphs[0], "a graph was compiled in the second epoch"
    return found


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("square", "compiled after"),
        ("images", "compiled before"),
        ("mlp", "has run before"),
        ("transposed", "compiled after"),
        ("tokens", "blocks"),
    ],
)
def test_a_compiled_model_has_the_same_rows(kind: str, way: str) -> None:
    check_compiled(kind, way)


def test_a_model_that_compiles_itself_goes_on_without_rows_when_it_is_restored() -> None:
    ran = check_compiled("mlp", "module.compile()")
    loss_of(ran.model(MODELS["mlp"][1]())).backward()
    assert not ran.capture.waiting
    assert type(ran.model.first) is nn.Linear


def test_forwards_of_a_compiled_model_add_up() -> None:
    check_compiled("mlp", "compiled after", two_forwards)


def test_a_compiled_model_may_be_checkpointed() -> None:
    check_compiled("tokens", "compiled after", model=partial(Tokens, "not reentrant"))


def test_a_compiled_model_may_run_in_lower_precision() -> None:
    # A compiler rounds in other places.
    check_compiled("tokens", "compiled before", in_half, allowed=1e-2)


# It says so of the Fourier transforms behind outer products.
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_a_model_that_is_compiled_for_real_has_the_same_rows() -> None:
    # One layer and batches of one size: this compiler takes long.
    few = {"model": lambda: nn.Linear(192, 96), "sizes": (BATCH, BATCH)}
    check_compiled("mlp", "compiled after", options={}, **few)


@pytest.mark.parametrize("kind", ["mlp", "images", "tokens", "transposed"])
def test_lower_precision_changes_little(kind: str) -> None:
    exact, half = Ran(kind), Ran(kind, step=in_half)
    assert half.left_out == set()
    assert all(rows.dtype == torch.float32 for rows in half.rows)
    assert 0 < half.error(exact) < 0.05


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_checkpoints_change_nothing(way: str) -> None:
    exact = Ran("tokens")
    assert Ran("tokens", model=partial(Tokens, way)).error(exact) < 1e-6


@pytest.mark.parametrize("kind", ["mlp", "images", "tokens", "transposed"])
def test_gradients_that_accumulate_change_nothing(kind: str) -> None:
    assert Ran(kind, accumulate=True).error(Ran(kind)) == 0


@pytest.mark.parametrize("kind", ["mlp", "images", "tokens", "transposed"])
def test_two_forwards_are_two_backwards(kind: str) -> None:
    once, twice = Ran(kind, step=two_forwards), Ran(kind, step=two_backwards)
    assert once.error(twice) < 1e-6
    assert once.error(Ran(kind)) > 0.1
    assert once.left_out == twice.left_out == set()


class UsedOutside(nn.Module):
    """Uses the weight of a layer outside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.wide = nn.Linear(192, 5), nn.Linear(5, 5), nn.Linear(5, 40)

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x).tanh())
        return self.wide(F.linear(y, self.two.weight).tanh())


def test_a_compiled_model_leaves_out_what_the_model_itself_does() -> None:
    expected = Ran("mlp", model=UsedOutside)
    found = Ran("mlp", "compiled after", model=UsedOutside)
    assert found.left_out == expected.left_out == {"two.weight"}
    pairs = list(zip(found.rows, expected.rows, strict=True))[FIRST_CHECKS:]
    for rows, own in pairs:
        assert float((rows - own).norm() / own.norm()) < 1e-5


def test_a_compiled_model_refuses_a_batch_of_another_size() -> None:
    model = nn.Linear(6, 5)
    capture = Capture(model, TwoSidedRows(), batch_size=BATCH)
    compiled = torch.compile(model, **OPTIONS)
    compiled(torch.randn(BATCH, 6)).square().mean().backward()
    with pytest.raises(RuntimeError, match=f"given {BATCH} examples, but the batch has {SHORT}"):
        capture.pop_rows(SHORT)


class Named(nn.Module):
    """Is given its inputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 5)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.layer(batch["x"])
        return out


def test_a_compiled_model_may_be_given_a_dict() -> None:
    def step(model: Callable[..., Tensor], x: Tensor) -> None:
        loss_of(model({"x": x})).backward()

    check_compiled("mlp", "compiled after", step, model=Named, sizes=(BATCH, BATCH))


def test_models_that_are_not_compiled_do_not_load_the_compiler() -> None:
    code = (
        "import sys, torch; from gradherd.rows.capture import Capture;"
        "from gradherd.rows.settings import SketchRows;"
        "model = torch.nn.Linear(6, 5); capture = Capture(model, SketchRows());"
        "model(torch.randn(4, 6)).sum().backward(); capture.pop_rows(4);"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", [None, torch.bfloat16])
def test_batch_norms_in_graphs(kind: torch.dtype | None) -> None:
    """Rows, gradients and running statistics are those of the layer itself."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip
    traced, images, labels = copy.deepcopy(plain), torch.randn(6, 3, 8, 8), torch.arange(6) % 5
    settings = TwoSidedRows(size=2048, rank=4, strict=True)
    captures = [Capture(one, settings, batch_size=6) for one in (plain, traced)]
    called = torch.compile(traced, backend="aot_eager", fullgraph=True)
    allowed = 1e-5 if kind is None else 2e-2
    for count in (6, 6, 6, 6, 4):  # the fourth is not checked, the last one is short
        found = []
        for model, run, capture in zip((plain, traced), (plain, called), captures, strict=True):
            model.zero_grad()
            with torch.autocast("cpu", kind, enabled=kind is not None):
                loss = F.cross_entropy(run(images[:count]).float(), labels[:count])
            loss.backward()
            grads = [p.grad.flatten() for p in model.parameters()]
            buffers = [b.flatten().float() for b in model.buffers()]
            found.append([capture.pop_rows(count), torch.cat(grads), torch.cat(buffers)])
        for own, expected in zip(*found[::-1], strict=True):
            assert float((own - expected).norm()) <= allowed * float(expected.norm())
