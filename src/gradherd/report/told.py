"""What a study's claims and figures ask for, checked before anything is run for them."""

from gradherd.report.claims_measures import MEASURES
from gradherd.report.figures_study import SERIES, TRAINED
from gradherd.study.checks import check_one
from gradherd.study.run import kind_of
from gradherd.study.spec import Figure, Study


def check_told(study: Study) -> None:
    """Raise ValueError if a claim or a figure asks for what no run of the study has.

    What runs have that train nothing is known when they have been made.
    """
    trains = study.kind == "compare"
    for claim in study.claims:
        if trains:
            check_one(f"measure of claim {claim.id}", claim.measure, MEASURES)
    for figure in study.figures:
        where = f"figure {figure.title}"
        if trains:
            check_one(f"y of {where}", figure.y, TRAINED if figure.x in SERIES else MEASURES)
        if figure.x not in SERIES:
            _check_across(study, figure, where)


def _check_across(study: Study, figure: Figure, where: str) -> None:
    """A setting is drawn over another one: both must be settings, and that one a number."""
    kind = kind_of(study)
    check_one(f"x of {where}", figure.x, (*SERIES, *kind.keys))
    check_one(f"lines of {where}", figure.lines, ("arm", *kind.keys))
    drawn = [arm for arm in study.arms if not figure.arms or arm.name in figure.arms]
    values = {arm.name: kind.settings(study, arm.settings).get(figure.x) for arm in drawn}
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(
                f"{where}: {figure.x} is no number in {name!r}, got {value!r}: "
                "name the arms that have one in arms"
            )
