"""Replay a sparsifier on recorded gradients: what is sent, and what stays in the residuals?

Letters: T steps, R workers, D elements.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.workers import VirtualWorkers


def replay_sparsify(
    gradients: NDArray[np.number],
    settings: Sparsify,
    *,
    layers: Sequence[int] | None = None,
    every: int = 1,
    decay: float = 1.0,
    out: Path | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Exchange recorded gradients step by step, all workers in this process.

    Args:
        gradients: (T, R, D). Read one step at a time, so it may be a memory map.
        settings: The sparsifier and how its values are sent.
        layers: Lengths of the tensors that make up D, for methods that use them.
        every: Steps between two exchanges, of the sum of their gradients: what local steps of SGD
            would have changed, if the gradients had stayed as recorded.
        decay: Factor of the residuals after each exchange.
        out: Folder for mean.npy (T, D), zero at steps without an exchange, and residual.npy (R, D).
        progress: Called after each step.

    Returns:
        The metrics of each exchange; residual_norm and bytes are means over workers.

    Raises:
        ValueError: A gradient or a sum over workers is not finite, or `out` is no folder.
    """
    steps, workers, dim = gradients.shape
    # Half precision is widened, as residuals are float32 in training; float64 stays exact.
    dtype = torch.float64 if gradients.dtype.itemsize > 4 else torch.float32
    virtual = VirtualWorkers(
        settings, dim, workers, layers=list(layers) if layers else None, dtype=dtype
    )
    metrics = []
    with _writer(out, (steps, dim), dtype) as write:
        changes = torch.zeros(workers, dim, dtype=dtype)
        for step in range(steps):
            changes += _step(gradients, step, dtype)
            # What is left after the last whole phase is exchanged, too.
            if (step + 1) % every and step + 1 < steps:
                write(step, torch.zeros(dim, dtype=dtype))
                progress()
                continue
            mean = virtual.step(changes)
            changes.zero_()
            if not bool(mean.isfinite().all()):
                raise ValueError(
                    f"step {step}: the sum over workers overflows; scale the values down"
                )
            if decay != 1:
                for worker in virtual.workers:
                    worker.feedback.residual.mul_(decay)
            write(step, mean)
            metrics.append(virtual.metrics)
            progress()
        if out is not None:
            _save(out / "residual.npy", virtual.residuals().numpy())
    return metrics


def _step(gradients: NDArray[np.number], step: int, dtype: torch.dtype) -> Tensor:
    with np.errstate(over="ignore", invalid="ignore"):  # long doubles may become infinite
        values = np.array(gradients[step], dtype=str(dtype).removeprefix("torch."))
    grads = torch.from_numpy(values)
    if not bool(grads.isfinite().all()):
        worker, column = (~grads.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"step {step} is not finite, first at worker {worker}, element {column}; training "
            "would skip this step, so leave it out"
        )
    return grads


@contextlib.contextmanager
def _writer(
    out: Path | None, shape: tuple[int, int], dtype: torch.dtype
) -> Iterator[Callable[[int, Tensor], None]]:
    """Yield a function that writes one row of mean.npy; the file appears once all are written."""
    if out is None:
        yield lambda step, mean: None
        return
    created = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{out} cannot be used as a folder for results: {error.strerror}"
        ) from None
    draft = out / "mean.npy.part"
    kind = np.float64 if dtype == torch.float64 else np.float32
    try:
        rows = np.lib.format.open_memmap(draft, mode="w+", dtype=kind, shape=shape)

        def write(step: int, mean: Tensor) -> None:
            rows[step] = mean.numpy()

        yield write
        rows.flush()
        draft.replace(out / "mean.npy")
    except BaseException:
        draft.unlink(missing_ok=True)
        if created:
            shutil.rmtree(out)
        raise


def _save(path: Path, array: NDArray[np.number]) -> None:
    draft = path.with_suffix(".npy.part")
    try:
        with draft.open("wb") as file:
            np.save(file, array)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
