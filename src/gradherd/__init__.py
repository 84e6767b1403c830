"""Distributed PyTorch training in fewer epochs and fewer bytes.

Every name is imported when it is first used. Importing torch takes seconds, and the command line
imports this package before it knows whether its command needs any of them.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

# What type checkers and editors see. `_HOMES` says the same at run time; a test compares them.
if TYPE_CHECKING:
    from gradherd.attach.attach import attach as attach
    from gradherd.attach.herd import Herd as Herd
    from gradherd.attach.state import merge_states as merge_states
    from gradherd.comm.world import World as World
    from gradherd.ordering.cd_grab import CDGraB as CDGraB
    from gradherd.ordering.grab import GraB as GraB
    from gradherd.ordering.pair_grab import PairGraB as PairGraB
    from gradherd.ordering.registry import POLICIES as POLICIES
    from gradherd.ordering.registry import make_policy as make_policy
    from gradherd.ordering.sampler import OrderedSampler as OrderedSampler
    from gradherd.ordering.scored import LengthGrouped as LengthGrouped
    from gradherd.ordering.sign_rules import Greedy as Greedy
    from gradherd.ordering.sign_rules import Kernel as Kernel
    from gradherd.ordering.sign_rules import Walk as Walk
    from gradherd.rows.settings import BatchRows as BatchRows
    from gradherd.rows.settings import ExactRows as ExactRows
    from gradherd.rows.settings import SketchRows as SketchRows
    from gradherd.rows.settings import TwoSidedRows as TwoSidedRows
    from gradherd.sparsify.basics import CLTK as CLTK
    from gradherd.sparsify.basics import Dense as Dense
    from gradherd.sparsify.basics import RandomK as RandomK
    from gradherd.sparsify.basics import TopK as TopK
    from gradherd.sparsify.deft import Deft as Deft
    from gradherd.sparsify.demo import DeMo as DeMo
    from gradherd.sparsify.gtopk import GTopK as GTopK
    from gradherd.sparsify.local import LocalSteps as LocalSteps
    from gradherd.sparsify.partitioned import ExDyna as ExDyna
    from gradherd.sparsify.partitioned import Micro as Micro
    from gradherd.sparsify.partitioned import Online as Online
    from gradherd.sparsify.registry import SPARSIFIERS as SPARSIFIERS
    from gradherd.sparsify.settings import Sparsify as Sparsify
    from gradherd.sparsify.thresholds import Sage as Sage
    from gradherd.sparsify.thresholds import SIDCo as SIDCo
    from gradherd.sparsify.thresholds import Threshold as Threshold

__version__ = "0.1.0"

_HOMES = {
    "attach": "attach.attach",
    "Herd": "attach.herd",
    "merge_states": "attach.state",
    "World": "comm.world",
    "CDGraB": "ordering.cd_grab",
    "GraB": "ordering.grab",
    "LengthGrouped": "ordering.scored",
    "PairGraB": "ordering.pair_grab",
    "POLICIES": "ordering.registry",
    "make_policy": "ordering.registry",
    "OrderedSampler": "ordering.sampler",
    "Greedy": "ordering.sign_rules",
    "Kernel": "ordering.sign_rules",
    "Walk": "ordering.sign_rules",
    "BatchRows": "rows.settings",
    "ExactRows": "rows.settings",
    "SketchRows": "rows.settings",
    "TwoSidedRows": "rows.settings",
    "CLTK": "sparsify.basics",
    "Deft": "sparsify.deft",
    "Dense": "sparsify.basics",
    "Online": "sparsify.partitioned",
    "ExDyna": "sparsify.partitioned",
    "DeMo": "sparsify.demo",
    "GTopK": "sparsify.gtopk",
    "Micro": "sparsify.partitioned",
    "LocalSteps": "sparsify.local",
    "RandomK": "sparsify.basics",
    "SPARSIFIERS": "sparsify.registry",
    "Sage": "sparsify.thresholds",
    "Sparsify": "sparsify.settings",
    "SIDCo": "sparsify.thresholds",
    "Threshold": "sparsify.thresholds",
    "TopK": "sparsify.basics",
}
"""Public name -> the module of this package that defines it."""
_ROOMS = ("comm", "ordering", "rows", "sparsify")
"""Subpackages that `import gradherd` offers as attributes."""
__all__ = list(_HOMES)


class _LazyPackage(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name in _ROOMS:
            return import_module(f"gradherd.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'gradherd' has no attribute {name!r}")
        value = getattr(import_module(f"gradherd.{_HOMES[name]}"), name)
        self.__dict__[name] = value  # the next use finds it without a call
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Importing a subpackage also makes it an attribute, and `attach` is the name of both a
        # subpackage and our main function. The attribute is the function.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_HOMES]


sys.modules[__name__].__class__ = _LazyPackage
