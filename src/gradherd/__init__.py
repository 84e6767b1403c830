"""Distributed PyTorch training in fewer epochs or fewer bytes.

Every name is imported when it is first used. Importing torch takes seconds, and the command line
imports this package before it knows whether its command needs any of them.
"""

from typing import TYPE_CHECKING

from gradherd.lazy import lazy_names

# The public names, for type checkers and editors; programs find them by the table below.
if TYPE_CHECKING:
    from gradherd.comm.world import World as World
    from gradherd.hooks.attach import attach as attach
    from gradherd.hooks.herd import Herd as Herd
    from gradherd.hooks.state import merge_states as merge_states
    from gradherd.local.settings import LocalSteps as LocalSteps
    from gradherd.ordering.grab import GraB as GraB
    from gradherd.ordering.pair_grab import CDGraB as CDGraB
    from gradherd.ordering.pair_grab import PairGraB as PairGraB
    from gradherd.ordering.registry import POLICIES as POLICIES
    from gradherd.ordering.registry import make_policy as make_policy
    from gradherd.ordering.sampler import OrderedSampler as OrderedSampler
    from gradherd.ordering.sign_rules import Greedy as Greedy
    from gradherd.ordering.sign_rules import Kernel as Kernel
    from gradherd.ordering.sign_rules import Walk as Walk
    from gradherd.rows.settings import BatchRows as BatchRows
    from gradherd.rows.settings import ExactRows as ExactRows
    from gradherd.rows.settings import SketchRows as SketchRows
    from gradherd.rows.settings import TwoSidedRows as TwoSidedRows
    from gradherd.sparsify.basics import Dense as Dense
    from gradherd.sparsify.basics import TopK as TopK
    from gradherd.sparsify.partitioned import ExDyna as ExDyna
    from gradherd.sparsify.partitioned import Micro as Micro
    from gradherd.sparsify.registry import SPARSIFIERS as SPARSIFIERS
    from gradherd.sparsify.settings import Sparsify as Sparsify

__version__ = "0.1.0"

_HOMES = {
    "gradherd.comm.world": ("World",),
    "gradherd.hooks.attach": ("attach",),
    "gradherd.hooks.herd": ("Herd",),
    "gradherd.hooks.state": ("merge_states",),
    "gradherd.local.settings": ("LocalSteps",),
    "gradherd.ordering.grab": ("GraB",),
    "gradherd.ordering.pair_grab": ("CDGraB", "PairGraB"),
    "gradherd.ordering.registry": ("POLICIES", "make_policy"),
    "gradherd.ordering.sampler": ("OrderedSampler",),
    "gradherd.ordering.sign_rules": ("Greedy", "Kernel", "Walk"),
    "gradherd.rows.settings": ("BatchRows", "ExactRows", "SketchRows", "TwoSidedRows"),
    "gradherd.sparsify.basics": ("Dense", "TopK"),
    "gradherd.sparsify.partitioned": ("ExDyna", "Micro"),
    "gradherd.sparsify.registry": ("SPARSIFIERS",),
    "gradherd.sparsify.settings": ("Sparsify",),
}

__getattr__, __all__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
