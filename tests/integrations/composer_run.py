"""The suite's training in Composer, which needs torch 2.7: `make composer`."""

import os

import torch
from composer import ComposerModel, Trainer
from composer.loggers import InMemoryLogger
from composer.utils import dist as composer_dist

from gradherd.integrations.composer import HerdCallback
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

NAME, PACKAGE, TORCHRUN = "Composer", "mosaicml", True
# Composer accumulates by cutting a batch into pieces, which an order refuses.
REFUSED = ("two batches to a step",)
os.environ.setdefault("NODE_RANK", "0")  # which Composer's launcher sets, and torchrun does not


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = make()

    def forward(self, batch):
        return self.inner(**batch)["loss"]

    def loss(self, outputs, batch):
        return outputs


def loader_of(shuffle=False, **options):
    return make_loader(sampler=composer_dist.get_sampler(Points(), shuffle=shuffle), **options)


def trainer(model, callback, loader=None, **options) -> Trainer:
    optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.05, momentum=0.9)
    quiet = dict(progress_bar=False, log_to_console=False, auto_log_hparams=False, device="cpu")
    return Trainer(
        model=model,
        train_dataloader=loader or loader_of(),
        optimizers=optimizer,
        max_duration=options.pop("max_duration", f"{EPOCHS}ep"),
        callbacks=[callback],
        **quiet | options,
    )


class Finish(HerdCallback):
    """Notes the end of a training before ranks exchange once more."""

    trace: Trace

    def fit_end(self, state, logger) -> None:
        self.trace.finish(state.model.module.inner, self.herd)
        super().fit_end(state, logger)


def train(plan: Plan) -> Trace:
    trace, model = Trace(), Model()
    if plan.accumulate > 1:
        return trace
    record_credits(trace, model.inner)
    callback, log = Finish(**plan.options, log_rows=True, log_every=1), InMemoryLogger()
    callback.trace = trace
    folder = checkpoint_file(plan).with_suffix("")
    options: dict = {}
    if plan.stop:
        options = dict(max_duration=f"{plan.stop}ba", save_folder=str(folder))
        options |= dict(
            save_interval=f"{plan.stop}ba", save_filename="last.pt", save_overwrite=True
        )
    own = trainer(
        model,
        callback,
        loader_of(num_workers=plan.workers),
        load_path=str(folder / "last.pt") if plan.resume else None,
        train_subset_num_batches=plan.limit or -1,
        loggers=[log],
        **options,
    )
    own.fit()
    trace.logged = {
        name: float(values[-1][1]) for name, values in log.data.items() if name.startswith("herd/")
    }
    own.close()
    return trace


def fit(loader=None, **options):
    own = trainer(Model(), HerdCallback(order="cd-grab"), loader, max_duration="1ep", **options)
    try:
        own.fit()
    finally:
        own.close()


WRONG = {
    "shuffle": lambda: fit(loader_of(shuffle=True)),
    "microbatches": lambda: fit(device_train_microbatch_size=2),
    "nothing to do": lambda: HerdCallback(),
}
