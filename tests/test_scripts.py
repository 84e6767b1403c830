"""Scripts outside the package import names that exist, also on machines where they cannot run."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_imports_of_the_package_resolve(script):
    imports = [
        node
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gradherd")
    ]
    for node in imports:
        try:
            module = importlib.import_module(node.module)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("gradherd"):
                raise
            continue  # a framework that is not installed here
        missing = [name.name for name in node.names if not hasattr(module, name.name)]
        for name in missing:  # `from package import module` names a submodule
            importlib.import_module(f"{node.module}.{name}")
