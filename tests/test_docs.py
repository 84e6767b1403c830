"""The pages: programs run as shown; links, files, names and commands exist."""

import contextlib
import functools
import importlib
import io
import json
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

from gradherd.cli.main import COMMANDS, main
from tests.launched import printed_under_torchrun

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
# Files and commands of the worked examples in CONTRIBUTING.md, which a reader is to write.
EXAMPLES = ("cyclic", "learn_once")
# Frameworks that gradherd.integrations imports; `make integrations` installs all of them.
EXTRAS = ("accelerate", "composer", "lightning", "ray", "transformers")


def programs(page: str) -> list[str]:
    """Return the blocks of Python outside of lists."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)


def output_of(folder: Path, program: str) -> str:
    """Run a program on two ranks if it has a process group, else on one; return what it prints."""
    (folder / "program.py").write_text(program)
    with contextlib.chdir(folder):
        return printed_under_torchrun(1 + ("init_process_group" in program), "program.py")


SAYS = [
    r"^0 {'epoch': 1, 'examples_fed_back': 0, 'examples': 512, .*\n1 .*\n2 {'epoch': 3, .*$",
    r"^{'epoch': 3, 'examples_fed_back': 0, 'examples': 256, 'rows': 'BatchRows\(\)', ",
    r"^{'selected': 444, 'density': 0.01, 'bytes': 2760, 'steps': 20}$",
    r"^$",
]


@pytest.mark.parametrize("number", range(len(SAYS)))
def test_programs_of_the_quickstart_print_what_the_page_says(tmp_path, number):
    blocks = programs("quickstart.md")
    assert len(blocks) == len(SAYS)
    assert re.match(SAYS[number], output_of(tmp_path, blocks[number]), re.S)


def test_arrays_of_replay_are_made_as_shown(tmp_path):
    for program in programs("replay.md"):
        output_of(tmp_path, program)
    assert {path.name for path in tmp_path.glob("*.npy")} == {"units.npy", "steps.npy"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_pages_exist(page):
    folders = r"\b(?:src|tests|docs|benchmarks|examples|studies)/[\w./-]+\.(?:py|md|toml)\b"
    for path in re.findall(folders, page.read_text()):
        assert (ROOT / path).exists() or Path(path).stem.endswith(EXAMPLES), f"{page.name}: {path}"
    rooms = r"`((?:hooks|comm|rows|ordering|sparsify|replay|advise|lab|cli)/[\w/]+\.py)"
    for path in re.findall(rooms, page.read_text()):
        assert (ROOT / "src" / "gradherd" / path).exists(), f"{page.name}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_names_in_pages_exist(page):
    text = page.read_text()
    names = re.findall(r"`(gradherd(?:\.\w+)+)", text)
    names += re.findall(r"^::: (\S+)", text, re.M)
    for module, imported in re.findall(r"^from (gradherd[\w.]*) import ([^#\n]+)", text, re.M):
        names += [f"{module}.{name.strip()}" for name in imported.split(",")]
    for name in names:
        if name.startswith("gradherd.integrations."):
            try:
                importlib.import_module(".".join(name.split(".")[:3]))
            except ModuleNotFoundError as missing:
                assert missing.name in EXTRAS, name
                continue
        pkgutil.resolve_name(name)


def test_every_page_and_every_command_is_in_the_index():
    index = (DOCS / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
    assert all(name.split()[0] in index for name in COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_pages_exist_with_their_options(page):
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if not words or words[0] != "gradherd":
                continue
            asked = (" ".join(words[1:3]), words[1])
            name = next((one for one in asked if one in COMMANDS), None)
            assert name is not None, line
            help_text = help_of(name)
            for option in (word.split("=")[0] for word in words if word.startswith("--")):
                assert re.search(rf"{option}\b", help_text), line


@functools.cache
def help_of(name: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    return output.getvalue()


def test_figures_of_the_first_screen_are_those_of_the_page_they_lead_to():
    first = (ROOT / "README.md").read_text().split("## Try it")[0]
    found = re.findall(r"\[([\d.]+)[^\]]*\]\((docs/[\w/-]+\.md)", first)
    assert len(found) > 8
    for figure, page in found:
        text = (ROOT / page).read_text()
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", text), (figure, page)


def test_predicted_steps_of_the_first_screen_are_those_of_advise():
    first = (ROOT / "README.md").read_text().split("## Try it")[0]
    table = [line for line in first.splitlines() if line.startswith("| **")]
    cases = {"ResNet": ("resnet50", 8, "10G"), "GPT-2": ("gpt2-124m", 2, "10G")}
    for name, (model, workers, link) in cases.items():
        (row,) = (line for line in table if name in line.split("|")[1])
        steps = predicted(model, workers, link)
        assert f"{steps['exdyna']:.0f}&nbsp;ms a step" in row
        assert f"bf16 {steps['fp16']:.0f}," in row and f"PowerSGD {steps['powersgd']:.0f}" in row
    assert f"{predicted('gpt2-124m', 2, '10G')['exdyna-int8']:.0f} with int8" in first


def predicted(model: str, workers: int, link: str) -> dict[str, float]:
    """Return the milliseconds of a step with each exchange, as `gradherd advise` prints them."""
    output = io.StringIO()
    command = f"advise --model {model} --workers {workers} --bandwidth {link} --json"
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
        main(command.split())
    choices = json.loads(output.getvalue())["choices"]
    return {c["exchange"]: 1e3 * c["step_seconds"] for c in choices if c["order"] == "d-rr"}
