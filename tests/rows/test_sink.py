"""Rows by sinks: one linear map of the gradients of single examples, added up by autograd."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from benchmarks.model_steps import correlation
from torch import Tensor, nn

from gradherd.rows import sink_maps
from gradherd.rows.capture import Capture
from gradherd.rows.settings import SketchRows, TwoSidedRows, row_length
from tests.rows.reference import loop_over_examples, mapped
from tests.rows.zoo import BATCH, TRANSFORMERS, ZOO, Case, losses

SIZE = 96


def is_close(rows: Tensor, expected: Tensor, error: float = 1e-8) -> bool:
    """Say whether rows are equal, relative to the longest of them."""
    return float((rows - expected).norm(dim=1).max() / expected.norm(dim=1).max()) < error


def gram_of(rows: Tensor) -> Tensor:
    return rows @ rows.T


def check(case: Case, rank: int, left_out: Iterable[str] = (), error: float = 1e-8) -> Capture:
    """Compare the rows of a model with the map of the gradients of single examples."""
    torch.manual_seed(0)
    model = case.make().double()
    model.train(not case.eval)
    x = case.inputs()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def of_examples(part: slice) -> Tensor:
        model.load_state_dict(state)  # spectral norms move with every forward
        return losses(case, model, x[part])

    expected = loop_over_examples(model, of_examples, BATCH)
    model.load_state_dict(state)
    capture = Capture(model, TwoSidedRows(rank=rank, size=SIZE), batch_size=BATCH)
    losses(case, model, x).mean().backward()
    rows = capture.pop_rows(BATCH)
    capture.remove_hooks()
    assert set(capture.left_out) == set(left_out)
    assert is_close(rows, mapped(capture, expected), error)
    return capture


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ZOO)
def test_rows_are_the_map_of_single_gradients(name: str) -> None:
    check(ZOO[name], 4, ZOO[name].left_out)


@pytest.mark.filterwarnings("ignore")  # not ours: of transformers and what it imports
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_rows_of_transformers_are_the_map_of_single_gradients(name: str) -> None:
    pytest.importorskip("transformers")
    case = TRANSFORMERS[name]
    # T5 normalises in float32, whatever the precision of the model.
    error = 1e-6 if name.startswith("t5") else 1e-8
    check(case, 4, case.left_out, error)


def test_rows_are_the_product_of_gradients_and_a_matrix() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(),
        nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3, bias=False),
    ).double()  # fmt: skip
    x, y = torch.randn(BATCH, 3, 7, 7).double(), torch.randint(3, (BATCH,))

    def of_examples(part: slice) -> Tensor:
        return F.cross_entropy(model(x[part]), y[part], reduction="none")

    expected = loop_over_examples(model, of_examples, BATCH)
    capture = Capture(model, TwoSidedRows(size=SIZE))
    of_examples(slice(None)).mean().backward()
    assert is_close(capture.pop_rows(BATCH), expected @ capture.matrix())


def layers() -> dict[str, tuple[nn.Module, Tensor]]:
    """Layers and inputs of every kind that has a sink."""
    torch.manual_seed(0)
    images, tokens = torch.randn(BATCH, 6, 9, 8), torch.randint(20, (BATCH, 5))
    volumes = images.view(BATCH, 3, 2, 9, 8)
    encoder = {"dropout": 0.0, "dim_feedforward": 12}
    found: dict[str, tuple[nn.Module, Tensor]] = {
        "linear, one position": (nn.Linear(6, 5), torch.randn(BATCH, 6)),
        "linear": (nn.Linear(6, 5), torch.randn(BATCH, 3, 6)),
        "linear without bias": (nn.Linear(6, 5, bias=False), torch.randn(BATCH, 3, 2, 6)),
        "linear, bias alone": (nn.Linear(6, 5), torch.randn(BATCH, 3, 6)),
        "linear, weight alone": (nn.Linear(6, 5), torch.randn(BATCH, 3, 6)),
        "long outputs": (nn.Linear(6, 5000), torch.randn(BATCH, 2, 6)),
        "long inputs": (nn.Linear(3000, 4), torch.randn(BATCH, 2, 3000)),
        "conv1d": (nn.Conv1d(6, 5, 3, padding=1), images.flatten(2)),
        "conv2d": (nn.Conv2d(6, 5, 3, stride=2, padding=1), images),
        "conv2d, dilated": (nn.Conv2d(6, 5, 3, dilation=2, bias=False), images),
        "conv2d, pointwise": (nn.Conv2d(6, 5, 1, bias=False), images),
        "conv2d, circular": (nn.Conv2d(6, 5, 3, padding=1, padding_mode="circular"), images),
        "conv2d, reflected": (
            nn.Conv2d(6, 5, (2, 4), padding="same", padding_mode="reflect"),
            images,
        ),
        "conv2d, same": (nn.Conv2d(6, 5, 3, dilation=2, padding="same"), images),
        "conv2d, valid": (nn.Conv2d(6, 5, (3, 2), padding="valid"), images),
        "conv2d, groups": (nn.Conv2d(6, 4, 3, groups=2), images),
        "conv2d, depthwise": (nn.Conv2d(6, 12, 3, groups=6), images),
        "conv2d, few channels": (nn.Conv2d(6, 4, 1, groups=2), images),
        "conv3d": (nn.Conv3d(3, 4, 2), volumes),
        "transposed": (
            nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1),
            images,
        ),
        "transposed, groups": (nn.ConvTranspose1d(6, 4, 3, groups=2), images.flatten(2)),
        "transposed, three dimensions": (nn.ConvTranspose3d(3, 4, 2, dilation=2), volumes),
        "embedding": (nn.Embedding(20, 6, padding_idx=3), tokens),
        "embedding, sparse": (nn.Embedding(20, 6, sparse=True), tokens),
        "embedding, one token": (nn.Embedding(20, 6), tokens[:, 0]),
        "long embedding": (nn.Embedding(5000, 6), tokens * 200),
        "layer norm": (nn.LayerNorm(8), images),
        "layer norm without bias": (nn.LayerNorm(8, bias=False), images),
        "layer norm, one position": (nn.LayerNorm(9), images[:, 0, :, 0]),
        "layer norm, two dimensions": (nn.LayerNorm((9, 8)), images),
        "layer norm, bias alone": (nn.LayerNorm(8), images),
        "rms norm": (nn.RMSNorm(8), images),
        "group norm": (nn.GroupNorm(2, 6), images),
        "group norm, one position": (nn.GroupNorm(2, 6), images[:, :, 0, 0]),
        "batch norm of features": (nn.BatchNorm1d(6), images[:, :, 0, 0]),
        "batch norm": (nn.BatchNorm2d(6), images),
        "attention": (
            nn.TransformerEncoderLayer(8, 2, batch_first=True, **encoder),
            torch.randn(BATCH, BATCH, 8),
        ),
    }
    for name, (layer, _) in found.items():
        if name.endswith("alone"):
            layer.requires_grad_(False)
            kind = name.split()[-2]
            getattr(layer, kind).requires_grad_()
    return found


@pytest.mark.parametrize("rank", [2, 16])
@pytest.mark.parametrize("name", layers())
def test_layers(name: str, rank: int) -> None:
    layer, x = layers()[name]
    x = x.double() if x.is_floating_point() else x
    # In evaluation mode, batch norm keeps examples apart.
    capture = check(Case(lambda: layer, lambda: x, eval=name.startswith("batch norm")), rank)
    assert not capture._whole, "it is looped over"


def test_examples_of_a_batch_norm_in_training_are_those_of_exact_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(27, 4), nn.BatchNorm1d(4),
    ).double()  # fmt: skip
    x = torch.randn(BATCH, 2, 5, 5).double()
    exact = Capture(model)
    model(x).sin().sum(1).mean().backward()
    expected = exact.pop_rows(BATCH)
    exact.remove_hooks()
    capture = Capture(model, TwoSidedRows(size=SIZE, strict=True))
    model(x).sin().sum(1).mean().backward()
    assert is_close(capture.pop_rows(BATCH), mapped(capture, expected))


@pytest.mark.parametrize("shape", [(300, 100), (100, 300), (90, 50)])
@pytest.mark.parametrize("size", [95, 96, 4096])
def test_layers_with_one_position(shape: tuple[int, int], size: int) -> None:
    torch.manual_seed(0)
    rows, columns = shape
    model = nn.Sequential(nn.Linear(columns, rows), nn.Tanh(), nn.Linear(rows, 5)).double()
    x = torch.randn(BATCH, columns).double()
    expected = loop_over_examples(model, lambda part: model(x[part]).square().sum(1), BATCH)
    capture = Capture(model, SketchRows(size=size, strict=True))
    model(x).square().sum(1).mean().backward()
    assert is_close(capture.pop_rows(BATCH), mapped(capture, expected))
    # Whether it is sketched as an outer product, or whole because it is short.
    outer = isinstance(capture._uses["0.weight"][0].layer.single, sink_maps.OuterMap)
    assert outer == (rows * columns > max(size, sink_maps.MOST_BUCKETS))


class Tied(nn.Module):
    """One weight for looking tokens up and for scoring them."""

    def __init__(self, tokens: int = 30) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(tokens, 8, padding_idx=2), nn.Linear(8, 8)
        self.head = nn.Linear(8, tokens)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.middle(self.embed(tokens))))
        return scores


def test_uses_of_a_shared_weight_add_up() -> None:
    check(Case(Tied, lambda: torch.randint(30, (BATCH, 6))), rank=8)


# Attention.


class Decoder(nn.Module):
    """Attention to other inputs, with queries projected apart from keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x[:, :3], x)
        return out


