"""`wikitext2-gpt2`: a tiny GPT-2 on WikiText-2.

Shapes: B sequences, T tokens of each, V tokens in the vocabulary.
"""

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from gradherd.lab.tasks.data_files import (
    DamagedData,
    LocalDataSet,
    cache_dir,
    find_dataset,
    read_arrays,
)
from gradherd.lab.tasks.language import GPT2, BytePairEncoder
from gradherd.lab.tasks.metrics import mean_over_examples
from gradherd.lab.tasks.task import Defaults, Split, Task, check_limit

TOKENS, GPT2_LENGTH = 50_257, 128


def overlapping_sequences(stream: NDArray[np.int64], length: int) -> Tensor:
    """Cut a stream into (n, length + 1); each sequence starts with the last word of the previous.

    >>> overlapping_sequences(np.arange(6), 2)
    tensor([[0, 1, 2],
            [2, 3, 4]])
    """
    count = (len(stream) - 1) // length
    # Overlapping by one, since the last word of a sequence is only a target.
    starts = np.arange(count)[:, None] * length
    return torch.from_numpy(stream[starts + np.arange(length + 1)])


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
    without gaps. Tokens are cached on disk, since tokenizing takes several seconds.
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
        max_tokens = None if limit is None else limit * GPT2_LENGTH
        return Split(
            (_blocks(text, "train.txt", bpe, max_tokens),),
            (_blocks(text, "test.txt", bpe, max_tokens),),
        ).first(limit)

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


def _blocks(text: LocalDataSet, name: str, bpe: LocalDataSet, max_tokens: int | None) -> Tensor:
    """Return (n, 128) tokens of a file, from the cache if they are there."""
    # The key covers text and vocabulary: other content never gets the wrong tokens.
    sources = [text.read(name), bpe.read("encoder.json"), bpe.read("vocab.bpe")]
    digests = "".join(hashlib.sha256(source).hexdigest() for source in sources)
    cached = cache_dir() / "tokens" / f"{hashlib.sha256(digests.encode()).hexdigest()[:32]}.npz"
    tokens = load_tokens(cached)
    if tokens is None:
        encoder = BytePairEncoder.parse(bpe.text("encoder.json"), bpe.text("vocab.bpe"))
        tokens = _encode(text.text(name), encoder, max_tokens)
        # A part of the tokens must not be taken for all of them later.
        if max_tokens is None:
            save_tokens(cached, tokens)
    count = len(tokens) // GPT2_LENGTH
    return torch.from_numpy(tokens[: count * GPT2_LENGTH].astype(np.int64)).view(count, GPT2_LENGTH)


def _encode(text: str, encoder: BytePairEncoder, max_tokens: int | None) -> NDArray[np.uint16]:
    tokens: list[int] = []
    for line in encoder.encode_lines(lines(text)):
        tokens += line
        if max_tokens is not None and len(tokens) >= max_tokens:
            break
    # 50,257 tokens fit into two bytes instead of eight.
    return np.array(tokens, np.uint16)


def load_tokens(path: Path) -> NDArray[np.uint16] | None:
    """Return cached tokens; None if there are none or the file is damaged."""
    try:
        return read_arrays(path, ("tokens",))[0]
    # The cache can always be rebuilt, so damage, which the archive's checksum tells, is no error.
    except DamagedData:
        return None


def save_tokens(path: Path, tokens: NDArray[np.uint16]) -> None:
    """Cache tokens; a folder that cannot be written to is not an error."""
    # Written under another name and renamed: a concurrent reader never sees half a file.
    draft = path.with_suffix(f".{os.getpid()}.npz")
    # A full disk or a read-only home only costs the seconds of tokenizing again.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            np.savez_compressed(draft, tokens=tokens)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
