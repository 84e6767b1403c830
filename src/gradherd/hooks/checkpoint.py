"""A herd in the form that torch.distributed.checkpoint (DCP) saves and loads."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradherd.hooks.exchange import ShardedExchange
from gradherd.hooks.state import merge_states, pack, unpack

if TYPE_CHECKING:
    from gradherd.hooks.herd import Herd


class HerdState:
    """A herd as `Stateful` of torch.distributed.checkpoint (DCP).

    DCP treats entries of the same name on different ranks as the same, and loads only names that
    a fresh herd has already. So each rank's state is one entry, under a name of its own:

        dcp.save({"model": ddp, "herd": herd.stateful()}, checkpoint_id=folder)

    A checkpoint of another number of ranks is loaded with `saved_by`, before anything is saved:

        dcp.load({"model": ddp, "herd": herd.stateful(saved_by=4)}, checkpoint_id=folder)
    """

    def __init__(self, herd: "Herd", saved_by: int | None = None) -> None:
        """Wrap a herd.

        Args:
            herd: The herd to save or load.
            saved_by: Number of ranks that saved what is to be loaded; as many as now by default.

        Raises:
            ValueError: `saved_by` is below 1.
        """
        self._herd, self._size = herd, herd.world.size
        self._saved_by = self._size if saved_by is None else saved_by
        if self._saved_by < 1:
            raise ValueError(f"saved_by must be at least 1, got {saved_by}")
        self._name = _name(herd.world.rank, self._size)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; to load from other ranks, the names of theirs."""
        # DCP asks for a state before it loads, to learn which names to read.
        if self._saved_by != self._size:
            return {_name(rank, self._saved_by): b"" for rank in range(self._saved_by)}
        return {self._name: pack(self._herd.state_dict(gather=False))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was saved. All ranks must call it.

        Raises:
            ValueError: The state of a rank is missing, empty or damaged.
        """
        if self._saved_by == self._size:
            self._herd.load_state_dict(unpack(self._entry(state, self._name)))
            return
        names = [_name(rank, self._saved_by) for rank in range(self._saved_by)]
        self._herd.load_state_dict(merge_states(unpack(self._entry(state, n)) for n in names))
        self._saved_by = self._size  # What is saved from now on is this rank's own again.

    def _entry(self, state: Mapping[str, Any], name: str) -> Any:
        # The empty placeholder of `state_dict` is still there: DCP saved it instead of loading.
        if name in state and not state[name]:
            raise ValueError(f"state of {name} is empty: it was saved before it was loaded")
        if name not in state:
            known = ", ".join(sorted(map(str, state))) or "none"
            raise ValueError(f"state has no {name}; it has {known}")
        return state[name]


def _name(rank: int, size: int) -> str:
    return f"rank-{rank}-of-{size}"


class ShardedHerdState:
    """A herd with a sharded model as `Stateful` of DCP, which reshards.

    Residuals belong to a replica and a shard of it. They are saved as DTensors, one for each
    parameter and replica, so that DCP cuts them anew for another number of shards. Another number
    of replicas gets the mean of all of them: a step applies the mean over replicas, so the mean
    must not change.

        dcp.save({"model": model.state_dict(), "herd": herd.stateful()}, checkpoint_id=folder)

    A checkpoint of another mesh is loaded with its shape, before anything is saved:

        dcp.load({"herd": herd.stateful(saved_by=(2, 4))}, checkpoint_id=folder)
    """

    def __init__(
        self,
        herd: "Herd",
        exchange: ShardedExchange,
        saved_by: tuple[int, int] | int | None = None,
    ) -> None:
        """Wrap a herd.

        Args:
            herd: The herd to save or load.
            exchange: What it exchanges.
            saved_by: (replicas, shards) of the mesh that saved what is to be loaded; those of now
                by default.

        Raises:
            ValueError: `saved_by` is not the shape of a mesh.
        """
        shape = exchange.mesh if saved_by is None else saved_by
        if isinstance(shape, int) or len(shape) != 2 or min(shape) < 1:
            raise ValueError(
                f"saved_by must be (replicas, shards) of a sharded model's mesh, got {saved_by!r}"
            )
        self._herd, self._exchange, self._saved_by = herd, exchange, tuple(shape)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; to load from another mesh, what of it to read."""
        exchange = self._exchange
        if self._saved_by == exchange.mesh:
            vectors = exchange.vectors()
            # Not gathered: every rank writes its own shards, which is what DCP is for.
            herd = self._herd.state_dict(gather=False)
            own = herd.pop(exchange.key)
            rest = {key: value for key, value in own.items() if key not in vectors}
            state = {"shared": pack(herd), self._rest_name(exchange.place): pack(rest)}
            return state | dict(self._tensors(vectors, exchange.place[0]))
        # DCP asks for a state before it loads, to learn what to read, and where to put tensors.
        state = {"shared": b"", self._rest_name((0, 0)): b""}
        for replica in self._replicas():  # copies for each: DCP reads into them
            state |= dict(self._tensors(exchange.vectors(), replica))
        return state

    def _replicas(self) -> range:
        """Return the saved replicas whose residuals this rank continues with."""
        replicas, own = self._saved_by[0], self._exchange.place[0]
        # As many replicas as before: each keeps its own residuals, in other shards.
        return range(own, own + 1) if replicas == self._exchange.mesh[0] else range(replicas)

    def _rest_name(self, place: tuple[int, int]) -> str:
        replicas, shards = self._saved_by
        return f"replica-{place[0]}-of-{replicas}-shard-{place[1]}-of-{shards}"

    def _tensors(
        self, vectors: Mapping[str, Mapping[str, Tensor]], replica: int
    ) -> Iterator[tuple[str, Any]]:
        """Yield each vector as a DTensor, under the name of its replica."""
        from torch.distributed.tensor import DTensor  # takes seconds, and is there by now

        for key, by_name in vectors.items():
            for name, local in by_name.items():
                like: Any = self._exchange.parameters[name]
                yield (
                    f"{key}.{replica}-of-{self._saved_by[0]}.{name}",
                    DTensor.from_local(
                        local,
                        like.device_mesh,
                        like.placements,
                        run_check=False,
                        shape=like.shape,
                        stride=like.stride(),
                    ),
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was saved. All ranks must call it.

        Raises:
            ValueError: The state is of another model or method, or was saved before it was loaded.
        """
        exchange, same = self._exchange, self._saved_by == self._exchange.mesh
        name = self._rest_name(exchange.place if same else (0, 0))
        for entry in ("shared", name):
            if not state.get(entry):
                raise ValueError(
                    f"state has no {entry!r}: was it saved on a mesh of another shape than "
                    f"{self._saved_by}, or before it was loaded?"
                )
        own = unpack(state[name])
        if not same:
            # As merged states are: the method starts again, and buffers stay what they are.
            own.pop("buffers", None)
            own |= {"rank": None, "method": None, "dim": exchange.layout.sparse}
            own |= {"mesh": list(exchange.mesh), "place": list(exchange.place)}
        for key, by_name in exchange.vectors().items():
            own[key] = {one: self._mean(state, key, one) for one in by_name}
        exchange.check_state(own)  # before anything changes
        self._herd.load_shared(unpack(state["shared"]))
        exchange.load_state_dict(own)
        self._saved_by = exchange.mesh  # What is saved from now on is this mesh's own again.

    def _mean(self, state: Mapping[str, Any], key: str, name: str) -> Tensor:
        """Return this rank's shard of the mean over the saved replicas, summed in float64."""
        parts: list[Tensor] = [
            state[f"{key}.{replica}-of-{self._saved_by[0]}.{name}"].to_local()
            for replica in self._replicas()
        ]
        if len(parts) == 1:
            return parts[0]
        total = torch.stack([part.double() for part in parts]).sum(0)
        return (total / len(parts)).to(parts[0].dtype)