class ThreeInputs(nn.Module):
    """Queries, keys and values that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.layer(x, x.flip(1), 2 * x)
        return out + weights.sum((1, 2))[:, None, None]


@pytest.mark.parametrize(
    "make", [Decoder, ThreeInputs, lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0)]
)
def test_attention(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().double()
    dim = int(isinstance(model, nn.TransformerEncoderLayer))  # that one is time-major
    x = torch.randn(5, BATCH, 8).double() if dim else torch.randn(BATCH, 5, 8).double()
    expected = loop_over_examples(
        model, lambda part: model(x.narrow(dim, part.start, 1)).sin().sum(), BATCH
    )
    capture = Capture(model, TwoSidedRows(rank=4, size=SIZE, batch_dim=dim, strict=True))
    (model(x).sin().sum() / BATCH).backward()
    assert not capture._whole, "it is looped over"
    assert is_close(capture.pop_rows(BATCH), mapped(capture, expected))


def masks() -> dict[str, dict[str, Tensor]]:
    """Masks for 3 queries, 5 keys and 2 heads."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.rand(3, 5, generator=generator) < 0.4
    hidden[:, 1] = False  # something is left to look at
    padding = torch.zeros(BATCH, 5, dtype=torch.bool)
    padding[1, 3:] = True
    scores = torch.randn(BATCH * 2, 3, 5, generator=generator)
    return {
        "none": {},
        "boolean": {"attn_mask": hidden},
        "numbers": {"attn_mask": scores[0]},
        "for each head": {"attn_mask": scores},
        "padding": {"key_padding_mask": padding},
        "padding and boolean": {"key_padding_mask": padding, "attn_mask": hidden},
        "padding in numbers": {"key_padding_mask": -9.0 * padding, "attn_mask": scores},
    }


