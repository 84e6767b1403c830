import json
from dataclasses import replace

import pytest

from gradherd.lab.report.comparison import compare, compare_all
from gradherd.lab.report.comparison_table import comparison_json, comparison_table
from gradherd.lab.report.verdicts import all_verdicts
from tests.lab.report.sample_records import HARDWARE, orders, record, sparsifiers

KEYS = ["order", "sparsify", "final_loss", "final_metric", "loss_by_epoch", "epochs_to_baseline"]


def curves(order, *losses, **more):
    """One run for each curve, seeds from 0."""
    return [
        record(order, seed=seed, epochs=len(curve), losses=list(curve), **more)
        for seed, curve in enumerate(losses)
    ]


def test_figures_by_hand():
    runs = [
        *curves("d-rr", [4.0, 3.0, 2.0], [4.0, 3.0, 1.0]),
        *curves("cd-grab", [3.0, 1.6, 0.5], [3.0, 1.4, 0.7]),
    ]
    found = compare(runs)
    base, arm = found.arms
    assert (base.label, arm.label) == ("d-rr", "cd-grab")
    assert base.final_loss.mean == 1.5 and base.final_loss.std == pytest.approx(0.5**0.5)
    assert [point.mean for point in arm.loss_by_epoch] == pytest.approx([3.0, 1.5, 0.6])
    pair = found.pairs[1]
    assert pair.epochs_to == 2  # At the goal is reached, not only below it.
    assert pair.epochs_to_by_seed == (3, 2)
    assert pair.loss.mean == pytest.approx(-0.9) and pair.loss.seeds == (0, 1)
    seconds = [sum(row.seconds for row in run.epochs[:2]) for run in arm.runs]
    assert pair.seconds_to == pytest.approx(sum(seconds) / 2)
    assert pair.bytes_to == 2 * arm.runs[0].epochs[0].bytes
    assert arm.bytes == 3 * arm.runs[0].epochs[0].bytes
    assert found.pairs[0].epochs_to == 3 and found.pairs[0].loss is None


def test_baseline_that_got_worse_was_there_earlier():
    runs = [*curves("d-rr", [3.0, 1.0, 2.0]), *curves("cd-grab", [2.5, 2.2, 2.1])]
    found = compare(runs)
    assert found.pairs[0].epochs_to == 2
    assert found.pairs[1].epochs_to is None and found.pairs[1].seconds_to is None


@pytest.mark.parametrize(
    ("arms", "labels", "kinds"),
    [
        ([("d-rr", "dense", None), ("cd-grab", "dense", None)], ["d-rr", "cd-grab"], ["order"]),
        (
            [("d-rr", "dense", None), ("d-rr", "exdyna", 0.01), ("d-rr", "exdyna", 0.001)],
            ["dense", "exdyna 0.01", "exdyna 0.001"],
            ["sparsify"],
        ),
        (
            [("d-rr", "dense", None), ("cd-grab", "exdyna", 0.01)],
            ["d-rr + dense", "cd-grab + exdyna 0.01"],
            ["both"],
        ),
        (
            [(o, s, d) for o in ("d-rr", "grab") for s, d in (("dense", None), ("topk", 0.1))],
            ["d-rr + dense", "d-rr + topk 0.1", "grab + dense", "grab + topk 0.1"],
            ["order", "sparsify", "both"],
        ),
        ([("d-rr", "dense", None)], ["d-rr"], []),
        ([("d-rr", "topk", 0.1)], ["topk 0.1"], []),
    ],
)
def test_labels_and_questions(arms, labels, kinds):
    found = compare([record(*arm, seed) for arm in arms for seed in range(2)])
    assert [arm.label for arm in found.arms] == labels
    assert list(found.questions) == kinds


def test_each_pair_of_a_grid_differs_in_one_thing():
    arms = [(o, s, d) for o in ("d-rr", "cd-grab") for s, d in (("dense", None), ("topk", 0.1))]
    found = compare([record(*arm, seed) for arm in arms for seed in range(2)])
    order, sparsify, both = found.questions.values()
    assert all(p.arm.sparsify == p.reference.sparsify for p in order)
    assert all(p.arm.order == p.reference.order for p in sparsify)
    assert (len(order), len(sparsify), len(both)) == (2, 2, 1)


def test_interrupted_run_is_left_out_and_named():
    runs = orders(names=("d-rr", "cd-grab"))
    runs[4] = record("cd-grab", seed=1, done=7)
    found = compare(runs)
    arm = found.arms[1]
    assert arm.seeds == (0, 2) and arm.finished and arm.epochs == 20
    assert found.pairs[1].loss.seeds == (0, 2)
    assert "cd-grab: runs without epoch 20 are left out: seed 1 (interrupted after 7)." in (
        found.notes
    )


