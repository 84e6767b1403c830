"""A model that is nearly all embedding: a gradient is zero wherever a word did not occur."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.lab.tasks.metrics import accuracy
from gradherd.lab.tasks.sst2 import PADDING, WORDS, SST2Transformer
from gradherd.lab.tasks.task import Defaults, Split

WIDTH = 96


class Bag(nn.Module):
    """The mean of a phrase's word vectors, scored."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)
        self.head = nn.Linear(WIDTH, 2)
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
