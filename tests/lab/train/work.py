"""What ranks do in these tests, and tasks that are awkward on purpose."""

import dataclasses
import time
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from gradherd.comm.world import World
from gradherd.lab.tasks.digits import Digits
from gradherd.lab.tasks.metrics import eval_mode
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.tasks.task import Defaults, Split, Task
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.loop import new_record
from gradherd.lab.train.rank_trainer import RankTrainer
from gradherd.lab.train.record import EpochRow
from gradherd.lab.train.virtual_trainer import VirtualTrainer
from studies.tasks.lstm import CarriedLSTM, WikiText2CarriedLSTM


def no_callback(steps=1):
    pass


def train_and_follow(trainer, ordering, epochs):
    """Train some epochs; return what a run is recognised by after each."""
    seen = []
    for number in range(1, epochs + 1):
        (own,) = trainer.train_epoch(number, no_callback)
        (evaluation,) = trainer.evaluate()
        weights = nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()
        seen.append((ordering.version, own, evaluation, weights))
    trainer.close()
    return seen


def on_ranks(configs, split=None):
    """Train each of the runs on this rank; with these data, if the tasks' own take long to read."""
    found = []
    for config in configs:
        task = find_task(config.task)
        data = split or task.load(None, config.limit)
        trainer = RankTrainer(config, task, data, World.detect())
        found.append(train_and_follow(trainer, trainer.sampler.ordering, config.epochs))
    return found


def in_one_process(config, split=None):
    """Train the same run with all workers here."""
    task, virtual = find_task(config.task), replace(config, virtual=True)
    trainer = VirtualTrainer(virtual, task, split or task.load(None, config.limit))
    return train_and_follow(trainer, trainer.ordering, config.epochs)


@dataclass(frozen=True)
class Awkward(Task):
    """BatchNorm and dropout, on made-up numbers."""

    name: ClassVar = "awkward"
    description: ClassVar = "batch statistics and dropout"
    data: ClassVar = ()
    metric_name: ClassVar = "error"
    higher_is_better: ClassVar = False
    defaults: ClassVar = Defaults(
        workers=3, batch_size=4, unit=4, lr=0.1, momentum=0.5, epochs=2, seeds=1, source="Here."
    )

    def load(self, data_dir=None, limit=None):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(50, 6, generator=generator)
        return Split((x, x[:, :2]), (x[:9], x[:9, :2])).first(limit)

    def model(self):
        return nn.Sequential(
            nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 2)
        )

    def loss(self, model, *tensors):
        return nn.functional.mse_loss(model(tensors[0]), tensors[1])

    def metric(self, model, *tensors):
        with eval_mode(model):
            return float(self.loss(model, *tensors))


@dataclass(frozen=True)
class Augmented(Awkward):
    """Batch statistics, no dropout, and examples whose sign is drawn before each epoch."""

    name: ClassVar = "augmented"

    def model(self):
        return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 2))

    def augment(self, generator, *tensors):
        x, y = tensors
        sign = torch.randint(2, (len(x), 1), generator=generator) * 2.0 - 1
        return x * sign, y * sign


@dataclass(frozen=True)
class Carrying(WikiText2CarriedLSTM):
    """The LSTM whose state is carried, on made-up sentences in few words."""

    name: ClassVar = "carrying"
    defaults: ClassVar = replace(WikiText2CarriedLSTM.defaults, epochs=2, lr=0.5)

    def load(self, data_dir=None, limit=None):
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(30, (64, 6), generator=generator)  # 4 units of each worker
        return Split(self.in_columns(words), self.in_columns(words[:32].flip(0)))

    def model(self):
        return CarriedLSTM(words=30)


@dataclass(frozen=True)
class Diverging(Awkward):
    """Its loss is soon not finite."""

    name: ClassVar = "diverging"
    defaults: ClassVar = Defaults(
        workers=2, batch_size=5, lr=1e30, epochs=6, seeds=1, source="Here."
    )

    def model(self):
        return nn.Linear(6, 2)


