"""Training a task: on real ranks, or all workers in one process; what was seen is a record."""

from gradherd.sparsify.registry import SPARSIFIERS

# Here, where nothing imports torch: the command line shows these names in its help.
ROWS = ("auto", "batch", "exact", "sketch", "two-sided")
"""The names that `attach` takes for rows."""
POWERSGD = "powersgd"
"""Name of PowerSGD among sparsifiers, see `exchanges`."""


def exchange_names() -> tuple[str, ...]:
    """Return the names of all sparsifiers, and of PowerSGD, which they are compared with."""
    return (*SPARSIFIERS, POWERSGD)
