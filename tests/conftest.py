"""The order of files: those that take longest first, so that no core waits at the end."""

import pytest

from gradherd.ordering.registry import POLICIES
from gradherd.sparsify.registry import SPARSIFIERS

# By seconds of CPU, all processes counted; those that wait for timeouts and signals before them.
LONGEST_FIRST = (
    "test_faults.py", "test_bad_input.py", "test_slow_network.py", "test_background_thread.py",
    "test_virtual_trainer.py", "test_fsdp.py", "test_conformance.py", "test_sparsifiers.py",
    "test_interpreted.py", "test_coordinated_hook.py", "test_adding_a_method.py", "test_bench.py",
    "test_page.py", "test_fsdp_sparse.py", "test_evidence.py", "test_data_files.py",
    "test_attach.py", "test_checkpoint.py", "test_run.py", "test_example.py", "test_loops.py",
    "test_stacked_step.py", "test_stacked_trainer.py", "test_policies.py", "test_command.py",
    "test_fsdp_local.py", "test_fuzz.py", "test_benchmarks.py", "test_sparse_hook.py",
    "test_tasks.py", "test_docs.py", "test_advise.py", "test_local_steps.py", "test_kinds.py",
    "test_pages.py", "test_training.py", "test_timing.py", "test_state.py",
    # Those that start no process, which come after all others.
    "test_ways.py", "test_exdyna.py", "test_sink.py", "test_capture.py", "test_layer_choice.py",
    "test_recorded.py", "test_balancing.py", "test_packing.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files, keeping the order of tests within a file."""
    rank = {name: at for at, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(autouse=True)
def same_methods():
    """Forget methods that a study has registered: other tests list those of the package."""
    before = [(registry, set(registry)) for registry in (SPARSIFIERS, POLICIES)]
    yield
    for registry, names in before:
        for name in set(registry) - names:
            del registry[name]
