"""Where a run is written down while it goes on: record.json, metrics.jsonl, TensorBoard events.

The record is written anew after every epoch, whole or not at all, so a run that is ended at any
moment leaves what was done so far.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from gradherd.lab.train.record import EpochRow, RunRecord, write_record, write_whole

METRICS = "metrics.jsonl"


class Journal:
    """The record of one run; without a folder it is kept in memory alone."""

    def __init__(
        self, record: RunRecord, folder: Path | None, *, tensorboard: bool = False
    ) -> None:
        self.record = record
        self._folder = folder
        self._events: Any = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_record(record, folder)
        if record.epochs or (folder / METRICS).exists():  # A run that goes on, or starts over.
            lines = [_line(row) for row in record.epochs]
            write_whole(folder / METRICS, "".join(f"{line}\n" for line in lines))
        if tensorboard:
            self._events = _events(folder)

    def start(self, loss: float | None, metric: float | None) -> None:
        """Note what the model was worth before training."""
        self.record = dataclasses.replace(self.record, start_loss=loss, start_metric=metric)
        self._save()

    def add(self, row: EpochRow, density_by_step: list[dict[str, float]]) -> None:
        """Note an epoch."""
        self.record = dataclasses.replace(
            self.record, epochs=[*self.record.epochs, row], density_by_step=density_by_step
        )
        if self._folder is not None:
            _append(self._folder / METRICS, _line(row))
        self._save()
        if self._events is not None:
            for name, value in dataclasses.asdict(row).items():
                if isinstance(value, int | float) and name != "epoch":
                    self._events.add_scalar(f"{_KINDS.get(name, 'run')}/{name}", value, row.epoch)
            self._events.flush()

    def end(self, status: str) -> RunRecord:
        """Note how it ended and return the record."""
        self.record = dataclasses.replace(self.record, status=status)
        self._save()
        if self._events is not None:
            self._events.close()
        return self.record

    def _save(self) -> None:
        if self._folder is not None:
            write_record(self.record, self._folder)


_KINDS = {
    "train_loss": "quality",
    "metric": "quality",
    "herding_bound": "order",
    "bytes": "bytes",
    "ordering_bytes": "bytes",
    "density": "sparsify",
    "padding": "sparsify",
    "residual_norm": "sparsify",
    **{
        name: "seconds"
        for name in (f.name for f in dataclasses.fields(EpochRow))
        if name.endswith("seconds")
    },
}


def _line(row: EpochRow) -> str:
    return json.dumps(dataclasses.asdict(row), allow_nan=False)


def _append(path: Path, line: str) -> None:
    """Add a line; a disk that is full leaves the file as it was."""
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        if path.exists():
            os.truncate(path, before)
        raise OSError(error.errno, error.strerror, str(path)) from None


def _events(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "tensorboard is not installed: pip install 'gradherd[tensorboard]'"
        ) from None
    return SummaryWriter(str(folder))
