"""Measure what integrations add to a step, beyond the same training with `attach` alone.

python benchmarks/integrations.py [--steps 200] [--repeats 4] [--only accelerate,lightning]

Two trainings in one process, each in a thread, that take turns step by step: one through the
integration, the other with the same framework, order and loader, attached by hand. CPU time is
measured, which other programs on the machine hardly change, and each step is divided by its
neighbour. This is repeated with new trainings, which change places. Frameworks that are not
installed are left out.
"""

import argparse
import statistics
import tempfile
import threading
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
from gradherd.ordering.batches import FollowedLoader

BATCH, WARM = 32, 32
Arm = Callable[[bool, "Clock"], None]


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


class Turns:
    """Two trainings that run one step at a time each."""

    def __init__(self) -> None:
        self.free = (threading.Semaphore(1), threading.Semaphore(0))


class Clock:
    """CPU times of one training's steps; only this training runs while it counts."""

    def __init__(self, turns: Turns, own: int, steps: int) -> None:
        self.last, self.seconds = WARM + steps, list[float]()
        self._own, self._other = turns.free[own], turns.free[1 - own]
        self._start = 0.0

    def wait(self) -> None:
        """Wait for the turn of this training."""
        self._own.acquire()
        self._start = time.process_time()

    def tick(self) -> None:
        """Count a step, and let the other training take one."""
        self.seconds.append(time.process_time() - self._start)
        self._other.release()
        if len(self.seconds) < self.last:
            self.wait()


def loop(loader: Any, clock: Clock, step: Callable[[Any], None]) -> None:
    """Train in a loop of one's own."""

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    for batch in islice(endless(), clock.last):
        step(batch)
        clock.tick()


def accelerate(integrated: bool, clock: Clock) -> None:
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
        loader = FollowedLoader(loader, sampler)
        herd = gh.attach(model, order=sampler)

    def step(batch: Any) -> None:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()

    loop(loader, clock, step)
    herd.detach()


def counted_loader(integrated: bool, clock: Clock) -> None:
    """Train in a plain loop, with the loader that Ray's integration puts around Ray's."""
    model, optimizer, data = parts()
    sampler, loader = ordered(data)
    herd = gh.attach(model, order=sampler)

    def step(batch: Any) -> None:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    loop(FollowedLoader(loader, sampler) if integrated else loader, clock, step)
    herd.detach()


def lightning(integrated: bool, clock: Clock) -> None:
    """Train with Lightning's Trainer."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from gradherd.integrations.lightning import GradherdCallback

    model, optimizer, data = parts()
    sampler, loader = ordered(data)

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

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            # Lightning goes through all numbers that were ever logged at every step.
            if trainer._logger_connector.should_update_logs:
                self.log_dict(self.herd.scalars())

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


def transformers(integrated: bool, clock: Clock) -> None:
    """Train with transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from gradherd.integrations.transformers import GradherdTrainer

    model, optimizer, data = parts()

    class Ticks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.tick()

    class ByHand(Trainer):
        def get_train_dataloader(self) -> Any:
            sampler, loader = ordered(data)
            self.herd = gh.attach(self.model, order=sampler)
            return FollowedLoader(self.accelerator.prepare(loader), sampler)

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


FRAMEWORKS: dict[str, Arm] = {
    "accelerate": accelerate,
    "transformers": transformers,
    "lightning": lightning,
    "ray": counted_loader,
}


def take_turns(arm: Arm, kinds: tuple[bool, bool], steps: int) -> list[list[float]]:
    """Return milliseconds of CPU per step of two trainings."""
    turns = Turns()
    clocks = [Clock(turns, own, steps) for own in range(2)]

    def train(integrated: bool, clock: Clock) -> None:
        clock.wait()
        arm(integrated, clock)

    threads = [
        threading.Thread(target=train, args=pair) for pair in zip(kinds, clocks, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The last step of one overlaps with the end of the other.
    return [[1e3 * s for s in clock.seconds[WARM:-1]] for clock in clocks]


def main() -> None:
    """Print milliseconds per step, and the ratio of neighbouring steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--only", default=",".join(FRAMEWORKS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in args.only.split(","):
        if name != "ray" and not find_spec(name):
            continue
        times: dict[bool, list[float]] = {False: [], True: []}
        ratios = []
        for number in range(2 * args.repeats):
            # Which training was made first, and where its memory lies, is worth a few percent.
            kinds = (False, True) if number % 2 else (True, False)
            found = dict(zip(kinds, take_turns(FRAMEWORKS[name], kinds, args.steps), strict=True))
            pairs = zip(found[False], found[True], strict=True)
            ratios.append(statistics.median(own / hand for hand, own in pairs))
            for integrated, ms in found.items():
                times[integrated] += ms
        print(
            f"{name}: {statistics.median(times[True]):.2f} ms of CPU per step, "
            f"by hand {statistics.median(times[False]):.2f}; "
            f"ratio {statistics.geometric_mean(ratios):.3f}, "
            f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} pairs of trainings",
            flush=True,
        )


if __name__ == "__main__":
    main()
