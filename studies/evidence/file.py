"""What pages of evidence need of a study file: claims, figures, sources and words.

`gradherd study` runs a study without reading any of this.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from gradherd.lab.study.file import Study, check_types
from gradherd.lab.text import check_known

TESTS = ("less", "greater", "no-worse", "at-most", "at-least")
"""Comparisons a claim can make; `claims` defines them."""
PAIRED = ("epochs_share", "epochs_to_final")
"""Measures that are only defined relative to another arm, whatever the test."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement that the results of a study confirm or not."""

    id: str
    """Unique among all studies."""
    text: str
    """The statement itself."""
    source: str
    """Who makes it, and where."""
    paper: str
    """The paper's figures, in words."""
    paper_values: tuple[float, float] | None = None
    """The paper's figures for `arm` and `against`; None if the paper gives none."""
    measure: str
    """What is measured of each run; see `claims`."""
    test: str
    """How the arm must compare: less, greater, no-worse, at-most, at-least."""
    arm: str
    """Name of the arm."""
    against: str | None = None
    """Name of the reference arm; required by less, greater, no-worse and PAIRED measures."""
    value: float | None = None
    """Bound of at-most and at-least; tolerance of no-worse, as a share."""
    epoch: int | None = None
    """Read the measure after this epoch; None reads it at the end."""
    note: str = ""
    """Remark added to the claim's row."""


@dataclass(frozen=True, kw_only=True)
class PageStudy(Study):
    """A study with what its page says."""

    theme: str = "open"
    """Section of the list of studies that it is in."""
    budget: str = ""
    """How it falls short of the paper's experiment; shown in rows of the paper's claims."""
    note: str = ""
    """Remarks, as paragraphs: the first is above the table, the others are folded."""
    left_out: str = ""
    """What was not run, and why."""
    sources: Mapping[str, Any] = field(default_factory=dict)
    """Where each setting comes from."""
    claims: tuple[Claim, ...] = ()
    figures: tuple[Mapping[str, Any], ...] = ()
    """Charts, as the file has them; `charts` reads them."""


def page_study(study: Study) -> PageStudy:
    """Return a study with what its page says; raise ValueError if that is invalid."""
    given = dict(study.page)
    claims, figures = (_tables(given.pop(key, []), key) for key in ("claim", "figure"))
    check_types("key", {one.name: one.type for one in fields(PageStudy)}, given)
    made = PageStudy(**vars(study), **given, claims=tuple(map(_claim, claims)), figures=figures)
    _check_claims(made)  # last, because it compares parts of the file with each other
    return made


def _tables(entries: Any, key: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise ValueError(f"{key} must be tables, each under [[{key}]]")
    return tuple(entries)


def _claim(table: Mapping[str, Any]) -> Claim:
    """Return a claim; raise ValueError if it cannot be judged."""
    claim: Claim = from_table(Claim, "claim", table)
    where = f"claim {claim.id}"
    check_known(f"test of {where}", claim.test, TESTS)
    # A forgotten reference, or one that has no effect, would change what a claim says.
    compared = claim.test in ("less", "greater", "no-worse") or claim.measure in PAIRED
    if compared != (claim.against is not None):
        paired = " and ".join(PAIRED)
        raise ValueError(
            f"{where}: against goes with less, greater and no-worse, and with {paired}"
        )
    if (claim.test in ("no-worse", "at-most", "at-least")) != (claim.value is not None):
        raise ValueError(f"{where}: value goes with no-worse, at-most and at-least")
    if claim.epoch is not None and claim.epoch < 1:
        raise ValueError(f"{where}: epochs are counted from 1, got {claim.epoch}")
    return claim


def _check_claims(study: PageStudy) -> None:
    """Refuse claims about what the study does not have."""
    ids: set[str] = set()
    for claim in study.claims:
        if claim.id in ids:
            raise ValueError(f"two claims are called {claim.id!r}")
        ids.add(claim.id)
        for name in (claim.arm, claim.against):
            if name is None:
                continue
            check_known(f"arm of claim {claim.id}", name, tuple(study.arms))
            # Otherwise the claim would stay unmeasured, however often the study runs.
            last = {**study.settings, **study.arms[name]}.get("epochs")
            if claim.epoch is not None and isinstance(last, int) and claim.epoch > last:
                raise ValueError(
                    f"claim {claim.id}: there is no epoch {claim.epoch}, {name!r} has {last}"
                )


def from_table(cls: Any, what: str, table: Mapping[str, Any]) -> Any:
    """Build a dataclass from a TOML table; `what` is what such a table is called in errors."""
    own_name = table.get("id", table.get("title"))
    where = f"{what} {own_name}" if isinstance(own_name, str) else f"a {what}"
    check_types("key", {one.name: one.type for one in fields(cls)}, table, where)
    lacks = [one.name for one in fields(cls) if one.default is MISSING and one.name not in table]
    if lacks:
        raise ValueError(f"{where} lacks {' and '.join(lacks)}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})
