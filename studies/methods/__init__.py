"""Methods that our studies compare with, in a file each: DEFT, gTop-k, SAGE and SIDCo.

They are written as a user's own methods are, and are no part of the package: nobody should choose
them to train. A study names those it needs under [methods]; a program registers them with
`gh.SPARSIFIERS.update(METHODS)`.
"""

from studies.methods.deft import Deft
from studies.methods.gtopk import GTopK
from studies.methods.sage import Sage
from studies.methods.sidco import SIDCo

METHODS = {"deft": Deft, "gtopk": GTopK, "sage": Sage, "sidco": SIDCo}
"""The methods by the names that studies and records give them."""
