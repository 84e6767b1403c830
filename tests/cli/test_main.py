import json
import os
import subprocess
import sys

import numpy as np
import pytest

from gradherd.cli.main import COMMANDS, main
from gradherd.ordering.registry import POLICIES, SIGN_RULES


def run(capsys, *args) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


@pytest.fixture
def tiny(tmp_path):
    """The 2 x 6 integer example with known orders."""
    z = [[((3 * i + 5 * j) % 7 - 3, (2 * i + 3 * j) % 5 - 2) for j in range(6)] for i in range(2)]
    path = tmp_path / "tiny.npy"
    np.save(path, np.array(z))
    return path


def test_replay_order_prints_the_golden_orders(capsys, tiny):
    code, out, err = run(
        capsys, "replay", "order", tiny, "--order", "cd-grab", "--rounds", 2, "--json"
    )
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert list(result) == ["order", "bounds", "orders"]
    assert result["order"] == "cd-grab" and len(result["bounds"]) == 3
    assert result["orders"] == [[0, 4, 3, 1, 5, 2], [2, 5, 3, 1, 4, 0]]


@pytest.mark.parametrize("order", POLICIES)
def test_replay_order_knows_every_policy(capsys, tiny, order):
    code, out, _ = run(
        capsys, "replay", "order", tiny, "--order", order, "--start", "random", "--json"
    )
    assert code == 0
    assert [sorted(row) for row in json.loads(out)["orders"]] == [list(range(6))] * 2


@pytest.mark.parametrize("signs", SIGN_RULES)
def test_replay_order_is_reproducible_for_every_sign_rule(capsys, tiny, signs):
    runs = [run(capsys, "replay", "order", tiny, "--signs", signs, "--json") for _ in range(2)]
    assert runs[0] == runs[1] and runs[0][0] == 0


def test_replay_order_reads_well_for_people(capsys, tiny):
    code, out, _ = run(capsys, "replay", "order", tiny, "--rounds", 1)
    assert code == 0
    assert "start  H = " in out and "round 1  H = " in out
    assert "worker 1: 0 2 5 4 3 1" in out


@pytest.mark.parametrize(
    ("command", "shape", "said"),
    [
        ("sparsify", (4, 50, 8), "read as 4 steps of 50 workers; a file of axes (workers, units, "),
        (
            "order",
            (50, 4, 8),
            "read as 50 workers of 4 units; a file of axes (steps, workers, dim)",
        ),
        ("sparsify", (50, 4, 8), ""),
        ("order", (4, 50, 8), ""),
    ],
)
def test_a_file_that_looks_like_that_of_the_other_replay(capsys, tmp_path, command, shape, said):
    path = tmp_path / "z.npy"
    np.save(path, np.random.RandomState(0).randn(*shape))
    code, _, err = run(capsys, "replay", command, path, "--json")
    assert code == 0 and err.startswith(f"gradherd: {said}" if said else "")
    assert bool(err) == bool(said)


def test_herding_json_has_its_keys_and_shrinks(capsys):
    code, out, err = run(
        capsys, "herding", "--workers", 20, "--units", 50, "--dim", 4, "--rounds", 6,
        "--orders", "cd-grab,d-rr", "--seed", 1, "--json",
    )  # fmt: skip
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert list(result) == ["workers", "units", "dim", "orders"]
    assert (result["workers"], result["units"], result["dim"]) == (20, 50, 4)
    assert list(result["orders"]) == ["cd-grab", "d-rr"]
    assert all(len(bounds) == 7 for bounds in result["orders"].values())
    assert result["orders"]["cd-grab"][-1] < result["orders"]["d-rr"][-1] / 4


def test_herding_table_names_every_order(capsys):
    code, out, _ = run(capsys, "herding", "--workers", 2, "--units", 6, "--rounds", 1)
    assert code == 0
    assert all(name in out for name in POLICIES)


@pytest.mark.parametrize("width", [50, 80, 160])
def test_the_overview_fits_the_terminal(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run(capsys)
    lines = out.splitlines()[1:]
    assert all(len(line) <= width for line in lines)
    words = " ".join(out.split())
    assert all(f"gradherd {name} {about}" in words for name, about in COMMANDS.items())


def test_help_everywhere(capsys):
    code, out, _ = run(capsys)
    assert code == 0 and all(f"gradherd {name}" in out for name in COMMANDS)
    for name in COMMANDS:
        code, out, _ = run(capsys, *name.split(), "--help")
        assert code == 0 and "--json" in out and "Example: gradherd" in out
    code, out, _ = run(capsys, "replay", "--help")
    assert code == 0 and "replay order" in out and "herding" not in out
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.startswith("gradherd 0.")


def test_an_unexpected_failure_is_one_line_and_code_1(capsys, tiny, monkeypatch):
    hint = " (set GRADHERD_TRACEBACK=1 to see where)"
    for error, says in (
        (KeyError("disk\non fire"), f"KeyError: 'disk\\non fire'{hint}"),
        # What the system says needs no traceback.
        (OSError(5, "Input/output error", "a.npy"), "Input/output error: a.npy"),
        # A pipe, but not that of stdout: nobody has stopped reading.
        (BrokenPipeError(32, "Broken pipe"), "Broken pipe: a process of ours has ended"),
    ):

        def broken(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr("gradherd.replay.recorded.replay_order", broken)
        code, _, err = run(capsys, "replay", "order", tiny)
        assert (code, err) == (1, f"gradherd: failed: {says}\n")


def test_a_reader_that_leaves_early_is_no_error(tiny):
    command = [sys.executable, "-m", "gradherd", "replay", "order", str(tiny), "--json"]
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=500)
    os.close(write)
    assert ran.stderr == ""


def test_only_rank_0_speaks_under_torchrun(capsys, tiny, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert run(capsys, "replay", "order", tiny, "--json") == (0, "", "")


@pytest.mark.parametrize("size", [None, "2"])
def test_variables_that_a_shell_has_kept_silence_nothing(capsys, monkeypatch, tmp_path, size):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "1")
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    for wrong in (["report", "nowhere"], ["demo", "--workers", "0"], ["herding", "--units", "0"]):
        code, out, err = run(capsys, *wrong)
        assert (code, out) == (2, "") and err.startswith("gradherd: ")
    train = ["train", "digits", "--virtual", "--workers", 2, "--epochs", 1, "--limit", 16]
    code, out, _ = run(capsys, *train, "--json", "--out", "a")
    assert code == 0 and json.loads(out)["status"] == "done"
    # The folder is in use by one command, and it is tidied up after a failure.
    code, _, err = run(capsys, *train, "--out", "a")
    assert code == 2 and "is not empty" in err


@pytest.mark.parametrize("command", ["bench rows", "advise", "train"])
def test_help_breaks_paragraphs_between_words_and_keeps_examples_whole(
    capsys, monkeypatch, command
):
    monkeypatch.setenv("COLUMNS", "50")
    code, narrow, _ = run(capsys, *command.split(), "--help")
    monkeypatch.setenv("COLUMNS", "2000")
    _, wide, _ = run(capsys, *command.split(), "--help")
    lines = narrow.splitlines()
    examples = [line for line in lines if line.startswith("Example: ")]
    assert code == 0 and examples and all(line.count("Example: ") == 1 for line in examples)
    assert all(len(line) <= 50 for line in lines if line not in examples)
    text = " ".join(narrow.partition("Example: ")[0].split())
    assert text == " ".join(wide.partition("Example: ")[0].split())
