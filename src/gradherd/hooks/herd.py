"""What `attach` returns: both halves of a model's training in one handle."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from torch import Tensor, nn

from gradherd.comm.checks import check_state
from gradherd.comm.world import World
from gradherd.hooks.exchange import ModelExchange
from gradherd.hooks.feedback import OrderFeedback, attached_models
from gradherd.hooks.local_steps import LocalExchange
from gradherd.hooks.state import NOT_FOR_DCP, HerdState, RefuseDCP, part_of_rank
from gradherd.ordering.batches import FollowedLoader
from gradherd.ordering.sampler import OrderedSampler
from gradherd.rows.layer_plan import unwrap_model

log = logging.getLogger("gradherd")


class Herd:
    """Connects a model with its order, its sparsifier or local steps, or both. Made by `attach`."""

    def __init__(
        self,
        model: nn.Module,
        feedback: OrderFeedback | None,
        exchange: ModelExchange | None,
    ) -> None:
        self._feedback = feedback
        self._exchange = exchange
        self.attached = True
        """Whether `detach` was not called yet."""
        # Weak, so that a model dropped without detach() can be freed, and its sampler attached
        # again.
        self._model = weakref.ref(unwrap_model(model))
        attached_models.add(unwrap_model(model))

    def _refuse_detached(self, what: str) -> None:
        """Raise RuntimeError after detach: a stale herd must not look as if it still worked."""
        if not self.attached:
            raise RuntimeError(f"{what} needs a herd that is attached: this one was detached")

    @property
    def world(self) -> World:
        """Rank of this process, and number of ranks."""
        if self._feedback is not None:
            return self._feedback.sampler.world
        assert self._exchange is not None
        return self._exchange.world

    @property
    def sampler(self) -> OrderedSampler:
        """The sampler that learns."""
        return self._ordered("sampler").sampler

    def _ordered(self, what: str) -> OrderFeedback:
        if self._feedback is None:
            raise RuntimeError(f"{what} needs an order: attach(model, order=sampler, ...)")
        return self._feedback

    def observe(self, indices: Sequence[int] | Tensor) -> None:
        """Name the examples of the current batch, for loaders that deliver out of order.

        Call it once for each batch, between its arrival and the optimizer's step. Rows are then
        held until the end of the epoch and learned in the order of the sampler.

        Args:
            indices: Indices of the examples into the data set, as the loader delivered them.
        """
        self._refuse_detached("observe()")
        self._ordered("observe()").observe(indices)

    def batches(self, loader: Any) -> Any:
        """Return a loader whose batches are counted as the loop receives them.

        Checks that the loader fits the sampler, and follows one that fetches ahead, by worker
        processes or in a wrapper of one's own: its sampler is asked for batches long before the
        loop trains on them. Iterate over what this returns: `for x, y in herd.batches(loader)`. It
        changes nothing without an order.

        Args:
            loader: The loader with this herd's sampler, or a wrapper of it that delivers its
                batches in order.

        Raises:
            ValueError: The loader delivers out of order, shards once more, or has another batch
                size or data set than the sampler.
        """
        self._refuse_detached("batches()")
        if self._feedback is None:
            return loader
        return FollowedLoader(loader, self._feedback.sampler)

    def pause(self) -> AbstractContextManager[None]:
        """Ignore backwards inside: they do not belong to examples of the sampler."""
        self._refuse_detached("pause()")
        return nullcontext() if self._feedback is None else self._feedback.pause()

    def finish(self) -> None:
        """Feed back what is waiting and let the sampler learn it, on all ranks together."""
        self._refuse_detached("finish()")
        if self._feedback is not None:
            self._feedback.finish()

    def sync(self) -> None:
        """Exchange local steps now, also in the middle of a phase. All ranks must call it.

        Afterwards parameters are equal on all ranks: call it at the end of training, and where
        ranks evaluate or save one model together.

        Raises:
            RuntimeError: There are no local steps, or a rank does not call it.
        """
        self._refuse_detached("sync()")
        if not isinstance(self._exchange, LocalExchange):
            raise RuntimeError("sync() needs local steps: attach(model, optimizer=..., local=...)")
        self._exchange.sync()

    def shared_weights(self) -> AbstractContextManager[None]:
        """Swap in the weights that all ranks share, to evaluate or save them.

        Nothing is exchanged: these are the weights after the last exchange. On exit this rank's own
        parameters and buffers are restored.
        """
        self._refuse_detached("shared_weights()")
        exchange = self._exchange
        return exchange.shared_weights() if isinstance(exchange, LocalExchange) else nullcontext()

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of both halves.

        Ordering: epoch, how much of it was fed back and how much in all, the bytes sent for
        ordering alone and to compare ranks' batches, and the seconds that training has waited for
        it; also total_bytes and exchange_seconds of the gradients themselves where both share one
        exchange. bytes_in_all is the sum of all of them.
        Sparsifying: those of the last step (selected, per_rank, threshold, density, padding,
        residual_norm of this rank, bytes), and steps, skipped_steps, total_bytes and
        exchange_seconds so far. Local steps: the same of the last exchange, and local_steps and
        exchanges so far.
        """
        metrics: dict[str, Any] = {}
        if self._feedback is not None:
            metrics |= self._feedback.metrics()
        if self._exchange is not None:
            metrics |= self._exchange.metrics()
        sent = ("total_bytes", "bytes_for_ordering", "bytes_for_comparing")
        return metrics | {"bytes_in_all": sum(metrics.get(name, 0) for name in sent)}

    def scalars(self, *, rows: bool = False) -> dict[str, float]:
        """Return the metrics that are scalars, for any logger, with the prefix "herd/".

        They are computed by this call (the residual's norm, for example), so they cost nothing
        unless it is made. Every rank may call it on its own.

        Args:
            rows: Whether to add statistics of the rows: quantiles of gradient norms, their noise
                scale and the herding bound of the last epoch. The first call with True starts to
                measure them; norms are there from the next batch on, the bound after a whole epoch.

        Returns:
            Floats only: loggers refuse strings and lists, and frameworks own keys such as "epoch".
        """
        metrics = self.metrics()
        if rows and self._feedback is not None:
            metrics |= self._feedback.row_scalars()
        return {
            f"herd/{name}": float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float)
        }

    def last_step(self) -> dict[str, Any]:
        """Return the metrics of the last exchange that are free; {} without a sparsifier."""
        return {} if self._exchange is None else self._exchange.last_step()

    def state_dict(self, *, gather: bool = True) -> dict[str, Any]:
        """Return everything that determines how training continues. All ranks must call it.

        "ordering", "sampler" and "rows" are the same on all ranks. Residuals differ: with `gather`,
        rank 0's "sparsify" holds those of all ranks, so it is enough that it saves its state. That
        takes the memory of one fp32 model for each rank on rank 0's CPU (two with momentum). With
        local steps it is "local", which also holds the weights of each rank: the model's own
        state is that of one rank only. torch.distributed.checkpoint refuses to save
        it: give that `stateful()`.

        Args:
            gather: Whether rank 0 gets the residuals of all ranks. With False every rank must save
                its own state, and nothing is sent for it.
        """
        # First, so that DCP comes to it before anything else.
        state: dict[str, Any] = {NOT_FOR_DCP: RefuseDCP()}
        if self._feedback is not None:
            state |= self._feedback.state_dict()
        if self._exchange is not None:
            state[self._exchange.key] = self._exchange.state_dict(gather)
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], *, skipped_by: Literal["sampler", "loader"] = "sampler"
    ) -> None:
        """Continue where `state_dict` was taken. Call it before iterating, on all ranks.

        All ranks may load rank 0's state, also on another number of ranks; where every rank has
        saved its own, each loads its own. States that were not gathered must be merged by
        `merge_states` for another number of ranks. Rank 0 then warns once about what has changed.
        With local steps this sets each rank's parameters: load the model first.

        Args:
            state: What `state_dict` returned.
            skipped_by: Who skips the batches of the epoch that were trained on before: the sampler,
                or "loader" if the framework skips them by itself.
        """
        self._refuse_detached("load_state_dict()")
        check_state(state)
        part: Mapping[str, Any] = {}
        if self._exchange is not None:
            key = self._exchange.key
            if key not in state:
                what = "a sparsifier" if key == "sparsify" else "local steps"
                raise ValueError(f"state has no {key!r}: it was saved without {what}")
            part = part_of_rank(state[key], self._exchange.peers, key)
            self._exchange.check_state(part)
        # Only after the checks of both halves: a herd that is half loaded would go on training.
        if self._feedback is not None:
            if "ordering" not in state:
                raise ValueError("state has no 'ordering': it was saved without an order")
            self._feedback.load_state_dict(state, skipped_by)
        if self._exchange is not None:
            self._exchange.load_state_dict(part)
        if self.world.rank == 0:
            self._warn_of_new_world(state)

    def _warn_of_new_world(self, state: Mapping[str, Any]) -> None:
        """Warn once about what differs from a run with a constant number of ranks."""
        changes, before = [], 0
        feedback = self._feedback
        if feedback is not None and (old := feedback.sampler.ordering.resharded_from):
            sampler, (_, _, before) = feedback.sampler, old
            if (rest := sampler.ordering.rest) is not None:
                changes.append(
                    f"the {len(rest)} units left of epoch {sampler.epoch} are striped over the new "
                    "ranks, and nothing is learned from them"
                )
            changes.append("each rank's order is made of the old ones")
        exchange = self._exchange
        if exchange is not None and state[exchange.key]["workers"] != exchange.peers.size:
            before = state[exchange.key]["workers"]
            means = "residuals" if exchange.key == "sparsify" else "residuals and weights"
            changes.append(f"each rank continues with the mean of all {means}")
        if before:
            log.warning(
                "a state of %d ranks continues on %d: %s",
                before,
                self.world.size,
                "; ".join(changes),
            )

    def stateful(self, saved_by: int | tuple[int, int] | None = None) -> HerdState:
        """Return this herd in the form that torch.distributed.checkpoint saves and loads.

        Args:
            saved_by: Number of ranks that saved what is to be loaded, if it was another number;
                with the residuals of a sharded model, (replicas, shards) of the mesh.
        """
        return HerdState(self, saved_by, self._exchange)

    def detach(self) -> None:
        """Remove all hooks from model and sampler; the sampler keeps what it has learned.

        DDP cannot unregister a hook: it stays, and only averages from now on. Residuals are not
        sent any more: save `state_dict()` first if they matter.
        """
        if not self.attached:
            return
        self.attached = False
        if (model := self._model()) is not None:
            attached_models.discard(model)
        try:
            # Ordering first: it may still need a collective, while an exchange has none at its end.
            if self._feedback is not None:
                self._feedback.detach()
        finally:
            if self._exchange is not None:
                self._exchange.close()
