from dataclasses import replace

import pytest

from studies.evidence.claims import (
    epochs_share,
    epochs_to_final,
    judge_claims,
    measure_runs,
    paper_effect,
)
from studies.evidence.file import Claim
from studies.evidence.pages import lost
from studies.evidence.words import our_figures
from tests.lab.report.sample_records import record
from tests.lab.report.sample_studies import result


def claim(**given):
    base = {"id": "c", "text": "t", "source": "s", "paper": "p", "measure": "train_loss"}
    return Claim(**{**base, "test": "less", "arm": "a", "against": "b", **given})


def judge(one, results):
    """Return the verdict on a claim that is the only one of its study; None without one."""
    found = judge_claims([one], results)
    return found[0] if found else None


def told(one, results):
    """Return our figures on that claim as the pages of evidence have them."""
    return our_figures(judge(one, results), results)


def arms(a, b):
    """Final losses of each seed -> results of two arms over four epochs."""
    return {
        name: [result(name, seed, [2.0, 1.5, 1.2, end]) for seed, end in enumerate(ends)]
        for name, ends in (("a", a), ("b", b))
    }


def summaries(**named):
    return {
        name: [
            replace(result(name, seed, [1.0]), figures={"summary": {"bound": value}})
            for seed, value in enumerate(values)
        ]
        for name, values in named.items()
    }


@pytest.mark.parametrize(
    "a, b, paper, word",
    [
        ([0.8, 0.81, 0.79], [1.0, 1.0, 1.0], None, "confirmed"),
        ([0.8, 0.81, 0.79], [1.0, 1.0, 1.0], (0.7, 1.0), "confirmed"),
        ([0.8, 0.81, 0.79], [1.0, 1.0, 1.0], (0.5, 1.0), "weaker"),
        ([0.99, 0.5, 0.9], [1.0, 1.0, 1.0], None, "weaker"),
        ([1.01, 0.5, 0.9], [1.0, 1.0, 1.0], None, "not confirmed"),
        ([1.2, 1.2, 1.2], [1.0, 1.0, 1.0], None, "not confirmed"),
        ([0.8, None, 0.8], [1.0, 1.0, 1.0], None, "not confirmed"),
        ([None, None, 0.8], [1.0, 1.0, 1.0], None, "not confirmed"),
        ([0.8, 0.81], [1.0, 1.0], None, "not enough seeds"),
        ([0.5], [1.0], None, "not enough seeds"),
        ([None, None], [1.0, 1.0], None, "not enough seeds"),
        # Equal losses may be luck: what is measured is not counted.
        ([0.8, 0.8, 0.8], [1.0, 1.0, 1.0], None, "weaker"),
    ],
)
def test_verdicts_on_less(a, b, paper, word):
    assert judge(claim(paper_values=paper), arms(a, b)).verdict == word


def test_seeds_are_pairs():
    """What all seeds share does not hide the difference."""
    results = arms([1.0, 2.0, 3.0], [1.01, 2.02, 3.031])
    found = judge(claim(), results)
    assert found.verdict == "confirmed" and "1.0 % less" in told(claim(), results)
    assert found.ours == (
        "train_loss: 2.00 ± 1.00 against 2.02 ± 1.01; corrected p < 0.001; 3 seeds"
    )
    assert judge(claim(), arms([1.0, 2.0], [1.01])).verdict == "not enough seeds"
    # Figures and shares are of the same seeds.
    uneven = judge(claim(), arms([1.0, 2.0], [1.01, 2.02, 99.0]))
    assert "1.50 \N{PLUS-MINUS SIGN} 0.71 against 1.52" in uneven.ours


def test_verdicts_on_bounds_and_margins():
    found = summaries(a=[1.02, 1.03, 1.01], b=[1.0, 1.0, 1.0])
    bound = {"measure": "bound", "against": None}
    assert judge(claim(test="at-most", value=1.1, **bound), found).verdict == "confirmed"
    assert judge(claim(test="at-most", value=1.0, **bound), found).verdict == "not confirmed"
    assert judge(claim(test="at-least", value=0.9, **bound), found).verdict == "confirmed"
    worse = {"measure": "bound", "test": "no-worse"}
    assert judge(claim(value=0.1, **worse), found).verdict == "confirmed"
    assert judge(claim(value=0.021, **worse), found).verdict == "not confirmed"
    assert judge(claim(value=0.001, **worse), found).verdict == "not confirmed"
    assert judge(claim(measure="bound", test="greater"), found).verdict == "weaker"
    # What is counted is the same in every seed, and exact.
    same = summaries(a=[2.0, 2.0, 2.0], b=[4.0, 4.0, 4.0])
    assert judge(claim(measure="bound"), same).verdict == "confirmed"
    # So is what does not differ at all.
    level = arms([0.8, 0.9, 0.7], [0.8, 0.9, 0.7])
    assert judge(claim(test="no-worse", value=0.01), level).verdict == "confirmed"


