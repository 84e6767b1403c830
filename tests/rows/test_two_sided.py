"""Two-sided rows: one linear map of the gradients of single examples, taken as they arrive."""

from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradherd.lab.bench.bench_models import correlation
from gradherd.rows import Capture, projected_weight
from gradherd.rows.column_table import ColumnTable
from gradherd.rows.layer_use import LayerUse
from gradherd.rows.settings import TwoSidedRows
from gradherd.rows.two_sided import TwoSidedCapture
from tests.rows.reference import loop_over_examples
from tests.rows.zoo import BATCH, TRANSFORMERS, ZOO, Case, losses

SIZE = 96
READ_WHERE_SHARED = {
    "positions-flat", "positions-flat-square", "positions", "positions-square",
    "time-major-square", "gpt2", "gpt2-square", "bert", "bert-square",
}  # fmt: skip
"""Models whose tables of positions other rows leave out."""


def mapped(capture: TwoSidedCapture, grads: Tensor) -> Tensor:
    """Apply the map of two-sided rows to gradients (B, D), parameter by parameter."""
    layers = {layer for layer, _ in capture._layer_of.values()}
    ends = [slot.begin + slot.width for layer in layers for slot in layer.slots.values()]
    width = max(ends, default=0)
    exact = width  # all columns count: unused ones are zero
    table = ColumnTable(width, exact, grads.new_empty(0))
    table.start(len(grads))
    views = capture.spec.views(grads)
    for layer, local in capture._layer_of.values():
        index = layer.index[local]
        name = capture.spec.names[index]
        if name in capture.left_out:
            continue
        place = layer.sketch.where(local)
        columns = torch.stack([layer.sketch.project(local, one) for one in views[name]])
        if not place.slot:
            table.finals[index] = columns
            continue
        slot = layer.slots[place.slot]
        table._used.add(slot)
        lo = slot.begin + place.lo
        table._table[:, lo : lo + place.hi - place.lo] = columns
    return table.sketch(SIZE, 0, [])


def check(case: Case, rank: int, left_out: Iterable[str] = ()) -> None:
    torch.manual_seed(0)
    model = case.make().double()
    model.train(not case.eval)
    x = case.inputs()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def of_examples(part: slice) -> Tensor:
        model.load_state_dict(state)
        return losses(case, model, x[part])

    expected = loop_over_examples(model, of_examples, BATCH)
    model.load_state_dict(state)
    settings = TwoSidedRows(rank=rank, size=SIZE)
    capture = TwoSidedCapture(model, settings, batch_size=BATCH)
    losses(case, model, x).mean().backward()
    rows = capture.pop_sketch(BATCH)
    assert set(capture.left_out) == set(left_out)
    if capture._capture is None:
        torch.testing.assert_close(rows, mapped(capture, expected), rtol=1e-8, atol=1e-10)
    else:  # modules that are run again have a sketch of their own; lengths tell mistakes
        assert rows.isfinite().all()
    capture.remove_hooks()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ZOO)
def test_rows_are_the_map_of_single_gradients(name: str) -> None:
    check(ZOO[name], 4, () if name in READ_WHERE_SHARED else ZOO[name].left_out)


@pytest.mark.filterwarnings("ignore")  # not ours: of transformers and what it imports
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_rows_of_transformers_are_the_map_of_single_gradients(name: str) -> None:
    pytest.importorskip("transformers")
    case = TRANSFORMERS[name]
    check(case, 4, () if name in READ_WHERE_SHARED else case.left_out)


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
    capture = TwoSidedCapture(model, TwoSidedRows(size=SIZE))
    of_examples(slice(None)).mean().backward()
    rows = capture.pop_sketch(BATCH)
    torch.testing.assert_close(rows, expected @ capture.matrix(), rtol=1e-8, atol=1e-10)
    capture.remove_hooks()


