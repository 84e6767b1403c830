"""Records as training would have left them: smooth curves, made from a seed."""

import math
import random
from dataclasses import replace
from typing import Any

from gradherd.lab.train.record import EpochRow, RunRecord

HARDWARE = {
    "cpu": "Made-up 3000",
    "cores": 8,
    "memory_bytes": 34_359_738_368,
    "accelerator": None,
    "system": "Linux 6.1",
}
VERSIONS = {"gradherd": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6", "python": "3.12.1"}
RATES = {"d-rr": 0.16, "cd-grab": 0.34, "always-plus": 0.18, "shuffle-once": 0.15}
WORKERS = 4


def record(
    order: str = "d-rr",
    sparsify: str = "dense",
    density: float | None = None,
    seed: int = 0,
    *,
    task: str = "digits",
    epochs: int = 20,
    done: int | None = None,
    losses: list[float | None] | None = None,
    metrics: list[float | None] | None = None,
    rate: float | None = None,
    slower: float | None = None,
    **fields: Any,
) -> RunRecord:
    """Return a run; `losses` and `metrics` replace the made-up curves, `fields` anything else."""
    chance = random.Random(f"{task} {order} {sparsify} {density} {seed}")
    luck = random.Random(seed).gauss(0, 0.06)  # Shared by all arms of a seed: seeds are pairs.
    rate = RATES.get(order, 0.2) if rate is None else rate
    slower = (1.25 if "grab" in order else 1.0) if slower is None else slower
    share = 1.0 if density is None else density
    parameters = 301_066 if task == "digits-mlp" else 650
    rows = []
    for epoch in range(1, epochs + 1):
        loss = 0.02 + (1.9 + luck) * math.exp(-rate * epoch) * (1 + chance.gauss(0, 0.02))
        loss += (0.02 if sparsify == "topk" else 0.006) * (1 - share) + 0.05 * luck
        dense_bytes = 2 * 4 * parameters * 90
        wire = dense_bytes if density is None else int(dense_bytes * share * 2.1)
        ordering = 60_000 if "grab" in order else 0
        picked = None
        if density is not None:
            even = share * parameters / WORKERS
            skew = 0.03 if sparsify == "exdyna" else 0.4
            picked = [even * (1 + skew * math.sin(3 + 2 * worker)) for worker in range(WORKERS)]
        compute, exchange = 0.3 + chance.gauss(0, 0.01), 0.15 if density is None else 0.06
        rows.append(
            EpochRow(
                epoch=epoch,
                train_loss=loss,
                metric=97.5
                - 25 * math.exp(-0.4 * epoch)
                - 0.7 * (sparsify == "topk")
                + 4 * luck
                + chance.gauss(0, 0.15),
                lr=0.1,
                steps=90,
                seconds=slower * (0.05 + compute + exchange) + 0.02,
                data_seconds=0.05,
                compute_seconds=compute,
                ordering_seconds=(slower - 1) * (0.05 + compute + exchange),
                exchange_seconds=exchange,
                evaluation_seconds=0.02,
                bytes=wire + ordering,
                ordering_bytes=ordering,
                density=share,
                padding=None if picked is None else WORKERS * max(picked) / sum(picked),
                residual_norm=None if picked is None else 3.0 - 2 * math.exp(-epoch / 5),
                herding_bound=40 * math.exp(-0.2 * epoch) + 6
                if "grab" in order
                else 45 + epoch % 3,
            )
        )
    if losses is not None:
        rows = [replace(row, train_loss=loss) for row, loss in zip(rows, losses, strict=False)]
    if metrics is not None:
        rows = [replace(row, metric=value) for row, value in zip(rows, metrics, strict=False)]
    made = RunRecord(
        task=task,
        description="logistic regression on 8 x 8 digits",
        order=order,
        sparsify=sparsify,
        density=density,
        seed=seed,
        metric_name="test accuracy (%)",
        higher_is_better=True,
        config={
            "task": task,
            "order": order,
            "sparsify": sparsify,
            "density": density,
            "seed": seed,
            "workers": WORKERS,
            "batch_size": 4,
            "epochs": epochs,
            "lr": 0.1,
            "clip": None,
            "virtual": False,
            "source": "ours",
        },
        parameters=parameters,
        train_examples=1438,
        test_examples=359,
        versions=VERSIONS,
        hardware=HARDWARE,
        started=f"2026-01-01T00:{seed:02d}:00+00:00",
        status="done" if done is None or done >= epochs else "interrupted",
        start_loss=2.3,
        start_metric=9.8,
        epochs=rows[:done],
    )
    return replace(made, **fields)


def orders(
    seeds: int = 3, names: tuple[str, ...] = ("d-rr", "always-plus", "cd-grab"), **more: Any
):
    """Return a comparison of orders."""
    return [record(name, seed=seed, **more) for name in names for seed in range(seeds)]


def sparsifiers(seeds: int = 3, **more: Any) -> list[RunRecord]:
    """Return a comparison of sparsifiers."""
    arms = [("dense", None), ("exdyna", 0.01), ("topk", 0.01)]
    return [
        record("d-rr", name, density, seed, **{"task": "digits-mlp", **more})
        for name, density in arms
        for seed in range(seeds)
    ]


def hostile(text: str, record: RunRecord) -> RunRecord:
    """Return the record with the text in every string that it holds."""

    def spoilt(value: Any) -> Any:
        if isinstance(value, str):
            return text + value
        if isinstance(value, dict):
            return {text + key: spoilt(inner) for key, inner in value.items()}
        return value

    strings = {name: text + value for name, value in vars(record).items() if isinstance(value, str)}
    if record.sparsify == "dense":
        strings["sparsify"] = "dense"
    return replace(
        record,
        **strings,
        config={**record.config, **spoilt(record.config)},
        versions=spoilt(record.versions),
        hardware={**record.hardware, **spoilt(record.hardware)},
    )
