"""What `attach` gives back: both halves of a model's training in one handle."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradherd.attach.feedback import Link
from gradherd.attach.sparse_hook import SparseHook
from gradherd.attach.state import HerdState
from gradherd.ordering.sampler import OrderedSampler

log = logging.getLogger("gradherd")


class Herd:
    """What connects a model with its order, its sparsifier, or both. Made by `attach`."""

    def __init__(self, link: Link | None, sparse: SparseHook | None) -> None:
        self._link = link
        self._sparse = sparse

    @property
    def place(self) -> tuple[int, int]:
        """Which rank this is, and of how many."""
        if self._link is not None:
            return self._link.sampler.world.rank, self._link.sampler.world.size
        assert self._sparse is not None
        return self._sparse.place

    @property
    def sampler(self) -> OrderedSampler:
        """The sampler that learns."""
        return self._ordered("sampler").sampler

    def _ordered(self, what: str) -> Link:
        if self._link is None:
            raise RuntimeError(f"{what} needs an order: attach(model, order=sampler, ...)")
        return self._link

    def observe(self, indices: Sequence[int] | Tensor) -> None:
        """Tell the examples of the batch at hand, for loaders that deliver out of order.

        Call it once for each batch, between its arrival and the optimizer's step. Rows then
        wait for the end of the epoch and are learned in the order of the sampler.
        """
        self._ordered("observe()").observe(indices)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Ignore backwards inside: they are not for examples of the sampler."""
        with contextlib.ExitStack() as stack:
            if self._link is not None:
                stack.enter_context(self._link.pause())
            yield

    def finish(self) -> None:
        """Feed back what waits and let the sampler learn it, on all ranks together."""
        if self._link is not None:
            self._link.finish()

    def metrics(self) -> dict[str, Any]:
        """Return the figures of both halves.

        Ordering: epoch, how much of it was fed back, what was sent for ordering alone, and the
        seconds that training has waited for it; total_bytes and exchange_seconds of the gradients
        themselves where both share a trip.
        Sparsifying: those of the last step (selected, per_rank, threshold, density, padding,
        residual_norm of this rank, bytes), and steps, skipped_steps, total_bytes and
        exchange_seconds so far.
        """
        found: dict[str, Any] = {}
        if self._link is not None:
            found |= self._link.metrics()
        if self._sparse is not None:
            found |= self._sparse.metrics()
        return found

    def last_step(self) -> dict[str, Any]:
        """Return the sparsifier's figures of the last step, without what costs time; else {}."""
        return {} if self._sparse is None else self._sparse.last_step()

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides what comes next. All ranks must call it.

        "ordering" and "sampler" are the same on all ranks; "sparsify" is this rank's own, and
        every rank must save its own.
        """
        state: dict[str, Any] = {}
        if self._link is not None:
            state |= self._link.state_dict()
        if self._sparse is not None:
            state["sparsify"] = self._sparse.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken. Call it before iterating, on all ranks.

        On another number of ranks: load what `merge_states` makes of the states of all of them.
        One warning, on rank 0, then says what has changed.
        """
        if self._sparse is not None:
            if "sparsify" not in state:
                raise ValueError("state has no 'sparsify': it was saved without a sparsifier")
            self._sparse.check_state(state["sparsify"])
        if self._link is not None:
            if "ordering" not in state:
                raise ValueError("state has no 'ordering': it was saved without an order")
            self._link.load_state_dict(state)
        if self._sparse is not None:
            self._sparse.load_state_dict(state["sparsify"])
        if self.place[0] == 0:
            self._tell_change(state)

    def _tell_change(self, state: Mapping[str, Any]) -> None:
        """Say once what is not as it would have been with as many ranks as before."""
        said, before = [], 0
        came_from = self._link and self._link.sampler.ordering.came_from
        if self._link is not None and came_from:
            sampler, (_, _, before) = self._link.sampler, came_from
            rest = sampler.ordering.rest
            if rest is not None:
                said.append(f"{len(rest)} units of epoch {sampler.epoch} are left: they are dealt")
                said[-1] += " out anew, and nothing is learned from them"
            said.append("each rank's order is made of the old ones")
        if self._sparse is not None and state["sparsify"]["workers"] != self.place[1]:
            before = state["sparsify"]["workers"]
            said.append("each rank goes on with the mean of all residuals")
        if before:
            log.warning(
                "a state of %d ranks goes on with %d: %s", before, self.place[1], "; ".join(said)
            )

    def stateful(self, saved_by: int | None = None) -> HerdState:
        """Return this herd in the form that torch.distributed.checkpoint saves and loads.

        Args:
            saved_by: How many ranks have saved what is to be loaded, where they are not as many.
        """
        return HerdState(self, saved_by)

    def detach(self) -> None:
        """Leave model and sampler as they were; what was learned stays in the sampler.

        DDP keeps its hook for ever; it only averages from now on. What was kept is not sent any
        more: save `state_dict()` first if it matters.
        """
        if self._link is not None:
            self._link.detach()
        if self._sparse is not None:
            self._sparse.close()
