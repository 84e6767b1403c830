"""Training on real ranks, with DDP or FSDP2: this process is one of them."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gradherd.comm.checks import TrainingDiverged
from gradherd.comm.collectives import all_gather
from gradherd.comm.world import World
from gradherd.hooks.herd import Herd
from gradherd.hooks.state import EXCHANGES, merge_states
from gradherd.lab.tasks.task import Split, Task, Tensors
from gradherd.lab.train.checkpoint import Checkpointer, LoadedCheckpoint, NoUsableCheckpoint
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.measurements import BinnedSeries, can_track_prefix_sums, herding_bound
from gradherd.lab.train.optimizers import (
    clip_and_step,
    flat_grad,
    get_rng_states,
    make_optimizer,
    mean_clip,
    set_lr,
    set_rng_states,
    sparse_settings,
    worker_seed,
)
from gradherd.lab.train.parallel_models import make_parallel_model
from gradherd.lab.train.trainer import (
    EpochCounters,
    EpochExamples,
    Evaluation,
    StepCallback,
    TrainingLoss,
    evaluation_chunk,
    finite_metric,
    full_loss,
)
from gradherd.ordering.sampler import OrderedSampler

log = logging.getLogger("gradherd")


class InMemoryDataset(Dataset[Tensors]):
    """Examples in memory; a DataLoader fetches a whole batch with one index."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Tensors:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> Tensors:
        """Return a batch; a DataLoader calls this instead of `__getitem__` if it exists."""
        return tuple(tensor[indices] for tensor in self.tensors)


def identity_collate(batch: Any) -> Any:
    """Return the batch unchanged: `InMemoryDataset` has collated it already."""
    return batch


