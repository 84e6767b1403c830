"""The state of a herd whose model is sharded, for torch.distributed.checkpoint, with resharding.

Residuals belong to a replica and a shard of it. They are saved as DTensors, one for each parameter
and replica, so that DCP cuts them anew for another number of shards. Another number of replicas
gets the mean of all of them: a step applies the mean over replicas, so the mean must not change.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradherd.attach.fsdp_local import ShardedLocalExchange
from gradherd.attach.fsdp_sparse import ShardedSparseHook
from gradherd.attach.state import pack, unpack

if TYPE_CHECKING:
    from gradherd.attach.herd import Herd


class ShardedHerdState:
    """A herd with a sharded model as `Stateful` of torch.distributed.checkpoint (DCP).

        dcp.save({"model": model.state_dict(), "herd": herd.stateful()}, checkpoint_id=folder)

    A checkpoint of another mesh is loaded with its shape, before anything is saved:

        dcp.load({"herd": herd.stateful(saved_by=(2, 4))}, checkpoint_id=folder)
    """

    def __init__(
        self,
        herd: "Herd",
        sparse: ShardedSparseHook | ShardedLocalExchange,
        saved_by: tuple[int, int] | int | None = None,
    ) -> None:
        """Wrap a herd.

        Args:
            herd: The herd to save or load.
            sparse: Its exchange.
            saved_by: (replicas, shards) of the mesh that saved what is to be loaded; those of now
                by default.

        Raises:
            ValueError: `saved_by` is not the shape of a mesh.
        """
        shape = sparse.mesh if saved_by is None else saved_by
        if isinstance(shape, int) or len(shape) != 2 or min(shape) < 1:
            raise ValueError(
                f"saved_by must be (replicas, shards) of a sharded model's mesh, got {saved_by!r}"
            )
        self._herd, self._sparse, self._saved_by = herd, sparse, tuple(shape)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; to load from another mesh, what of it to read."""
        sparse = self._sparse
        if self._saved_by == sparse.mesh:
            # Not gathered: every rank writes its own shards, which is what DCP is for.
            herd = self._herd.state_dict(gather=False)
            own = herd.pop(sparse.key)
            state = {"shared": pack(herd), self._worker_name(sparse.place): pack(own["worker"])}
            return state | dict(self._tensors(sparse.vectors(), sparse.place[0]))
        # DCP asks for a state before it loads, to learn what to read, and where to put tensors.
        state = {"shared": b"", self._worker_name((0, 0)): b""}
        for replica in self._replicas():
            state |= dict(self._tensors(sparse.vectors(), replica))
        return state

    def _replicas(self) -> range:
        """Return the saved replicas whose residuals this rank continues with."""
        replicas, own = self._saved_by[0], self._sparse.place[0]
        # As many replicas as before: each keeps its own residuals, in other shards.
        return range(own, own + 1) if replicas == self._sparse.mesh[0] else range(replicas)

    def _worker_name(self, place: tuple[int, int]) -> str:
        replicas, shards = self._saved_by
        return f"replica-{place[0]}-of-{replicas}-shard-{place[1]}-of-{shards}"

    def _tensors(
        self, vectors: Mapping[str, Mapping[str, Tensor]], replica: int
    ) -> Iterator[tuple[str, Any]]:
        """Yield each vector as a DTensor, under the name of its replica."""
        from torch.distributed.tensor import DTensor  # takes seconds, and is there by now

        for key, by_name in vectors.items():
            for name, local in by_name.items():
                like = self._sparse.parameters[name].sharded
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
        sparse, same = self._sparse, self._saved_by == self._sparse.mesh
        name = self._worker_name(sparse.place if same else (0, 0))
        for entry in ("shared", name):
            if not state.get(entry):
                raise ValueError(
                    f"state has no {entry!r}: was it saved on a mesh of another shape than "
                    f"{self._saved_by}, or before it was loaded?"
                )
        vectors = {
            key: {one: self._mean(state, key, one) for one in by_name}
            for key, by_name in sparse.vectors().items()
        }
        worker = unpack(state[name])
        self._herd.load_shared(unpack(state["shared"]))
        sparse.load_worker(worker, merged=not same)
        sparse.load_vectors(vectors)
        self._saved_by = sparse.mesh  # What is saved from now on is this mesh's own again.

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
