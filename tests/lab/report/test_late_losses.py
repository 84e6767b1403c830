"""Mean losses over the last half of the epochs: what verdicts about orders rest on."""

import json
import math
from dataclasses import replace

import pytest

from gradherd.lab.report.comparison import compare
from gradherd.lab.report.comparison_table import comparison_json, comparison_table
from gradherd.lab.report.page import write_report
from gradherd.lab.report.verdicts import all_verdicts
from tests.lab.report.sample_records import record, sparsifiers

BASE = [8.0, 6.0, 4.0, 2.0]
LONG = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
OTHER = {"hardware": {"cpu": "other"}}  # Seconds of made-up runs are luck: leave them out.
STEADY = (0.0, 0.1, -0.1)


def curves(order, losses, *changes, **more):
    """One run for each list of changes to the last losses, seeds from 0."""
    runs = []
    for seed, change in enumerate(changes):
        change = [0.0] * (len(losses) - len(change)) + list(change)
        curve = [loss + by for loss, by in zip(losses, change, strict=True)]
        more = {"epochs": len(losses), **more}
        runs.append(record(order, seed=seed, losses=curve, **more))
    return runs


def base(losses=BASE, **more):
    return curves("d-rr", losses, [], [], [], **more)


def steady(order, *changes, losses=BASE, **more):
    """Three runs with the same changes, but for a little that lasts over all of them."""
    return curves(order, losses, *([by + luck for by in changes] for luck in STEADY), **more)


def said(records):
    return [(verdict.tone, verdict.text) for verdict in all_verdicts(compare(records))]


def loss_column(records):
    table = comparison_table(compare(records))
    return next(column for column in table.items() if column[0].startswith("loss \u2212"))


# Mean changes over epochs 3 and 4: -1, -0.9, -1.1. Standard error 0.1 / sqrt(3), t quantile
# 4.30265, t^2 = 300. After epoch 4 alone: 0.6, -0.6, -0.3.
LASTING = ([-2.6, 0.6], [-1.2, -0.6], [-1.9, -0.3])
# The other way round: -1, -0.9, -1.1 after epoch 4; 0.6, -0.6, -0.3 over both.
AT_LAST = ([2.2, -1.0], [-0.3, -0.9], [0.5, -1.1])


def test_figures_by_hand():
    found = compare([*base(), *curves("cd-grab", BASE, *LASTING)])
    late = found.pairs[1].late_loss
    assert late.mean == pytest.approx(-1) and late.seeds == (0, 1, 2) and late.epoch is None
    assert (late.low, late.high) == pytest.approx((-1.248414, -0.751586), abs=1e-6)
    assert late.p == pytest.approx(1 - math.sqrt(300 / 302))
    assert found.pairs[1].loss.mean == pytest.approx(-0.1) and found.pairs[0].late_loss is None
    told = json.loads(json.dumps(comparison_json(found, None)))["arms"]
    assert told[0]["late_loss_difference"] is None
    assert told[1]["late_loss_difference"].keys() == told[1]["loss_difference"].keys()
    assert told[1]["late_loss_difference"]["low"] == late.low


def test_gain_that_lasts_is_shown_though_the_last_epoch_shows_nothing():
    records = [*base(), *curves("fixed", BASE, *LASTING, **OTHER)]
    assert not compare(records).pairs[1].loss.excludes_zero
    assert said(records) == [
        (
            "gain",
            "fixed reaches d-rr's final loss after 4 epochs, d-rr itself after 4, with 1.00 times "
            "its bytes; final loss 1.90 vs 2.00 (difference over epochs 3 to 4 \u22121.0, "
            "95 % interval \u22121.2 to \u22120.8, 3 seeds, paired p = 0.0033, "
            "corrected p = 0.0066: better); test accuracy (%) 92.94 vs 92.99 (difference "
            "\u22120.05, 95 % interval \u22120.27 to +0.16, 3 seeds, paired p = 0.40: no "
            "difference shown).",
        )
    ]
    name, (_, cell) = loss_column(records)
    assert name == "loss \u2212 baseline, last half"
    assert (cell.text, cell.more[:2]) == ("\u22121.0", ("\u22121.2 to \u22120.8", "p = 0.0033"))


def test_gain_of_the_last_epoch_alone_is_not_shown():
    records = [*base(), *curves("fixed", BASE, *AT_LAST, **OTHER)]
    assert compare(records).pairs[1].loss.excludes_zero
    [(tone, text)] = said(records)
    assert tone == "open"
    assert (
        "; final loss 1.00 vs 2.00 (difference over epochs 3 to 4 \u22120.1, 95 % "
        "interval \u22121.7 to +1.5, 3 seeds, paired p = 0.81: no difference shown); "
        "test accuracy (%) 92.94 vs 92.99 ("
    ) in text


def test_what_is_worse_for_long_is_called_worse():
    [(tone, text)] = said([*base(), *steady("fixed", 1.0, 1.0)])
    assert tone == "cost" and "(difference over epochs 3 to 4 +1.0, " in text and ": worse)" in text


def test_fewer_than_four_epochs_have_no_late_ones():
    records = [*base(BASE[1:]), *steady("cd-grab", -1.0, -1.0, losses=BASE[1:])]
    found = compare(records)
    assert found.pairs[1].late_loss is None and found.pairs[1].loss.excludes_zero
    assert comparison_json(found, None)["arms"][1]["late_loss_difference"] is None
    assert (
        "; final loss 1.00 vs 2.00 (difference \u22121.0, 95 % interval "
        "\u22121.2 to \u22120.8, 3 seeds, paired p = " in (said(records)[0][1])
    )
    name, (_, cell) = loss_column(records)
    assert name == "loss \u2212 baseline" and cell.more[0] == "\u22121.2 to \u22120.8"


