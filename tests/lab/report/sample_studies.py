"""A small study and results for it, made from sample records."""

from gradherd.lab.study.results import RunResult, describe_run, to_columns
from tests.lab.report.sample_records import record

STUDY = """
kind = "compare"
theme = "ordering"
title = "A <study>"
task = "digits"
seeds = 3
[settings]
epochs = 4
[sources]
epochs = "ours"
workers = "ours"
[[arms]]
order = ["d-rr", "cd-grab"]
workers = [4]
label = "few"
[[figure]]
title = "Loss"
y = "train_loss"
[[figure]]
title = "Late loss"
x = "workers"
y = "late_train_loss"
lines = "order"
[[claim]]
id = "one"
text = "less"
source = "s"
paper = "p"
measure = "train_loss"
test = "less"
arm = "cd-grab, few"
against = "d-rr, few"
"""


def result(arm, seed, losses, **fields):
    made = record(seed=seed, epochs=len(losses), losses=losses, **fields)
    settings = {k: v for k, v in made.config.items() if k not in ("seed", "source", "virtual")}
    return RunResult(
        arm=arm,
        seed=seed,
        settings=settings,
        status="done",
        about=describe_run(made),
        figures=to_columns(made),
        versions=made.versions,
        hardware=made.hardware,
        started=made.started,
    )