def test_arms_that_were_cut_short_are_compared_where_both_are():
    found = compare([*orders(names=("d-rr",)), *orders(names=("cd-grab",), done=7)])
    arm, pair = found.arms[1], found.pairs[1]
    assert (arm.epochs, arm.planned, arm.finished) == (7, 20, False)
    assert pair.loss.epoch == 7
    deltas = [
        b.epochs[6].train_loss - a.epochs[6].train_loss
        for a, b in zip(found.arms[0].runs, arm.runs, strict=True)
    ]
    assert pair.loss.mean == pytest.approx(sum(deltas) / 3)
    assert pair.bytes_ratio == pytest.approx(
        sum(row.bytes for row in arm.runs[0].epochs)
        / sum(row.bytes for row in found.arms[0].runs[0].epochs[:7])
    )
    assert any("reached epoch 7 of 20" in note for note in found.notes)


def test_runs_without_an_epoch_have_no_figures():
    found = compare([*orders(names=("d-rr",)), *orders(names=("cd-grab",), done=0)])
    arm = found.arms[1]
    assert (arm.epochs, arm.seeds, arm.final_loss.mean, arm.seconds) == (0, (), None, None)
    assert found.pairs[1].epochs_to is None and found.pairs[1].loss is None
    assert json.loads(json.dumps(comparison_json(found, None)))["arms"][1]["loss_by_epoch"] == []
    alone = compare(orders(names=("d-rr", "cd-grab"), done=0))
    assert alone.baseline.final_loss.mean is None and alone.pairs[1].epochs_to is None


@pytest.mark.parametrize("stopped", [False, True])
def test_diverged_run_counts_also_if_it_stopped(stopped):
    runs = orders(names=("d-rr", "cd-grab"), epochs=4)
    losses = [9.0, 8.0, None] if stopped else [9.0, 8.0, None, None]
    status = "diverged" if stopped else "done"
    runs[4] = record("cd-grab", seed=1, epochs=4, losses=losses, status=status)
    found = compare(runs)
    arm, pair = found.arms[1], found.pairs[1]
    assert arm.seeds == (0, 1, 2) and arm.final_loss.mean is None
    assert [point.mean is None for point in arm.loss_by_epoch] == [False, False, True, True]
    assert pair.loss is None and pair.epochs_to_by_seed[1] is None
    assert "cd-grab, seed 1: the loss was not finite after epoch 3" in found.notes[0]
    json.dumps(comparison_json(found, None), allow_nan=False)


def test_all_runs_diverged():
    runs = orders(names=("d-rr",), epochs=4)
    runs += [
        record("grab", seed=s, epochs=4, losses=[1.0, None], status="diverged") for s in (0, 1)
    ]
    arm = compare(runs).arms[1]
    assert arm.epochs == 2 and arm.final_loss.mean is None and arm.bytes > 0


def test_missing_seeds_are_named_and_pairs_are_common_ones():
    runs = [*orders(4, names=("d-rr",)), *[record("cd-grab", seed=s) for s in (1, 3, 9)]]
    found = compare(runs)
    assert found.pairs[1].loss.seeds == (1, 3) and found.arms[1].seeds == (1, 3, 9)
    assert any("differences over seeds 1 and 3" in note for note in found.notes)
    apart = compare([record("d-rr", seed=0), record("cd-grab", seed=1)])
    assert apart.pairs[1].loss is None
    assert any("they share no seed" in note for note in apart.notes)


def test_one_epoch_one_seed_one_arm():
    found = compare([record(epochs=1)])
    assert found.arms[0].epochs == 1 and found.pairs[0].epochs_to == 1
    assert found.arms[0].final_loss.std == 0
    assert any("One seed" in note for note in found.notes)


def test_other_settings_hardware_and_versions_are_named():
    runs = orders(names=("d-rr", "cd-grab"))
    runs[4] = replace(
        runs[4],
        config={**runs[4].config, "lr": 0.5, "virtual": True},
        hardware={**HARDWARE, "cores": 2},
        versions={"torch": "2.7"},
        parameters=651,
    )
    runs[3] = replace(runs[3], epochs=[replace(row, skipped_steps=2) for row in runs[3].epochs])
    notes = " ".join(compare(runs).notes)
    assert "lr (0.1, 0.5)" in notes and "parameters (650, 651)" in notes
    assert "differ in hardware" in notes and "differ in versions" in notes
    assert "inside one process" in notes and "40 steps skipped" in notes
    assert compare(orders()).notes == ()


