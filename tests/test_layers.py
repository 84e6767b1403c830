"""The tree's rule: who may import whom, read from the source itself."""

import ast
import compileall
import functools
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

import gradherd
from gradherd.cli.main import COMMANDS

ROOT = Path(gradherd.__file__).parent

# Room -> rooms it may import. The core is rows, comm, ordering, sparsify, local, hooks; the lab
# measures it and is never imported by it. Ordering, sparsify and local do not know each other.
CORE = {"rows", "comm", "ordering", "sparsify", "local", "hooks"}
ALLOWED = {
    "comm": {"comm"},
    "rows": {"rows"},
    "ordering": {"ordering", "comm"},
    "sparsify": {"sparsify", "comm"},
    "local": {"local", "comm"},
    "hooks": CORE,
    "integrations": {"integrations", *CORE},
    "replay": {"replay", "ordering", "sparsify"},
    "advise": {"advise", "comm", "sparsify", "ordering", "lab.text"},
    "lab": {"lab", "replay", "advise", *CORE},
    "lab.text": {"lab.text"},
    "lab.tasks": {"lab.tasks", "lab.text", "comm"},  # its checks of settings
    "lab.ranks": {"comm"},
    "lab.train": {"lab.train", "lab.tasks", "lab.text", "lab.ranks", *CORE},
    "lab.bench": {"lab.bench", *CORE},
    "lab.study": {
        *("lab.study", "lab.train", "lab.tasks", "lab.text", "lab.ranks"),
        *("comm", "ordering", "sparsify"),
    },
    "lab.report": {"lab.report", "lab.train", "lab.study", "lab.text"},
    "cli": {"cli", "lab", "replay", "advise", "comm", "ordering", "sparsify", "__init__"},
    "__main__": {"cli"},
    "lazy": set(),
    "flat": set(),
    "gpu": set(),
    "torch_names": set(),
    "__init__": CORE,
}
# Everything in torch.distributed that makes ranks communicate, whatever this version of torch calls
# it, and the names of other versions.
_STARTS = "all_ reduce gather scatter broadcast barrier monitored_barrier send recv isend irecv"
COLLECTIVES = {
    name
    for name in dir(dist)
    if name.lstrip("_").startswith((*_STARTS.split(), "batch_isend", "coalescing", "P2POp"))
} | {"all_gather_into_tensor", "all_gather_single", "all_to_all_single", "reduce_scatter_tensor"}
# Modules that hold the same functions under the same or other names.
COLLECTIVE_MODULES = {
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.nn",
    "torch.ops.c10d",
}


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """Return all nodes of a source, the module first; several tests look at the same files."""
    return list(ast.walk(ast.parse(source)))


def room(module: str) -> str:
    """Return the room of a dotted module: its first name, in the lab the first two."""
    names = module.split(".")[1:]
    return ".".join(names[: 2 if names[:1] == ["lab"] else 1]) or "__init__"


def imports(path: Path) -> set[str]:
    found = set()
    for node in nodes(path.read_text()):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gradherd":
            found.add(room(node.module))
        if isinstance(node, ast.Import):
            found |= {room(a.name) for a in node.names if a.name.split(".")[0] == "gradherd"}
    return found


def test_imports_follow_the_flow():
    for path in ROOT.rglob("*.py"):
        own = room(".".join(("gradherd", *path.relative_to(ROOT).with_suffix("").parts)))
        allowed = ALLOWED[own] if own in ALLOWED else ALLOWED[own.split(".")[0]]
        # Every room may have names that are imported late, vectors of parameters, kernels, and
        # torch's private names.
        shared = {"lazy", "flat", "gpu", "torch_names"}
        extra = {m for m in imports(path) if not {m, m.split(".")[0]} & (allowed | shared)}
        assert not extra, f"{path.relative_to(ROOT)} imports {extra}"


def modules_after(code: str) -> set[str]:
    """Return the names of all modules that a program has loaded at its end."""
    code += "\nimport sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(loaded.stdout.splitlines()[-1].split())


def test_importing_gradherd_loads_nothing_of_the_lab():
    names = modules_after("import gradherd; [getattr(gradherd, name) for name in dir(gradherd)]")
    assert "gradherd.hooks.attach" in names
    assert not [name for name in names if name.startswith(("gradherd.lab", "gradherd.cli"))]


def test_help_of_every_command_does_not_wait_for_torch():
    """Names, defaults and help texts are declared where nothing heavy is imported."""
    calls = [["--help"], ["--version"], ["data", "list"]]
    calls += [[*name.split(), "--help"] for name in COMMANDS]
    # All in one process: the answer for each is that nothing heavy was loaded by any.
    code = f"""
from gradherd.cli.main import main
import sys
for words in {calls}:
    try:
        main(words)
    except SystemExit as stop:
        assert stop.code == 0
"""
    heavy = {"torch", "numpy", "scipy", "jinja2", "sklearn"}
    assert not modules_after(code) & heavy


def test_reports_are_written_without_torch():
    assert "torch" not in modules_after("import gradherd.lab.report.page")


@pytest.mark.parametrize("package", ["gradherd", "gradherd.lab.tasks"])
def test_lazy_names_are_those_that_type_checkers_see(package):
    module = importlib.import_module(package)
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert module.__all__ == list(seen)
    for name, home in seen.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)


def test_an_install_without_sources(tmp_path):
    shutil.copytree(ROOT, tmp_path / "gradherd", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(tmp_path, quiet=1, legacy=True)
    for source in tmp_path.rglob("*.py"):
        source.unlink()
    code = (
        "import gradherd, gradherd.lab.tasks; print(gradherd.__file__, gradherd.attach, "
        "gradherd.lab.tasks.TASKS)"
    )
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(tmp_path)}}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith(str(tmp_path / "gradherd" / "__init__.pyc"))