@pytest.mark.parametrize("weights", ["none", "averaged", "of each head"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", masks())
def test_outputs_of_attention_are_those_of_torch(
    mask: str, batch_first: bool, weights: str
) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=batch_first)
    query, key = torch.randn(BATCH, 3, 8), torch.randn(BATCH, 5, 8)
    if not batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    options = {
        "need_weights": weights != "none",
        "average_attn_weights": weights == "averaged",
        **masks()[mask],
    }

    def run() -> list[Tensor | None]:
        results: list[Tensor | None] = []
        for training in (True, False):
            model.train(training)
            for inputs in ((query, key, key), (query, key, 2 * key)):
                torch.manual_seed(1)  # the same dropout
                results += model(*inputs, **options)
        return results

    expected = run()
    capture = Capture(model, TwoSidedRows())
    for found, own in zip(run(), expected, strict=True):
        if own is None:
            assert found is None
        else:
            torch.testing.assert_close(found, own)
    capture.remove_hooks()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_causal_attention_to_itself_is_that_of_torch(
    batch_first: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same kernel: one that is told of a mask takes any."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, bias=False, batch_first=batch_first)
    x, mask = torch.randn(5, 5, 8), nn.Transformer.generate_square_subsequent_mask(5)
    options = {"attn_mask": mask, "is_causal": True, "need_weights": False}
    if padded:
        padding = torch.zeros(5, 5).masked_fill(torch.arange(5) > 3, float("-inf"))
        options["key_padding_mask"] = padding
    attend, masks = F.scaled_dot_product_attention, []

    def noted(q, k, v, mask=None, dropout=0.0, is_causal=False):  # type: ignore[no-untyped-def]
        masks.append((mask is not None, is_causal))
        return attend(q, k, v, mask, dropout, is_causal)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    expected = model(x, x, x, **options)[0]
    Capture(model, TwoSidedRows())
    found = model(x, x, x, **options)[0]
    torch.testing.assert_close(found, expected)
    assert set(masks) == {(padded, not padded)}


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 8}])
@pytest.mark.parametrize("frozen", [False, True])
def test_attention_of_other_kinds_is_left_as_it_is(options: dict, frozen: bool) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True, **options)
    if frozen:  # what is not trained is used all the same
        for name in ("bias_k", "bias_v", "k_proj_weight"):
            if getattr(model, name) is not None:
                getattr(model, name).requires_grad_(False)
    x = torch.randn(BATCH, 3, 8)
    expected = model(x, x, x)[0]
    Capture(model, TwoSidedRows())
    torch.testing.assert_close(model(x, x, x)[0], expected)


