"""Distributed PyTorch training in fewer epochs and fewer bytes."""

from gradherd.attach import attach as attach
from gradherd.comm.world import World as World
from gradherd.herd import Herd as Herd
from gradherd.ordering.cd_grab import CDGraB as CDGraB
from gradherd.ordering.grab import GraB as GraB
from gradherd.ordering.pair_grab import PairGraB as PairGraB
from gradherd.ordering.policy import POLICIES as POLICIES
from gradherd.ordering.rules import Greedy as Greedy
from gradherd.ordering.rules import Kernel as Kernel
from gradherd.ordering.rules import Walk as Walk
from gradherd.ordering.sampler import OrderedSampler as OrderedSampler
from gradherd.rows.settings import BatchRows as BatchRows
from gradherd.rows.settings import ExactRows as ExactRows
from gradherd.rows.settings import SketchRows as SketchRows

__version__ = "0.1.0.dev0"
