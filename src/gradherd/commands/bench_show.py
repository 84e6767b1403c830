"""What the benchmarks share: a result as JSON or as a table."""

from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gradherd.commands.usage import UsageError, print_json


def show(bench: str, device: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print a benchmark's rows."""
    if as_json:
        print_json({"bench": bench, "device": device, "rows": rows})
        return
    table = Table(title=f"bench {bench} on {device}, torch {torch.__version__}")
    for name in ("workers", "dim", "case", "ms", "time ratio", "bytes sent", "peak bytes"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            str(row["workers"]),
            f"{row['dim']:,}",
            row["case"],
            f"{1e3 * row['seconds']:.3f}",
            f"{row['ratio']:.2f}",
            f"{row['bytes']:,}",
            "" if row["peak_bytes"] is None else f"{row['peak_bytes']:,}",
            end_section=following is not None and _size(row) != _size(following),
        )
    Console().print(table)


def _size(row: dict[str, Any]) -> tuple[int, int]:
    return row["workers"], row["dim"]


def usable_device(name: str) -> torch.device:
    """Return the device of that name, or raise UsageError if it cannot be used here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name!r} cannot be used here: {reason}") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu or cuda, got {name!r}")
    return device