def test_attention_without_a_batch_is_that_of_torch_and_left_out() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.MultiheadAttention(6, 2), nn.Linear(6, 40)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.stack([self.layer(one, one, one)[0] for one in x]))

    model, x = Alone(), torch.randn(BATCH, 3, 6)
    expected = model(x)
    capture = Capture(model, TwoSidedRows(size=SIZE))
    out = model(x)
    torch.testing.assert_close(out, expected)
    out.square().mean().backward()
    capture.pop_rows(BATCH)
    assert {name.split(".")[0] for name in capture.left_out} == {"layer"}


def test_attention_that_fails_raises_and_works_again() -> None:
    model = nn.MultiheadAttention(8, 2)
    capture = Capture(model, TwoSidedRows(batch_dim=1, strict=True))
    x = torch.randn(5, BATCH, 8)
    with pytest.raises((RuntimeError, AssertionError)):
        model(x, torch.randn(5, BATCH, 7), torch.randn(5, BATCH, 7))
    model(x, x, x)[0].square().mean().backward()
    assert capture.pop_rows(BATCH).isfinite().all()


# Parameters that a module uses itself.


class Token(nn.Module):
    """A parameter of the model's own, used in a way that is given."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.randn(1, 3, 6)), nn.Linear(6, 5)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.use(x, self.token).tanh())
        return out


BROADCAST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda x, token: x + token,
    "expanded": lambda x, token: token.expand(len(x), -1, -1) * x,
    "part": lambda x, token: x + token[:, :1],
    "twice": lambda x, token: x * token + token,
    "squeezed": lambda x, token: x + token.squeeze(0),
}
NOT_BROADCAST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "first": lambda x, token: x + token[0],
    "repeated": lambda x, token: torch.cat([token.repeat(len(x), 1, 1), x], 1),
    "flattened": lambda x, token: x + token.flatten().view(3, 6),
    "averaged": lambda x, token: x + token.mean(0),
}


@pytest.mark.parametrize("use", BROADCAST)
def test_a_token_that_all_examples_share_has_rows(use: str) -> None:
    x = torch.randn(BATCH, 3, 6).double()
    check(Case(lambda: Token(BROADCAST[use]), lambda: x), 4)


@pytest.mark.parametrize("use", NOT_BROADCAST)
def test_a_token_of_which_examples_get_no_copies_is_left_out(use: str) -> None:
    x = torch.randn(BATCH, 3, 6).double()
    check(Case(lambda: Token(NOT_BROADCAST[use]), lambda: x), 4, ["token"])


def check_sizes(model: nn.Module, sizes: Iterable[int], batch_size: int | None) -> None:
    """Compare the rows of batches of some sizes with the map of the gradients of examples."""
    plain = copy.deepcopy(model)
    capture = Capture(model, TwoSidedRows(size=SIZE), batch_size=batch_size)
    for examples in sizes:
        x = torch.randn(examples, 3, 6).double()
        singles = (plain(one[None]).square().sum() for one in x)
        expected = torch.stack([gradient(plain, loss) for loss in singles])
        model(x).square().sum((1, 2)).mean().backward()
        rows = capture.pop_rows(examples)
        assert capture.left_out == {}
        assert rows.shape == (examples, SIZE)
        assert is_close(rows, mapped(capture, expected))


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """Return the gradient of a loss, (D,)."""
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


class Shared(nn.Module):
    """A parameter and a table of positions that all examples share, used before any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.table = nn.Parameter(torch.randn(1, 3, 6)), nn.Embedding(3, 6)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer((x * self.token + self.table(torch.arange(3))).tanh())
        return out


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("sizes", [[4], [4, 1, 4], [1], [1, 4], [2, 4]])
def test_what_examples_share_has_rows_in_batches_of_any_size(
    sizes: list[int], batch_size: int | None
) -> None:
    torch.manual_seed(0)
    model = Shared().double()
    check_sizes(model, sizes, batch_size)


