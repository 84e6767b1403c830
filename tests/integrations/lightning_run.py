"""The suite's training in Lightning."""

from types import SimpleNamespace

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import FSDPStrategy
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from gradherd.integrations.lightning import GradherdCallback
from tests.integrations.task import (
    EPOCHS,
    Plan,
    Points,
    Trace,
    checkpoint_file,
    make,
    make_loader,
    record_credits,
)

NAME, PACKAGE, TORCHRUN = "Lightning", "lightning", True


class Lit(LightningModule):
    def __init__(self, loader=None, reads_steps=False) -> None:
        super().__init__()
        self.inner, _ = make()
        self.loader, self.reads_steps = loader, reads_steps

    def training_step(self, batch, number):
        return self.inner(**batch)["loss"]

    def train_dataloader(self):
        return self.loader or make_loader()

    def configure_optimizers(self):
        if self.reads_steps:  # asks for the loader while the strategy is set up
            assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.inner.parameters(), lr=0.05, momentum=0.9)


class Log(Logger):
    """Keeps what the trainer logs."""

    name, version = "log", 0

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def log_metrics(self, metrics, step=None) -> None:
        self.trace.logged |= metrics

    def log_hyperparams(self, *args, **kwargs) -> None:
        pass


def trainer(callback, **options) -> Trainer:
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1)
    quiet |= dict(accelerator="cpu", devices=2, strategy="ddp", use_distributed_sampler=True)
    callbacks = [callback, *options.pop("callbacks", [])]
    return Trainer(**quiet | options, callbacks=callbacks)


class Finish(GradherdCallback):
    """Notes the end of a training before the herd is detached."""

    trace: Trace

    def on_train_end(self, trainer, pl_module) -> None:
        self.trace.finish(pl_module.inner, self.herd)


def train(plan: Plan, kind: type[Lit] = Lit, **options) -> Trace:
    trace = Trace()
    lit = kind(make_loader(num_workers=plan.workers), reads_steps=plan.name.startswith("whole"))
    record_credits(trace, lit.inner)
    callback = Finish(**plan.options, log_rows=True)
    callback.trace = trace
    folder = checkpoint_file(plan).with_suffix("")
    saving = ModelCheckpoint(
        dirpath=folder, filename="last", every_n_train_steps=plan.stop or 10**6, save_top_k=-1
    )
    own = trainer(
        callback,
        callbacks=[saving],
        max_epochs=EPOCHS,
        max_steps=plan.stop or -1,
        accumulate_grad_batches=plan.accumulate,
        limit_train_batches=plan.limit,
        logger=Log(trace),
        **options,
    )
    own.fit(lit, ckpt_path=str(folder / "last.ckpt") if plan.resume else None, weights_only=False)
    return trace


def fit(loader=None, **options):
    options = dict(max_epochs=1, logger=False, enable_checkpointing=False) | options
    trainer(GradherdCallback(order="cd-grab"), **options).fit(Lit(loader))


def unsupported():
    # Lightning makes this strategy on GPUs only; the callback looks at its class.
    sharded = SimpleNamespace(strategy=object.__new__(FSDPStrategy))
    GradherdCallback(order="cd-grab").setup(sharded, None, "fit")


WRONG = {
    "shuffle=True": lambda: fit(make_loader(shuffle=True)),
    "a DistributedSampler": lambda: fit(make_loader(sampler=DistributedSampler(Points()))),
    "another sampler": lambda: fit(make_loader(sampler=WeightedRandomSampler([1.0] * 48, 48))),
    "two loaders": lambda: fit([make_loader(), make_loader()]),
    "an unsupported strategy": unsupported,
    "overfit_batches": lambda: fit(overfit_batches=2),
    "nothing to do": lambda: GradherdCallback(),
}
