"""What the benchmarks share: a result as JSON or as a table."""

from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gradherd.cli.usage import UsageError, print_json


def show(bench: str, device: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print a benchmark's rows."""
    if as_json:
        print_json({"bench": bench, "device": device, "rows": rows})
        return
    table = Table(title=f"bench {bench} on {device}, torch {torch.__version__}")
    # What says nothing here leaves its place to the others.
    sends = any(row["bytes"] for row in rows)
    bounded = not sends and all("ceiling_ratio" in row for row in rows)
    names = ["workers", "dim", "case", "ms", "time ratio", "peak bytes"]
    for name in names + ["bytes sent"] * sends + ["x ceiling"] * bounded:
        left = name == "case"
        table.add_column(name, justify="left" if left else "right", no_wrap=left)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            str(row["workers"]),
            f"{row['dim']:,}",
            row["case"],
            f"{1e3 * row['seconds']:.3f}",
            f"{row['ratio']:.2f}",
            "" if row["peak_bytes"] is None else f"{row['peak_bytes']:,}",
            *([f"{row['bytes']:,}"] if sends else []),
            *([f"{row['ceiling_ratio']:.2f}"] if bounded else []),
            end_section=following is not None and _size(row) != _size(following),
        )
    Console().print(table)


def _size(row: dict[str, Any]) -> tuple[int, int]:
    return row["workers"], row["dim"]


def usable_device(name: str) -> torch.device:
    """Return the device of that name, or raise UsageError if it cannot be used here."""
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu or cuda, got {name!r}")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name!r} cannot be used here: {reason}") from None
    return device
