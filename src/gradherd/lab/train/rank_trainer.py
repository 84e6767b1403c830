"""Training on real ranks, with DDP or local steps: this process is one of them."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from gradherd.comm.checks import TrainingDiverged
from gradherd.comm.collectives import all_gather, broadcast
from gradherd.comm.sliced_mean import ONE_BUCKET_ELEMENTS, SlicedMean, padded_length
from gradherd.comm.world import World
from gradherd.hooks.attach import attach
from gradherd.hooks.bucket_hook import BucketHook
from gradherd.hooks.herd import Herd
from gradherd.hooks.state import EXCHANGES, merge_states
from gradherd.lab.tasks.task import Split, Task
from gradherd.lab.train.checkpoint import Checkpointer, LoadedCheckpoint
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.measurements import can_track_prefix_sums, herding_bound
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
from gradherd.lab.train.record import build_dataclass
from gradherd.lab.train.trainer import (
    EpochCounters,
    Evaluation,
    StepCallback,
    Trainer,
    evaluate,
    training_loss,
)
from gradherd.ordering.sampler import OrderedSampler

log = logging.getLogger("gradherd")


class MeanHook(BucketHook):
    """Averages a DDP model's gradients in a hook, and counts what that costs.

    Small models are averaged as one vector by slices (`comm.sliced_mean`): each element is summed
    by one rank in the order of ranks, so workers in one process get the same bits. Large ones are
    averaged bucket by bucket with all-reduce while the backward runs, as DDP does by itself.
    """

    def __init__(self, ddp: DDP, world: World) -> None:
        super().__init__(ddp, world)
        parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        size = sum(p.numel() for p in parameters)
        alike = len({(p.dtype, p.device) for p in parameters}) == 1
        # As one vector only while that is cheap: it waits for the whole backward.
        self._one_bucket = size <= ONE_BUCKET_ELEMENTS and alike and world.size > 1
        # Padded to whole slices per rank, once: the padding stays zero.
        length = padded_length(size, world.size) if self._one_bucket else 0
        self._flat = parameters[0].detach().new_zeros(length)
        self._mean = SlicedMean(world)

    def collects(self) -> bool:
        """Return whether the model is averaged as one vector."""
        return self.active and self._one_bucket

    def average(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average a bucket by all-reduce; count the wait after the last one."""
        begin, future = time.perf_counter(), super().average(bucket)
        if not bucket.is_last() or self.world.size == 1:
            return future

        def arrived(done: Future[Tensor]) -> Tensor:
            self.stopwatch.seconds += time.perf_counter() - begin
            return done.value()

        # Only the wait after the last bucket: earlier ones overlap with the backward.
        return future.then(arrived)

    def exchange(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Average all buckets as one vector."""
        buffers = [bucket.buffer() for bucket in buckets]
        flats = self._flat[: sum(map(len, buffers))].split([len(buffer) for buffer in buffers])
        for flat, buffer in zip(flats, buffers, strict=True):
            flat.copy_(buffer)
        before = self._mean.bytes
        self._mean.start(self._flat)
        self._mean.finish()
        self.total_bytes += self._mean.bytes - before
        for flat, buffer in zip(flats, buffers, strict=True):
            buffer.copy_(flat)


class RankTrainer(Trainer):
    """One rank of a DDP training with gradherd attached: the loop that a user would write."""

    def __init__(self, config: RunConfig, task: Task, split: Split, world: World) -> None:
        super().__init__(config, task, split)
        self._world = world
        # From here on every rank draws its own random numbers, such as dropout masks.
        torch.manual_seed(worker_seed(config.seed, world.rank))
        # With local steps every rank trains on its own between two exchanges.
        self._module: Any = self.model if config.local_steps is not None else DDP(self.model)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        dataset = TensorDataset(*self._examples.tensors)
        self.sampler = OrderedSampler(
            dataset,
            config.order,
            batch_size=config.batch_size,
            unit=config.unit,
            seed=config.seed,
            world=world,
        )
        self._optimizer = make_optimizer(self._parameters, config)
        self._mean_hook: MeanHook | None = None
        self._herd = self._attach()
        self._loader = DataLoader(
            dataset,
            # A list of indices fetches a whole batch, which needs no collating.
            batch_size=None,
            sampler=BatchSampler(self.sampler, config.batch_size, drop_last=False),
            # Its own generator: else the loader would draw from the model's random numbers.
            generator=torch.Generator(),
        )
        self._exchanges = 0  # of local steps
        self._diverged = False
        size = sum(p.numel() for p in self._parameters)
        self.checkpointer: Checkpointer | None = None
        """Saves the run from time to time, if it is to be saved."""
        self.record: Callable[[], Any] | None = None
        """Returns rank 0's record so far, which is saved with the rest."""
        self.counters = EpochCounters()
        """Counters of the current epoch up to the checkpoint that the run resumed from."""
        # Averaged gradients are equal on all ranks, so one of them is enough.
        self._tracks_prefix_sums = (
            config.sparsify == "dense"
            and config.local_steps is None
            and world.rank == 0
            and can_track_prefix_sums(len(self._loader), size)
        )

    def _attach(self) -> Herd:
        config, model, order = self._config, self._module, self.sampler
        rows = config.row_choice()
        if config.local_steps is not None:
            local = config.local()
            return attach(model, order=order, optimizer=self._optimizer, local=local, rows=rows)
        sparsify = None if config.density is None else sparse_settings(config)
        herd = attach(model, order=order, sparsify=sparsify, rows=rows)
        # Ordering whole batches and sparsifying register a hook of their own.
        if not model._comm_hooks:
            self._mean_hook = MeanHook(model, self._world)
        return herd

    def train_epoch(self, number: int, on_step: StepCallback) -> list[EpochCounters]:
        """Train one epoch, or what is left of it after resuming."""
        counters, self.counters = self.counters, EpochCounters()
        # A checkpoint after the last step of an epoch has already advanced the order.
        if self.sampler.ordering.epoch < number:
            self._train(number, counters, on_step)
        else:
            # Of the last epoch, it was saved before the exchange that ends the run.
            before = self._costs()
            self._exchange_the_rest(number, counters)
            self._add_costs(counters, before)
        return [counters]

    def _train(self, number: int, counters: EpochCounters, on_step: StepCallback) -> None:
        before, earlier_seconds, means = self._costs(), counters.seconds, []
        whole_epoch = counters.steps == 0
        begin = time.perf_counter()
        self._examples.begin_epoch(number)
        # Epochs count from 1 in records, from 0 in samplers, as in torch.
        self.sampler.set_epoch(number - 1)
        self._module.train()
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
                training_loss(self._task, self._module, batch).backward()
                if self._tracks_prefix_sums:
                    # Before clipping, which scales the gradient in place: the bound is about what
                    # was averaged.
                    means.append(flat_grad(self._parameters))
                clip_and_step(self._optimizer, self._parameters, mean_clip(self._config))
            if self._diverged:
                break
            counters.steps += 1
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
        self._exchange_the_rest(number, counters)
        # Hands over the rows that still wait, so that the time of ordering belongs to this epoch.
        with self._noting_divergence():
            self._herd.finish()
        counters.seconds = earlier_seconds + time.perf_counter() - begin
        self._add_costs(counters, before)
        # The bound needs all gradients of an epoch; a checkpoint holds none.
        if means and whole_epoch:
            examples = self._config.batch_size * self._world.size
            counters.herding_bound = herding_bound(torch.stack(means), examples)

    def _exchange_the_rest(self, number: int, counters: EpochCounters) -> None:
        """Exchange what the last local steps of the run have changed: it belongs to the result."""
        last = number == self._config.epochs and not self._diverged
        if self._config.local_steps is not None and last:
            self._herd.sync()
            self._count_exchange(counters)

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
        own: dict[str, Any] = {"generators": get_rng_states(self._device)}
        own |= {key: herd.pop(key, None) for key in EXCHANGES}

        def shared() -> dict[str, Any]:
            return {
                "epoch": number,
                "counters": asdict(counters),
                "model": dict(self.model.state_dict()),
                "optimizer": self._optimizer.state_dict(),
                "herd": herd,
                "record": None if self.record is None else self.record(),
            }

        return shared, own

    def load(self, checkpoint: LoadedCheckpoint) -> int:
        """Continue from a checkpoint; return the epoch to continue with."""
        shared, size = checkpoint.shared, self._world.size
        own = checkpoint.part(self._world.rank) if checkpoint.workers == size else {}
        self.model.load_state_dict(shared["model"])
        self._optimizer.load_state_dict(shared["optimizer"])
        self.counters = build_dataclass(EpochCounters, shared["counters"])
        if checkpoint.workers == size:
            self._herd.load_state_dict(_herd_state(shared, own))
            set_rng_states(own["generators"], self._device)
        else:
            ranks = range(checkpoint.workers)
            self._herd.load_state_dict(
                merge_states(_herd_state(shared, checkpoint.part(rank)) for rank in ranks)
            )
            # Generators of other ranks cannot be continued; the step makes the seed a new one.
            seed = self._config.seed + checkpoint.step
            torch.manual_seed(worker_seed(seed, self._world.rank))
        epoch: int = shared["epoch"]
        return epoch

    def _costs(self) -> dict[str, float]:
        """Return what was spent since this process started, by the names of counters."""
        metrics, hook = self._herd.metrics(), self._mean_hook
        ordering = metrics["bytes_for_ordering"]
        return {
            "ordering_seconds": metrics["ordering_seconds"],
            "exchange_seconds": hook.stopwatch.seconds if hook else metrics["exchange_seconds"],
            "saving_seconds": self.checkpointer.stopwatch.seconds if self.checkpointer else 0.0,
            "skipped_steps": metrics.get("skipped_steps", 0),
            "ordering_bytes": ordering,
            "bytes": ordering + (hook.total_bytes if hook else metrics["total_bytes"]),
        }

    def _add_costs(self, counters: EpochCounters, before: dict[str, float]) -> None:
        spent = {name: after - before[name] for name, after in self._costs().items()}
        # Ranks send different amounts: the record holds the mean over them.
        sent = [spent["ordering_bytes"], spent["bytes"]]
        all_sent = all_gather(
            torch.tensor(sent, dtype=torch.float64, device=self._device), self._world
        )
        spent["ordering_bytes"], spent["bytes"] = map(round, all_sent.value.mean(0).tolist())
        for name, value in spent.items():
            setattr(counters, name, getattr(counters, name) + value)
        # Local steps that send all coordinates, in one bit, have a residual as well.
        if self._config.density is not None or self._config.local_steps is not None:
            counters.residual_norm = self._herd.metrics().get("residual_norm", 0.0)

    def evaluate(self) -> list[Evaluation]:
        """Evaluate the model, all ranks together."""
        # Evaluation calls the model, too: its hooks must not take that for training. Local steps
        # are evaluated at the weights that all ranks share.
        with self._herd.pause(), self._herd.shared_weights():
            # Else each rank would evaluate its part of the loss with BatchNorm statistics of its
            # own; DDP sends rank 0's, too, before a forward.
            for buffer in self.model.buffers():
                broadcast(buffer, self._world)
            if self._diverged:  # The loss in the record says so.
                for parameter in self._parameters:
                    parameter.detach().fill_(torch.nan)
            return [evaluate(self._config, self._task, self.model, self._split, self._world)]

    def close(self) -> None:
        """Detach from the model."""
        with self._noting_divergence():
            self._herd.detach()


def _herd_state(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one rank's herd."""
    return dict(shared["herd"]) | {key: own[key] for key in EXCHANGES if own.get(key) is not None}
