"""The pages: programs run as shown; links, files, names and commands exist."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import io
import json
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from benchmarks import few_bytes_page

import gradherd
from gradherd.cli.main import COMMANDS, main
from tests.launched import printed_under_torchrun

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
# Files and commands of the worked examples in CONTRIBUTING.md, which a reader is to write.
EXAMPLES = ("cyclic", "learn_once")
# Frameworks that gradherd.integrations imports; `make integrations` installs all of them.
EXTRAS = ("accelerate", "lightning", "ray", "transformers")


def programs(page: str) -> list[str]:
    """Return the blocks of Python outside of lists."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)


def output_of(folder: Path, program: str) -> str:
    """Run a program on two ranks if it has a process group, else on one; return what it prints."""
    (folder / "program.py").write_text(program)
    with contextlib.chdir(folder):
        return printed_under_torchrun(1 + ("init_process_group" in program), "program.py")


# What the programs of start.md print; figures in these lines are those of the page.
SAYS = [
    r"^0 {'epoch': 1, 'examples_fed_back': 0, 'examples': 512, .*\n1 .*\n2 {'epoch': 3, .*$",
    r"^{'epoch': 3, 'examples_fed_back': 0, 'examples': 256, .*'rows': 'BatchRows\(\)', ",
    r"^{'local_steps': 20, 'exchanges': 5, 'total_bytes': 30000}$",
    r"saved with 3 batches of epoch 1 left\nepoch 1: steps 5 to 7\nepoch 2: steps 0 to 7\n*$",
]


@pytest.mark.parametrize("number", range(len(SAYS)))
def test_programs_of_the_first_page_print_what_it_says(tmp_path, number):
    blocks = programs("start.md")
    assert len(blocks) == len(SAYS)
    printed = output_of(tmp_path, blocks[number])
    assert re.search(SAYS[number], printed, re.S)
    page = (DOCS / "start.md").read_text()
    if number == 0:  # all of the line but the seconds
        first = re.sub(r"seconds': [\d.]+", "seconds': 0.047", printed.splitlines()[0])
        assert f"```\n{first}\n```" in page
    elif number == 2:
        assert f"prints `{printed.strip()}`" in page
    elif number == 3:
        said = re.findall(r"run prints `(.*?)`.*?continues with `(.*?)`", page, re.S)
        assert set(said[0]) <= set(printed.splitlines())


def test_packages_in_the_first_page_are_those_that_are_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w-]+", one)[0] for one in project["dependencies"]]
    (said,) = re.findall(
        r"^The library needs ([^.]*\.\d[^.]*)\.", (DOCS / "start.md").read_text(), re.M
    )
    assert re.sub(r" \([^)]*\)", "", said).replace(" and ", ", ").split(", ") == names


def test_messages_in_the_first_page_are_those_of_the_code():
    table = (DOCS / "start.md").read_text().split("## When something goes wrong")[1]
    messages = re.findall(r'"([^"|]+)"', "".join(re.findall(r"^\| (.*?) \|", table, re.M)))
    assert len(messages) > 5
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source).replace("{key!r}", "'ordering'")
    for message in messages:
        assert message in source, message


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


def test_every_page_is_in_the_index_and_on_the_site():
    index, site = (DOCS / "README.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
        assert re.search(rf"^ +- (\w+: )?{page.name}$", site, re.M), page.name


def test_anchors_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*\.md)?#([^)]+)\)", page.read_text()):
            text = (page.parent / target).read_text() if target else page.read_text()
            titles = re.findall(r"^#+ (.*)", text, re.M)
            anchors = [re.sub(r"[^\w -]", "", title.lower()).strip() for title in titles]
            assert anchor.replace("-", " ") in anchors, (page.name, target, anchor)


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
    return printed_by(f"{name} --help")


