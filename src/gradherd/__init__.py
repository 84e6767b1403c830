"""Distributed PyTorch training in fewer epochs and fewer bytes."""

from gradherd.attach.attach import attach as attach
from gradherd.attach.herd import Herd as Herd
from gradherd.attach.state import merge_states as merge_states
from gradherd.comm.world import World as World
from gradherd.ordering.cd_grab import CDGraB as CDGraB
from gradherd.ordering.grab import GraB as GraB
from gradherd.ordering.pair_grab import PairGraB as PairGraB
from gradherd.ordering.registry import POLICIES as POLICIES
from gradherd.ordering.sampler import OrderedSampler as OrderedSampler
from gradherd.ordering.sign_rules import Greedy as Greedy
from gradherd.ordering.sign_rules import Kernel as Kernel
from gradherd.ordering.sign_rules import Walk as Walk
from gradherd.rows.settings import BatchRows as BatchRows
from gradherd.rows.settings import ExactRows as ExactRows
from gradherd.rows.settings import SketchRows as SketchRows
from gradherd.sparsify.cltk import CLTK as CLTK
from gradherd.sparsify.deft import Deft as Deft
from gradherd.sparsify.dense import Dense as Dense
from gradherd.sparsify.exclusive import Online as Online
from gradherd.sparsify.exdyna import ExDyna as ExDyna
from gradherd.sparsify.gtopk import GTopK as GTopK
from gradherd.sparsify.micro import Micro as Micro
from gradherd.sparsify.outer_optimizer import LocalSteps as LocalSteps
from gradherd.sparsify.randomk import RandomK as RandomK
from gradherd.sparsify.registry import SPARSIFIERS as SPARSIFIERS
from gradherd.sparsify.sage import Sage as Sage
from gradherd.sparsify.settings import Sparsify as Sparsify
from gradherd.sparsify.sidco import SIDCo as SIDCo
from gradherd.sparsify.threshold import Threshold as Threshold
from gradherd.sparsify.topk import TopK as TopK

__version__ = "0.1.0.dev0"
