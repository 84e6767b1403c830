"""What a study's claims and figures ask for, checked before anything is run for them."""

from gradherd.lab.report.claims_measures import MEASURES
from gradherd.lab.report.claims_words import OF_EPOCHS
from gradherd.lab.report.figures_study import SERIES
from gradherd.lab.study.file import check_known, has_type
from gradherd.lab.study.run import kind_of
from gradherd.lab.study.spec import Figure, Study


def check_told(study: Study) -> None:
    """Raise ValueError if a claim or a figure asks for what no run of the study has.

    What runs have that train nothing is known when they have been made.
    """
    trains = study.kind == "compare"
    times = [one for one in SERIES if not trains or one != "round"]
    for claim in study.claims:
        if trains:
            check_known(f"measure of claim {claim.id}", claim.measure, MEASURES)
    for figure in study.figures:
        where = f"figure {figure.title}"
        check_known(f"x of {where}", figure.x, (*times, *kind_of(study).keys))
        if trains:
            check_known(f"y of {where}", figure.y, OF_EPOCHS if figure.x in times else MEASURES)
        if figure.x not in times:
            _check_across(study, figure, where)


def _check_across(study: Study, figure: Figure, where: str) -> None:
    """What is drawn over a setting: each arm has a number of it, lines are of another."""
    kind = kind_of(study)
    check_known(f"lines of {where}", figure.lines, ("arm", *kind.keys))
    for arm in study.arms_in(figure):
        value = kind.settings(study, arm.settings).get(figure.x)
        if not has_type(value, float):
            raise ValueError(
                f"{where}: {figure.x} is no number in {arm.name!r}, got {value!r}: "
                "name the arms that have one in arms"
            )
