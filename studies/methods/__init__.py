"""Methods that our studies compare with, each in the form of a user's own.

They are no part of the package: nobody should choose them to train. A study names those it needs
under [methods]; a program registers them with `gh.SPARSIFIERS.update(METHODS)`.
"""

from studies.methods.cltk import CLTK
from studies.methods.deft import Deft
from studies.methods.demo import DeMo
from studies.methods.gtopk import GTopK
from studies.methods.randomk import RandomK
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
