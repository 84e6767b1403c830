"""Accelerate: prepare a model and its loader so that examples are sharded once and skipped once.

    model, optimizer, loader, herd = prepare(accelerator, model, optimizer, loader, order="cd-grab")

`accelerator.prepare` would shard the loader of an ordered sampler a second time. So the loader is
built here, from Accelerate's own class: it moves batches to the device, ends accumulation at the
end of the data, and is known to `accelerator.save_state` and `load_state`.
"""

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import BatchSampler

from gradherd.hooks.herd import Herd
from gradherd.integrations.loaders import HerdSettings
from gradherd.ordering.batches import FollowedIterator
from gradherd.ordering.sampler import OrderedSampler

_UNSUPPORTED = ("DEEPSPEED", "MEGATRON_LM", "XLA")
# What a user may have set on the loader, besides its data, batches and order.
_OPTIONS = (
    "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator "
    "prefetch_factor persistent_workers"
).split()


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    *others: Any,
    **settings: Any,
) -> tuple[Any, ...]:
    """Do what `accelerator.prepare` does, with an order and few bytes.

    The herd is registered with the accelerator: `save_state` saves it, and after `load_state` the
    loader continues where the epoch was interrupted, with or without
    `accelerator.skip_first_batches`.

    Args:
        accelerator: The accelerator.
        model: The model, not prepared yet.
        optimizer: Its optimizer, not prepared yet.
        loader: The training loader, not prepared yet, without shuffle.
        *others: What else to prepare: schedulers, evaluation loaders.
        **settings: order, unit, sparsify, local, rows and seed, as in `HerdSettings`. With local
            steps, call `herd.sync()` before you evaluate or save a model.

    Returns:
        Model, optimizer, loader and the others, prepared; then the herd.

    Raises:
        ValueError: The set-up would train on wrong examples, or is not supported.
    """
    herding = HerdSettings(**settings)
    shards = herding.sparsify is None and herding.local is None
    check_accelerator(accelerator, ordered=herding.order is not None, shards=shards)
    prepared = getattr(loader, "_is_accelerate_prepared", False)
    sampler = herding.make_sampler(loader, prepared=prepared)
    if sampler is None:
        model, optimizer, loader, *others = accelerator.prepare(model, optimizer, loader, *others)
    else:
        model, optimizer, *others = accelerator.prepare(model, optimizer, *others)
        loader = ordered_shard(accelerator, loader, sampler)
        _skip_once(accelerator, loader)
    herd = herding.attach(model, sampler, accelerator.scaler, optimizer)
    accelerator.register_for_checkpointing(SavedHerd(herd, None if sampler is None else loader))
    return (model, optimizer, loader, *others, herd)


def check_accelerator(accelerator: Accelerator, *, ordered: bool, shards: bool = False) -> None:
    """Raise ValueError unless gradients and examples arrive as expected; `shards` allows FSDP2."""
    kind = accelerator.distributed_type
    if kind in [getattr(DistributedType, name) for name in _UNSUPPORTED] or (
        kind == DistributedType.FSDP and not (shards and accelerator.is_fsdp2)
    ):
        raise ValueError(
            f"Accelerate runs with {kind.value}, which this integration does not support: use DDP, "
            "or fsdp_version=2 with an order alone, or shard the model with "
            "fully_shard in a loop of your own and attach to it"
        )
    mesh = accelerator.parallelism_config
    if mesh is not None and mesh.non_data_parallel_size > 1:
        # Ranks would share examples, but every rank counts as a worker with its own.
        raise ValueError(
            f"parallelism_config puts {mesh.non_data_parallel_size} ranks on the same examples, "
            "which this integration does not support: leave out tp_size, cp_size and sp_size"
        )
    if not ordered:
        return
    config = accelerator.dataloader_config
    for name in ("split_batches", "dispatch_batches", "use_stateful_dataloader"):
        if getattr(config, name):
            raise ValueError(
                f"DataLoaderConfiguration({name}=True) does not go with an order: every rank draws "
                "its own batches, and the herd's state knows the position; leave it at its default"
            )


