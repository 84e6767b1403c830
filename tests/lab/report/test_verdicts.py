import re
from dataclasses import replace

import pytest

from gradherd.lab.report.comparison import compare
from gradherd.lab.report.verdicts import all_verdicts, multiple_testing_note
from gradherd.ordering.registry import POLICIES
from tests.lab.report.sample_records import orders, record, sparsifiers

CLAIMS = re.compile(r"\b(better|worse|balancing is what helps)\b")


def runs(order, finals, *, seeds=None, epochs=4, **more):
    """Runs that end at these losses, halving from 8 times as much."""
    made = []
    for seed, final in zip(seeds or range(len(finals)), finals, strict=True):
        losses = [final * 2**left for left in reversed(range(epochs))]
        made.append(record(order, seed=seed, epochs=epochs, losses=losses, **more))
    return made


def said(records):
    return [(verdict.tone, verdict.text) for verdict in all_verdicts(compare(records))]


def test_fewer_epochs_and_lower_loss():
    arm = runs("cd-grab", [0.25, 0.26, 0.24], slower=1.0)
    [(tone, text)] = said([*runs("d-rr", [1.0, 1.02, 0.98]), *arm])
    assert tone == "gain"
    assert text.startswith(
        "cd-grab reaches d-rr's final loss after 2 epochs, d-rr itself after 4, with 0.5"
    )
    assert re.search(
        r"with 0\.5\d times its seconds and 0\.56 times its bytes; final loss 0\.25 vs 1\.00 "
        # Twice the final loss and itself: 1.5 times 0.75.
        r"\(difference over epochs 3 to 4 \u22121\.1, 95 % interval ",
        text,
    )
    assert "3 seeds, paired p < 0.001: better" in text


def test_headlines_say_what_is_shown_and_what_it_takes():
    base, better = runs("d-rr", [1.0, 1.02, 0.98]), runs("cd-grab", [0.25, 0.26, 0.24], slower=1.0)
    dearer = [
        replace(run, epochs=[replace(row, bytes=4 * row.bytes) for row in run.epochs])
        for run in better
    ]
    alike = runs("cd-grab", [1.01, 0.99, 1.0], slower=1.0)
    sooner = "whose final loss it reaches after 2 epochs instead of 4"
    for arm, says in (
        (better, f"cd-grab: better than d-rr, {sooner}; it takes 1.13 times the bytes and "),
        (dearer, f"cd-grab: better than d-rr, at a price, {sooner}; it takes 4.51 times the bytes"),
        (alike, "cd-grab: no difference from d-rr shown; it takes "),
        (better[:2], "cd-grab: too few seeds to compare it with d-rr; it takes "),
    ):
        [verdict] = all_verdicts(compare([*base, *arm]))
        assert verdict.headline.startswith(says), verdict.headline
    # What is worse and sends less is for the reader to weigh.
    [verdict] = all_verdicts(
        compare(
            [
                record("d-rr", sparsify, density, seed, metrics=[metric + seed / 10] * 20)
                for sparsify, density, metric in (("dense", None, 90.0), ("topk", 0.01, 80.0))
                for seed in range(3)
            ]
        )
    )
    assert verdict.tone == "mixed"
    assert verdict.headline.startswith("topk 0.01: worse than dense, but it saves bytes; it takes ")
    assert "% of the bytes" in verdict.headline


def test_fewer_epochs_but_no_less_time():
    arm = runs("cd-grab", [0.25, 0.26, 0.24], slower=3.0)
    [(tone, text)] = said([*runs("d-rr", [1.0, 1.02, 0.98]), *arm])
    assert tone == "mixed"
    assert re.search(
        r"after 2 epochs, d-rr itself after 4, with 1\.\d\d times its seconds and 0\.56 times its",
        text,
    )


def test_fewer_epochs_but_more_bytes():
    arm = [
        replace(run, epochs=[replace(row, bytes=4 * row.bytes) for row in run.epochs])
        for run in runs("cd-grab", [0.25, 0.26, 0.24], slower=1.0)
    ]
    [(tone, text)] = said([*runs("d-rr", [1.0, 1.02, 0.98]), *arm])
    assert tone == "mixed" and "2.26 times its bytes; final loss" in text


@pytest.mark.parametrize(
    "change", [{"hardware": {"cpu": "other"}}, {"config": {"epochs": 4, "virtual": True}}]
)
def test_seconds_of_other_clocks_are_not_compared(change):
    arm = runs("cd-grab", [0.25, 0.26, 0.24], **change)
    [(_, text)] = said([*runs("d-rr", [1.0, 1.02, 0.98]), *arm])
    assert "seconds" not in text and "itself after 4, with 0.56 times its bytes; final" in text
    sent = metrics([97.0, 97.5, 96.9], sparsify="exdyna", density=0.01, **change)
    sent = [replace(run, config={**run.config, "epochs": 2}) for run in sent]
    assert "seconds" not in said([*metrics([97.3, 97.4, 97.2]), *sent])[0][1]


