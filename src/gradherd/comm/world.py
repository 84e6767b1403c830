"""The ranks of a training run: one frozen value that is passed on, never a global lookup."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gradherd.comm.checks import check_in, check_whole


@dataclass(frozen=True)
class World:
    """This process's rank among all processes. A test can build any world it likes."""

    rank: int
    """Rank of this process, from 0."""
    size: int
    """Number of processes."""
    group: dist.ProcessGroup | None = None
    """Process group for collectives; None is torch's default group."""

    def __post_init__(self) -> None:
        check_whole("size", self.size, 1)
        check_in(f"[0, {self.size})", rank=self.rank)

    # A process group belongs to its process, and cannot be pickled.
    def __reduce__(self) -> tuple[type["World"], tuple[int, int]]:
        return World, (self.rank, self.size)

    def __deepcopy__(self, memo: dict[int, Any]) -> "World":
        return self

    @classmethod
    def single(cls) -> "World":
        """Return the world of one process.

        >>> World.single()
        World(rank=0, size=1, group=None)
        """
        return cls(rank=0, size=1)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "World":
        """Return the world of a process group, of which this process is a member."""
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    @classmethod
    def detect(cls) -> "World":
        """Return the world of this process.

        Reads torch.distributed if it is initialised, else the variables that torchrun sets (a
        sampler may be built before the process group), else assumes one process.

        Raises:
            ValueError: RANK and WORLD_SIZE are set but are not a rank and a size.
        """
        # Torch first: a process group may have been initialised without any variables.
        if dist.is_available() and dist.is_initialized():
            return cls(rank=dist.get_rank(), size=dist.get_world_size())
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
            try:
                return cls(rank=int(rank), size=int(size))
            except ValueError as error:
                raise ValueError(
                    f"RANK={rank!r} and WORLD_SIZE={size!r} are not a rank and a world size: "
                    f"{error}; start with torchrun, or unset both to run one process"
                ) from None
        return cls.single()

    @property
    def _group(self) -> Any:
        # torch 2.7 does not take None for the default group.
        return dist.group.WORLD if self.group is None else self.group

    def ranks(self) -> list[int]:
        """Return the ranks of this world as torch's default group counts them."""
        if not dist.is_available() or not dist.is_initialized():
            return list(range(self.size))
        return dist.get_process_group_ranks(self._group)

    def store(self) -> dist.Store:
        """Return the key-value store through which the ranks of this world have met."""
        return c10d._get_process_group_store(self._group)

    @property
    def destroyed(self) -> bool:
        """Whether ranks cannot meet any more: `destroy_process_group` was called."""
        return self.size > 1 and not dist.is_initialized()

    def timeout(self) -> timedelta:
        """Return how long a rank waits for its peers, as given to `init_process_group`."""
        group = self._group
        backends = [group._get_backend(device) for device in group._device_types]
        limits = [
            backend.options._timeout
            for backend in backends
            if hasattr(getattr(backend, "options", None), "_timeout")
        ]
        return min(limits, default=c10d.default_pg_timeout)

    def backend(self, device: torch.device) -> str:
        """Return the backend that exchanges tensors of a device; "" if the group has none.

        `dist.get_backend` names one for all devices, and is "undefined" where
        `init_process_group()` was left to choose one for each.
        """
        config = str(dist.get_backend_config(self.group))  # "cpu:gloo,cuda:nccl"
        pairs = (pair.split(":") for pair in config.split(","))
        return next((name for kind, name in pairs if kind == device.type), "")

    def exchanges(self, device: torch.device) -> bool:
        """Return whether the group can exchange tensors of a device."""
        if self.size == 1:
            return True
        backend = self.backend(device)
        # gloo names GPUs among its devices, but has not all collectives for them.
        return bool(backend) and (device.type == "cpu" or backend != "gloo")

    def side_channel(self, device: torch.device | None = None) -> "World":
        """Return the same world with a group of its own, for tensors of a device.

        A thread beside the training loop needs it: its collectives must not mix with the loop's
        own, whose order relative to the thread's differs from rank to rank. All ranks must call it
        at the same point, and `close_side_channel` when it is over.

        Args:
            device: None is the CPU. If this group cannot exchange tensors of a device, or has only
                some of the ranks, the new one is gloo's (`exchanges` tells): for the CPU.
        """
        if self.size == 1:
            return self
        timeout, ranks, cpu = self.timeout(), self.ranks(), torch.device("cpu")
        if device is None or not self.exchanges(device):
            device = cpu
        if len(ranks) == dist.get_world_size():
            backend = "gloo" if device.type == "cpu" else self.backend(device)
            group = dist.new_group(backend=backend, timeout=timeout)
        else:
            # Not nccl's: torch may split the default group's communicator, for which it needs all
            # of its ranks.
            device, group = cpu, _new_gloo_subgroup(self, ranks, timeout)
        # Ranks that have exchanged something are connected. gloo returns when this rank is: one
        # that closes its side at once must not do so while its peers are still connecting. And nccl
        # would connect in the thread, beside whatever the loop does.
        each = torch.zeros(self.size, device=device)
        dist.all_to_all_single(torch.empty_like(each), each, group=group)
        return World(self.rank, self.size, group)

    def close_side_channel(self) -> None:
        """Give back what a side channel has taken; does nothing to a single rank."""
        # The default group may be gone already, and every other group with it.
        if self.size > 1 and self.group in c10d._world.pg_map:
            dist.destroy_process_group(self.group)


def keep_group(group: dist.ProcessGroup) -> None:
    """Keep the group of a DDP model, until it is destroyed and another one is kept.

    A model that outlives `destroy_process_group` has the last reference to its group. The C++ part
    of DDP drops it without releasing the GIL, and gloo's threads, which the group joins, need the
    GIL to free tensors that Python has seen: the process hangs. Dropped from Python, a group
    releases the GIL first.
    """
    _kept[:] = [each for each in _kept if each in c10d._world.pg_map and each is not group]
    _kept.append(group)


_kept: list[dist.ProcessGroup] = []


def _new_gloo_subgroup(world: World, ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    """Return a new gloo group of the same ranks, which only those ranks have to make.

    `dist.new_group` would wait for the ranks that are not in the group. With
    use_local_synchronization it does not, but it then names groups by their ranks and by how many
    groups this process has: names would differ between ranks that are in different groups, and
    a second group would find the addresses of the first one, which is closed.
    """
    _subgroups[tuple(ranks)] = number = _subgroups.get(tuple(ranks), 0) + 1
    name = f"gradherd-{'-'.join(map(str, ranks))}-{number}"
    new_group: Any = c10d._new_process_group_helper  # what dist.new_group calls, less its naming
    backend, store = c10d.Backend("gloo"), c10d._get_default_store()
    group: dist.ProcessGroup
    group, _ = new_group(world.size, world.rank, ranks, backend, store, name, timeout=timeout)
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


_subgroups: dict[tuple[int, ...], int] = {}