def test_values_of_few_bits_are_what_is_compared():
    """The name of an arm tells them at every step, not beside local steps."""
    runs = orders(names=("d-rr", "cd-grab"))
    methods = [{"values": "int4"}, {"values": "int4", "blocks": 64}]
    for given, steps, told in ((0, None, False), (1, None, True), (0, 4, True)):
        config = {**runs[3].config, "method": methods[given], "local_steps": steps}
        notes = " ".join(compare([*runs[:3], replace(runs[3], config=config)]).notes)
        assert ("method" in notes) == told, notes


def test_density_and_padding_are_means():
    dense, exdyna, _ = compare(sparsifiers()).arms
    assert (dense.mean_density, dense.padding) == (1, None)
    assert exdyna.mean_density == pytest.approx(0.01)
    assert exdyna.padding == pytest.approx(exdyna.runs[0].epochs[0].padding)


def test_records_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="no record"):
        compare([])
    with pytest.raises(ValueError, match="share their task, got 'digits' and 'hmda'"):
        compare([record(), record(task="hmda")])
    with pytest.raises(ValueError, match="share their metric_name"):
        compare([record(), record(seed=1, metric_name="loss")])
    with pytest.raises(
        ValueError, match=r"two records .*\(digits, .*dense, seed 3\): a seed counts once"
    ):
        compare([record(seed=3), record(seed=3)])


def test_tasks_are_compared_apart_in_the_given_order():
    mixed = [one for pair in zip(sparsifiers(), orders(), strict=True) for one in pair]
    assert [found.task for found in compare_all(mixed)] == ["digits-mlp", "digits"]


def test_json_keeps_its_contract():
    found = json.loads(
        json.dumps(comparison_json(compare(orders()), "out/report.html"), allow_nan=False)
    )
    assert {"task", "baseline", "arms", "report"} <= set(found)
    assert (found["task"], found["baseline"], found["report"]) == (
        "digits", "d-rr", "out/report.html",
    )  # fmt: skip
    for arm in found["arms"]:
        assert set(KEYS) | {"bytes", "seconds"} <= set(arm)
        assert {"loss_difference", "late_loss_difference", "metric_difference"} <= set(arm)
        assert set(arm["final_loss"]) == set(arm["final_metric"]) == {"mean", "std"}
        assert len(arm["loss_by_epoch"]) == 20
        assert isinstance(arm["epochs_to_baseline"], int)
    assert [arm["order"] for arm in found["arms"]] == ["d-rr", "always-plus", "cd-grab"]
    assert comparison_json(compare(orders()), None)["report"] is None


def test_seconds_are_best_only_where_clocks_can_be_compared():
    """Workers in one process take turns, and another machine has another clock."""
    runs = [record(order, seed=seed) for order in ("d-rr", "cd-grab") for seed in (0, 1)]

    def marked(records):
        found = comparison_table(compare(records))
        return any(cell.best for name in found if "seconds" in name for cell in found[name])

    assert marked(runs)
    assert not marked([replace(run, config={**run.config, "virtual": True}) for run in runs])
    other = {**HARDWARE, "cpu": "Made-up 4000"}
    assert not marked([*runs[:2], *(replace(run, hardware=other) for run in runs[2:])])


def test_a_rounding_error_is_no_miss():
    """Losses are float32: 1.49e-8 above 0.1 is as low."""
    runs = [record("d-rr", seed=s, epochs=2, losses=[1.0, 0.1]) for s in range(2)]
    runs += [record("grab", seed=s, epochs=2, losses=[0.1 + 1.49e-8, 0.2]) for s in range(2)]
    found = compare(runs).pairs[1]
    assert found.epochs_to == 1 and found.epochs_to_by_seed == (1, 1)


def test_single_seeds_that_got_there_are_no_never():
    """Each seed reaches the goal, but at another epoch, so their mean never does."""
    runs = [record("d-rr", seed=s, epochs=4, losses=[1.0, 1.0, 1.0, 0.5]) for s in (0, 1)]
    runs.append(record("grab", seed=0, epochs=4, losses=[0.4, 2.0, 2.0, 2.0]))
    runs.append(record("grab", seed=1, epochs=4, losses=[2.0, 2.0, 0.4, 2.0]))
    runs += [record("fixed", seed=s, epochs=4, losses=[2.0] * 4) for s in (0, 1)]
    cells = comparison_table(compare(runs))["epochs to baseline's final loss"]
    assert (cells[1].text, cells[1].more) == ("not on average", ("by seed 1 to 3",))
    assert (cells[2].text, cells[2].more) == ("never", ("no seed",))
    assert all_verdicts(compare(runs))[0].text.startswith("the mean loss of grab does not reach")