def test_interrupted_arm_is_compared_over_the_last_half_of_what_both_have():
    # Epochs 3 to 5 of 8: the middle one of an odd number counts. Mean of -3, -2 and -1.
    cut = steady("cd-grab", -3.0, -2.0, -1.0, 90.0, 90.0, 90.0, losses=LONG, done=5)
    found = compare([*base(LONG), *cut])
    late = found.pairs[1].late_loss
    assert late.epoch == 5 and late.mean == pytest.approx(-2)
    text = said([*base(LONG), *cut])[0][1]
    assert "; final loss 3.00 vs 1.00 (difference over epochs 3 to 5 \u22122.0, 95 % " in text


def test_arms_of_other_lengths_are_compared_over_the_same_epochs():
    late = compare([*base(LONG), *steady("cd-grab", -1.0, -1.0, losses=LONG[:4])]).pairs[1]
    assert late.late_loss.epoch == 4 and late.late_loss.mean == pytest.approx(-1)
    assert late.loss.epoch is None and late.loss.mean == pytest.approx(5 - 1 - 1)


def test_arm_too_short_for_a_mean_says_where_it_was_read():
    short = steady("cd-grab", *[-1.0] * 8, losses=LONG, done=3)
    name, cells = loss_column([*base(LONG), *steady("fixed", -1.0, losses=LONG), *short])
    assert name.endswith("last half") and cells[1].more[0] != "after epoch 3"
    assert cells[2].text == "\u22121.0" and cells[2].more[0] == "after epoch 3"


def test_loss_that_is_not_finite_leaves_no_late_mean():
    pairs = []
    for at in (1, 2, 3):
        runs = steady("cd-grab", -1.0, -1.0)
        runs[1].epochs[at] = replace(runs[1].epochs[at], train_loss=None)
        pairs.append(compare([*base(), *runs]).pairs[1])
    early, late, last = pairs
    assert early.late_loss.mean == pytest.approx(-1)
    assert late.late_loss is None and late.loss is not None
    assert last.late_loss is None and last.loss is None


def test_one_common_seed_has_no_late_difference():
    pair = compare([*base(), record("cd-grab", seed=1, epochs=4), record("cd-grab", seed=7)])
    assert pair.pairs[1].late_loss is None


def test_control_that_gains_as_much_for_long_takes_the_credit():
    grab = steady("cd-grab", -1.0, -1.0)  # 1 on average, and after the last epoch.
    control = curves("always-plus", BASE, *[[-3.0, 0.0]] * 3)  # 1.5 on average, nothing at last.
    tone, text = said([*base(), *control, *grab])[-1]
    assert tone == "mixed" and "final loss 1.00 vs 2.00 (difference over epochs 3 to 4 +0.5" in text
    assert text.endswith(": balancing is not the reason for the gain.")


def test_control_that_gains_less_for_long_leaves_the_credit():
    grab = steady("cd-grab", -2.0, 0.0)
    control = curves("always-plus", BASE, *[[0.0, -1.0]] * 3)
    tone, text = said([*base(), *control, *grab])[-1]
    assert tone == "gain" and "(difference over epochs 3 to 4 \u22120.5" in text
    assert "3 seeds, paired p = 0.013, corrected p = 0.039: better)" in text
    assert text.endswith(": balancing is what helps.")


def test_control_without_a_gain_that_is_shown():
    # Changes that differ a lot by seed, but by the same for both: only their difference is shown.
    luck = (-3.0, 0.0, 2.0)
    grab = curves(
        "cd-grab", BASE, *([by - 1.0 + e] * 2 for by, e in zip(luck, STEADY, strict=True))
    )
    control = curves("always-plus", BASE, *([by] * 2 for by in luck))
    tone, text = said([*base(), *control, *grab])[-1]
    assert tone == "gain"
    assert text.endswith("balancing is what helps, but a gain over d-rr is not shown.")


def test_control_that_was_cut_short_is_held_against_the_same_epochs():
    # cd-grab: 3 in the first half, 0.2 in the second. The control stops after 0.5 in the first.
    grab = steady("cd-grab", *[-3.0] * 4, *[-0.2] * 4, losses=LONG)
    control = curves("always-plus", LONG, *[[-0.5] * 8] * 3, done=4)
    tone, text = said([*base(LONG), *control, *grab])[-1]
    assert tone == "gain" and "(difference over epochs 3 to 4 \u22122.5" in text


def test_sparsifiers_are_judged_by_their_metric():
    """Its metric comes first, and a loss that shows nothing leaves the verdict to it."""
    found = said(sparsifiers())
    assert all(": test accuracy (%) " in text.partition("(difference")[0] for _, text in found)
    assert "(difference over epochs 11 to 20 +0.018" in found[1][1] and found[1][0] == "mixed"


def test_table_fits_a_screen(look, tmp_path):
    # Losses as close as those of a small convex task: figures with as many digits as there can be.
    arms = [("d-rr", "dense", None), ("id-pair-grab", "dense", None), ("d-rr", "exdyna", 0.001)]
    close = [
        record(*arm, seed, losses=[0.294408 + by * (seed - 1) / 80_000] * 20)
        for by, arm in enumerate(arms)
        for seed in range(3)
    ]
    path = tmp_path / "report.html"
    write_report([*close, *sparsifiers()], path)
    with look(path) as page:
        assert page.locator("th", has_text="loss \u2212 baseline, last half").count() == 2
        assert page.locator("th", has_text="density").count() == 2
        for table in page.locator("table.arms").all():
            wide = table.evaluate("t => [t.scrollWidth, t.parentElement.clientWidth]")
            assert wide[0] <= wide[1]
