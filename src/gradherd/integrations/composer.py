"""Composer: a callback that orders the training loader, sends few bytes, saves and logs.

    trainer = Trainer(..., callbacks=[HerdCallback(order="cd-grab")])

Composer wraps the model and loads a checkpoint while the Trainer is made, and calls `fit_start`
before it iterates. There the loader gets its sampler, the herd is attached, and a loaded state
goes in. On resume Composer would run through the batches of all epochs before ("spin"); it leaves
that to loaders which know their position, as an ordered one does.
"""

from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from torch.utils.data import DistributedSampler, SequentialSampler

from gradherd.integrations.loaders import HerdCallbackBase, with_sampler
from gradherd.ordering.policy import Policy
from gradherd.ordering.sampler import OrderedSampler


class HerdCallback(HerdCallbackBase, Callback):
    """Order the training examples of a ComposerModel, and exchange few bytes."""

    def __init__(
        self, order: str | Policy | None = None, *, log_every: int = 50, **options: Any
    ) -> None:
        """Note the settings; nothing happens before `Trainer.fit`.

        Args:
            order: Order of the training examples, such as "cd-grab"; None keeps the loader's.
            log_every: Batches between two logs.
            **options: log_rows, and unit, sparsify, local, rows and seed as in `HerdSettings`.
        """
        super().__init__(order, **options)
        if log_every < 1:
            raise ValueError(f"log_every must be at least 1, got {log_every}")
        self._log_every = log_every

    def fit_start(self, state: State, logger: Logger) -> None:
        """Put the sampler in, attach, and continue from a checkpoint."""
        if self._herd is not None:  # another fit() of the same Trainer goes on
            return
        if state.fsdp_enabled:
            raise ValueError("HerdCallback works with DDP or one process, but Composer uses FSDP")
        sampler = None
        if self._settings.order is not None:
            loader = state.dataloader
            sampler = self._make_sampler(loader)
            size = "auto" if state.auto_microbatching else state.device_train_microbatch_size
            if size not in (None, sampler.batch_size):
                raise ValueError(
                    f"device_train_microbatch_size is {size}, but an order needs whole batches of "
                    f"{sampler.batch_size}: leave it out"
                )
            if self._loaded is not None and int(state.dataloader_len) < len(loader):
                # Composer would count the batches of the interrupted epoch from 0 again.
                raise ValueError(
                    f"train_subset_num_batches={int(state.dataloader_len)} ends epochs early, and "
                    "Composer cannot resume such an epoch: leave it out"
                )
            length = state.dataloader_len
            ordered = with_sampler(loader, sampler, follow=True)
            state.set_dataloader(ordered, state.dataloader_label, length)
        scaler = state.scaler if state.scaler is not None and state.scaler.is_enabled() else None
        if self._attach(state.model, sampler, scaler, state.optimizers) and sampler is not None:
            state.dataset_resumption["train"] = True  # the sampler skips, Composer does not

    def _make_sampler(self, loader: Any) -> OrderedSampler:
        own = getattr(loader, "sampler", None)
        # Composer insists on a DistributedSampler at several ranks; ours takes its place.
        if type(own) is DistributedSampler:
            if own.shuffle:
                raise ValueError(
                    "the training loader's sampler shuffles, but the order decides: use "
                    "composer.utils.dist.get_sampler(dataset, shuffle=False)"
                )
            loader = with_sampler(loader, SequentialSampler(loader.dataset))
        return self._settings.make_sampler(loader)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the herd's numbers every few batches."""
        if int(state.timestamp.batch) % self._log_every == 0:
            logger.log_metrics(self.herd.scalars(rows=self._log_rows))

    def eval_start(self, state: State, logger: Logger) -> None:
        """Evaluate what all ranks share."""
        self._sync()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Leave all ranks equal weights."""
        self._sync()

    def close(self, state: State, logger: Logger) -> None:
        """Leave the model as it was."""
        if self._herd is not None:
            self._herd.detach()
            self._herd = None
