"""Lightning: a callback that orders the training loader, sends few bytes, saves and logs.

    trainer = Trainer(strategy="ddp", callbacks=[GradherdCallback(order="cd-grab")])

What happens when, inside `Trainer.fit`: the callback's `setup` puts itself between the trainer and
the training loader. When the trainer asks for that loader, the strategy has wrapped the model: the
loader gets its sampler, the herd is attached, and a state from the checkpoint is loaded, all before
the loader is iterated for the first time.
"""

from collections.abc import Callable
from typing import Any

from lightning.fabric.wrappers import _FabricModule
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from gradherd.hooks.attach import attach
from gradherd.hooks.herd import Herd
from gradherd.integrations.loaders import HerdOwner, HerdSettings, with_sampler
from gradherd.ordering.policy import Policy
from gradherd.ordering.sampler import OrderedSampler


class GradherdCallback(HerdOwner, Callback):
    """Order the training examples of a LightningModule, and exchange few bytes."""

    def __init__(
        self, order: str | Policy | None = None, *, log_rows: bool = False, **settings: Any
    ) -> None:
        """Note the settings; nothing happens before `Trainer.fit`.

        Args:
            order: Order of the training examples, such as "cd-grab"; None keeps the loader's.
            log_rows: Whether to log norms of gradients, noise scale and herding bound as well.
            **settings: unit, sparsify, local, rows and seed, as in `HerdSettings`.
        """
        self._settings = HerdSettings(order=order, **settings)
        self._log_rows = log_rows
        self._sampler: OrderedSampler | None = None
        self._loaded: dict[str, Any] | None = None  # waits for the herd

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the strategy, and wait for the training loader."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy):
            raise ValueError(
                f"GradherdCallback works with strategy='ddp', ModelParallelStrategy or a single "
                f"device, got {type(strategy).__name__}"
            )
        self._detach()  # from an earlier fit that failed
        self._herd = self._sampler = None
        if self._settings.order is not None:
            # Earlier than any other hook: `trainer.estimated_stepping_batches`, which many a
            # configure_optimizers reads, asks for the loader while the strategy is set up.
            source = trainer.fit_loop._data_source
            source.dataloader = self._ordering(trainer, source.dataloader)

    def _ordering(self, trainer: Trainer, request: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that requests the training loader and gives it the sampler."""

        def ordered() -> Any:
            if trainer.overfit_batches:
                raise ValueError(
                    "overfit_batches replaces the sampler, so nothing can be ordered: remove "
                    "GradherdCallback or overfit_batches"
                )
            loader = request()
            if self._sampler is None:
                self._sampler = self._settings.make_sampler(loader)
                assert self._sampler is not None
                if self._settings.local is None:
                    self._attach_to(trainer)
            elif len(loader.dataset) != self._sampler.sharding.examples:
                # reload_dataloaders_every_n_epochs
                raise ValueError(
                    f"the reloaded training data has {len(loader.dataset)} examples, before it had "
                    f"{self._sampler.sharding.examples}: an order needs the same examples in every "
                    "epoch"
                )
            return with_sampler(loader, self._sampler, follow=True)

        return ordered

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach a sparsifier; the strategy has wrapped the model by now."""
        if self._settings.order is None and self._settings.local is None:
            self._attach_to(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach local steps: weights and optimizers of a checkpoint are loaded by now."""
        if self._settings.local is not None:
            self._attach_to(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate what all ranks share."""
        if not trainer.sanity_checking:
            self._sync()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave all ranks equal weights."""
        self._sync()

    def _attach_to(self, trainer: Trainer) -> None:
        # Lightning does not skip batches of an epoch it resumes: it counts them and takes what the
        # loader gives. So it is the sampler that starts where the epoch continues.
        scaler, optimizers = getattr(trainer.precision_plugin, "scaler", None), trainer.optimizers
        if self._settings.local is not None and len(optimizers) != 1:
            raise ValueError(f"local steps need one optimizer, got {len(optimizers)}")
        model = trainer.strategy.model
        self._herd = self._settings.attach(model, self._sampler, scaler, *optimizers[:1])
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._herd.load_state_dict(loaded)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the herd; Lightning asks on all ranks and saves rank 0's."""
        if self._herd is None:
            return self._loaded or {}
        return self._herd.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint, as soon as the model and the loader are there."""
        if self._herd is not None and state_dict:  # a strategy that restores after it was set up
            self._herd.load_state_dict(state_dict)
        else:
            self._loaded = dict(state_dict) or None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the herd's numbers, at those steps at which the trainer logs."""
        if trainer._logger_connector.should_update_logs:
            self.log_dict(self.herd.scalars(rows=self._log_rows))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the model as it was."""
        if stage == "fit":
            self._detach()


def attach_fabric(model: Any, **options: Any) -> Herd:
    """Attach to a model that `Fabric.setup` returned.

    The loader is made with an `OrderedSampler`, which `fabric.setup_dataloaders` keeps.

    Args:
        model: The model, set up by Fabric.
        **options: As for `gradherd.attach`: order, sparsify, local, optimizer, rows. Fabric's
            GradScaler, if there is one, is passed on.

    Raises:
        ValueError: Fabric has not set up this model.
    """
    if not isinstance(model, _FabricModule):
        raise ValueError(
            f"attach_fabric needs the model that fabric.setup() returned, got a "
            f"{type(model).__name__}"
        )
    # Fabric's wrapper is not the module that DDP calls: hooks belong on the one inside.
    scaler = getattr(model._strategy.precision, "scaler", None)
    return attach(model._forward_module, scaler=scaler, **options)