class TimeMajor(nn.Module):
    """Adds its own parameter where the examples are the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.randn(1, 1, 6)), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer((x.transpose(0, 1) + self.shift).tanh()).transpose(0, 1)
        return out


def test_copies_of_a_token_for_positions_are_not_taken_for_those_of_examples() -> None:
    x = torch.randn(BATCH, BATCH, 6).double()  # with as many positions as examples
    check(Case(TimeMajor, lambda: x), 4, ["shift"])


def test_a_batch_of_another_length_runs_whatever_the_first_one_was_like() -> None:
    torch.manual_seed(0)
    model = TimeMajor()
    capture = Capture(model, TwoSidedRows(size=SIZE), batch_size=BATCH)
    for positions in (BATCH, 7):
        model(torch.randn(BATCH, positions, 6)).square().mean().backward()
        capture.pop_rows(BATCH)


class RelativePositions(nn.Module):
    """Looks up how far apart two positions are, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 2), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        far = self.table(places[:, None] - places + 4).permute(2, 0, 1)
        heads = self.layer(x).unflatten(-1, (2, 3)).transpose(1, 2)
        weights = (heads @ heads.transpose(-1, -2) + far).softmax(-1)
        return (weights @ heads).transpose(1, 2).flatten(2)


def test_one_pair_of_positions_is_not_taken_for_a_table_of_positions() -> None:
    torch.manual_seed(0)
    model, x = RelativePositions(), torch.randn(BATCH, 1, 6)
    expected = model(x)
    Capture(model, TwoSidedRows(size=SIZE), batch_size=BATCH)
    model(torch.randn(BATCH, 3, 6))
    torch.testing.assert_close(model(x), expected)


# Sizes, seeds, and what rows preserve.


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def test_inner_products_are_preserved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(24 * 64, 10),
    )  # fmt: skip
    classes = torch.arange(24) % 4
    x = torch.randn(4, 3, 12, 12)[classes] + torch.randn(24, 3, 12, 12)
    exact = Capture(model)
    F.cross_entropy(model(x), classes).backward()
    gram = gram_of(exact.pop_rows(24))
    exact.remove_hooks()
    capture = Capture(model, TwoSidedRows(size=4096))
    F.cross_entropy(model(x), classes).backward()
    rows = capture.pop_rows(24)
    assert correlation(rows @ rows.T, gram) > 0.97
    assert 0.9 < float((rows @ rows.T).trace() / gram.trace()) < 1.1


def test_small_models_are_exact() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    exact = Capture(model)
    model(x).square().mean().backward()
    gram = gram_of(exact.pop_rows(BATCH))
    exact.remove_hooks()
    capture = Capture(model, TwoSidedRows(size=4096))  # as many as columns, or more
    model(x).square().mean().backward()
    rows = capture.pop_rows(BATCH)
    torch.testing.assert_close(rows @ rows.T, gram)


def alike_layers() -> nn.Module:
    """Layers of one shape, which share their columns, and one position for the last."""
    torch.manual_seed(0)
    shared = (nn.Linear(12, 12) for _ in range(3))
    return nn.Sequential(*shared, nn.Flatten(), nn.Linear(36, 150), nn.Tanh())