def test_worse_arm_is_called_worse():
    [(tone, text)] = said([*runs("d-rr", [1.0, 1.02, 0.98]), *runs("fixed", [2.0, 2.1, 1.9])])
    assert tone == "cost"
    assert text.startswith(
        "the mean loss of fixed does not reach d-rr's final loss in 4 epochs; final loss 2.00 vs 1"
    )
    assert "difference over epochs 3 to 4 +1.5" in text and ": worse)" in text


def test_nothing_shown_is_said():
    [(tone, text)] = said([*runs("d-rr", [1.0, 1.2, 0.8]), *runs("cd-grab", [1.1, 0.9, 0.85])])
    assert tone == "open" and "3 seeds" in text and "no difference shown" in text
    assert not CLAIMS.search(text)


def test_one_seed_shows_nothing():
    [(tone, text)] = said([*runs("d-rr", [1.0]), *runs("cd-grab", [0.1])])
    assert tone == "open" and "1 common seed: no difference can be shown" in text
    assert not CLAIMS.search(text)


def test_no_common_seed_shows_nothing():
    found = said([*runs("d-rr", [1.0, 1.1]), *runs("cd-grab", [0.1, 0.2], seeds=[5, 6])])
    assert "0 common seeds: no difference can be shown" in found[0][1]


def test_equal_differences_show_nothing():
    [(tone, text)] = said([*runs("d-rr", [1.0, 2.0]), *runs("cd-grab", [0.5, 1.5])])
    assert tone == "open" and "equal for each of 2 seeds, so there is no interval" in text


def test_baseline_that_got_worse_is_told():
    base = [record("d-rr", seed=s, epochs=4, losses=[3, 1, 2, 2.0 + s / 10]) for s in (0, 1)]
    found = said([*base, *runs("cd-grab", [0.25, 0.26])])
    assert "after 1 epoch, d-rr itself after 2, with" in found[0][1]


def test_control_that_gains_as_much_takes_the_credit():
    found = said(
        [
            *runs("d-rr", [1.0, 1.02, 0.98]),
            *runs("always-plus", [0.24, 0.26, 0.25]),
            *runs("cd-grab", [0.25, 0.26, 0.25]),
        ]
    )
    tone, text = found[-1]
    assert len(found) == 3 and tone == "mixed"
    assert text.startswith("cd-grab beside always-plus, which ignores gradients: final loss 0.2")
    assert text.endswith("balancing is not the reason for the gain.") and "3 seeds" in text


def test_control_that_gains_less_leaves_the_credit():
    tone, text = said(orders())[-1]
    assert tone == "gain" and text.endswith("balancing is what helps.")


def test_the_control_is_of_the_family():
    """Alone p = 0.02; with the tests of both orders, five in all, it is not below 0.05."""
    arms = [
        *runs("d-rr", [1.0, 1.02, 0.98]),
        *runs("always-plus", [0.30, 0.34, 0.26]),
        *runs("cd-grab", [0.24, 0.24, 0.19]),
    ]
    tone, text = said(arms)[-1]
    assert "paired p = 0.024, corrected p = 0.0" in text
    assert tone == "open" and text.endswith("it is not shown that balancing is the reason.")
    assert multiple_testing_note(compare(arms)).startswith("5 differences were tested")


def test_control_too_close_to_tell():
    found = said(
        [
            *runs("d-rr", [1.0, 1.02, 0.98]),
            *runs("always-plus", [0.3, 0.4, 0.2]),
            *runs("cd-grab", [0.2, 0.25, 0.35]),
        ]
    )
    assert found[-1][0] == "open"
    assert found[-1][1].endswith("it is not shown that balancing is the reason.")


def test_control_is_silent_without_a_gain():
    found = said(
        [
            *runs("d-rr", [1.0, 1.02, 0.98]),
            *runs("always-plus", [0.3, 0.4, 0.2]),
            *runs("cd-grab", [2.0, 2.1, 2.2]),
        ]
    )
    assert len(found) == 2


def metrics(finals, *, density=None, sparsify="dense", **more):
    return [
        record("d-rr", sparsify, density, s, epochs=2, metrics=[50.0, final], **more)
        for s, final in enumerate(finals)
    ]


@pytest.mark.parametrize(
    ("finals", "tone", "words"),
    [
        ([97.0, 97.5, 96.9], "open", "no difference shown"),
        ([90.0, 90.3, 89.6], "mixed", "worse"),
        ([99.0, 99.1, 99.0], "gain", "better"),
    ],
)
def test_sparsifier(finals, tone, words):
    found = said([*metrics([97.3, 97.4, 97.2]), *metrics(finals, sparsify="exdyna", density=0.01)])
    assert found[0][0] == tone
    text = found[0][1]
    assert text.startswith("exdyna 0.01 against dense: test accuracy (%) ") and words in text
    assert "vs 97.3" in text and "3 seeds" in text and "with 2.1 % of the bytes" in text
    assert words in ("better", "worse") or not CLAIMS.search(text)


