"""A GPT-2 of eleven million parameters on WikiText-2."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gradherd.lab.tasks.language import GPT2, GPT2_LENGTH, TOKENS, WikiText2GPT2


@dataclass(frozen=True)
class WideGPT2(WikiText2GPT2):
    """GPT-2 with 4 layers, 6 heads, width 192, context 128: 11,453,760 parameters."""

    name: ClassVar = "wikitext2-gpt2-wide"
    description: ClassVar = "GPT-2 on WikiText-2, 11,453,760 parameters"

    def model(self) -> nn.Module:
        """Return the network."""
        return GPT2(TOKENS, GPT2_LENGTH, width=192, heads=6, layers=4)
