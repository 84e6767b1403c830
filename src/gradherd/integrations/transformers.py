"""transformers: a Trainer whose examples are ordered and whose ranks send few bytes.

    trainer = GradherdTrainer(model, args, train_dataset=data, order="cd-grab")
    trainer.train(resume_from_checkpoint=True)

It is also a mixin for a Trainer of your own: class MyTrainer(GradherdTrainer, TheirTrainer).

Checkpoints hold `herd.safetensors` beside the optimizer's state. On resume the Trainer skips the
batches of the epoch that were trained on, and the sampler leaves that to it.
"""

import os
from pathlib import Path
from typing import Any

from accelerate.data_loader import DataLoaderShard
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, SequentialSampler
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback

from gradherd.hooks.state import pack, unpack
from gradherd.integrations.accelerate import check_accelerator, ordered_shard
from gradherd.integrations.loaders import HerdOwner, HerdSettings
from gradherd.ordering.batches import LoopCount
from gradherd.ordering.sampler import OrderedSampler

FILE = "herd.safetensors"


class GradherdTrainer(HerdOwner, Trainer):
    """`transformers.Trainer` with an order, and with a sparsifier or local steps.

    As a mixin it must come first among the base classes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the Trainer.

        Args:
            *args: As for the Trainer.
            **kwargs: As for the Trainer; and order, unit, sparsify, local and rows, as in
                `HerdSettings`, and log_rows, whether to log norms of gradients, noise scale and
                herding bound as well. The seed of the order is `args.data_seed`, or `args.seed`.

        Raises:
            ValueError: The set-up would train on wrong examples, or is not supported.
        """
        names = {"order", "unit", "sparsify", "local", "rows"} & kwargs.keys()
        given = {name: kwargs.pop(name) for name in names}
        self._log_rows = kwargs.pop("log_rows", False)
        super().__init__(*args, **kwargs)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._settings = HerdSettings(**given, seed=seed)
        self._sampler: OrderedSampler | None = None
        self._count: LoopCount | None = None  # batches that this epoch has trained on
        self._skipped = 0  # batches that the Trainer skips in the first epoch of a resumed training
        ordered = self._settings.order is not None
        check_accelerator(self.accelerator, ordered=ordered)
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process drives {self.args.n_gpu} GPUs by nn.DataParallel, which gradherd "
                "does not support: start one process for each GPU with torchrun"
            )
        if ordered and self.args.train_sampling_strategy not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy={self.args.train_sampling_strategy!r} decides on the "
                "order itself: leave it at 'random', or give no order"
            )
        self.add_callback(_EpochCallback(self))

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Any:
        if self._settings.order is None:
            return super()._get_train_sampler(train_dataset)
        # A placeholder: get_train_dataloader puts the ordered sampler in its place.
        return SequentialSampler(train_dataset or self.train_dataset)  # type: ignore[arg-type]

    def get_train_dataloader(self) -> Any:
        """Return the training loader, with the ordered sampler in place of the Trainer's."""
        loader = super().get_train_dataloader()
        if self._settings.order is None:
            return loader
        batches = getattr(loader, "batch_sampler", None)
        # On several ranks Accelerate has put the batch sampler into one that shards.
        batches = getattr(batches, "batch_sampler", batches)
        own = getattr(batches, "sampler", None)
        if not isinstance(own, SequentialSampler):
            raise ValueError(
                f"the training loader has the sampler {type(own).__name__}, but the order decides: "
                "do not override get_train_dataloader with a sampler of its own"
            )
        # What Accelerate prepared shards once more; only the settings of it are kept.
        self.accelerator._dataloaders.remove(loader)
        self._sampler = self._settings.sampler_of(loader.dataset, self._train_batch_size)
        plain = {"kind": DataLoaderShard, "batches": BatchSampler}
        return ordered_shard(self.accelerator, loader, self._sampler, **plain)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._detach()  # from an earlier train() that failed
        self._skipped = 0
        self._herd = self._settings.attach(
            self.model_wrapped, self._sampler, self.accelerator.scaler, self.optimizer
        )
        checkpoint = kwargs.get("resume_from_checkpoint", args[-1] if args else None)
        if checkpoint is not None:
            self._load_herd(Path(checkpoint) / FILE)
        return prepared

    def _load_herd(self, file: Path) -> None:
        if not file.exists():
            raise ValueError(
                f"{file} is missing: the checkpoint was saved without gradherd, or with "
                "save_only_model=True, so the order cannot continue"
            )
        skipper = "sampler" if self.args.ignore_data_skip else "loader"
        self.herd.load_state_dict(unpack(file.read_bytes()), skipped_by=skipper)  # type: ignore[arg-type]
        if self._sampler is not None and not self.args.ignore_data_skip:
            self._skipped = self._sampler.start // self._sampler.batch_size

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self.args.save_only_model:
            state = self.herd.state_dict()  # on all ranks: rank 0 gets everyone's residuals
            folder = Path(self._get_output_dir(trial=trial))
            folder /= f"checkpoint-{self.state.global_step}"
            if self.args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
                draft = folder / f"{FILE}.draft"
                draft.write_bytes(pack(state))
                os.replace(draft, folder / FILE)
        super()._save_checkpoint(model, trial)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train on one batch, which is the next one of the loader."""
        # The Trainer fetches all batches of an update before it trains on the first.
        if self._count is not None:
            self._count.delivered += 1
        if self._herd is None:
            raise RuntimeError("this version of transformers trains without attaching gradherd")
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, and add the herd's numbers to those of the training."""
        if "loss" in logs and self._herd is not None:
            logs = logs | self._herd.scalars(rows=self._log_rows)
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate what all ranks share."""
        self._sync()
        return super().evaluate(*args, **kwargs)

    def _load_best_model(self) -> None:
        self._sync()  # before: an exchange afterwards would mix the best weights with the last
        super()._load_best_model()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, and leave the model as it was."""
        output = super().train(*args, **kwargs)
        self._detach()
        return output


class _EpochCallback(TrainerCallback):
    """Counts the batches of each epoch from where it begins."""

    def __init__(self, trainer: GradherdTrainer) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Expect the batches of a new epoch, or of the rest of a resumed one."""
        trainer = self._trainer
        if trainer._sampler is None:
            return
        # Once: the signs of a resumed epoch may still be on their way when the next one begins.
        skipped, trainer._skipped = trainer._skipped, 0
        if skipped:
            # As the Trainer computes what it skips.
            accumulated = args.gradient_accumulation_steps
            updates = max(-(-len(kwargs["train_dataloader"]) // accumulated), 1)
            skips = state.global_step % updates * accumulated
            if skips != skipped:
                raise ValueError(
                    f"the Trainer skips {skips} batches, but the order continues after {skipped}: "
                    "resume with the batch size and the gradient_accumulation_steps that the "
                    "checkpoint was saved with"
                )
        trainer._count = LoopCount(delivered=skipped)
        trainer._sampler.follow(trainer._count)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave all ranks equal weights."""
        self._trainer._sync()


class GradherdSeq2SeqTrainer(GradherdTrainer, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with an order, and with a sparsifier or local steps."""
