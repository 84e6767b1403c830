"""Sentiment of film-review phrases: a small transformer encoder on words, and a bag of words.

The bag is nearly all embedding: a gradient is zero wherever a word did not occur.

Shapes: B phrases, T words of the longest, W = 96 width.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.lab.tasks.data_files import LocalDataSet, find_dataset
from gradherd.lab.tasks.metrics import accuracy
from gradherd.lab.tasks.registry import import_file
from gradherd.lab.tasks.task import Classifier, Defaults, Split, check_limit

# By its path: a study may be run from any folder.
gpt2 = import_file(Path(__file__).with_name("gpt2.py"), "task")
WORDS = 12_000
LENGTH = 64
PADDING, UNKNOWN = 0, 1


class PhraseClassifier(nn.Module):
    """Two bidirectional transformer layers, mean pooling over words, and a linear classifier."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.transformer = gpt2.Transformer(WORDS, LENGTH, width, heads, layers, causal=False)
        self.head = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits (B, 2) of (B, T) word ids, padded at the end."""
        mask = words != PADDING
        # Padding must not count in the mean: its states are cleared, and only words are counted.
        states = self.transformer(words, mask) * mask.unsqueeze(2)
        logits: Tensor = self.head(states.sum(1) / mask.sum(1, keepdim=True))
        return logits


@dataclass(frozen=True)
class SST2Transformer(Classifier):
    """A transformer encoder with 2 layers, 4 heads, width 96: 1,382,210 parameters.

    The vocabulary is the 12,000 most frequent words of the training part, taken from the file as
    they are; nothing is pretrained.
    """

    name: ClassVar = "sst2-transformer"
    description: ClassVar = "a small transformer encoder on SST-2 phrases, 1.4 M parameters"
    data: ClassVar = ("sst2",)
    metric_name: ClassVar = "dev accuracy (%)"
    metric_chunk: ClassVar = 200
    defaults: ClassVar = Defaults(
        workers=4,
        batch_size=8,
        optimizer="adamw",
        lr=3e-4,
        weight_decay=1e-2,
        epochs=5,
        seeds=3,
        source="Our own choice: a small transformer from scratch on the data of GraB's BERT "
        "experiment (arXiv:2205.10733).",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Load (n, 64) word ids, padded with 0, and (n,) labels, 1 = positive."""
        check_limit(limit)
        local = find_dataset("sst2", data_dir)
        train, test = (read_phrases(local, name) for name in ("train.tsv", "dev.tsv"))
        # Of the whole training part, even with a limit: ids must not depend on it.
        counts = Counter(chain.from_iterable(train[0]))
        # Behind padding and unknown words; equally frequent ones in the order of first appearance.
        frequent = (word for word, _ in counts.most_common(WORDS - 2))
        vocabulary = {word: index for index, word in enumerate(frequent, 2)}
        parts = []
        for phrases, labels in (train, test):
            # One length for all: examples are rows of a tensor, fetched by index.
            words = np.full((len(phrases[:limit]), LENGTH), PADDING)
            for row, phrase in zip(words, phrases[:limit], strict=True):
                # Longer phrases are cut: positions have 64 embeddings.
                ids = [vocabulary.get(word, UNKNOWN) for word in phrase[:LENGTH]]
                row[: len(ids)] = ids
            parts.append((torch.from_numpy(words), torch.tensor(labels[:limit])))
        return Split(*parts).first(limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return PhraseClassifier()

    def prepare(self, inputs: Tensor) -> Tensor:
        """Drop the columns that are padding in all phrases: most phrases are short."""
        if inputs.is_cuda:
            return inputs  # Reading the longest length would make the host wait for the GPU.
        return inputs[:, : int((inputs != PADDING).sum(1).max())]


def read_phrases(local: LocalDataSet, name: str) -> tuple[list[list[str]], list[int]]:
    """Return the words of each phrase and its label, from a table with a header."""
    # Not by csv, which would take the quotation marks in phrases for quoting.
    rows = [line.split("\t") for line in local.text(name).strip("\n").split("\n")[1:]]
    return [phrase.split() for phrase, _ in rows], [int(label) for _, label in rows]


class Bag(nn.Module):
    """The mean of a phrase's word vectors, scored."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=PADDING)
        self.head = nn.Linear(width, 2)
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, words: Tensor) -> Tensor:
        """Return scores (B, 2) of (B, T) words, padded at the end."""
        seen = (words != PADDING).unsqueeze(2)
        scores: Tensor = self.head((self.words(words) * seen).sum(1) / seen.sum(1))
        return scores


@dataclass(frozen=True)
class SST2Bag:
    """Bag of words on SST-2: 1,152,194 parameters, all but 194 of them word vectors."""

    name: ClassVar = "sst2-bag"
    description: ClassVar = "a bag of word vectors on SST-2 phrases, 1,152,194 parameters"
    data: ClassVar = ("sst2",)
    metric_name: ClassVar = "dev accuracy (%)"
    higher_is_better: ClassVar = True
    defaults: ClassVar = Defaults(
        workers=8,
        batch_size=8,
        lr=0.5,
        momentum=0.9,
        epochs=5,
        seeds=3,
        source="Our own choice: about the smallest model whose gradients are sparse by nature.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Read (n, 64) word numbers, padded with 0, and (n,) answers, 1 = kind."""
        return SST2Transformer().load(data_dir, limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return Bag()

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        words, answers = tensors
        return F.cross_entropy(model(words), answers)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the share of right answers in percent."""
        return accuracy(model, *tensors, chunk=872)
