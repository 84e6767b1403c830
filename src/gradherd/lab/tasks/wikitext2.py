"""`wikitext2-gpt2`: a tiny GPT-2 on WikiText-2.

Shapes: B sequences, T tokens of each, V tokens in the vocabulary.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.lab.tasks.data_files import LocalDataSet, find_dataset
from gradherd.lab.tasks.language import GPT2, BytePairEncoder
from gradherd.lab.tasks.metrics import mean_over_examples
from gradherd.lab.tasks.task import Defaults, Split, Task, check_limit

TOKENS, GPT2_LENGTH = 50_257, 128


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


def lines(text: str) -> Iterator[str]:
    r"""Yield lines with their ends; only \n ends a line, unlike in `str.splitlines`."""
    return iter(io.StringIO(text, newline="\n"))


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


def _blocks(text: LocalDataSet, name: str, encoder: BytePairEncoder, limit: int | None) -> Tensor:
    """Return (n, 128) tokens of a file; enough for `limit` blocks."""
    tokens: list[int] = []
    for line in encoder.encode_lines(lines(text.text(name))):
        tokens += line
        if limit is not None and len(tokens) >= limit * GPT2_LENGTH:
            break
    count = len(tokens) // GPT2_LENGTH
    return torch.tensor(tokens[: count * GPT2_LENGTH]).view(count, GPT2_LENGTH)
