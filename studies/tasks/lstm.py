"""A two-layer LSTM on WikiText-2: its state starts at zero, or is carried from batch to batch.

Shapes: B sequences, T words of each, V words in the vocabulary.
"""

import io
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.lab.tasks.data_files import find_dataset
from gradherd.lab.tasks.metrics import mean_over_examples
from gradherd.lab.tasks.task import (
    BadTask,
    Defaults,
    Split,
    Task,
    Tensors,
    UnsuitableSettings,
    check_limit,
)

WORDS, LENGTH, WIDTH = 33_278, 35, 32
UNKNOWN, END = "<unk>", "<eos>"
COLUMNS = 16


class WordLSTM(nn.Module):
    """Embedding, two LSTM layers, and the transposed embedding as output layer."""

    def __init__(self, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits (B, T, V) of the word after each of (B, T); the state starts at zero."""
        states, _ = self.lstm(self.embedding(words))
        logits: Tensor = self.head(states)
        return logits


@dataclass(frozen=True)
class WikiText2LSTM(Task):
    """A two-layer LSTM of width 32 with tied weights, no dropout: 1,081,792 parameters.

    An example is a sequence of 35 words and the word after each. The hidden state starts at zero
    for each example, unlike in the CD-GraB paper, whose code carries it over, as
    `WikiText2CarriedLSTM` does.
    """

    name: ClassVar = "wikitext2-lstm"
    description: ClassVar = "a two-layer LSTM on WikiText-2 words, 1,081,792 parameters"
    data: ClassVar = ("wikitext-2",)
    metric_name: ClassVar = "test perplexity"
    higher_is_better: ClassVar = False
    evaluation_chunk: ClassVar = 256
    metric_chunk: ClassVar = 32
    """Sequences of the test that are read at once: logits over a vocabulary take much memory."""
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
        """Load (n, 36) word ids; the vocabulary is that of the training part."""
        check_limit(limit)
        local = find_dataset("wikitext-2", data_dir)
        train, test = (_words(local.text(f"{part}.txt")) for part in ("train", "test"))
        counts = Counter(word for word in train if word not in (UNKNOWN, END))
        # Equally frequent words are numbered in the order of their first appearance.
        frequent = (word for word, _ in counts.most_common(WORDS - 2))
        vocabulary = {word: index for index, word in enumerate((UNKNOWN, END, *frequent))}
        parts = []
        for words in (train, test):
            # Enough words for `limit` sequences; the vocabulary is still that of the whole text.
            used = words if limit is None else words[: limit * LENGTH + 1]
            ids = torch.tensor([vocabulary.get(word, vocabulary[UNKNOWN]) for word in used])
            # The last word of a sequence is only a target, so the next one starts with it.
            parts.append((ids.unfold(0, LENGTH + 1, LENGTH).clone(),))
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
        loss = mean_over_examples(model, self._losses, *tensors, chunk=self.metric_chunk)
        return float(torch.tensor(loss).exp())

    def _losses(self, model: nn.Module, words: Tensor, *columns: Tensor) -> Tensor:
        """Return (B,) the mean cross-entropy of each sequence."""
        # Flattened: softmax over a middle dimension is slow on a GPU.
        logits, targets = model(words[:, :-1], *columns).flatten(0, 1), words[:, 1:]
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return losses.view_as(targets).mean(1)


def _words(text: str) -> list[str]:
    lines = io.StringIO(text, newline="\n")  # only \n ends a line, unlike in `str.splitlines`
    return list(chain.from_iterable([*line.split(), END] for line in lines))


class CarriedLSTM(WordLSTM):
    """The same network, which goes on from the state in which it has left a column of the text.

    It forgets all states whenever its mode is set: before each epoch and before each evaluation.
    """

    states: Tensor | None = None
    """(2, 2, columns, width): hidden state and cell of each layer; None is zero. No buffer: these
    are equal on all workers."""

    def train(self, mode: bool = True) -> Self:
        """Set the mode, and forget."""
        self.states = None
        return super().train(mode)

    def forward(self, words: Tensor, columns: Tensor) -> Tensor:  # type: ignore[override]
        """Return logits (B, T, V) of (B, T) words, which come next in (B,) different columns."""
        embedded = self.embedding(words)
        if self.states is None:
            self.states = embedded.new_zeros(2, 2, COLUMNS, embedded.shape[2])
        outputs, after = self.lstm(embedded, tuple(self.states.index_select(2, columns)))
        self.states.index_copy_(2, columns, torch.stack(after).detach())
        logits: Tensor = self.head(outputs)
        return logits


@dataclass(frozen=True)
class WikiText2CarriedLSTM(WikiText2LSTM):
    """The LSTM of `wikitext2-lstm`, its state carried as in the published code of CD-GraB.

    The text is cut into 16 columns, of which each of 4 workers reads 4: a unit is one sequence of
    each. A worker's state starts at zero in every epoch and goes, detached, from the unit it has
    visited to the one it visits next. As every order permutes units, that is hardly ever the state
    of the text before; only the evaluation reads the text in its own order.

    The model keeps the states, and no checkpoint does: workers are simulated, as in all studies.
    """

    name: ClassVar = "wikitext2-lstm-carried"
    description: ClassVar = "the LSTM on WikiText-2 with its state carried, 1,081,792 parameters"
    metric_chunk: ClassVar = COLUMNS

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Load (n, 36) word ids, the first sequence of all columns first, and their (n,) columns.

        A limit shortens the text before it is cut into columns.

        Raises:
            UnsuitableSettings: It leaves fewer sequences than there are columns.
        """
        split = super().load(data_dir, limit)
        return Split(self.in_columns(*split.train), self.in_columns(*split.test))

    def in_columns(self, words: Tensor) -> Tensors:
        """Return the sequences of a text, one of each column after the other, and their columns."""
        length = len(words) // COLUMNS
        if not length:
            raise UnsuitableSettings(
                f"{self.name} needs {COLUMNS} sequences or more, got {len(words)}"
            )
        columns = words[: length * COLUMNS].view(COLUMNS, length, -1)
        # Unit g is worker g mod R's: each of 4 workers has the same columns in all its units.
        return columns.transpose(0, 1).flatten(0, 1), torch.arange(COLUMNS).repeat(length)

    def model(self) -> nn.Module:
        """Return the network."""
        if dist.is_initialized():  # ranks would each evaluate a part of the text, from zero
            raise BadTask(f"task {self.name!r} takes simulated workers only: --virtual")
        return CarriedLSTM()

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next word, of sequences in their order."""
        parts = zip(*(tensor.split(COLUMNS) for tensor in tensors), strict=True)
        return torch.cat([self._losses(model, *part) for part in parts]).mean()

    def _losses(self, model: nn.Module, words: Tensor, *columns: Tensor) -> Tensor:
        """Return (B,) the mean cross-entropy of sequences that lie beside each other."""
        if (columns[0].diff() % COLUMNS != 1).any():
            raise UnsuitableSettings(
                f"{self.name} carries a state from batch to batch: unit must be batch_size"
            )
        return super()._losses(model, words, *columns)
