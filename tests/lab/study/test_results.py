import json
from dataclasses import replace

import pytest

from gradherd.lab.study.results import (
    RunResult,
    describe_run,
    is_done,
    read_arms,
    read_results,
    result_path,
    round_floats,
    to_columns,
    write_results,
)
from tests.lab.report.sample_records import record


def result(made, **changed):
    settings = {k: v for k, v in made.config.items() if k not in ("seed", "source", "virtual")}
    return replace(
        RunResult(
            arm="an arm",
            seed=made.seed,
            settings=settings,
            status=made.status,
            about=describe_run(made),
            figures=to_columns(made),
            versions=made.versions,
            hardware=made.hardware,
            started=made.started,
        ),
        **changed,
    )


@pytest.mark.parametrize("sparsify, density", [("dense", None), ("exdyna", 0.01)])
def test_a_record_comes_back_with_seven_digits(tmp_path, sparsify, density):
    made = [record("cd-grab", sparsify, density, seed, epochs=12) for seed in (1, 0)]
    write_results(tmp_path, "study", "compare", [result(one) for one in made])
    back = read_results(result_path(tmp_path, "an arm"))
    assert [one.seed for one in back] == [0, 1]
    for one in back:
        there = next(m for m in made if m.seed == one.seed)
        here = one.record()
        assert (here.order, here.sparsify, here.density) == ("cd-grab", sparsify, density)
        for row, expected in zip(here.epochs, there.epochs, strict=True):
            assert row.train_loss == pytest.approx(expected.train_loss, rel=1e-6)
            assert (row.bytes, row.steps, row.epoch) == (
                expected.bytes,
                expected.steps,
                expected.epoch,
            )


def test_fifty_epochs_of_a_run_take_a_few_kilobytes(tmp_path):
    made = [result(record("cd-grab", seed=seed, epochs=50)) for seed in range(5)]
    write_results(tmp_path, "study", "compare", made)
    sparse = [result(record("d-rr", "topk", 0.01, seed, epochs=50)) for seed in range(5)]
    write_results(tmp_path / "sparse", "study", "compare", sparse)
    assert result_path(tmp_path, "an arm").stat().st_size < 5 * 2_500
    assert result_path(tmp_path / "sparse", "an arm").stat().st_size < 5 * 3_500


def test_the_same_results_are_the_same_bytes_in_any_order(tmp_path):
    made = [result(record(seed=seed)) for seed in range(3)]
    write_results(tmp_path / "a", "study", "compare", made)
    write_results(tmp_path / "b", "study", "compare", made[::-1])
    write_results(
        tmp_path / "c", "study", "compare", read_results(result_path(tmp_path / "b", "an arm"))
    )
    texts = {result_path(tmp_path / one, "an arm").read_text() for one in "abc"}
    assert len(texts) == 1


def test_a_run_is_done_if_seed_and_settings_are_the_same():
    there = [result(record(seed=1))]
    settings = dict(there[0].settings)
    assert is_done(there, 1, settings) and not is_done(there, 0, settings)
    assert is_done(there, 1, {**settings, "sketch_size": None})
    assert not is_done(there, 1, {**settings, "sketch_size": 128})
    assert is_done(there, 1, {**settings, "sketch_size": None, "method": None})
    assert not is_done(there, 1, {**settings, "method": {"rotate": False}})
    assert not is_done(there, 1, {**settings, "lr": 0.3})
    assert not is_done([replace(there[0], status="running")], 1, settings)
    assert is_done([replace(there[0], status="diverged")], 1, settings)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format":2}', '{"format":1,"kind":"cost"}'])
def test_damaged_results_are_named(tmp_path, text):
    path = tmp_path / "arm.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"arm\.json: damaged results"):
        read_results(path)


def test_only_arms_with_results_are_found(tmp_path):
    write_results(tmp_path, "study", "compare", [result(record())])
    assert list(read_arms(tmp_path, ["an arm", "another"])) == ["an arm"]
    head = json.loads(result_path(tmp_path, "an arm").read_text())
    assert head["study"] == "study" and head["shared"]["arm"] == "an arm"


def test_numbers_are_rounded():
    assert round_floats({"a_seconds": 0.123456789, "b": (1 / 3,)}) == {
        "a_seconds": 0.1235,
        "b": [0.3333333],
    }
