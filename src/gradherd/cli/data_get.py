"""`gradherd data get`: download a data set from its usual public source."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from gradherd.cli.usage import name, print_json
from gradherd.lab.tasks.data_files import LocalDataSet, cache_dir
from gradherd.lab.tasks.datasets import DATASETS
from gradherd.lab.tasks.download import DownloadError, download_dataset


@dataclass(frozen=True, kw_only=True)
class DataGet:
    """Download a data set into the cache folder (~/.cache/gradherd) and check it.

    What is there already, and whole, is not downloaded again.

    Example: gradherd data get fashion-mnist
    """

    set: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """One of: hmda-2017, wikitext-2, gpt2-bpe, m4, cifar10, fashion-mnist, sst2."""
    data_dir: Path | None = None
    """Folder to put it into, instead of the cache folder."""
    json: bool = False
    """Print {"name", "folder", "files", "bytes"}."""

    def run(self) -> None:
        """Fetch it."""
        dataset = DATASETS[name("NAME", self.set, DATASETS)]
        root = (self.data_dir or cache_dir()).expanduser()
        try:
            found = self._fetch(root)
        except DownloadError as error:
            print(f"gradherd: {' '.join(str(error).split())}", file=sys.stderr)
            raise SystemExit(1) from None
        paths = list(found.paths.values())
        size = sum(path.stat().st_size for path in paths)
        if self.json:
            files = [path.name for path in paths]
            folder = str(found.folder)
            print_json({"name": dataset.name, "folder": folder, "files": files, "bytes": size})
        else:
            print(f"{dataset.name}: {len(paths)} files, {size:,} bytes in {found.folder}, checked")

    def _fetch(self, root: Path) -> LocalDataSet:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        with Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as bar:
            bars = {}

            def tell(file: str, done: int, size: int | None) -> None:
                if file not in bars:
                    bars[file] = bar.add_task(file, total=size)
                bar.update(bars[file], completed=done)

            return download_dataset(DATASETS[self.set], root, tell)