def test_lazy_names_of_gradherd():
    assert set(gradherd.__all__) <= set(dir(gradherd))
    # Nothing that this package only uses itself.
    shown = {name for name in dir(gradherd) if not name.startswith("_")}
    modules = {name for name in shown if isinstance(getattr(gradherd, name), ModuleType)}
    assert shown - modules - {"TYPE_CHECKING", "lazy_names"} == set(gradherd.__all__)
    assert not modules & set(sys.stdlib_module_names)
    assert gradherd.attach is importlib.import_module("gradherd.hooks.attach").attach
    with pytest.raises(AttributeError, match="'gradherd' has no attribute 'atach'"):
        gradherd.atach  # noqa: B018


def test_the_sampler_sees_the_world_but_no_collective():
    source = (ROOT / "ordering" / "sampler.py").read_text()
    modules = {node.module for node in nodes(source) if isinstance(node, ast.ImportFrom)}
    assert {m for m in modules if m and "comm" in m.split(".")} == {
        "gradherd.comm.checks",  # pure functions on arguments
        "gradherd.comm.world",
        "gradherd.comm.script",  # what a script asks for is data: it calls no collective
    }


def dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """Return what a.b.c stands for, with the first name resolved by the file's imports."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, aliases)}.{node.attr}"
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def collective_uses(source: str) -> set[str]:
    """Return the collectives of torch that a source names, called or not, under any alias."""
    aliases, names = {}, set()
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                names.add(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
    names |= {dotted(node, aliases) for node in nodes(source) if isinstance(node, ast.Attribute)}
    banned = {f"torch.distributed.{name}" for name in COLLECTIVES} | COLLECTIVE_MODULES
    return {n for n in names if n in banned or any(n.startswith(f"{b}.") for b in banned)}


def test_collectives_are_used_in_comm_only():
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] != "comm":
            assert not collective_uses(path.read_text()), path


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch.distributed as td\ntd.all_gather_object(x, y)",
        "import torch\ntorch.distributed.broadcast(x)",
        "from torch import distributed\nhook = distributed.reduce_scatter_tensor",
        "from torch.distributed import all_to_all_single as exchange",
        "import torch.distributed as dist\nops = [dist.P2POp(dist.isend, x, 1)]",
        "import torch.distributed as dist\ndist.send_object_list([x])",
        "import torch.distributed as dist\ndist.barrier()",
        "import torch.distributed._functional_collectives as funcol",
        "from torch.distributed import _functional_collectives",
        "from torch.distributed.distributed_c10d import all_reduce",
        "from torch.distributed.nn.functional import all_reduce",
        "import torch\ntorch.ops.c10d.allreduce_(x)",
    ],
)
def test_no_alias_hides_a_collective(source):
    assert collective_uses(source)


def test_reading_the_world_is_no_collective():
    source = (
        "import torch.distributed as dist\ndist.get_rank(); dist.get_backend(); dist.GradBucket"
    )
    assert not collective_uses(source)


def test_reports_read_records_and_no_tensor():
    for path in (ROOT / "lab" / "report").rglob("*.py"):
        modules = set()
        for node in nodes(path.read_text()):
            if isinstance(node, ast.ImportFrom):
                modules.add(node.module or "")
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
        assert "torch" not in {module.split(".")[0] for module in modules}, path
        trained = {module for module in modules if module.startswith("gradherd.lab.train")}
        assert trained <= {"gradherd.lab.train.record"}, path


def test_triton_is_imported_where_it_is_needed_only():
    """A machine without Triton has no use for it, and importing it takes a second."""
    for path in ROOT.rglob("*.py"):
        if path.stem.startswith("triton_"):
            continue
        tree = nodes(path.read_text())
        names = {a.name for n in tree if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in tree if isinstance(n, ast.ImportFrom)}
        assert "triton" not in {name.split(".")[0] for name in names}, path
        for node in tree[0].body:  # at the top: whenever the module is imported
            if isinstance(node, ast.ImportFrom):
                modules = {*(node.module or "").split("."), *(a.name for a in node.names)}
                assert not {m for m in modules if m.startswith("triton_")}, path


def test_nobody_looks_at_the_frames_of_callers():
    """A frame that is looked at keeps its variables alive, and callers are none of our business."""
    frames = {"_getframe", "_current_frames", "currentframe", "f_back", "f_locals"}
    for path in ROOT.rglob("*.py"):
        tree = nodes(path.read_text())
        used = {n.attr for n in tree if isinstance(n, ast.Attribute)}
        used |= {a.name for n in tree if isinstance(n, ast.ImportFrom) for a in n.names}
        assert not used & frames, path


def imported_modules(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules of gradherd that a file imports, anywhere but for type checkers alone."""
    tree = nodes(path.read_text())
    checked = {
        id(inner)
        for node in tree
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = set()
    for node in tree:
        if id(node) in checked:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in modules else str(node.module) for name in names}
    return found & modules.keys()


def test_no_imports_go_in_a_circle():
    modules = {}
    for path in ROOT.rglob("*.py"):
        names = path.relative_to(ROOT.parent).with_suffix("").parts
        modules[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    needs = {name: imported_modules(path, modules) - {name} for name, path in modules.items()}
    assert sum(map(len, needs.values())) > 500  # they were found
    while done := [name for name, needed in needs.items() if not needed & needs.keys()]:
        for name in done:
            del needs[name]
    assert not needs, f"modules in a circle, and those that import them: {sorted(needs)}"


def test_a_class_has_one_name_and_a_name_one_class():
    places: dict[str, list[str]] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
