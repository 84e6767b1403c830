"""The LSTM of `wikitext2-lstm`, its state carried from batch to batch."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.lab.tasks.metrics import eval_mode
from gradherd.lab.tasks.task import Split, Tensors, UnsuitableSettings
from gradherd.lab.tasks.wikitext2 import WIDTH, WikiText2LSTM, WordLSTM

COLUMNS = 16


class CarriedLSTM(WordLSTM):
    """The same network, which takes and returns its state."""

    def forward(self, words: Tensor, *state: Tensor) -> Tensors:  # type: ignore[override]
        """Return logits (B, T, V), and hidden state and cell, (2, B, width); none mean zero."""
        outputs, after = self.lstm(self.embedding(words), state or None)
        return self.head(outputs), *after


@dataclass(frozen=True)
class WikiText2CarriedLSTM(WikiText2LSTM):
    """The LSTM of `wikitext2-lstm`, its state carried as in the published code of CD-GraB.

    The text is cut into 16 columns, of which each of 4 workers reads 4: a unit is one sequence of
    each. A worker's state starts at zero in every epoch and goes, detached, from the unit it has
    visited to the one it visits next. As every order permutes units, that is hardly ever the state
    of the text before; only the evaluation reads the text in its own order.
    """

    name: ClassVar = "wikitext2-lstm-carried"
    description: ClassVar = "the LSTM on WikiText-2 with its state carried, 1,081,792 parameters"

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Load (n, 36) word ids: the first sequence of all columns, then the second, and so on.

        A limit shortens the text before it is cut into columns.

        Raises:
            UnsuitableSettings: It leaves fewer sequences than there are columns.
        """
        parts, split = [], super().load(data_dir, limit)
        for (words,) in (split.train, split.test):
            length = len(words) // COLUMNS
            if not length:
                raise UnsuitableSettings(
                    f"{self.name} needs {COLUMNS} sequences or more, got {len(words)}"
                )
            columns = words[: length * COLUMNS].view(COLUMNS, length, -1)
            # Unit g is worker g mod R's: each of 4 workers has the same columns in all its units.
            parts.append((columns.transpose(0, 1).flatten(0, 1),))
        return Split(*parts)

    def model(self) -> nn.Module:
        """Return the network."""
        return CarriedLSTM()

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next word, from a state of zero."""
        return self.carried_loss(model, (), *tensors)[0]

    def initial_state(self, count: int, device: torch.device) -> Tensors:
        """Return the state before the first of `count` sequences at a time: zero."""
        hidden = torch.zeros(2, count, WIDTH, device=device)
        return hidden, hidden.clone()

    def carried_loss(
        self, model: nn.Module, state: Tensors, *tensors: Tensor
    ) -> tuple[Tensor, Tensors]:
        """Return the mean cross-entropy of the next word, and the state after the last one."""
        (words,) = tensors
        logits, *after = model(words[:, :-1], *state)
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()), tuple(after)

    def whole_loss(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the mean cross-entropy of the next word, all columns read in their order."""
        (words,) = tensors
        state = self.initial_state(COLUMNS, words.device)
        total = torch.zeros((), dtype=torch.float64, device=words.device)
        with eval_mode(model):
            # A few sequences of each column at a time: logits over a vocabulary take much memory.
            for rows in words.view(-1, COLUMNS, words.shape[1]).split(8 if words.is_cuda else 2):
                # Sequences overlap by one word: what follows the last of them is predicted once.
                text = torch.cat([rows[0], *rows[1:, :, 1:]], 1)
                loss, state = self.carried_loss(model, state, text)
                total += loss.double() * (text.shape[1] - 1) * COLUMNS
        return float(total) / words[:, 1:].numel()

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the exponential of `whole_loss`."""
        return float(torch.tensor(self.whole_loss(model, *tensors)).exp())
