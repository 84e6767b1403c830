"""Private names of torch: all in one list, and those that are missing are named."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import gradherd as gh
from gradherd import torch_names
from gradherd.hooks import fsdp
from gradherd.torch_names import OPTIONAL_NAMES, PRIVATE_NAMES, missing_names

ROOT = Path(torch_names.__file__).parent
FILES = sorted(path for room in ("comm", "hooks", "rows") for path in (ROOT / room).glob("*.py"))
ALLOWED = {part for name in PRIVATE_NAMES | OPTIONAL_NAMES for part in name.split(".")}
FSDP = {
    *fsdp.GROUP_NAMES, *fsdp.PARAMETER_NAMES, *fsdp.STATE_NAMES,
    "_get_fsdp_state", "_unsharded_param", "_reduce_scatter_comm", "_fsdp_param_group",
    "_fsdp_param_groups",
}  # fmt: skip
"""Also those that some versions lack."""


def is_private(name: object) -> bool:
    """Say whether a name is not ours: we mark objects of torch with names that say so."""
    is_name = isinstance(name, str) and name.startswith("_")
    return is_name and not name.startswith(("__", "_gradherd_"))


def private_names(tree: ast.AST) -> set[str]:
    """Return the private attributes in a source that are not of the classes in it."""
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls"):
            own.add(node.attr)
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:  # getattr(module, "_name")
        if isinstance(node, ast.Call) and len(node.args) > 1:
            if getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr", "delattr"):
                found.add(getattr(node.args[1], "value", ""))
    return set(filter(is_private, found - own))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_private_name_of_torch_is_listed(path: Path) -> None:
    found = private_names(ast.parse(path.read_text()))
    assert found <= (FSDP if path.name == "fsdp.py" else ALLOWED)


def test_what_this_version_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_names() == []
    monkeypatch.delattr(torch, "_foreach_copy_")
    assert missing_names() == ["torch._foreach_copy_"]
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"has no torch\._foreach_copy_, which gradherd needs"):
        gh.attach(net, optimizer=optimizer, local=gh.LocalSteps())


def test_names_that_only_instances_have(monkeypatch: pytest.MonkeyPatch) -> None:
    names = dict.fromkeys(["torch.nn.parallel.DistributedDataParallel._comm_hoks"], "a typo")
    monkeypatch.setattr(torch_names, "PRIVATE_NAMES", names)
    assert missing_names() == list(names)


def test_the_wrapper_of_a_compiled_model_has_the_name_we_know() -> None:
    inner = nn.Linear(2, 2)
    assert torch.compile(inner, backend="eager")._orig_mod is inner
