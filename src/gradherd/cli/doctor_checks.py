"""What `gradherd doctor` finds, and its look at packages."""

import importlib
import importlib.util
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

Status = Literal["ok", "missing", "problem"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    """ok; missing: it is optional and not there; problem: it is there and does not work."""
    found: str
    hint: str = ""
    """What it is for, and the way out where it is not ok."""
    essential: bool = False
    """Whether gradherd cannot do its work where this is a problem."""


@dataclass(frozen=True)
class Package:
    """A package that gradherd uses."""

    name: str
    module: str
    least: str
    """Oldest version that will do."""
    purpose: str
    get: str
    """How to get it."""
    essential: bool = False


PACKAGES = (
    Package("torch", "torch", "2.7", "everything", "pip install 'torch>=2.7'", essential=True),
    Package("numpy", "numpy", "1.26", "everything", "pip install 'numpy>=1.26'", essential=True),
    Package("scikit-learn", "sklearn", "1.5", "the data of digits, digits-mlp and the demo",
            "pip install 'gradherd[tasks]'"),
    Package("pillow", "PIL", "10", "CIFAR-10 in WebP sheets", "pip install 'gradherd[tasks]'"),
    Package("jinja2", "jinja2", "3.1", "pages of compare, demo and report",
            "pip install 'gradherd[report]'"),
    Package("plotly", "plotly", "6", "charts of these pages", "pip install 'gradherd[report]'"),
    Package("scipy", "scipy", "1.13", "intervals and tests", "pip install 'gradherd[report]'"),
    Package("tensorboard", "tensorboard", "2", "train and compare with --tensorboard",
            "pip install tensorboard"),
    Package("triton", "triton", "3", "one-pass picking on a GPU",
            "comes with the CUDA builds of torch"),
)  # fmt: skip
"""Packages, those that are needed first."""


def packages() -> list[Check]:
    """Look at Python and every package."""
    python = Check(name="python", status="ok", found=platform.python_version())
    own = Check(name="gradherd", status="ok", found=version("gradherd"))
    return [python, own, *(package(one) for one in PACKAGES)]


def package(one: Package) -> Check:
    """Import a package and look at its version."""
    if importlib.util.find_spec(one.module) is None:
        hint = f"for {one.purpose}; {one.get}"
        status: Status = "problem" if one.essential else "missing"
        return _of(one, status, "not installed", hint)
    try:
        module = importlib.import_module(one.module)
    except Exception as error:  # A broken package may raise anything, and that is the finding.
        said = f"cannot be imported: {line(error)}"
        return _of(one, "problem", said, f"for {one.purpose}; install it anew: {one.get}")
    found = _version(one, module)
    if _numbers(found) < _numbers(one.least):
        return _of(one, "problem", found, f"for {one.purpose}; needs {one.least}: {one.get}")
    return _of(one, "ok", found, f"for {one.purpose}")


def _of(one: Package, status: Status, found: str, hint: str) -> Check:
    return Check(name=one.name, status=status, found=found, hint=hint, essential=one.essential)


def _version(one: Package, module: object) -> str:
    try:
        return version(one.name)
    except PackageNotFoundError:  # Put there by other means than pip.
        return str(getattr(module, "__version__", "unknown"))


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers a version starts with; an unknown one counts as new.

    >>> _numbers("2.13.0+cpu") > _numbers("2.7")
    True
    """
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found.group().split("."))) if found else (10**9,)


def line(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