class RankTrainer:
    """One rank of a DDP training with gradherd attached: the loop that a user would write."""

    def __init__(self, config: RunConfig, task: Task, split: Split, world: World) -> None:
        self._config, self._task, self._world = config, task, world
        self._device = torch.device(config.device)
        self._split = split.to(self._device)
        # The same weights on every rank.
        torch.manual_seed(config.seed)
        self.model = task.model().to(self._device)
        # From here on every rank draws its own random numbers, such as dropout masks.
        torch.manual_seed(worker_seed(config.seed, world.rank))
        self._parallel = make_parallel_model(self.model, config, world)
        self._parameters: list[nn.Parameter] = [
            p for p in self._parallel.module.parameters() if p.requires_grad
        ]
        self._steps = 0  # since this process started
        self._examples = EpochExamples(config, task, self._split.train)
        self._loss = TrainingLoss(config, task, len(split.train[0]), workers=1)
        dataset = InMemoryDataset(self._examples.tensors)
        self.sampler = OrderedSampler(
            dataset,
            config.order,
            batch_size=config.batch_size,
            unit=config.unit,
            seed=config.seed,
            world=world,
        )
        self._optimizer = make_optimizer(self._parameters, config)
        self._herd = self._attach()
        self._loader = DataLoader(
            dataset,
            batch_size=config.batch_size,
            sampler=self.sampler,
            collate_fn=identity_collate,
            # Its own generator: else the loader would draw from the model's random numbers.
            generator=torch.Generator(),
        )
        self._exchanges = 0  # of local steps
        self._diverged = False
        size = sum(p.numel() for p in self._parameters)
        self.series = [BinnedSeries()]
        self.checkpointer: Checkpointer | None = None
        """Saves the run from time to time, if it is to be saved."""
        self.record: Callable[[], Any] | None = None
        """Returns rank 0's record so far, which is saved with the rest."""
        self.counters = EpochCounters()
        """Counters of the current epoch up to the checkpoint that the run resumed from."""
        # Averaged gradients are equal on all ranks, so one of them is enough.
        self._tracks_prefix_sums = (
            config.sparsify == "dense"
            and config.parallel is None  # else no rank has the whole gradient
            and config.local_steps is None
            and world.rank == 0
            and can_track_prefix_sums(len(self._loader), size)
        )

    def _attach(self) -> Herd:
        config, sparsify = self._config, None
        if config.density is not None and config.local_steps is None:
            sparsify = sparse_settings(config)
        return self._parallel.attach(self.sampler, sparsify, self._optimizer)

    def train_epoch(self, number: int, on_step: StepCallback) -> list[EpochCounters]:
        """Train one epoch, or what is left of it after resuming."""
        counters, self.counters = self.counters, EpochCounters()
        # A checkpoint after the last step of an epoch has already advanced the order.
        if self.sampler.ordering.epoch < number:
            self._train(number, counters, on_step)
        return [counters]

    def _train(self, number: int, counters: EpochCounters, on_step: StepCallback) -> None:
        before, earlier_seconds, means = self._costs(), counters.seconds, []
        whole_epoch = counters.steps == 0
        begin = time.perf_counter()
        self._examples.begin_epoch(number)
        if whole_epoch:  # else a checkpoint holds what is carried
            self._loss.begin_epoch()
        # Epochs count from 1 in records, from 0 in samplers, as in torch.
        self.sampler.set_epoch(number - 1)
        self._parallel.module.train()
        batches = iter(self._loader)
        while True:
            fetch = time.perf_counter()
            batch = next(batches, None)
            counters.data_seconds += time.perf_counter() - fetch
            if batch is None:
                break
            lr = self._config.lr_at(number, counters.steps, len(self._loader))
            set_lr(self._optimizer, lr)
            self._optimizer.zero_grad()
            with self._noting_divergence():
                self._loss(self._parallel.module, *batch).backward()
                if self._tracks_prefix_sums:
                    # Before clipping, which scales the gradient in place: the bound is about what
                    # was averaged.
                    means.append(flat_grad(self._parameters))
                clip_and_step(self._optimizer, self._parameters, mean_clip(self._config))
            if self._diverged:
                break
            counters.steps += 1
            self._steps += 1
            self._count_exchange(counters)
            on_step()
            if self.checkpointer is not None:

                def state() -> tuple[Callable[[], Any], Any]:
                    # First: it exchanges the rows that wait, whose bytes belong to these steps.
                    herd = self._herd.state_dict(gather=False)  # every rank saves its own
                    seconds = earlier_seconds + time.perf_counter() - begin
                    so_far = replace(counters, seconds=seconds)
                    self._add_costs(so_far, before)
                    return self.state(number, so_far, herd)

                self.checkpointer.after_step(state)
        if self._config.local_steps is not None and number == self._config.epochs:
            # What the last steps have changed belongs to the result.
            if not self._diverged:
                self._herd.sync()
                self._count_exchange(counters)
        # Hands over the rows that still wait, so that the time of ordering belongs to this epoch.
        with self._noting_divergence():
            self._herd.finish()
        counters.seconds = earlier_seconds + time.perf_counter() - begin
        self._add_costs(counters, before)
        # The bound needs all gradients of an epoch; a checkpoint holds none.
        if means and whole_epoch:
            examples = self._config.batch_size * self._world.size
            counters.herding_bound = herding_bound(torch.stack(means), examples)

    @contextlib.contextmanager
    def _noting_divergence(self) -> Iterator[None]:
        """End the run, which has a result, if training has diverged; say so once."""
        try:
            yield
        except TrainingDiverged as error:  # on all ranks alike
            if not self._diverged:
                log.warning("%s", error)
            self._diverged = True

    def _count_exchange(self, counters: EpochCounters) -> None:
        """Count the exchange of the last step, if there was one."""
        metrics = self._herd.last_step()
        if self._config.local_steps is not None:
            done = metrics.get("exchanges", 0)
            if done == self._exchanges:
                return
            self._exchanges = done
        elif self._config.density is None:
            return
        counters.add_sparse(metrics)
        self.series[0].add(metrics.get("density", 0.0))

    def state(
        self, number: int, counters: EpochCounters, herd: dict[str, Any] | None = None
    ) -> tuple[Callable[[], Any], Any]:
        """Return what determines the rest of the run.

        Args:
            number: The epoch.
            counters: What it has cost so far.
            herd: The herd's state, if it was taken already.

        Returns:
            A function that collects what rank 0 saves for all ranks, and what this rank saves for
            itself: its generators and residuals.
        """
        herd = self._herd.state_dict(gather=False) if herd is None else herd
        model, own = self._parallel.state(self._optimizer)
        own |= {"generators": get_rng_states(self._device), "carried": self._loss.tensors}
        own |= {key: herd.pop(key, None) for key in EXCHANGES}

        def shared() -> dict[str, Any]:
            return {
                "epoch": number,
                "counters": asdict(counters),
                **model,
                "herd": herd,
                "series": self.series[0].state_dict(),
                "record": None if self.record is None else self.record(),
            }

        return shared, own

    def load(self, checkpoint: LoadedCheckpoint) -> int:
        """Continue from a checkpoint; return the epoch to continue with."""
        shared, size = checkpoint.shared, self._world.size
        bound = self._config.parallel is not None or bool(self._loss.tensors)
        if bound and checkpoint.workers != size:
            raise NoUsableCheckpoint(
                f"it was saved by {checkpoint.workers} workers, this run has {size}: shards of a "
                "model, or a state that workers carry, can be continued by as many workers only"
            )
        part = checkpoint.part(self._world.rank) if checkpoint.workers == size else {}
        self._parallel.load(shared, part, self._optimizer)
        self.counters = EpochCounters(**shared["counters"])
        self.series = [BinnedSeries.from_state_dict(shared["series"])]
        if checkpoint.workers == size:
            own = checkpoint.part(self._world.rank)
            self._herd.load_state_dict(_herd_state(shared, own))
            set_rng_states(own["generators"], self._device)
            for tensor, saved in zip(self._loss.tensors, own.get("carried", ()), strict=True):
                tensor.copy_(saved)
        else:
            ranks = range(checkpoint.workers)
            self._herd.load_state_dict(
                merge_states(_herd_state(shared, checkpoint.part(rank)) for rank in ranks)
            )
            # Generators of other ranks cannot be continued; the step makes the seed a new one.
            seed = self._config.seed + checkpoint.step
            torch.manual_seed(worker_seed(seed, self._world.rank))
            # Loads are per worker: those of another number of workers cannot be added to.
            self.counters.load, self.counters.load_steps = [], 0
        epoch: int = shared["epoch"]
        return epoch

    def _costs(self) -> dict[str, float]:
        """Return what was spent since this process started."""
        metrics = self._herd.metrics()
        seconds, sent = self._parallel.exchange_costs(metrics, self._steps)
        saving = 0.0 if self.checkpointer is None else self.checkpointer.stopwatch.seconds
        return {
            "ordering_seconds": metrics["ordering_seconds"],
            "ordering_bytes": metrics["bytes_for_ordering"],
            "exchange_seconds": seconds,
            "saving_seconds": saving,
            "exchange_bytes": sent,
            "skipped_steps": metrics.get("skipped_steps", 0),
            "residual_norm": metrics.get("residual_norm", 0.0),
        }

    def _add_costs(self, counters: EpochCounters, before: dict[str, float]) -> None:
        after = self._costs()
        spent = {name: after[name] - before[name] for name in after}
        counters.ordering_seconds += spent["ordering_seconds"]
        counters.exchange_seconds += spent["exchange_seconds"]
        counters.saving_seconds += spent["saving_seconds"]
        counters.skipped_steps += int(spent["skipped_steps"])
        # Ranks send different amounts: the record holds the mean over them.
        sent = torch.tensor(
            [spent["ordering_bytes"], spent["exchange_bytes"]],
            dtype=torch.float64,
            device=self._device,
        )
        ordering, exchange = all_gather(sent, self._world).value.mean(0).tolist()
        counters.ordering_bytes += round(ordering)
        counters.bytes += round(ordering + exchange)
        if self._config.density is not None:
            counters.residual_norm = after["residual_norm"]

    def evaluate(self) -> list[Evaluation]:
        """Evaluate the model, all ranks together."""
        chunk = evaluation_chunk(self._task, self.model, self._config.batch_size)
        # Evaluation calls the model, too: its hooks must not take that for training. Local steps
        # are evaluated at the weights that all ranks share.
        with self._herd.pause(), self._herd.shared_weights():
            self._parallel.refresh()
            if self._diverged:  # The loss in the record says so.
                for parameter in self._parameters:
                    parameter.detach().fill_(torch.nan)
            loss = full_loss(self._task, self.model, self._split.train, self._world, chunk)
            metric = None
            if not self._world.rank:
                metric = finite_metric(self._task, self.model, self._split.test)
        return [Evaluation(loss, metric)]

    def close(self) -> None:
        """Detach from the model."""
        with self._noting_divergence():
            self._herd.detach()


def _herd_state(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one rank's herd."""
    return dict(shared["herd"]) | {key: own[key] for key in EXCHANGES if own.get(key) is not None}
