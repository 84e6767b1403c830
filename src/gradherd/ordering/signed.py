"""What all forms of signing share.

Letters: W streams (each with its own running sum), P vectors of a stream in visiting order,
D dimension, C numbers that a rule remembers.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradherd.ordering.sign_rules import Floats

Numbers = NDArray[np.floating]
Signs = NDArray[np.int8]
Reduce = Callable[[Tensor], Tensor]
"""Completes partial products: a flat float64 tensor on the CPU in, its sum over shards out."""


class Signed(NamedTuple):
    """What signing gives back."""

    signs: Tensor
    """(W, P) int8 on the CPU."""
    running: Tensor
    """(W, D) running sums after the last vector."""
    carry: Floats
    """(C, W) what the rule remembers."""
