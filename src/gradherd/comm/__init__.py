"""Communication between ranks: the world, collectives that count bytes, local test ranks."""

from gradherd.comm.collectives import CollectiveResult as CollectiveResult
from gradherd.comm.collectives import PendingCollective as PendingCollective
from gradherd.comm.collectives import all_gather as all_gather
from gradherd.comm.collectives import all_gather_start as all_gather_start
from gradherd.comm.collectives import all_gather_uneven as all_gather_uneven
from gradherd.comm.collectives import all_reduce as all_reduce
from gradherd.comm.collectives import all_reduce_small as all_reduce_small
from gradherd.comm.collectives import all_reduce_start as all_reduce_start
from gradherd.comm.collectives import all_to_all as all_to_all
from gradherd.comm.collectives import all_to_all_start as all_to_all_start
from gradherd.comm.collectives import broadcast as broadcast
from gradherd.comm.ranks import run_ranks as run_ranks
from gradherd.comm.world import World as World
