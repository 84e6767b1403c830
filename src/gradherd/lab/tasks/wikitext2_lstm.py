"""`wikitext2-lstm`: a small recurrent language model on words.

Shapes: B sequences, T = 35 words of each, V words in the vocabulary, W = 32 width.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from gradherd.lab.tasks.data import find_set
from gradherd.lab.tasks.evaluate import average
from gradherd.lab.tasks.read import DamagedData, lines
from gradherd.lab.tasks.task import Defaults, Split, check_limit
from gradherd.lab.tasks.words import numbers, vocabulary

WORDS = 33_278
LENGTH = 35
UNKNOWN, END = "<unk>", "<eos>"


class WordLSTM(nn.Module):
    """Embedding, two LSTM layers, and the embedding again to score the next word."""

    def __init__(self, words: int = WORDS, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, words: Tensor) -> Tensor:
        """Return scores (B, T, V) of the word after each of (B, T); the state starts at zero."""
        states, _ = self.lstm(self.embedding(words))
        scores: Tensor = self.head(states)
        return scores


@dataclass(frozen=True)
class WikiText2LSTM:
    """A two-layer LSTM of width 32 with tied weights, no dropout: 1,081,792 parameters.

    An example is a sequence of 35 words and the word after each. The hidden state starts at
    zero for each of them, unlike in the CD-GraB paper, which carries it along from one to the
    next in the order they are visited.
    """

    name: ClassVar = "wikitext2-lstm"
    description: ClassVar = "a two-layer LSTM on WikiText-2 words, 1,081,792 parameters"
    data: ClassVar = ("wikitext-2",)
    metric_name: ClassVar = "test perplexity"
    higher_is_better: ClassVar = False
    defaults: ClassVar = Defaults(
        workers=4,
        batch_size=4,
        unit=4,
        lr=5.0,
        momentum=0.9,
        clip=0.25,
        lr_drop=0.1,
        lr_drop_every=10,
        epochs=50,
        seeds=5,
        source="CD-GraB paper (arXiv:2302.00845), its WikiText-2 experiment: 4 workers with 4 "
        "sequences each ordered as one, lr 5 times 0.1 every 10 epochs, momentum 0.9, averaged "
        "gradient clipped at 0.25.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Read (n, 36) word numbers; the vocabulary is that of the training part."""
        check_limit(limit)
        found = find_set("wikitext-2", data_dir)
        train, test = (_words(found.text(f"{part}.txt")) for part in ("train", "test"))
        known = vocabulary(train, WORDS, (UNKNOWN, END))
        parts = []
        for name, words in (("train.txt", train), ("test.txt", test)):
            if len(words) <= LENGTH:
                raise DamagedData(f"{found.paths[name]} has only {len(words)} words")
            used = words if limit is None else words[: limit * LENGTH + 1]
            parts.append((sequences(numbers(used, known, known[UNKNOWN]), LENGTH),))
        return Split(*parts).first(limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return WordLSTM()

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next word."""
        (words,) = tensors
        return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the exponential of the mean cross-entropy of the next word."""
        return perplexity(model, *tensors, chunk=32)


def sequences(stream: NDArray[np.int64], length: int) -> Tensor:
    """Cut a stream into (n, length + 1): each begins with the last word of the one before.

    >>> sequences(np.arange(6), 2)
    tensor([[0, 1, 2],
            [2, 3, 4]])
    """
    count = (len(stream) - 1) // length
    starts = np.arange(count)[:, None] * length
    return torch.from_numpy(stream[starts + np.arange(length + 1)])


def perplexity(model: nn.Module, tokens: Tensor, *, chunk: int) -> float:
    """Return the perplexity of a language model on (n, T + 1) tokens."""

    def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
        # Flat, as in training: over a middle dimension softmax is slow on a GPU.
        scores, wanted = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:]
        losses = F.cross_entropy(scores, wanted.flatten(), reduction="none")
        return losses.view_as(wanted).mean(1)

    return float(torch.tensor(average(model, mean_loss, tokens, chunk=chunk)).exp())


def _words(text: str) -> list[str]:
    return list(chain.from_iterable([*line.split(), END] for line in lines(text)))
