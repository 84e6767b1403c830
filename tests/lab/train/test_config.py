"""Settings of runs, and the runs of a comparison."""

import dataclasses
import json
import math

import pytest

from gradherd.cli.options import TrainingOptions
from gradherd.lab import text
from gradherd.lab.study.kinds import CompareStudy
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.tasks.task import Defaults
from gradherd.lab.train import config
from gradherd.lab.train.config import RunConfig, plan_runs, run_settings
from gradherd.lab.train.virtual_trainer import row_settings
from gradherd.rows.settings import SketchRows
from tests.lab.tasks.fake_data import task_named
from tests.lab.train.work import config_of, record

EXDYNA = {"sparsify": "exdyna", "density": 0.1}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"order": "fly"}, "unknown order 'fly'; known are d-rr"),
        ({"sparsify": "all", "density": 0.1}, "unknown sparsify 'all'"),
        ({"sparsify": "topk"}, "density goes with a sparsifier, got None with topk"),
        ({"density": 0.1}, "density goes with a sparsifier, got 0.1 with dense"),
        ({"sparsify": "topk", "density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"sparsify": "topk", "density": 2.0}, r"density must be in \(0, 1\], got 2.0"),
        ({"rows": "all"}, "unknown rows 'all'"),
        ({"sketch_size": 8}, "sketch_size 8 has no effect with rows 'auto'"),
        ({"rows": "sketch", "sketch_size": 0}, "sketch_size must be at least 1, got 0"),
        ({"method": {"blocks": 8}}, "method goes with a sparsifier, got {'blocks': 8} with dense"),
        ({**EXDYNA, "method": {"odd": 1}}, "unknown setting 'odd' of exdyna; known are threshold"),
        ({**EXDYNA, "method": {"blocks": 0}}, "blocks must be at least 1, got 0"),
        ({**EXDYNA, "method": {"capacity": math.inf}}, "method must be a dict of JSON values"),
        ({**EXDYNA, "method": {"warmup": 9}}, "run with values, .*, clip, warmup_steps"),
        ({**EXDYNA, "method": {"momentum": "a"}}, "momentum must be a number, got 'a'"),
        (
            {**EXDYNA, "momentum": 0.5, "method": {"momentum": 0.9}},
            "method has momentum 0.9, which replaces .* with momentum 0, got sgd with 0.5",
        ),
        (
            {**EXDYNA, "momentum": 0.0, "optimizer": "adamw", "method": {"momentum": 0.9}},
            "must be sgd with momentum 0, got adamw with 0.0",
        ),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"unit": 3}, "unit must divide batch_size 4, got 3"),
        ({"seed": -1}, r"seed must be in \[0, 2147483648\), got -1"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"lr": 0.0}, r"lr must be in \(0, inf\), got 0.0"),
    ],
)
def test_settings_are_checked(wrong, says):
    with pytest.raises(ValueError, match=says):
        config_of("digits", **wrong)


def test_settings_of_rows_and_methods_are_handed_on():
    assert config_of("digits", rows="sketch").row_choice() == "sketch"
    sketch = config_of("digits", rows="sketch", sketch_size=8)
    assert sketch.row_choice() == SketchRows(size=8)
    assert row_settings(sketch, 650) == SketchRows(size=8)
    still = config_of("digits", **EXDYNA, method={"rotate": False})
    assert len({still, sketch, config_of("digits", **EXDYNA)}) == 3
    written = record(config=dataclasses.asdict(still)).to_json()
    assert json.loads(json.dumps(written))["config"]["method"] == {"rotate": False}


def test_whole_batches_stay_whole_batches():
    resnet = task_named("cifar10-resnet18").defaults
    assert RunConfig.of("x", resnet, batch_size=8).unit == 8
    assert RunConfig.of("x", resnet, batch_size=8, unit=2).unit == 2
    assert config_of("digits", batch_size=8).unit == 1


def test_arms_are_crossed_and_runs_have_folders_of_their_own():
    runs = plan_runs(
        "digits",
        find_task("digits").defaults,
        orders=["d-rr", "cd-grab"],
        sparsifiers=["dense", "topk"],
        density=0.5,
        seeds=range(2),
        epochs=3,
    )
    assert [run.arm for run in runs[:4]] == [
        ("d-rr", "dense", None),
        ("d-rr", "topk", 0.5),
        ("cd-grab", "dense", None),
        ("cd-grab", "topk", 0.5),
    ]
    assert len({run.folder() for run in runs}) == len(runs) == 8


def test_one_schema_has_every_setting_of_tasks_studies_and_the_command_line():
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    of_tasks = {field.name for field in dataclasses.fields(Defaults)} - {"seeds", "source"}
    of_studies = set(CompareStudy.keys)
    options = {field.name for field in dataclasses.fields(TrainingOptions)}
    options -= {"data_dir", "out", "quiet"}
    assert set(run_settings()) == fields
    assert of_tasks < fields
    assert of_studies == fields - {"task", "seed", "held_out", "virtual", "device"}
    # `train` has options of its own for what `compare` crosses.
    own = {"task", "order", "sparsify", "density", "method", "local_steps", "seed", "held_out"}
    assert options == fields - own
    assert CompareStudy.keys["lr"] is float
    assert all(one.help.endswith((".", "defaults.")) for one in run_settings().values())


def test_settings_without_a_source_have_no_text(monkeypatch):
    def gone(cls):
        raise OSError("could not get source code")

    monkeypatch.setattr(text.inspect, "getsource", gone)
    monkeypatch.setattr(config, "field_texts", text.field_texts.__wrapped__)
    found = config.run_settings.__wrapped__()
    assert list(found) == list(run_settings()) and {one.help for one in found.values()} == {""}


def test_options_of_the_command_line_become_settings():
    defaults = find_task("digits").defaults
    plain = RunConfig.of("digits", defaults, **TrainingOptions().checked())
    assert plain == RunConfig.of("digits", defaults)
    chosen = TrainingOptions(
        optimizer="adamw", lr=0.01, lr_drop=0.5, lr_drop_every=2, augment=True, autocast="bf16",
        virtual=True, lr_schedule="constant",
    ).checked()  # fmt: skip
    run = RunConfig.of("digits", defaults, **chosen)
    assert (run.optimizer, run.momentum, run.lr_drop, run.augment) == ("adamw", 0.0, 0.5, True)
    assert (run.autocast, run.lr_schedule) == ("bf16", None)
