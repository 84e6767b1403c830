"""The tree's rule: who may import whom, read from the source itself."""

import ast
from pathlib import Path

import gradherd

ROOT = Path(gradherd.__file__).parent

# Part of the package -> parts it may import. What is not named here imports nothing of ours.
ALLOWED = {
    "comm": {"comm"},
    "rows": {"rows"},
    "ordering": {"ordering", "comm"},
    "sparsify": {"sparsify", "comm"},
    "replay": {"replay", "ordering", "sparsify"},
    "bench": {
        "bench",
        "train",
        "tasks",
        "attach",
        "herd",
        "ordering",
        "sparsify",
        "comm",
        "rows",
    },
    "advise": {"advise", "comm"},
    "tasks": {"tasks"},
    "train": {
        "train",
        "tasks",
        "pack",
        "stateful",
        "attach",
        "herd",
        "readers",
        "rows",
        "ordering",
        "sparsify",
        "comm",
    },
    "study": {
        "study",
        "advise",
        "train",
        "tasks",
        "replay",
        "bench",
        "ordering",
        "sparsify",
        "comm",
    },
    "report": {"report", "train", "study"},
    "commands": {
        "commands",
        "advise",
        "bench",
        "ordering",
        "sparsify",
        "replay",
        "comm",
        "tasks",
        "report",
        "study",
        "train",
    },
    "cli": {"commands", "__init__"},
    "__main__": {"cli"},
    "readers": {"rows"},
    "feeds": {"readers", "ordering", "comm"},
    "ride": {"readers", "rows", "ordering", "comm"},
    "link": {"feeds", "ride", "rows", "ordering", "comm"},
    "stateful": {"sparsify", "pack"},
    "herd": {"link", "ordering", "sparsify", "stateful"},
    "attach": {"herd", "link", "feeds", "readers", "ride", "rows", "ordering", "sparsify", "comm"},
    "__init__": {"attach", "herd", "comm", "ordering", "rows", "sparsify", "stateful"},
}
COLLECTIVES = {
    "all_reduce",
    "all_gather_into_tensor",
    "all_to_all_single",
    "batch_isend_irecv",
    "broadcast",
    "barrier",
}


def part(module: str) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gradherd":
            found.add(part(node.module))
        if isinstance(node, ast.Import):
            found |= {part(a.name) for a in node.names if a.name.split(".")[0] == "gradherd"}
    return found


def test_imports_follow_the_flow():
    for path in ROOT.rglob("*.py"):
        own = path.relative_to(ROOT).with_suffix("").parts[0]
        extra = imports(path) - ALLOWED.get(own, set())
        assert not extra, f"{path.relative_to(ROOT)} imports {extra}"


def test_the_sampler_sees_the_world_but_no_collective():
    tree = ast.parse((ROOT / "ordering" / "sampler.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {m for m in modules if m and "comm" in m.split(".")} == {"gradherd.comm.world"}


def test_collectives_are_called_in_comm_only():
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] == "comm":
            continue
        calls = {
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "dist"
        }
        assert not calls & COLLECTIVES, path


def test_reports_read_records_and_no_tensor():
    for path in (ROOT / "report").rglob("*.py"):
        modules = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                modules.add(node.module or "")
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
        assert "torch" not in {module.split(".")[0] for module in modules}, path
        trained = {module for module in modules if module.startswith("gradherd.train")}
        assert trained <= {"gradherd.train.record"}, path


def test_triton_is_imported_where_it_is_needed_only():
    """A machine without Triton has no use for it, and importing it takes a second."""
    for path in ROOT.rglob("*.py"):
        if path.stem.startswith("triton_"):
            continue
        tree = ast.parse(path.read_text())
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert "triton" not in {name.split(".")[0] for name in names}, path
        for node in tree.body:  # at the top: whenever the module is imported
            if isinstance(node, ast.ImportFrom):
                modules = {*(node.module or "").split("."), *(a.name for a in node.names)}
                assert not {m for m in modules if m.startswith("triton_")}, path
