"""Private names of torch: all in one list, and those that are missing are named."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import gradherd.rows
from gradherd.rows.torch_names import OPTIONAL_NAMES, PRIVATE_NAMES, missing_names

FOLDER = Path(gradherd.rows.__file__).parent
LISTED = {
    part
    for name in PRIVATE_NAMES | OPTIONAL_NAMES
    for part in name.split(".")
    if part.startswith("_")
}
OF_TORCH = {
    "_version", "_backward_hooks", "_parameters", "_buffers", "_forward_pre_hooks", "_modules",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_compiled_call_impl", "_orig_mod",
    "_execution_engine", "_grad_fn", "_saved_tensors", "_post_accumulate_grad_hooks",
}  # fmt: skip
"""Private attributes of torch's objects, which look like our own in the source."""


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_every_private_name_of_torch_is_listed(path: Path) -> None:
    text = path.read_text()
    modules = set(re.findall(r"torch(?:\.\w+)*?\.(_\w+)", text))
    attributes = set(re.findall(r"\w\.(_[a-z_]+)\b", text)) & OF_TORCH
    # Attributes of our own may have these names, too.
    own = set(re.findall(r"self\.(_\w+)", text)) if "sink_layers" not in path.name else set()
    assert (modules | attributes - own) <= LISTED


def test_what_this_version_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_names() == []
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    assert missing_names() == ["torch._C._current_graph_task_id"]


def test_the_wrapper_of_a_compiled_model_has_the_name_we_know() -> None:
    inner = nn.Linear(2, 2)
    assert torch.compile(inner, backend="eager")._orig_mod is inner
