"""Methods and orders that our studies compare with, each in the form of a user's own.

They are no part of the package: nobody should choose them to train. A study names those it needs
under [methods]; a program registers them with `gh.SPARSIFIERS.update(METHODS)` and
`gh.POLICIES.update(ORDERS)`.
"""

from studies.methods.block_reshuffling import BlockReshuffling
from studies.methods.cltk import CLTK
from studies.methods.deft import Deft
from studies.methods.demo import DeMo
from studies.methods.gtopk import GTopK
from studies.methods.live import CDGraBLive
from studies.methods.randomk import RandomK
from studies.methods.scored import Curriculum, Saw, Stair
from studies.methods.thresholds import Sage, SIDCo, Threshold

METHODS = {
    "cltk": CLTK,
    "deft": Deft,
    "threshold": Threshold,
    "sidco": SIDCo,
    "gtopk": GTopK,
    "randomk": RandomK,
    "sage": Sage,
    "demo": DeMo,
}
"""The methods by the names that studies and records give them."""

ORDERS = {
    "cd-grab-live": CDGraBLive,
    "block-reshuffling": BlockReshuffling,
    "curriculum": Curriculum,
    "stair": Stair,
    "saw": Saw,
}
"""The orders by the same."""
