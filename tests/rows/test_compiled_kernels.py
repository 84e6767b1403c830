"""The kernels of rows compiled for a GPU (Hopper), without one: they load 16 bytes at a time.

Element by element they would be right as well, and two to three times slower.
"""

import os
import re

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from gradherd.rows import triton_rows  # noqa: E402

# Of Triton 3.9, about a default of its own.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

PRODUCT = {"THIN": tl.bfloat16, "Q": 16, "BT": 64}
COMBINE = {"G": tl.bfloat16, "THIN": tl.bfloat16, "DENSE": True, "Q": 16, "BT": 64, "BO": 32}
NORM = {"X": tl.bfloat16, "G": tl.bfloat16, "STATS": tl.float32, "BLOCK": 256, "STAGES": 2}


def loads(name: str, **constants) -> str:
    """Return the instructions that load from global memory."""
    kernel = getattr(triton_rows, name)
    names = kernel.arg_names
    signature = dict.fromkeys(names, "constexpr") | {
        "pointers": "*i64", "fields": "*i64", "tiles": "*i32"
    }  # fmt: skip
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(key),): value for key, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at in range(3)},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    lines = re.findall(r"(?:ld\.global|cp\.async\.c)[^;]*;", compiled.asm["ptx"])
    assert lines
    return "\n".join(lines)


CASES = {
    "project": ("project_kernel", PRODUCT | {"X": tl.bfloat16, "LAST": True, "BC": 64}),
    "project, positions side by side": (
        "project_kernel", PRODUCT | {"X": tl.bfloat16, "LAST": False, "BC": 64},
    ),
    "combine": ("combine_kernel", COMBINE | {"LAST": True, "FOLDS": 1}),
    "combine, positions side by side": ("combine_kernel", COMBINE | {"LAST": False, "FOLDS": 1}),
    "combine, folded": ("combine_kernel", COMBINE | {"LAST": True, "FOLDS": 3}),
    "combine, a vocabulary": ("combine_kernel", COMBINE | {"LAST": True, "FOLDS": 50}),
    "norm": ("norm_first_kernel", NORM | {"ROWS": 8}),
    "norm, channels side by side": ("norm_last_kernel", NORM | {"ROWS": 16, "PER_CHANNEL": False}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_kernels_load_many_elements_at_a_time(case):
    name, constants = CASES[case]
    found = loads(name, **constants, STEP=8)
    assert "ld.global.b16" not in found
    assert "0x10" in found or "ld.global.v4" in found


def test_the_check_sees_single_elements():
    assert "ld.global.b16" in loads("combine_kernel", **CASES["combine"][1], STEP=1)
