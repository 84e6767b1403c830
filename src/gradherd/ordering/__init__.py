"""From gradients to signs to permutations: which unit comes next.

Names are imported when they are first used, so that `registry` can be read without torch.
"""

from typing import TYPE_CHECKING

from gradherd.lazy import lazy_names

if TYPE_CHECKING:
    from gradherd.ordering.bounds import herding_bound as herding_bound
    from gradherd.ordering.bounds import parallel_herding_bound as parallel_herding_bound
    from gradherd.ordering.grab import GraB as GraB
    from gradherd.ordering.ordering import Ordering as Ordering
    from gradherd.ordering.pair_grab import CDGraB as CDGraB
    from gradherd.ordering.pair_grab import PairGraB as PairGraB
    from gradherd.ordering.policy import Policy as Policy
    from gradherd.ordering.registry import POLICIES as POLICIES
    from gradherd.ordering.registry import SIGN_RULES as SIGN_RULES
    from gradherd.ordering.registry import make_policy as make_policy
    from gradherd.ordering.sign_rules import Greedy as Greedy
    from gradherd.ordering.sign_rules import Kernel as Kernel
    from gradherd.ordering.sign_rules import Walk as Walk

__getattr__, __all__ = lazy_names(__name__)