@pytest.mark.parametrize("kind", ["tied", "alike"])
def test_inner_products_are_right_on_average(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where columns are folded, for two uses of one weight, and for an outer product."""
    monkeypatch.setattr(sink_maps, "MOST_KEPT", 5)
    torch.manual_seed(0)
    if kind == "tied":
        model, x = Tied(), torch.randint(30, (BATCH, 6))
    else:
        model, x = alike_layers(), torch.randn(BATCH, 3, 12)
    exact = Capture(model)
    model(x).square().mean().backward()
    gram = gram_of(exact.pop_rows(BATCH))
    exact.remove_hooks()
    grams = []
    for seed in range(200):
        capture = Capture(model, TwoSidedRows(rank=3, size=128, seed=seed))
        model(x).square().mean().backward()
        rows = capture.pop_rows(BATCH)
        capture.remove_hooks()
        grams.append(rows @ rows.T)
    found = torch.stack(grams)
    assert not torch.allclose(found[0], found[1], rtol=0.01)
    error = (found.mean(0) - gram).abs() / (found.std(0) / 200**0.5)
    assert error.max() < 5  # standard errors


def test_equal_seeds_give_equal_rows() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    state = torch.get_rng_state()
    found = []
    for seed in (0, 0, 1):
        capture = Capture(model, SketchRows(size=32, seed=seed))
        model(x).square().mean().backward()
        found.append(capture.pop_rows(BATCH))
        capture.remove_hooks()
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    assert torch.equal(state, torch.get_rng_state()), "a global generator was used"


@pytest.mark.parametrize("settings", [SketchRows(size=33), TwoSidedRows(size=33)])
def test_reduction_and_loss_scale(settings: SketchRows | TwoSidedRows) -> None:
    torch.manual_seed(0)
    model, x = small().double(), torch.randn(BATCH, 6).double()
    capture = Capture(model, replace(settings, reduction="sum"))
    model(x).square().sum().backward()
    summed = capture.pop_rows(BATCH)
    assert summed.shape == (BATCH, 33)
    capture.remove_hooks()
    capture = Capture(model, settings)
    model(x).square().sum(1).mean().backward()
    torch.testing.assert_close(capture.pop_rows(BATCH), summed)
    (model(x).square().sum(1).mean() * 8).backward()
    torch.testing.assert_close(capture.pop_rows(BATCH, loss_scale=8.0), summed)


@pytest.mark.parametrize(("parameters", "size"), [(10, 1024), (25_000_000, 16384), (1e9, 65536)])
def test_longer_rows_for_larger_models(parameters: float, size: int) -> None:
    assert TwoSidedRows().size_for(int(parameters)) == size
    assert TwoSidedRows(size=77).size_for(int(parameters)) == 77
    assert row_length(SketchRows(size=77), int(parameters)) == 77


def columns_of(model: nn.Module, settings: SketchRows | TwoSidedRows) -> int:
    """Return the columns that the first weight of a model is projected to."""
    columns: int = next(iter(Capture(model, settings)._uses.values()))[0].layer.matrix.columns
    return columns


def test_more_columns_for_models_with_tokens() -> None:
    assert columns_of(Tied(100), TwoSidedRows()) == columns_of(Tied(100), SketchRows()) == 64
    assert columns_of(nn.Linear(50, 40), TwoSidedRows()) == 16
    assert columns_of(Tied(100), TwoSidedRows(rank=9)) == 9
    assert columns_of(nn.Linear(50, 5), TwoSidedRows(rank=256)) == 5  # the short side, as it is


@pytest.mark.parametrize("bad", [{"rank": 1}, {"rank": 257}, {"rank": 2.0}, {"size": 0}])
def test_bad_settings(bad: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        TwoSidedRows(**bad)


def test_a_model_that_cannot_run_without_gradients() -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            y = self.layer(x)
            self.slope = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
            return self.head(y.tanh())

    torch.manual_seed(0)
    model, x = Watched().double(), torch.randn(5, 3, dtype=torch.float64)
    capture = Capture(model, SketchRows(size=64))
    model(x).square().sum(1).mean().backward()
    rows = capture.pop_rows(5)
    capture.remove_hooks()
    exact = Capture(model)
    model(x).square().sum(1).mean().backward()
    gram = gram_of(exact.pop_rows(5))
    torch.testing.assert_close(rows @ rows.T, gram)  # nothing is lost in rows that are long enough
