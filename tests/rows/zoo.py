"""Models people train, at toy size, and models whose rows once were wrong."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH = 4


@dataclasses.dataclass
class Case:
    """A model, its inputs, and the parameters that its rows have to leave out."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    left_out: tuple[str, ...] = ()
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    """Loss of each example; by default a function of all outputs."""
    eval: bool = False
    """Whether the model runs in evaluation mode, where examples do not interact."""


def outputs_of(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    if dataclasses.is_dataclass(out) and not isinstance(out, dict):
        return [getattr(out, f.name) for f in dataclasses.fields(out)]
    return list(out.values()) if isinstance(out, dict) else list(out)


def loss_of_outputs(out: Any) -> Tensor:
    parts = [(p.sin() + p * p).reshape(len(p), -1).sum(1) for p in outputs_of(out)]
    return torch.stack(parts).sum(0)


def losses(case: Case, model: nn.Module, inputs: Any) -> Tensor:
    """Return the loss of each example."""
    return case.loss(model, inputs) if case.loss else loss_of_outputs(model(inputs))


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, generator=torch.Generator().manual_seed(8)).double()


def ids(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(11, shape, generator=torch.Generator().manual_seed(8))


class Cell(nn.Module):
    """A cell whose outputs depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.cell(x[:, 0])
        h, c = self.cell(x[:, 1], (h, c))
        return torch.cat([h, c], 1)


class Block(nn.Module):
    """Returns features and a head on them, and the features under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = (x @ self.a).tanh()
        return {"features": features, "head": features @ self.b, "again": features}


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, features: int) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat(outputs_of(self.inner(x)), -1))


@dataclasses.dataclass(frozen=True)
class Out:
    y: Tensor
    z: Tensor


class ReturnsDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Out:
        return Out(x * self.scale, (x + self.scale).tanh())


class TiedByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(11, 4), nn.Linear(4, 4)
        self.head = nn.Linear(11, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(self.body(self.embed(x)).tanh(), self.embed.weight))


class Positions(nn.Module):
    """Looks a table of positions up once, with ids of a given shape."""

    def __init__(self, *shape: int, time_major: bool = False) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(11, 4), nn.Embedding(9, 4)
        self.layer = nn.Linear(4, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=not time_major)
        self.shape, self.time_major = shape, time_major

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).view(*self.shape)
        y = self.layer(self.embed(x) + self.table(positions))
        if self.time_major:
            return self.encoder(y.transpose(0, 1)).transpose(0, 1)
        return self.encoder(y)


class HookedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * torch.arange(4))
        return self.b(h.tanh())


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.transpose(0, 1))[1][0][-1])


class Residual(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.down(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width))
        self.body = nn.Sequential(Residual(width, width, 1), Residual(width, 2 * width, 2))
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class ViT(nn.Module):
    """Patches, a class token and a table of positions that the model owns itself."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(len(x), -1, -1), y], 1) + self.positions
        if self.checkpointed:
            y = checkpoint(self.encoder, y, use_reentrant=False)
        else:
            y = self.encoder(y)
        return self.head(self.norm(y)[:, 0])


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 6)), nn.Tanh(), nn.Linear(6, 2))


def parametrized_spectral() -> nn.Module:
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 6))
    return nn.Sequential(normed, nn.Tanh(), nn.Linear(6, 2))


def language_model_loss(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(input_ids=x).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), x[:, 1:], reduction="none").mean(1)


def bert_loss(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(input_ids=x, attention_mask=torch.ones_like(x)).logits
    return F.cross_entropy(logits.transpose(1, 2), x, reduction="none").mean(1)


def t5_loss(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(input_ids=x, decoder_input_ids=x.flip(1)).logits
    return F.cross_entropy(logits.transpose(1, 2), x, reduction="none").mean(1)


def image_loss(model: nn.Module, x: Tensor) -> Tensor:
    return loss_of_outputs(model(pixel_values=x).logits)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=8, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=11, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0,
            relative_attention_num_buckets=8, decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        )
    )  # fmt: skip


def hf_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            image_size=8, patch_size=4, hidden_dropout_prob=0.0, num_labels=3,
        )
    )  # fmt: skip


ZOO: dict[str, Case] = {
    "lstm-cell": Case(Cell, floats(BATCH, 2, 3)),
    "features-and-head": Case(lambda: Wrapped(Block(), 10), floats(BATCH, 3)),
    "dataclass": Case(lambda: Wrapped(ReturnsDataclass(), 6), floats(BATCH, 3)),
    "dataclass-of-the-model": Case(ReturnsDataclass, floats(BATCH, 3)),
    "tied-by-function": Case(TiedByFunction, ids(BATCH, 5), ("embed.weight",)),
    "positions-flat": Case(lambda: Positions(-1), ids(BATCH, 5)),
    "positions-flat-square": Case(lambda: Positions(-1), ids(BATCH, BATCH)),
    "positions": Case(lambda: Positions(1, -1), ids(BATCH, 5)),
    "positions-square": Case(lambda: Positions(1, -1), ids(BATCH, BATCH)),
    "time-major-square": Case(lambda: Positions(1, -1, time_major=True), ids(BATCH, BATCH)),
    "user-hook": Case(HookedOutput, floats(BATCH, 3)),
    "last-state": Case(LastState, floats(BATCH, 5, 3)),
    "last-state-evaluated": Case(LastState, floats(BATCH, 5, 3), eval=True),
    "spectral-norm": Case(spectral, floats(BATCH, 3)),
    "parametrized-spectral-norm": Case(parametrized_spectral, floats(BATCH, 3)),
    "resnet": Case(ResNet, floats(BATCH, 3, 8, 8), eval=True),
    "vit": Case(ViT, floats(BATCH, 3, 8, 8)),
    "vit-evaluated": Case(ViT, floats(BATCH, 3, 8, 8), eval=True),
    "vit-checkpointed": Case(lambda: ViT(True), floats(BATCH, 3, 8, 8)),
}

_T5_BIASES = tuple(
    f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    for part in ("encoder", "decoder")
)
TRANSFORMERS: dict[str, Case] = {
    "gpt2": Case(gpt2, ids(BATCH, 6), (), language_model_loss),
    "gpt2-square": Case(gpt2, ids(BATCH, 4), (), language_model_loss),
    "bert": Case(bert, ids(BATCH, 6), (), bert_loss),
    "bert-square": Case(bert, ids(BATCH, 4), (), bert_loss),
    "t5": Case(t5, ids(BATCH, 6), _T5_BIASES, t5_loss),
    "t5-square": Case(t5, ids(BATCH, 4), _T5_BIASES, t5_loss),
    "llama": Case(llama, ids(BATCH, 6), (), language_model_loss),
    "llama-square": Case(llama, ids(BATCH, 4), (), language_model_loss),
    "hf-vit": Case(hf_vit, floats(BATCH, 3, 8, 8), (), image_loss),
}
