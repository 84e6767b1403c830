"""The order of files: those that take longest first, so that no core waits at the end."""

import pytest

LONGEST_FIRST = (
    "test_faults.py", "test_bad_input.py", "test_virtual_trainer.py", "test_bench.py",
    "test_fsdp_local.py", "test_stacked_trainer.py", "test_example.py", "test_interpreted.py",
    "test_loops.py", "test_page.py", "test_run.py", "test_torchrun.py", "test_slow_network.py",
    "test_fsdp.py", "test_fsdp_sparse.py", "test_fuzz.py", "test_pages.py", "test_state.py",
    "test_checkpoint.py", "test_conformance.py", "test_sparse_hook.py", "test_advise.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files, keeping the order of tests within a file."""
    rank = {name: at for at, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