def test_the_claims_of_a_study_are_one_family():
    """Alone each is confirmed, p = 0.01; four of them are not: one of four may be luck."""
    results = arms([0.8, 0.84, 0.76], [1.0, 1.0, 1.0])
    (alone,) = judge_claims([claim()], results)
    assert alone.verdict == "confirmed" and lost(alone) == ""
    assert our_figures(alone, results).endswith("p = 0.013; 3 seeds")
    # Others that cannot be tested cost nothing: no run, too few seeds.
    few = {**results, "c": [result("c", 0, [1.0] * 4)]}
    more = [claim(id="d", arm="d"), claim(id="e", arm="c")]
    assert judge_claims([claim(), *more], few)[0] == alone
    found = judge_claims([claim(id=str(n)) for n in range(4)], results)
    assert {one.verdict for one in found} == {"weaker"}
    assert {lost(one) for one in found} == {"corrected p = 0.052"}
    assert "p = 0.013, corrected for 4 claims p = 0.052" in our_figures(found[0], results)


def test_no_worse_goes_by_what_is_better():
    """The metric of these records is an accuracy: higher is better."""
    made = {
        name: [result(name, seed, [1.0], metrics=[value]) for seed, value in enumerate(values)]
        for name, values in (("a", [90.0, 90.1, 90.3]), ("b", [80.0, 80.1, 80.2]))
    }
    given = {"measure": "metric", "test": "no-worse", "value": 0.01}
    assert judge(claim(**given), made).verdict == "confirmed"
    assert judge(claim(**given, arm="b", against="a"), made).verdict == "not confirmed"


def test_a_row_tells_the_end_and_the_last_half_whichever_was_chosen():
    """Losses of the last half are 10 % less, of the last epoch alone 20 % more."""
    results = {
        "a": [result("a", seed, [3.0, 3.0, 0.6, 1.2]) for seed in (0, 1)],
        "b": [result("b", seed, [3.0, 3.0, 1.0, 1.0]) for seed in (0, 1)],
    }
    end = "after the last epoch alone 20 % more"
    half = "over the last half of the epochs 10 % less"
    for given, one, other in (
        ({"measure": "late_train_loss"}, end, half),
        ({}, half, end),
        ({"epoch": 4}, half, end),
    ):
        ours = told(claim(**given), results)
        assert one in ours and other not in ours
    early = told(claim(epoch=3), results)
    assert "40 % less" in early and half not in early and end not in early


def test_figures_in_percent_differ_by_points():
    made = {
        name: [result(name, seed, [1.0], metrics=[value]) for seed, value in enumerate(values)]
        for name, values in (("a", [90.0, 91.0]), ("b", [80.0, 80.8]))
    }
    found = told(claim(measure="metric", test="greater"), made)
    assert "10.1 points more (95 % interval 8.8 to 11.4)" in found
    assert "points" not in told(claim(), arms([0.8, 0.81], [1.0, 1.0]))


def test_what_was_not_measured_has_no_verdict():
    found = arms([0.8, 0.8], [1.0, 1.0])
    assert judge(claim(arm="c"), found) is None
    assert judge(claim(measure="padding"), found) is None  # Dense runs have none.
    with pytest.raises(ValueError, match="unknown measure 'odd'; known are train_loss"):
        judge(claim(measure="odd"), found)
    with pytest.raises(ValueError, match="unknown measure 'odd'; known are bound"):
        judge(claim(measure="odd"), summaries(a=[1.0], b=[1.0]))