def layers() -> dict[str, tuple[nn.Module, Tensor]]:
    """Layers and inputs of every kind that has a sketch of its own."""
    torch.manual_seed(0)
    images, tokens = torch.randn(BATCH, 6, 9, 8).double(), torch.randint(20, (BATCH, 5))
    encoder = {"dropout": 0.0, "dim_feedforward": 12}
    return {
        "linear, one position": (nn.Linear(6, 5), torch.randn(BATCH, 6)),
        "linear": (nn.Linear(6, 5), torch.randn(BATCH, 3, 6)),
        "linear without bias": (nn.Linear(6, 5, bias=False), torch.randn(BATCH, 3, 2, 6)),
        "linear, bias alone": (nn.Linear(6, 5).requires_grad_(False), torch.randn(BATCH, 3, 6)),
        "conv1d": (nn.Conv1d(6, 5, 3, padding=1), images.flatten(2)),
        "conv2d": (nn.Conv2d(6, 5, 3, stride=2, padding=1), images),
        "conv2d, dilated": (nn.Conv2d(6, 5, 3, dilation=2, bias=False), images),
        "conv2d, pointwise": (nn.Conv2d(6, 5, 1, bias=False), images),
        "conv2d, circular": (nn.Conv2d(6, 5, 3, padding=1, padding_mode="circular"), images),
        "conv2d, same": (nn.Conv2d(6, 5, 3, dilation=2, padding="same"), images),
        "conv2d, groups": (nn.Conv2d(6, 4, 3, groups=2), images),
        "conv2d, depthwise": (nn.Conv2d(6, 6, 3, groups=6), images),
        "conv2d, few channels": (nn.Conv2d(6, 4, 1, groups=6 // 3), images[:, :6]),
        "conv3d": (nn.Conv3d(3, 4, 2), images.view(BATCH, 3, 2, 9, 8)),
        "transposed": (
            nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1),
            images,
        ),
        "transposed, groups": (nn.ConvTranspose1d(6, 4, 3, groups=2), images.flatten(2)),
        "embedding": (nn.Embedding(20, 6, padding_idx=3), tokens),
        "long outputs": (nn.Linear(6, 5000), torch.randn(BATCH, 2, 6)),
        "long embedding": (nn.Embedding(5000, 6), tokens * 200),
        "layer norm": (nn.LayerNorm(8), images),
        "layer norm, two dimensions": (nn.LayerNorm((9, 8)), images),
        "rms norm": (nn.RMSNorm(8), images),
        "group norm": (nn.GroupNorm(2, 6), images),
        "attention": (
            nn.TransformerEncoderLayer(8, 2, batch_first=True, **encoder),
            torch.randn(BATCH, BATCH, 8),
        ),
    }


@pytest.mark.parametrize("rank", [2, 16])
@pytest.mark.parametrize("name", layers())
def test_layers(name: str, rank: int) -> None:
    layer, x = layers()[name]
    if name == "linear, bias alone":
        layer.bias.requires_grad_()
    check(Case(lambda: layer, lambda: x.double() if x.is_floating_point() else x), rank)


def test_every_layer_has_its_own_sketch() -> None:
    for name, (layer, _) in layers().items():
        if name != "linear, bias alone":
            assert TwoSidedCapture(layer, TwoSidedRows(rank=2))._capture is None, name


class Tied(nn.Module):
    """One weight for looking tokens up and for scoring them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(30, 8, padding_idx=2), nn.Linear(8, 8)
        self.head = nn.Linear(8, 30)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.middle(self.embed(tokens))))
        return scores


def test_uses_of_a_shared_weight_add_up() -> None:
    check(Case(Tied, lambda: torch.randint(30, (BATCH, 6))), rank=8)


class Decoder(nn.Module):
    """Attention to other inputs, with queries projected apart from keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x[:, :3], x)
        return out


