"""Every framework meets every demand; the page shows that, and nothing else."""

from importlib.util import find_spec

import pytest

from tests.integrations import conformance
from tests.integrations.conformance import (
    ALL,
    BEGIN,
    DEMANDS,
    END,
    PAGE,
    SMALL,
    Results,
    results_of,
)
from tests.integrations.task import RANKS
from tests.launched import printed_under_torchrun

NEEDS = {
    "plain": (),
    "stateful": ("torchdata",),
    "transformers": ("transformers", "accelerate"),
}
NAMES = [name for name in SMALL if all(find_spec(package) for package in NEEDS.get(name, (name,)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("integrations")
    # `make integrations` starts torchrun; here ranks are used that have imported torch already.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(conformance.ROOT)
        printed_under_torchrun(RANKS, "-m", "tests.integrations.run", ",".join(NAMES), found)
    return found


@pytest.mark.parametrize("demand", DEMANDS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("name", NAMES)
def test_demands(folder, name, demand):
    own = results_of(name, folder)
    if demand in own.without:
        assert all(own.refused.values()), own.refused
        return
    assert DEMANDS[demand](own, Results(folder / "plain")), own.refused


@pytest.mark.skipif("transformers" not in NAMES, reason="transformers is not installed")
def test_the_trainer_resumes_while_signs_are_on_their_way(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(conformance.ROOT)
        words = ("-m", "tests.integrations.late_run", tmp_path)
        assert printed_under_torchrun(RANKS, *words).count("resumed\n") == RANKS


@pytest.mark.skipif("transformers" not in NAMES, reason="transformers is not installed")
def test_the_trainer_evaluates_and_leaves_what_ranks_share(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(conformance.ROOT)
        words = ("-m", "tests.integrations.best_run", tmp_path)
        assert printed_under_torchrun(RANKS, *words).count("shared\n") == RANKS


def test_the_page_shows_all_frameworks_and_all_demands():
    text = PAGE.read_text()
    lines = text.split(BEGIN)[1].split(END)[0].strip().splitlines()
    header = lines[0].strip("| ").split(" | ")
    assert [line.split(" | ")[0].strip("| ") for line in lines[2 : 2 + len(DEMANDS)]] == [*DEMANDS]
    names = [cell.rsplit(" ", 1)[0] for cell in header[1:]]
    installed = {name: conformance.module_of(name).NAME for name in NAMES}
    assert len(names) == len(ALL)
    assert all(names[ALL.index(name)] == shown for name, shown in installed.items())
    cells = [cell for line in lines[2 : 2 + len(DEMANDS)] for cell in line.split(" | ")[1:]]
    assert {cell.strip("| ") for cell in cells} == {"yes", "refused"}
