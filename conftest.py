"""Collect doctests, and set up hypothesis, the garbage collector and the number of threads.

Ranks of the tests are forks of one server process per test process. It imports what they need, so
that they do not: importing takes longer than most of what they are asked to do.
"""

import gc
import os
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import settings

# A busy machine may be slow to answer; that alone is no failure.
settings.register_profile("gradherd", deadline=None)
settings.load_profile("gradherd")

# Test processes share the cores: a second thread of each takes twice the time of the machine, since
# threads wait for each other by running in circles. Torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every test process collects all tests, which makes millions of objects that stay. Looking for
# garbage among them, over and over, would take a tenth of the time.
gc.disable()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Import no module for a doctest that it does not have.

    That would load frameworks of extras, which take seconds or are not installed.
    """
    is_test = collection_path.name.startswith(("test_", "conftest"))
    if collection_path.suffix != ".py" or is_test or ">>>" in collection_path.read_text():
        return None  # up to pytest
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector]]:
    """Look for doctests where there are some."""
    found = yield
    if file_path.suffix == ".py" and ">>>" not in file_path.read_text():
        return [one for one in found if not isinstance(one, DoctestModule)]
    return found


collect_ignore_glob = [] if find_spec("triton") else ["src/gradherd/*/triton_*.py"]

# Files are handed out to test processes in this order. Long ones first, or one process would work
# on the last of them while the other has nothing left to do.
_SHORT_TESTS = ("src", "tests/ordering", "tests/replay", "tests/rows", "tests/sparsify")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tests, and move those that start no processes to the end."""
    slow = set((config.rootpath / "tests" / "slow.txt").read_text().splitlines())

    def is_short(item: pytest.Item) -> bool:
        return item.path.relative_to(config.rootpath).as_posix().startswith(_SHORT_TESTS)

    items.sort(key=is_short)  # stable: files keep their order otherwise
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in slow or name.partition("::")[0] in slow:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every garbage collection that follows."""
    # A search through it takes half a second, a test may cause several, and forks would copy the
    # memory that it touches.
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter clean up at its end, or extensions complain of leaks."""
    gc.unfreeze()


# On a busy machine a command that takes a moment takes long enough for lines of progress, and tests
# look at all that is printed. Those about progress turn it on.
os.environ["GRADHERD_QUIET"] = "1"

# A process that a test starts and that dies of a signal shows where on its stderr. Ranks of
# `run_ranks` do so in the error that it raises.
os.environ["PYTHONFAULTHANDLER"] = "1"

# What functions that run on ranks import. Test files themselves are not listed: importing one may
# skip it, which would end the server.
_RANK_MODULES = [
    "gradherd.cli.launch",
    "hypothesis",
    "pytest",
    "tests.attach.agreement_work",
    "tests.attach.attach_work",
    "tests.attach.copy_work",
    "tests.attach.ddp_work",
    "tests.attach.detach_work",
    "tests.attach.loops",
    "tests.attach.stateful_work",
    "tests.comm.rank_functions",
    "tests.comm.script_functions",
    "tests.lab.train.work",
    "tests.launched",
    "tests.sparsify.one_step",
    "tests.sparsify.rank_work",
    "torchdata.stateful_dataloader",
]


@pytest.fixture(scope="session", autouse=True)
def warm_ranks() -> None:
    """Let the server that ranks are forked from import the tests' functions."""
    from gradherd.lab import ranks

    ranks._PRELOAD += _RANK_MODULES
    # On a machine that does five other things, what takes half a minute takes several.
    assert ranks.run_ranks.__kwdefaults__ is not None
    ranks.run_ranks.__kwdefaults__["timeout"] = 500.0
    if "PYTEST_XDIST_WORKER" in os.environ:
        # All tests are run, so some need ranks. Now, since the server finds the tests only if it
        # is started here: later tests may stand in another folder.
        ranks.start_fork_server(ranks.run_ranks)
