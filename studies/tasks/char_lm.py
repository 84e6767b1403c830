"""A small GPT-2 on the characters of WikiText-2: a language model that two cores can train."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gradherd.lab.tasks.data_files import find_dataset
from gradherd.lab.tasks.registry import import_file
from gradherd.lab.tasks.task import Defaults, Split, check_limit

# By its path: a study may be run from any folder.
gpt2 = import_file(Path(__file__).with_name("gpt2.py"), "task")
LENGTH = 32


@dataclass(frozen=True)
class WikiText2Characters(gpt2.WikiText2GPT2):
    """GPT-2 with 2 layers, 4 heads, width 96, context 32 over bytes: 251,520 parameters."""

    name: ClassVar = "wikitext2-characters"
    description: ClassVar = "a small GPT-2 on the characters of WikiText-2, 251,520 parameters"
    data: ClassVar = ("wikitext-2",)
    metric_name: ClassVar = "test bits per character"
    defaults: ClassVar = Defaults(
        workers=8,
        batch_size=4,
        optimizer="adamw",
        lr=3e-3,
        epochs=5,
        seeds=3,
        source="Our own choice: about the smallest language model with attention.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Load (n, 33) characters; at most 2,000 sequences for test."""
        check_limit(limit)
        text = find_dataset("wikitext-2", data_dir)
        train, test = (
            torch.tensor(np.frombuffer(text.text(name).encode(), np.uint8).astype(np.int64))
            for name in ("train.txt", "test.txt")
        )
        return Split(
            # The last character of a sequence is only a target, so the next one starts with it.
            (train.unfold(0, LENGTH + 1, LENGTH)[:limit].clone(),),
            (test.unfold(0, LENGTH + 1, LENGTH)[:2000].clone(),),
        )

    def model(self) -> nn.Module:
        """Return the network."""
        return gpt2.GPT2(256, LENGTH, width=96, heads=4, layers=2)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the mean cross-entropy of the next character in bits."""
        return math.log2(gpt2.perplexity(model, *tensors, chunk=250))
