"""Verdicts on claims, as commands print them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # It needs packages that a command may have to ask for first.
    from gradherd.lab.report.claims import Verdict


def print_claims(verdicts: "Sequence[Verdict]") -> None:
    """Print a line for each."""
    for one in verdicts:
        print(f"{one.word:13}  {one.claim.id}: {one.ours}")


def as_claims(verdicts: "Sequence[Verdict]") -> list[dict[str, str]]:
    """Return them for --json."""
    return [{"id": one.claim.id, "verdict": one.word, "ours": one.ours} for one in verdicts]
