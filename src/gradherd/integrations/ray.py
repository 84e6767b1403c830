"""Ray Train: prepare a model and its loader inside the training function of a TorchTrainer.

    def train_loop(config):
        model, loader, herd = prepare(model, loader, order="cd-grab")
        ...
        ray.train.report({"loss": loss, **herd.scalars()}, checkpoint=...)

Save `herd.state_dict()`, called on all workers, with the model in rank 0's checkpoint, and load it
on all workers after a restart; their number may have changed.
"""

from dataclasses import fields
from typing import Any

import ray.train.torch
from torch import nn

from gradherd.hooks.herd import Herd
from gradherd.integrations.loaders import HerdSettings, with_sampler
from gradherd.ordering.batches import FollowedLoader


def prepare(
    model: nn.Module,
    loader: Any,
    *,
    optimizer: Any = None,
    **options: Any,
) -> tuple[Any, Any, Herd]:
    """Do what `prepare_model` and `prepare_data_loader` do, with an order and few bytes.

    Args:
        model: The model, not prepared yet.
        loader: The training loader, not prepared yet, without shuffle.
        optimizer: The optimizer of the loop; for `local` only.
        **options: order, unit, sparsify, local, rows and seed, as in `HerdSettings`; all others
            are for `ray.train.torch.prepare_model`. With local steps, call `herd.sync()` before
            you evaluate or report a model.

    Returns:
        The model, the loader and the herd.

    Raises:
        ValueError: The set-up would train on wrong examples, or is not supported.
    """
    names = {field.name for field in fields(HerdSettings)} & options.keys()
    settings = HerdSettings(**{name: options.pop(name) for name in names})
    strategy = options.get("parallel_strategy", "ddp")
    if strategy not in (None, "ddp"):
        raise ValueError(f"parallel_strategy must be 'ddp', got {strategy!r}")
    # Ray's loader passes for a DataLoader, and shows the attributes of the one inside.
    sampler = settings.make_sampler(loader, prepared=hasattr(loader, "_dataloader"))
    if sampler is None:
        loader = ray.train.torch.prepare_data_loader(loader)
    else:
        ordered = with_sampler(loader, sampler)
        # Ray's own loader is one batch ahead of the loop, so batches are counted outside of it.
        prepared = ray.train.torch.prepare_data_loader(ordered, add_dist_sampler=False)
        loader = FollowedLoader(prepared, sampler)
    model = ray.train.torch.prepare_model(model, **options)
    return model, loader, settings.attach(model, sampler, optimizer=optimizer)