@pytest.mark.parametrize("make", [Decoder, lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0)])
def test_attention(make) -> None:
    model = make().double()
    time_major = not isinstance(model, Decoder)
    x = torch.randn(BATCH, 5, 8).double()
    x = x.transpose(0, 1).contiguous() if time_major else x
    dim = 1 if time_major else 0
    expected = loop_over_examples(
        model, lambda part: model(x.narrow(dim, part.start, 1)).sin().sum(), BATCH
    )
    settings = TwoSidedRows(rank=4, size=SIZE, batch_dim=dim, strict=True)
    capture = TwoSidedCapture(model, settings)
    (model(x).sin().sum() / BATCH).backward()
    assert capture._capture is None
    torch.testing.assert_close(
        capture.pop_sketch(BATCH), mapped(capture, expected), rtol=1e-8, atol=1e-10
    )
    assert F.linear is torch._C._nn.linear


def test_attention_that_fails_leaves_torch_as_it_was() -> None:
    model = nn.MultiheadAttention(8, 2)
    TwoSidedCapture(model, TwoSidedRows())
    with pytest.raises((RuntimeError, AssertionError)):
        model(torch.randn(3, 2, 8), torch.randn(3, 2, 7), torch.randn(3, 2, 7))
    assert F.linear is torch._C._nn.linear


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 4))
    x = torch.randn(BATCH, 3, 6, requires_grad=True)
    capture = TwoSidedCapture(block, TwoSidedRows(size=SIZE))
    block(x).square().mean().backward()
    plain = capture.pop_sketch(BATCH)
    capture.remove_hooks()
    model = nn.Sequential(block)
    model.forward = lambda y: checkpoint(block, y, use_reentrant=reentrant)  # type: ignore[method-assign]
    capture = TwoSidedCapture(model, TwoSidedRows(size=SIZE))
    model(x).square().mean().backward()
    again = capture.pop_sketch(BATCH)
    # Names differ, and with them the projections: lengths and angles agree on average only.
    torch.testing.assert_close(again.norm(dim=1), plain.norm(dim=1), rtol=0.7, atol=0)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def test_several_uses_and_backwards_add_up() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    capture = TwoSidedCapture(model, TwoSidedRows(size=SIZE))
    (model(x).square().mean() + model(2 * x).square().mean()).backward()
    together = capture.pop_sketch(BATCH)
    model(x).square().mean().backward()
    model(2 * x).square().mean().backward()
    torch.testing.assert_close(capture.pop_sketch(BATCH), together)
    model(x).square().mean().backward()
    alone = capture.pop_sketch(BATCH)
    assert not torch.allclose(alone, together)


def test_gradients_of_inputs_alone_do_not_count() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6, requires_grad=True)
    capture = TwoSidedCapture(model, TwoSidedRows(size=SIZE, strict=True))
    model(x).square().mean().backward()
    expected = capture.pop_sketch(BATCH)
    torch.autograd.grad(model(x).square().mean(), x)
    model(x).square().mean().backward()
    torch.testing.assert_close(capture.pop_sketch(BATCH), expected)


def test_a_second_backward_through_one_graph_is_refused() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    TwoSidedCapture(model, TwoSidedRows())
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"retain_graph=True.*rows='sketch'"):
        loss.backward()


def test_inputs_overwritten_before_the_backward_are_refused() -> None:
    model, x = nn.Sequential(nn.Embedding(9, 4)), torch.randint(9, (BATCH, 3))
    TwoSidedCapture(model, TwoSidedRows())
    out = model(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        out.square().mean().backward()


def test_inputs_are_let_go_when_the_gradient_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    TwoSidedCapture(model, TwoSidedRows(size=SIZE))
    held = []
    receive = LayerUse.__call__

    def spy(one: LayerUse, grads: tuple[Tensor | None, ...]) -> None:
        receive(one, grads)
        held.append(one)

    monkeypatch.setattr(LayerUse, "__call__", spy)
    loss = model(x).square().mean()  # keeps the graph, and with it the hooks
    loss.backward()
    assert len(held) == 2 and all(one.inputs is None for one in held)


def test_parts_of_the_model_are_left_out_where_the_batch_is_unknown() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    capture = TwoSidedCapture(model, TwoSidedRows())
    model[2](model[0](x)).square().mean().backward()
    with pytest.raises(RuntimeError, match="call the model itself"):
        capture.pop_sketch(BATCH)


def test_a_batch_of_another_size_is_refused() -> None:
    model = small()
    capture = TwoSidedCapture(model, TwoSidedRows())
    model(torch.randn(BATCH, 3, 6)).square().mean().backward()
    with pytest.raises(RuntimeError, match=f"given {BATCH} examples, but the batch has 2"):
        capture.pop_sketch(2)


def test_a_loss_with_gradients_is_refused() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6, requires_grad=True)
    TwoSidedCapture(model, TwoSidedRows())
    loss = model(x).sin().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        (loss + grad.square().sum()).backward()