def test_pages_show_what_the_command_line_prints():
    # In a process of its own: other tests register methods, which --help then lists.
    program = (
        "import json\n"
        "from made_pages import advise_page, cli_page\n"
        "print(json.dumps([cli_page(), advise_page()]))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=DOCS, capture_output=True, check=True)
    for name, page in zip(("cli.md", "advise.md"), json.loads(ran.stdout), strict=True):
        assert (DOCS / name).read_text() == page, "run python docs/made_pages.py"


def test_the_comparison_in_the_page_is_what_is_printed(tmp_path, monkeypatch):
    page = (DOCS / "measure.md").read_text()
    ((command, shown),) = re.findall(
        r"^gradherd (compare [^\n]*)\n```\n\n```\n(.*?)```", page, re.S | re.M
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")  # a narrow terminal gets a list instead of a table
    printed = printed_by(command)
    assert words_of(printed) == words_of(shown)


def words_of(output: str) -> list[str]:
    """Return what does not depend on the machine: all but figures, and lines of tables."""
    return [
        re.sub(r"[\d.]+\*?|[\d.]*e-?\d+", "#", word) for word in re.findall(r"[^\s─-]+", output)
    ]


def test_the_reference_has_every_public_name_and_no_private_one():
    text = (DOCS / "api.md").read_text()
    found = re.findall(r"^::: (\S+)(?:\n    options: {members: \[([^\]]*)\])?", text, re.M)
    names = {path.rpartition(".")[2] for path, _ in found}
    assert set(gradherd.__all__) <= names
    for path, listed in found:
        if path.startswith("gradherd.integrations."):
            continue  # needs the frameworks
        members = listed.split(", ") if listed else []
        assert not [name for name in members if name.startswith("_")]
        one = pkgutil.resolve_name(path)
        if dataclasses.is_dataclass(one):
            settings = [field.name for field in dataclasses.fields(one)]
            assert set(settings) <= set(members), f"{path}: {settings}"
        for name in set(members) - set(getattr(one, "__dataclass_fields__", ())):
            assert (getattr(one, name).__doc__ or "").strip(), f"{path}.{name}"


def test_the_first_page_of_all_is_short_and_its_figures_are_those_of_the_evidence():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 450
    assert len(re.findall(r"!\[", text)) == 1
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 12 and "# new" in code
    card = [line for line in text.splitlines() if re.match(r"\| \[", line)]
    assert len(card) == 6
    for row in card:
        model, _, gain, price, seeds, interval = row.strip("| ").split(" | ")
        page = figures_of(re.search(r"\((docs/[^)#]+)", model)[1])
        (bold,) = re.findall(r"\*\*([\d.]+) ", f"{gain} {price}")
        shown = rf"(?<![\d.]){re.escape(bold)} (%|points) \w+ \({re.escape(interval)}\b"
        assert re.search(shown, page), row
        for figure in re.findall(r"(?<!\[)\b([\d.]+) (?:%|times|GB)", f"{gain} {price}"):
            assert re.search(rf"(?<![\d.]){re.escape(figure)} (%|times|GB)", page), (figure, row)
        assert re.search(rf"\b{seeds} seeds", page), row
    linked = re.findall(r"\[([\d.]+)[^\]]*\]\((docs/[\w/-]+\.md)", text)
    assert len(linked) > 1
    for figure, page in linked:
        shown = rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)"
        assert re.search(shown, figures_of(page)), (figure, page)


def test_the_tables_of_few_bytes_are_those_of_their_records():
    results, page = ROOT / "benchmarks/results", figures_of("docs/few_bytes.md")
    read = few_bytes_page.reader(results)
    arms = few_bytes_page.by_arm(read("few-bytes"))
    assert few_bytes_page.table(arms) in page
    assert few_bytes_page.growth_table(read) in page
    assert few_bytes_page.task_table(read("few-bytes-tasks"), results) in page
    assert (ROOT / "docs/images/few-bytes.svg").read_text() == few_bytes_page.picture(arms)


def figures_of(page: str) -> str:
    return (ROOT / page).read_text().replace("&nbsp;", " ")


def printed_by(command: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
        main(shlex.split(command))
    return output.getvalue()
