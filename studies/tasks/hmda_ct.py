"""HMDA of Connecticut, a second state."""

from dataclasses import dataclass
from typing import ClassVar

from gradherd.lab.tasks.hmda import HMDA


@dataclass(frozen=True)
class Connecticut(HMDA):
    """The task `hmda` on the applications of another state: 73,105 rows."""

    name: ClassVar = "hmda-ct"
    file: ClassVar = "hmda-2017-CT.npz"