def test_tables_are_reused_and_unused_layers_are_zero() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            out: Tensor = self.one(x) + (self.two(x) if both else 0)
            return out

    model, x = Either(), torch.randn(BATCH, 3, 6)
    capture = TwoSidedCapture(model, TwoSidedRows(size=SIZE))
    rows = []
    for both in (False, True, False):
        model(x, both).square().mean().backward()
        rows.append(capture.pop_sketch(BATCH))
    torch.testing.assert_close(rows[0], rows[2], rtol=0, atol=0)
    assert not torch.allclose(rows[0], rows[1])


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
    gram = exact.pop_rows(24).gram()
    exact.remove_hooks()
    capture = TwoSidedCapture(model, TwoSidedRows(size=4096))
    F.cross_entropy(model(x), classes).backward()
    rows = capture.pop_sketch(24)
    assert correlation(rows @ rows.T, gram) > 0.97
    assert 0.9 < float((rows @ rows.T).trace() / gram.trace()) < 1.1


def test_layers_of_few_inputs_are_exact() -> None:
    model = small()
    x = torch.randn(BATCH, 3, 6)
    exact = Capture(model)
    capture = TwoSidedCapture(model, TwoSidedRows(size=4096))  # as many as columns, or more
    model(x).square().mean().backward()
    gram, rows = exact.pop_rows(BATCH).gram(), capture.pop_sketch(BATCH)
    torch.testing.assert_close(rows @ rows.T, gram)


def test_inner_products_are_right_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where outputs are folded, and for two uses of one weight."""
    monkeypatch.setattr(projected_weight, "_FEWEST_OUTPUTS", 8)
    torch.manual_seed(0)
    model, x = Tied(), torch.randint(30, (BATCH, 6))
    exact = Capture(model)
    model(x).square().mean().backward()
    gram = exact.pop_rows(BATCH).gram()
    exact.remove_hooks()
    grams = []
    for seed in range(200):
        capture = TwoSidedCapture(model, TwoSidedRows(rank=3, size=512, seed=seed))
        model(x).square().mean().backward()
        rows = capture.pop_sketch(BATCH)
        capture.remove_hooks()
        grams.append(rows @ rows.T)
    found = torch.stack(grams)
    assert not torch.allclose(found[0], found[1], rtol=0.01)
    error = (found.mean(0) - gram).abs() / (found.std(0) / 200**0.5)
    assert error.max() < 5  # standard errors


@pytest.mark.parametrize(("parameters", "size"), [(10, 1024), (25_000_000, 16384), (1e9, 65536)])
def test_longer_rows_for_larger_models(parameters: float, size: int) -> None:
    assert TwoSidedRows().size_for(int(parameters)) == size
    assert TwoSidedRows(size=77).size_for(int(parameters)) == 77


def test_higher_rank_for_models_with_tokens() -> None:
    assert TwoSidedCapture(Tied(), TwoSidedRows())._layer_of[0][0].sketch.plan.inside == 64
    assert TwoSidedCapture(small(), TwoSidedRows())._layer_of[0][0].sketch.plan.inside == 16
    assert TwoSidedCapture(Tied(), TwoSidedRows(rank=9))._layer_of[0][0].sketch.plan.inside == 9


@pytest.mark.parametrize("bad", [{"rank": 1}, {"rank": 257}, {"rank": 2.0}, {"size": 0}])
def test_bad_settings(bad) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        TwoSidedRows(**bad)
