"""A tiny GPT-2 on WikiText-2, its tokenizer, and a transformer of plain modules.

Byte-pair encoding splits text into words, each with the space before it, writes a word's bytes as
printable characters, and then merges the adjacent pair that ranks first in the merge list, again
and again, until no pair is in the list.

The modules are plain so that per-example gradients can be read: `nn.MultiheadAttention` applies its
projections without calling submodules, so hooks never see them.

Shapes: B examples, T positions or tokens, W width, H heads, V tokens in the vocabulary.
"""

import io
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.lab.tasks.data_files import LocalDataSet, find_dataset
from gradherd.lab.tasks.metrics import mean_over_examples
from gradherd.lab.tasks.task import Defaults, Split, Task, check_limit


@dataclass(frozen=True)
class BytePairEncoder:
    r"""GPT-2's tokenizer: a vocabulary, and merges with their ranks.

    >>> encoder = BytePairEncoder.parse(
    ...     '{"h": 0, "i": 1, "hi": 2, "!": 3}', "#version: 0.2\nh i\n")
    >>> encoder.encode("hi!ih")
    [2, 3, 1, 0]
    """

    tokens: dict[str, int]
    ranks: dict[tuple[str, str], int]
    _cache: dict[str, list[int]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, encoder: str, merges: str) -> "BytePairEncoder":
        """Build an encoder from the text of encoder.json and vocab.bpe."""
        lines = [line for line in merges.split("\n") if line and not line.startswith("#version")]
        ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}
        return cls(json.loads(encoder), ranks)  # type: ignore[arg-type]  # two parts each

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return [token for line in self.encode_lines([text]) for token in line]

    def encode_lines(self, lines: Iterable[str]) -> Iterator[list[int]]:
        """Yield the token ids of each line, tokenized on its own."""
        # The pattern is compiled anew only for a line with a character not seen before.
        characters: set[str] = set()
        pattern = _word_pattern(characters)
        for line in lines:
            if not characters.issuperset(line):
                characters.update(line)
                pattern = _word_pattern(characters)
            yield [token for word in pattern.findall(line) for token in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        # Texts repeat words: most are looked up, not merged.
        ids = self._cache.get(word)
        if ids is None:
            parts = merge_pairs([_BYTE_CHARACTERS[byte] for byte in word.encode()], self.ranks)
            ids = self._cache[word] = [self.tokens[part] for part in parts]
        return ids


def merge_pairs(parts: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Merge adjacent parts as long as a merge applies, the lowest rank first.

    >>> merge_pairs(list("abab"), {("a", "b"): 0, ("ab", "ab"): 1})
    ['abab']
    """
    while len(parts) > 1:
        mergeable = [pair for pair in pairwise(parts) if pair in ranks]
        if not mergeable:
            break
        first, second = min(mergeable, key=ranks.__getitem__)
        merged, at = [], 0
        while at < len(parts):
            matches = parts[at : at + 2] == [first, second]
            merged.append(first + second if matches else parts[at])
            at += 2 if matches else 1
        parts = merged
    return parts


def _word_pattern(characters: set[str]) -> re.Pattern[str]:
    r"""Return GPT-2's word pattern, exact for texts of these characters.

    The original uses \p{L} and \p{N}, which `re` lacks; the letters and numbers that occur are
    listed instead.
    """
    # One member each, since an empty class is no valid pattern.
    classes = {"L": "a", "N": "0"}
    for character in sorted(characters):
        category = unicodedata.category(character)[0]
        if category in classes:
            classes[category] += re.escape(character)
    letter, number = classes["L"], classes["N"]
    return re.compile(
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{letter}]+| ?[{number}]+| ?[^\s{letter}{number}]+"
        r"|\s+(?!\S)|\s+"
    )


def _byte_characters() -> list[str]:
    """Return a printable character for every byte: its own, or one beyond the first 256."""
    # The table of GPT-2: bytes that print stand for themselves, the others are shifted past 255, so
    # that vocabulary files have neither spaces nor control characters.
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_BYTE_CHARACTERS = _byte_characters()


class SelfAttention(nn.Module):
    """Self-attention with H heads."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads must divide width {width}, got {heads}")
        self.heads, self.causal = heads, causal
        # One layer for all three: one hook, and one matrix product.
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend over T in (B, T, W); positions where `mask`, (B, T), is False are ignored."""
        # B and T stay separate dimensions throughout, so that rows can be split by example.
        queries, keys, values = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=None if mask is None else mask[:, None, None, :],
            is_causal=self.causal,
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class TransformerLayer(nn.Module):
    """Self-attention and a feed-forward network, each with a residual connection (as in GPT-2)."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, T, W) to (B, T, W)."""
        x = x + self.attention(self.norm1(x), mask)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


class Transformer(nn.Module):
    """Token and position embeddings and a stack of layers.

    Args:
        tokens: Size of the vocabulary.
        positions: Longest sequence, T.
        width: W.
        heads: H; must divide W.
        layers: Number of layers.
        causal: Whether a position sees only those before it.
    """

    def __init__(
        self, tokens: int, positions: int, width: int, heads: int, layers: int, *, causal: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(positions, width)
        self.layers = nn.ModuleList(
            TransformerLayer(width, heads, causal=causal) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # As in GPT-2: projections into the residual stream start smaller in deeper stacks.
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * layers) ** 0.5 if residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, T) token ids to (B, T, W)."""
        # Expanded to one row per example: a shared row would have no gradient per example.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, mask)
        out: Tensor = self.norm(x)
        return out


class GPT2(nn.Module):
    """GPT-2's architecture without dropout; the token embedding is also the output layer."""

    def __init__(self, tokens: int, positions: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.transformer = Transformer(tokens, positions, width, heads, layers, causal=True)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.transformer.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, T, V) of the token after each of (B, T)."""
        logits: Tensor = self.head(self.transformer(tokens))
        return logits


TOKENS, GPT2_LENGTH = 50_257, 128


@dataclass(frozen=True)
class WikiText2GPT2(Task):
    """GPT-2 with 2 layers, 2 heads, width 128, context 128: 6,846,080 parameters.

    As in the CD-GraB paper, but on WikiText-2 instead of WikiText-103. An example is a block of
    128 tokens, of which the last 127 are predicted. Lines are tokenized one by one and packed
    without gaps, which takes four seconds.
    """

    name: ClassVar = "wikitext2-gpt2"
    description: ClassVar = "a tiny GPT-2 on WikiText-2, 6,846,080 parameters"
    data: ClassVar = ("wikitext-2", "gpt2-bpe")
    metric_name: ClassVar = "test perplexity"
    higher_is_better: ClassVar = False
    defaults: ClassVar = Defaults(
        workers=64,
        batch_size=1,
        optimizer="adamw",
        lr=5e-4,
        epochs=30,
        seeds=3,
        source="CD-GraB paper (arXiv:2302.00845), its GPT-2 experiment: 64 workers with one "
        "block each, AdamW with lr 5e-4 and no weight decay.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Load (n, 128) tokens."""
        check_limit(limit)
        text, bpe = find_dataset("wikitext-2", data_dir), find_dataset("gpt2-bpe", data_dir)
        encoder = BytePairEncoder.parse(bpe.text("encoder.json"), bpe.text("vocab.bpe"))
        train, test = (_blocks(text, f"{part}.txt", encoder, limit) for part in ("train", "test"))
        return Split((train,), (test,)).first(limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return GPT2(TOKENS, GPT2_LENGTH, width=128, heads=2, layers=2)

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next token."""
        (tokens,) = tensors
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the exponential of the mean cross-entropy of the next token."""
        return perplexity(model, *tensors, chunk=8)


def perplexity(model: nn.Module, tokens: Tensor, *, chunk: int) -> float:
    """Return the perplexity of a language model.

    Args:
        model: Returns (B, T, V) logits of (B, T) tokens.
        tokens: (n, T + 1) tokens; all but the first are predicted.
        chunk: Sequences per call: logits over a vocabulary take much memory.
    """

    def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
        # Flattened as in training: softmax over a middle dimension is slow on a GPU.
        logits, targets = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:]
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return losses.view_as(targets).mean(1)

    # Through a tensor: math.exp raises where torch gives infinity, which the record has as None.
    return float(torch.tensor(mean_over_examples(model, mean_loss, tokens, chunk=chunk)).exp())


def _blocks(text: LocalDataSet, name: str, encoder: BytePairEncoder, limit: int | None) -> Tensor:
    """Return (n, 128) tokens of a file; enough for `limit` blocks."""
    tokens: list[int] = []
    # Only \n ends a line, unlike in `str.splitlines`.
    for line in encoder.encode_lines(io.StringIO(text.text(name), newline="\n")):
        tokens += line
        if limit is not None and len(tokens) >= limit * GPT2_LENGTH:
            break
    count = len(tokens) // GPT2_LENGTH
    return torch.tensor(tokens[: count * GPT2_LENGTH]).view(count, GPT2_LENGTH)