def test_lower_metric_can_be_the_better_one():
    more = {"higher_is_better": False, "metric_name": "test perplexity"}
    found = said(
        [*metrics([80.0, 81.0, 79.0], **more),
         *metrics([70.0, 71.0, 69.5], sparsify="topk", density=0.5, **more)]
    )  # fmt: skip
    assert ": better)" in found[0][1]
    # This made-up topk sends indices, too: 0.5 of the numbers are more than all of the bytes.
    assert found[0][0] == "mixed" and "with 1.05 times the bytes" in found[0][1]


def test_diverged_and_empty_arms_are_told():
    lost = metrics([90.0, 91.0], sparsify="topk", density=0.1)
    lost[1] = record("d-rr", "topk", 0.1, 1, epochs=2, losses=[1.0, None], metrics=[50.0, None])
    tone, text = said([*metrics([97.0, 97.1]), *lost])[0]
    assert tone == "cost" and "topk 0.1 diverged with 1 of 2 seeds" in text
    tone, text = said([*orders(2, names=("d-rr",)), *orders(2, names=("grab",), done=0)])[0]
    assert tone == "open" and "grab has no finished epoch" in text


def test_unfinished_arms_are_compared_where_both_are():
    tone, text = said([*orders(names=("d-rr",)), *orders(names=("cd-grab",), done=3)])[0]
    assert (
        "(difference after epoch 3 \u2212" in text and "does not reach" in text and tone == "mixed"
    )
    text = said(orders(names=("d-rr", "cd-grab"), done=5))[0][1]
    assert "cd-grab reaches d-rr's last loss after 3 epochs, d-rr itself after 5" in text


def test_p_values_are_corrected_for_the_number_of_tests():
    note = multiple_testing_note(compare(sparsifiers()))
    assert note.startswith("4 differences were tested (losses and metrics).") and "Holm" in note
    assert multiple_testing_note(compare(orders(1))) is None
    # Enough beside the metric, not beside two more arms.
    losses = [0.80, 0.86, 0.84]
    arms = [runs(name, losses) for name in ("cd-grab", "grab", "pair-grab")]
    [(tone, text)] = said([*runs("d-rr", [1.0, 1.02, 0.98]), *arms[0]])
    assert "paired p = 0.0" in text and tone in ("gain", "mixed")
    tone, text = said([*runs("d-rr", [1.0, 1.02, 0.98]), *(one for arm in arms for one in arm)])[0]
    assert tone == "open" and re.search(r"corrected p = 0\.\d+: no difference shown", text)


def test_two_seeds_are_not_enough():
    [(tone, text)] = said([*runs("d-rr", [1.0, 1.02]), *runs("cd-grab", [0.25, 0.2699])])
    assert tone == "open" and "2 seeds, paired p < 0.001" in text and ": not enough seeds)" in text
    assert not CLAIMS.search(text)


def test_loss_and_metric_are_weighed_together():
    base = metrics([97.3, 97.4, 97.2])
    losses = {"losses": [2.0, 1.0]}
    # A metric that shows nothing does not hide a loss that does.
    arm = [
        record("d-rr", "exdyna", 0.01, s, epochs=2, metrics=[50.0, m], losses=[3.0, loss])
        for s, (m, loss) in enumerate([(97.0, 2.0), (97.5, 2.01), (96.9, 2.02)])
    ]
    same = [record("d-rr", seed=r.seed, epochs=2, metrics=[50.0, r.epochs[-1].metric], **losses)
            for r in base]  # fmt: skip
    [(tone, text)] = said([*same, *arm])
    assert (
        tone == "mixed" and "no difference shown); final loss 2.01 vs 1.00 (difference +1.0" in text
    )
    assert ": worse); with 2.1 % of the bytes" in text
    # A lower loss with a worse metric is both, and so is the other way round.
    grab = [
        record(
            "cd-grab", seed=s, epochs=2, metrics=[50.0, 90.0 + s / 10], losses=[1.0, 0.5 + s / 99]
        )
        for s in range(3)
    ]
    [(tone, text)] = said([*same, *grab])
    assert tone == "mixed" and ": better); test accuracy (%) " in text and ": worse)." in text


def test_both_changed_at_once():
    arms = [("d-rr", "dense", None), ("cd-grab", "exdyna", 0.01)]
    [(_, text)] = said([record(*arm, seed) for arm in arms for seed in range(3)])
    assert text.startswith("cd-grab + exdyna 0.01 against d-rr + dense: test accuracy (%)")


def test_an_order_that_is_added_later_is_checked_by_the_control(monkeypatch):
    """What counts is whether it uses gradients, not its name."""
    monkeypatch.setitem(POLICIES, "mine", POLICIES["cd-grab"])
    monkeypatch.setitem(POLICIES, "grab-bag", POLICIES["d-rr"])
    arms = [*runs("d-rr", [1.0, 1.02, 0.98]), *runs("always-plus", [0.9, 0.92, 0.88])]
    mine = said([*arms, *runs("mine", [0.25, 0.26, 0.24])])
    assert mine[-1][1].startswith("mine beside always-plus, which ignores gradients: final loss")
    assert len(said([*arms, *runs("grab-bag", [0.25, 0.26, 0.24])])) == 2
