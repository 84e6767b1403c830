"""Is a data set that is there also whole?"""

from collections.abc import Callable

from gradherd.lab.tasks.cifar10 import read_batches
from gradherd.lab.tasks.data import Found
from gradherd.lab.tasks.hmda import read_hmda

# Sets whose files have no checksum of their own; all others are read file by file.
_READERS: dict[str, Callable[[Found], object]] = {
    "cifar10": read_batches,
    "hmda-2017": read_hmda,
}


def check_set(found: Found) -> None:
    """Read a whole data set and compare it with what was published.

    Raises:
        DamagedData: A file is damaged; the message names it.
    """
    reader = _READERS.get(found.dataset.name)
    if reader is not None:
        reader(found)
        return
    for file in found.form.files:
        found.read(file.name)
