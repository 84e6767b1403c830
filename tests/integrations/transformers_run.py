"""The suite's training in transformers' Trainer."""

import torch
from torch.utils.data import RandomSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from gradherd.integrations.transformers import GradherdTrainer
from tests.integrations.task import (
    BATCH,
    EPOCHS,
    Plan,
    Points,
    Trace,
    checkpoint_file,
    make,
    make_loader,
    record_credits,
)

NAME, PACKAGE, TORCHRUN = "transformers Trainer", "transformers", True


class Finish(TrainerCallback):
    """Notes the end of a training before the herd is detached."""

    def __init__(self, trace: Trace, limit: int | None) -> None:
        self.trace, self.limit, self.trainer = trace, limit, None

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.limit and state.global_step % self.limit == 0:
            control.should_epoch_stop = True

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.trace.finish(self.trainer.model, self.trainer.herd)
        for entry in state.log_history:
            self.trace.logged |= entry


def arguments(folder, **options) -> TrainingArguments:
    common = dict(
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        max_grad_norm=0.0,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        save_strategy="no",
    )
    return TrainingArguments(str(folder), **common | options)


def build(args, options, callbacks=(), kind=GradherdTrainer):
    model, optimizer = make()
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return kind(
        model,
        args,
        train_dataset=Points(),
        optimizers=(optimizer, constant),
        callbacks=list(callbacks),
        **options,
    )


def train(plan: Plan) -> Trace:
    trace = Trace()
    folder = checkpoint_file(plan).with_suffix("")
    options: dict = dict(gradient_accumulation_steps=plan.accumulate, seed=0)
    options |= dict(dataloader_num_workers=plan.workers)
    if plan.stop:
        options |= dict(max_steps=plan.stop, save_strategy="steps", save_steps=plan.stop)
    finish = Finish(trace, plan.limit)
    trainer = build(arguments(folder, **options), plan.options | {"log_rows": True}, [finish])
    finish.trainer = trainer
    record_credits(trace, trainer.model)
    trainer.train(resume_from_checkpoint=plan.resume)
    return trace


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return make_loader(sampler=RandomSampler(Points()))


class Ordered(GradherdTrainer, OwnLoader):
    pass


def refused(kind=GradherdTrainer, given=None, **options):
    given = {"order": "cd-grab"} if given is None else given
    build(arguments("unused", **options), given, kind=kind).train()


WRONG = {
    "a sampler of its own": lambda: refused(Ordered),
    "group_by_length": lambda: refused(train_sampling_strategy="group_by_length"),
    "split_batches": lambda: refused(accelerator_config={"split_batches": True}),
    "nothing to do": lambda: refused(given={}),
}