class OrderedDataLoader(DataLoaderShard):
    """Accelerate's loader of one rank, for batches that are this rank's own already."""

    def __iter__(self) -> Iterator[Any]:
        sampler = self.batch_sampler.sampler
        number, epoch = self.iteration, sampler.epoch
        self.batch_sampler.drawn_by_loader = True
        try:
            # Accelerate's loader is one batch ahead of the loop, so batches are counted here.
            yield from FollowedIterator(super().__iter__, sampler)
        finally:
            self.batch_sampler.drawn_by_loader = False
            # Accelerate counts no epoch that was broken off. It would be named to the sampler
            # again, which then began it anew: the same examples for ever.
            trained = sampler.epoch != epoch or sampler.state_dict()["position"] > sampler.start
            if trained and self.iteration == number:
                self.iteration += 1


class OrderedBatches(BatchSampler):
    """The batches of an ordered sampler, for its own loader; nobody may skip some of them."""

    drawn_by_loader = False
    """Whether the loader itself is being iterated."""

    def __iter__(self) -> Iterator[list[int]]:
        # accelerate.skip_first_batches makes another loader around these batches.
        if not self.drawn_by_loader:
            raise ValueError(
                "skip_first_batches would skip batches of an ordered loader twice: call "
                "accelerator.skip_first_batches(loader, n), or just iterate over the loader, which "
                "continues where the loaded state was saved"
            )
        return super().__iter__()


def ordered_shard(
    accelerator: Accelerator,
    loader: Any,
    sampler: OrderedSampler,
    *,
    kind: type[Any] = OrderedDataLoader,
    batches: type[BatchSampler] = OrderedBatches,
) -> Any:
    """Return a prepared loader of a `kind` that draws from `sampler`; the rest as the user set it.

    The accelerator gets to know it.
    """
    prepared = kind(
        loader.dataset,
        device=accelerator.device if accelerator.device_placement else None,
        batch_sampler=batches(sampler, sampler.batch_size, loader.drop_last),
        # Otherwise gather_for_metrics cuts off what the last batch repeats, which it takes to be
        # at the end of the data set: an order repeats other examples.
        _drop_last=True,
        _non_blocking=accelerator.non_blocking,
        **{name: getattr(loader, name) for name in _OPTIONS},
    )
    prepared._is_accelerate_prepared = True  # accelerator.prepare leaves it alone from now on
    accelerator._dataloaders.append(prepared)
    return prepared


class SavedHerd:
    """What `accelerator.save_state` saves, asking on all ranks, and `load_state` loads."""

    def __init__(self, herd: Herd, loader: Any) -> None:
        self._herd, self._loader = herd, loader

    def state_dict(self) -> dict[str, Any]:
        """Return the herd's state; rank 0's, which is the one saved, holds those of all ranks."""
        return self._herd.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was saved, also in a process that has trained further."""
        self._herd.load_state_dict(state)
        if self._loader is not None:
            # The loader counts epochs by itself and names them to the sampler. A number beyond
            # the restored epoch would end that epoch at once.
            self._loader.iteration = self._herd.sampler.epoch


def _skip_once(accelerator: Accelerator, loader: OrderedDataLoader) -> None:
    """Let `accelerator.skip_first_batches` leave an ordered loader to skip by itself."""
    skip = accelerator.skip_first_batches

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if dataloader is not loader:
            return skip(dataloader, num_batches)
        sampler = loader.batch_sampler.sampler
        position = sampler.start // sampler.batch_size
        if num_batches != position:
            raise ValueError(
                f"num_batches is {num_batches}, but the herd's state was saved after {position} "
                "batches of this epoch: call accelerator.load_state first, and skip as many "
                "batches as were trained on"
            )
        return loader

    accelerator.skip_first_batches = skip_first_batches
