"""Communication between ranks: the world, and collectives that count bytes.

`run_ranks`, which starts local ranks for tests and simulations, belongs to the lab. It can be
imported from here, too, and only then are processes and their server loaded.
"""

from importlib import import_module
from typing import Any

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
from gradherd.comm.world import World as World


def __getattr__(name: str) -> Any:
    if name != "run_ranks":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("gradherd.lab.ranks").run_ranks
