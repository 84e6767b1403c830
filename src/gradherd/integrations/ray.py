"""Ray Train: prepare a model and its loader inside the training function of a TorchTrainer.

    def train_loop(config):
        model, loader, herd = prepare(model, loader, order="cd-grab")
        ...
        ray.train.report({"loss": loss, **herd.scalars()}, checkpoint=...)

Save `herd.state_dict()`, called on all workers, with the model in rank 0's checkpoint, and load it
on all workers after a restart; their number may have changed.
"""

from typing import Any

import ray.train.torch
from torch import nn

from gradherd.hooks.herd import Herd
from gradherd.integrations.loaders import HerdSettings, with_sampler
from gradherd.ordering.batches import FollowedLoader
from gradherd.ordering.policy import Policy
from gradherd.rows.settings import RowSettings
from gradherd.sparsify.local import LocalSteps
from gradherd.sparsify.selector import Selector
from gradherd.sparsify.settings import Sparsify


def prepare(
    model: nn.Module,
    loader: Any,
    *,
    order: str | Policy | None = None,
    unit: int | str = "batch",
    sparsify: str | Selector | Sparsify | None = None,
    local: LocalSteps | None = None,
    optimizer: Any = None,
    rows: str | RowSettings = "auto",
    seed: int = 0,
    **model_options: Any,
) -> tuple[Any, Any, Herd]:
    """Do what `prepare_model` and `prepare_data_loader` do, with an order and few bytes.

    Args:
        model: The model, not prepared yet.
        loader: The training loader, not prepared yet, without shuffle.
        order: Order of the training examples, such as "cd-grab"; None leaves it to Ray.
        unit: Examples that are ordered as one; whole batches by default.
        sparsify: How DDP exchanges gradients, such as `ExDyna(density=0.01)`; None keeps DDP's.
        local: Steps that each worker takes on its own, such as `LocalSteps()`; call `herd.sync()`
            before you evaluate or report a model. None averages gradients at every step.
        optimizer: The optimizer of the loop; for `local` only.
        rows: How gradients are read for ordering; see `gradherd.attach`.
        seed: Seed of the order.
        **model_options: For `ray.train.torch.prepare_model`.

    Returns:
        The model, the loader and the herd.

    Raises:
        ValueError: The set-up would train on wrong examples, or is not supported.
    """
    settings = HerdSettings(
        order=order, unit=unit, sparsify=sparsify, local=local, rows=rows, seed=seed
    )
    strategy = model_options.get("parallel_strategy", "ddp")
    if strategy not in (None, "ddp"):
        raise ValueError(f"parallel_strategy must be 'ddp', got {strategy!r}")
    # Ray's loader passes for a DataLoader, and shows the attributes of the one inside.
    sampler = settings.sampler_before_prepare(loader, hasattr(loader, "_dataloader"))
    if sampler is None:
        loader = ray.train.torch.prepare_data_loader(loader)
    else:
        ordered = with_sampler(loader, sampler)
        # Ray's own loader is one batch ahead of the loop, so batches are counted outside of it.
        prepared = ray.train.torch.prepare_data_loader(ordered, add_dist_sampler=False)
        loader = FollowedLoader(prepared, sampler)
    model = ray.train.torch.prepare_model(model, **model_options)
    return model, loader, settings.attach(model, sampler, optimizer=optimizer)
