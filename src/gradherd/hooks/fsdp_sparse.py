"""The sparse exchange between replicas of a sharded model (HSDP of our own).

Inside a replica `fully_shard` reduces gradients as ever: a reduce-scatter gives every rank its
shard. Its all-reduce hook adds the shard to a vector of this rank's and leaves zeros in its place.
At the end of the backward the vector is exchanged with the ranks that hold the same shard in other
replicas, sparsely and with error feedback, and the mean is added to p.grad. Selection needs the
whole vector, so it cannot begin earlier.

Shapes: D elements of this rank's shards, K of them that are sent.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from gradherd.comm.collectives import all_gather
from gradherd.comm.world import World
from gradherd.flat import exchangeable, local_shard, plain_name
from gradherd.hooks.exchange import GradientExchange, ShardedExchange
from gradherd.hooks.fsdp_checks import ShardedWorlds
from gradherd.hooks.fsdp_torch import ShardedGroup, is_inner, on_backward_end
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.worker import scale_by


class ShardedSparseHook(ShardedExchange, GradientExchange):
    """Exchanges a sharded model's gradients sparsely between its replicas."""

    def __init__(
        self,
        model: nn.Module,
        settings: Sparsify,
        worlds: ShardedWorlds,
        world: World,
        scaler: GradScaler | None = None,
    ) -> None:
        """Hook into the model's groups. All ranks must do so at the same point.

        Args:
            model: The model, on which `fully_shard` was called with the shard dimension alone.
            settings: The method, its density and what else it needs.
            worlds: Which ranks hold the shards, and which the replicas.
            world: All of them.
            scaler: The GradScaler of the loop, if there is one: residuals are divided by its scale.

        Raises:
            ValueError: The gradients of a parameter cannot be sparsified.
        """
        parameters = exchangeable(model.named_parameters())
        super().__init__(parameters, settings, world, worlds.replicate, worlds.groups[0].device)
        self.shards = worlds.shard
        self._model, self._scaler = model, scaler
        self._slices = self.layout.slices
        # Groups may be reduced several times before an exchange: layers that are used twice, and
        # set_requires_all_reduce(False).
        self._grad = torch.zeros_like(self._worker.feedback.residual)
        self._touched: set[str] = set()
        self._averages = True
        self._handles: list[Any] = [on_backward_end(model, self._end_of_backward)]
        for group in worlds.groups:
            self._handles.append(group.note_present())
            self._handles.append(group.set_all_reduce_hook(self._collecting(group)))

    def _collecting(self, group: ShardedGroup) -> Callable[[Tensor], None]:
        """Return FSDP's all-reduce hook for a group."""

        def collect(reduced: Tensor) -> None:
            with self.stopwatch:
                self._collect(group, reduced)

        return collect

    def _collect(self, group: ShardedGroup, reduced: Tensor) -> None:
        """Add the flat result of a reduce-scatter to this rank's vector, and clear it."""
        if is_inner(self._model):
            raise RuntimeError(
                "the model is part of a larger one that fully_shard was called on: attach to that"
            )
        # Read here, in the backward: the loop may set it anew before each one.
        self._averages = group.averages_replicas
        # Torch divides after this hook, but what is cleared here never gets there.
        _, divisor = group.divide_factors(reduced.dtype)
        at = 0
        for parameter in group.noted:
            piece, name = reduced[at : at + parameter.local_numel], plain_name(parameter.name)
            if name in self._slices:
                self._grad[self._slices[name]].add_(piece, alpha=1 / divisor)
                self._touched.add(name)
                piece.zero_()
            else:  # It was frozen when the hook was attached, so it has no residual.
                self._average_whole(piece)
            at += parameter.padded_numel(self.shards.size)

    def _end_of_backward(self) -> None:
        """Exchange what this backward has reduced, and add the mean to p.grad."""
        # Without a reduction (set_requires_gradient_sync), or to be averaged over replicas later.
        if not self._touched or not self._averages:
            return
        with self.stopwatch, torch.no_grad():
            touched, self._touched = self._touched, set()
            self._exchange(touched)

    def _exchange(self, touched: set[str]) -> None:
        # Once per exchange: the loss scale may change between steps, and residuals of earlier steps
        # must stay comparable.
        loss_scale = self._scaler.get_scale() if self._scaler else 1.0
        self._worker.set_unit(loss_scale)
        if self._worker.settings.clip is not None:
            # The gradient of a replica: every rank of its shards has a part.
            own = torch.linalg.vector_norm(self._grad, dtype=torch.float64)
            norms, sent = all_gather(own.view(1), self.shards)
            self.total_bytes += sent
            whole = torch.linalg.vector_norm(norms)
            scale_by([self._grad], whole, self._worker.settings.clip * loss_scale)
        self._worker.add(0, self._grad, clear=True)
        # Inside a replica all ranks use the same parameters, or the reduce-scatter itself would
        # fail. Replicas may differ.
        flags = [name in touched for name in self.parameters]
        on_device = torch.tensor(flags, dtype=torch.uint8, device=self._grad.device)
        outcome, used = self._run(set(self.parameters), on_device)
        if outcome is None:
            for name in used:
                self._local_grad(name).fill_(torch.nan)
            return
        written = self._write(outcome.coordinates(), self._worker.mean_of(outcome), used)
        self._keep(outcome, written, used)

    def _local_grad(self, name: str) -> Tensor:
        """Return this rank's shard of p.grad, flat."""
        parameter = self.parameters[name]
        if parameter.grad is None:  # used by other replicas only
            parameter.grad = torch.zeros_like(parameter)
        return local_shard(parameter.grad).view(-1)

    def _write(self, indices: Tensor, mean: Tensor, used: set[str]) -> Tensor:
        """Add the (K,) mean to p.grad; return (K,) what the dtypes of the gradients could hold."""
        self._grad.index_copy_(0, indices, mean)  # it was cleared, and is again below
        for name in used:
            part, grad = self._grad[self._slices[name]], self._local_grad(name)
            if grad.dtype != part.dtype:
                limit = torch.finfo(grad.dtype).max
                part.copy_(part.clamp(-limit, limit).to(grad.dtype))
            grad.add_(part.to(grad.dtype))
        written = self._grad[indices]
        self._grad.index_fill_(0, indices, 0)
        return written

    def _vectors(self) -> dict[str, Tensor]:
        return super()._vectors() | {"partial": self._grad}

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._touched = set(self.parameters) if self._grad.any() else set()

    def close(self) -> None:
        """Leave the model, whose replicas nobody averages from now on."""
        super().close()
        for handle in self._handles:
            handle.remove()