def config_of(task, **chosen):
    return RunConfig.of(task, find_task(task).defaults, **chosen)


HERE = __file__


@dataclass(frozen=True)
class Weighted(Digits):
    """Digits whose loss weighs classes: the loss of a batch is not the mean over its examples."""

    name: ClassVar = "weighted"

    def loss(self, model, *tensors):
        images, labels = tensors
        return F.cross_entropy(model(images), labels, weight=torch.arange(1.0, 11.0))


class _Overflow(torch.autograd.Function):
    """Passes scores on; their gradient is infinite if it should be."""

    @staticmethod
    def forward(ctx, scores, overflows):
        ctx.factor = torch.inf if overflows else 1.0
        return scores.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@dataclass(frozen=True)
class Overflowing(Digits):
    """The gradient of one example is not finite, though its loss is."""

    name: ClassVar = "overflowing"

    def load(self, data_dir=None, limit=None):
        """Mark an example."""
        split = super().load(data_dir, limit)
        split.train[0][7, 0] = 0.123
        return split

    def loss(self, model, inputs, labels):
        """Return the mean cross-entropy."""
        marked = bool((inputs[:, 0] == 0.123).any())
        return F.cross_entropy(_Overflow.apply(model(inputs), marked), labels)


@dataclass(frozen=True)
class VectorLoss(Digits):
    """Its loss has a number for each example."""

    name: ClassVar = "vector-loss"

    def loss(self, model, *tensors):
        return F.cross_entropy(model(tensors[0]), tensors[1], reduction="none")


@dataclass(frozen=True)
class TupleLoss(Digits):
    """Its loss comes with what the model has answered."""

    name: ClassVar = "tuple-loss"

    def loss(self, model, *tensors):
        return super().loss(model, *tensors), model(tensors[0])


@dataclass(frozen=True)
class TupleSplit(Digits):
    """Loads two tuples, not a split."""

    name: ClassVar = "tuple-split"

    def load(self, data_dir=None, limit=None):
        split = super().load(data_dir, limit)
        return split.train, split.test


@dataclass(frozen=True)
class DatasetSplit(Digits):
    """Its columns are a data set."""

    name: ClassVar = "dataset-split"

    def load(self, data_dir=None, limit=None):
        split = super().load(data_dir, limit)
        return Split(TensorDataset(*split.train), TensorDataset(*split.test))


@dataclass(frozen=True)
class ArraySplit(Digits):
    """One of its columns is an array of numpy."""

    name: ClassVar = "array-split"

    def load(self, data_dir=None, limit=None):
        split = super().load(data_dir, limit)
        return Split((split.train[0], split.train[1].numpy()), split.test)


@dataclass(frozen=True)
class ShortLoss(Digits):
    """Its loss takes no labels."""

    name: ClassVar = "short-loss"

    def loss(self, model, inputs):
        return model(inputs).mean()


@dataclass(frozen=True)
class NoNumber(Digits):
    """Its metric forgets to return what it computes."""

    name: ClassVar = "no-number"

    def metric(self, model, *tensors):
        super().metric(model, *tensors)


@dataclass(frozen=True)
class BadlyStarted(Digits):
    """Digits whose weights are not finite with seeds 1 and 2."""

    name: ClassVar = "badly-started"

    def model(self):
        model = super().model()
        if torch.initial_seed() in (1, 2):
            nn.init.constant_(next(model.parameters()), torch.inf)
        return model


@dataclass(frozen=True)
class Unhurried(Digits):
    """Digits that leave time for a signal after each epoch, and no work for the machine."""

    name: ClassVar = "unhurried"

    def metric(self, model, *tensors):
        time.sleep(0.25)
        return super().metric(model, *tensors)


def row(epoch=1, **more):
    base = dict.fromkeys((f.name for f in dataclasses.fields(EpochRow)), 1)
    return EpochRow(**base | {"epoch": epoch, **more})


def record(**more):
    task = find_task("digits")
    return dataclasses.replace(
        new_record(config_of("digits"), task, task.load(None, 20), 650), **more
    )
