"""A GPT-2 of eleven million parameters on WikiText-2."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import nn

from gradherd.lab.tasks.registry import import_file

# By its path: a study may be run from any folder.
gpt2 = import_file(Path(__file__).with_name("gpt2.py"), "task")


@dataclass(frozen=True)
class WideGPT2(gpt2.WikiText2GPT2):
    """GPT-2 with 4 layers, 6 heads, width 192, context 128: 11,453,760 parameters."""

    name: ClassVar = "wikitext2-gpt2-wide"
    description: ClassVar = "GPT-2 on WikiText-2, 11,453,760 parameters"

    def model(self) -> nn.Module:
        """Return the network."""
        return gpt2.GPT2(gpt2.TOKENS, gpt2.GPT2_LENGTH, width=192, heads=6, layers=4)