def test_the_paper_counts_by_half():
    assert paper_effect(claim(paper_values=(9, 39))) == pytest.approx(30 / 39)
    one = claim(paper_values=(0.2, 1.0))
    assert judge(one, arms([0.6, 0.6, 0.59], [1.0] * 3)).verdict == "confirmed"
    assert judge(one, arms([0.61, 0.61, 0.6], [1.0] * 3)).verdict == "weaker"


def test_the_papers_effect_of_an_accuracy_that_is_no_worse():
    """Two points less of an accuracy are worse by two points; of a loss they would be better."""
    one = claim(test="no-worse", value=0.01, paper_values=(60.0, 62.0))
    assert paper_effect(one, in_percent=True, higher_is_better=True) == pytest.approx(-0.01)
    assert paper_effect(one, in_percent=True) == pytest.approx(0.03)


def test_epochs_to_the_best_loss_of_the_other():
    quick = [record(seed=s, epochs=4, losses=[1.0, 0.5, 0.4, 0.3]) for s in (0, 1)]
    slow = [record(seed=s, epochs=4, losses=[2.0, 1.0, 0.5, 0.6]) for s in (0, 1)]
    slow[1] = record(seed=1, epochs=4, losses=[2.0, 1.0, 0.5, 0.35])
    assert epochs_share(quick, slow) == {0: 2 / 3, 1: 1.0}
    assert epochs_share(slow, quick) == {0: None, 1: None}
    lost = [record(seed=0, epochs=2, losses=[1.0, None])]
    assert epochs_share(quick, lost) == {0: None}


def test_epochs_to_the_final_loss_of_the_same_seed():
    quick = [record(seed=s, epochs=4, losses=[1.0, 0.5, 0.4, 0.3]) for s in (0, 1, 2)]
    slow = [
        record(seed=s, epochs=4, losses=[2.0, 1.0, 0.1, end]) for s, end in ((0, 1.0), (1, 0.4))
    ]
    assert epochs_to_final(quick, slow) == {0: 1, 1: 3}
    assert epochs_to_final(slow, quick) == {0: 3, 1: 3}
    lost = [record(seed=0, epochs=2, losses=[None, None])]
    assert epochs_to_final(quick, lost) == {0: None}
    found = arms([0.8, 0.9, 0.9], [1.2, 1.5, 1.5])
    given = {"measure": "epochs_to_final", "test": "at-most"}
    one = judge(claim(**given, value=4), found)
    assert one.verdict == "confirmed"
    assert "epochs_to_final: 2.33 \N{PLUS-MINUS SIGN} 0.58 against" in one.ours
    assert judge(claim(**given, value=2), found).verdict == "not confirmed"


def test_the_epoch_whose_density_is_furthest_off_counts():
    run = record(seed=0, epochs=3, sparsify="topk", density=0.01)
    rows = [
        replace(row, density=d) for row, d in zip(run.epochs, (0.01, 0.0097, 0.0102), strict=True)
    ]
    found = measure_runs("density_off", None, [replace(run, epochs=rows)])
    assert found == {0: pytest.approx(0.03)}
    assert measure_runs("density_off", 1, [replace(run, epochs=rows)]) == {0: 0.0}
    assert measure_runs("density_off", None, [record(seed=0, epochs=3)]) == {0: None}


def test_measures_of_runs():
    runs = [record(seed=0, epochs=6, losses=[6.0, 5.0, 4.0, 3.0, 2.0, 1.0])]
    assert measure_runs("train_loss", None, runs) == {0: 1.0}
    assert measure_runs("train_loss", 2, runs) == {0: 5.0}
    assert measure_runs("late_train_loss", None, runs) == {0: 2.0}
    assert measure_runs("bytes", None, runs) == {0: 6 * runs[0].epochs[0].bytes}


def test_of_steps_per_second_more_is_better():
    def speeds(*values):
        figures = [{"summary": {"one run.steps_per_second": value}} for value in values]
        return [replace(result("x", s, [1.0]), figures=one) for s, one in enumerate(figures)]

    slower = {"a": speeds(50.0, 51.0, 49.0), "b": speeds(100.0, 100.0, 100.0)}
    no_worse = claim(measure="one run.steps_per_second", test="no-worse", value=0.1)
    assert judge(no_worse, slower).verdict == "not confirmed"
    faster = {"a": slower["b"], "b": slower["a"]}
    assert judge(no_worse, faster).verdict == "confirmed"
