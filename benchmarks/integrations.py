"""Measure what integrations add to a step, beyond the same training with `attach` alone.

python benchmarks/integrations.py [--steps 96] [--rounds 21] [--only accelerate,lightning]

One process per framework's row, two arms that take turns: one through the integration, the other
with the same framework, order and loader, attached by hand. CPU time is measured, which other
programs on the machine hardly change. Frameworks that are not installed are left out.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import gradherd as gh
from gradherd.integrations.loaders import CountedLoader

BATCH, WARM = 32, 16
Arm = Callable[[bool, int], float]


class Net(nn.Module):
    """An MLP of 66,000 parameters that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        """Return the loss of a batch."""
        return {"loss": (self.net(x) - labels).square().mean()}


def parts() -> tuple[Net, torch.optim.Optimizer, list[dict[str, Any]]]:
    """Return model, optimizer and data."""
    torch.manual_seed(0)
    model = Net()
    data = [{"x": torch.randn(64), "labels": torch.randn(64)} for _ in range(64 * BATCH)]
    return model, torch.optim.SGD(model.parameters(), lr=0.01), data


def ordered(data: Any) -> tuple[gh.OrderedSampler, DataLoader[Any]]:
    """Return a sampler and its loader, as a loop of one's own has them."""
    sampler = gh.OrderedSampler(data, "grab", batch_size=BATCH, unit=BATCH)
    return sampler, DataLoader(data, batch_size=BATCH, sampler=sampler)


class Clock:
    """CPU time from the end of the warm-up to the last step."""

    def __init__(self, steps: int) -> None:
        self.last, self.count = WARM + steps, 0
        self.start = self.end = 0.0

    def tick(self) -> None:
        """Count a step."""
        self.count += 1
        if self.count == WARM:
            self.start = time.process_time()
        if self.count == self.last:
            self.end = time.process_time()

    def ms(self) -> float:
        """Return milliseconds of CPU per step."""
        return (self.end - self.start) / (self.last - WARM) * 1e3


def loop(loader: Any, steps: int, step: Callable[[Any], None]) -> float:
    """Train in a loop of one's own."""
    clock = Clock(steps)

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    for batch in islice(endless(), clock.last):
        step(batch)
        clock.tick()
    return clock.ms()


def accelerate(integrated: bool, steps: int) -> float:
    """Train with an Accelerator."""
    from accelerate import Accelerator

    from gradherd.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    model, optimizer, data = parts()
    if integrated:
        loader = DataLoader(data, batch_size=BATCH)
        model, optimizer, loader, herd = prepare(
            accelerator, model, optimizer, loader, order="grab"
        )
    else:
        # At one rank Accelerate does not shard again. Its loader is one batch ahead of the loop.
        sampler, plain = ordered(data)
        model, optimizer, loader = accelerator.prepare(model, optimizer, plain)
        loader = CountedLoader(loader, sampler)
        herd = gh.attach(model, order=sampler)

    def step(batch: Any) -> None:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()

    taken = loop(loader, steps, step)
    herd.detach()
    return taken


def counted_loader(integrated: bool, steps: int) -> float:
    """Train in a plain loop, with the loader that Ray's integration puts around Ray's."""
    model, optimizer, data = parts()
    sampler, loader = ordered(data)
    herd = gh.attach(model, order=sampler)

    def step(batch: Any) -> None:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    taken = loop(CountedLoader(loader, sampler) if integrated else loader, steps, step)
    herd.detach()
    return taken


def lightning(integrated: bool, steps: int) -> float:
    """Train with Lightning's Trainer."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from gradherd.integrations.lightning import GradherdCallback

    model, optimizer, data = parts()
    sampler, loader = ordered(data)
    clock = Clock(steps)

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def training_step(self, batch: Any, number: int) -> Any:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return optimizer

    class ByHand(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.herd = gh.attach(trainer.strategy.model, order=sampler)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.herd.detach()

    class Ticks(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            clock.tick()

    quiet = dict(enable_progress_bar=False, enable_model_summary=False, logger=False)
    quiet |= dict(enable_checkpointing=False, accelerator="cpu", devices=1)
    own = GradherdCallback(order="grab") if integrated else ByHand()
    trainer = Trainer(max_steps=clock.last, callbacks=[own, Ticks()], **quiet)
    trainer.fit(Lit(), DataLoader(data, batch_size=BATCH) if integrated else loader)
    return clock.ms()


def transformers(integrated: bool, steps: int) -> float:
    """Train with transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from gradherd.integrations.transformers import GradherdTrainer

    model, optimizer, data = parts()
    clock = Clock(steps)

    class Ticks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.tick()

    class ByHand(Trainer):
        def get_train_dataloader(self) -> Any:
            sampler, loader = ordered(data)
            self.herd = gh.attach(self.model, order=sampler)
            return CountedLoader(self.accelerator.prepare(loader), sampler)

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=clock.last,
            per_device_train_batch_size=BATCH,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            remove_unused_columns=False,
        )
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        options: Any = dict(train_dataset=data, optimizers=(optimizer, constant))
        if integrated:
            trainer: Any = GradherdTrainer(model, args, order="grab", **options)
        else:
            trainer = ByHand(model, args, **options)
        trainer.add_callback(Ticks())
        trainer.train()
        if not integrated:
            trainer.herd.detach()
    return clock.ms()


FRAMEWORKS: dict[str, Arm] = {
    "accelerate": accelerate,
    "transformers": transformers,
    "lightning": lightning,
    "ray": counted_loader,
}


def main() -> None:
    """Print milliseconds per step, and the ratio of both arms in each round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", default=",".join(FRAMEWORKS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in args.only.split(","):
        if name != "ray" and not find_spec(name):
            continue
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(args.rounds):
            for integrated in (False, True):
                times[integrated].append(FRAMEWORKS[name](integrated, args.steps))
        ratios = sorted(b / a for a, b in zip(times[False], times[True], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-len(ratios) // 4]
        hand, own = (statistics.median(ms) for ms in times.values())
        print(
            f"{name}: {own:.3f} ms of CPU per step, by hand {hand:.3f}; ratio "
            f"{statistics.median(ratios):.3f}, quartiles {low:.3f} to {high:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
