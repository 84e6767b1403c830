"""A run on real ranks: this process is one of them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from gradherd.attach.attach import attach
from gradherd.attach.herd import Herd
from gradherd.attach.state import merge_states
from gradherd.comm.collectives import all_gather
from gradherd.comm.world import World
from gradherd.lab.tasks.task import Split, Task, Tensors
from gradherd.lab.train.checkpoint import LoadedCheckpoint
from gradherd.lab.train.checkpoint_schedule import Checkpointer
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.mean_hook import MeanHook
from gradherd.lab.train.measurements import BinnedSeries, can_track_prefix_sums, herding_bound
from gradherd.lab.train.optimizers import (
    clip_and_step,
    flat_grad,
    get_rng_states,
    make_optimizer,
    set_lr,
    set_rng_states,
    worker_seed,
)
from gradherd.lab.train.trainer import (
    EpochCounters,
    Evaluation,
    StepCallback,
    broadcast_buffers,
    chunk_size,
    finite_metric,
    full_loss,
)
from gradherd.ordering.sampler import OrderedSampler
from gradherd.sparsify.settings import make_settings


class InMemoryDataset(Dataset[Tensors]):
    """Examples in memory; a loader takes a whole batch at once."""

    def __init__(self, columns: Tensors) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Tensors:
        return tuple(column[index] for column in self.columns)

    def __getitems__(self, indices: list[int]) -> Tensors:
        """Return the columns of a batch."""
        return tuple(column[indices] for column in self.columns)


def identity_collate(batch: Any) -> Any:
    """Collate nothing: the table's batches are whole."""
    return batch


class RankTrainer:
    """One rank of a DDP training with gradherd attached: the loop that a user would write."""

    def __init__(self, config: RunConfig, task: Task, split: Split, world: World) -> None:
        self._config, self._task, self._world = config, task, world
        self._device = torch.device(config.device)
        self._split = split.to(self._device)
        torch.manual_seed(config.seed)
        self.model = task.model().to(self._device)
        torch.manual_seed(worker_seed(config.seed, world.rank))
        self._parameters: list[nn.Parameter] = [
            p for p in self.model.parameters() if p.requires_grad
        ]
        self._ddp = DDP(self.model)
        table = InMemoryDataset(self._split.train)
        self.sampler = OrderedSampler(
            table,
            config.order,
            batch_size=config.batch_size,
            unit=config.unit,
            seed=config.seed,
            world=world,
        )
        self._herd, self._mean = self._attached()
        self._loader = DataLoader(
            table,
            batch_size=config.batch_size,
            sampler=self.sampler,
            collate_fn=identity_collate,
            generator=torch.Generator(),  # or it would draw among the model's own numbers
        )
        self._optimizer = make_optimizer(self._parameters, config)
        size = sum(p.numel() for p in self._parameters)
        dense = config.sparsify == "dense"
        # Gradients are the same on all ranks, so one of them watches.
        self.series = [BinnedSeries()]
        self.keeper: Checkpointer | None = None
        """Saves the run in time, if it is to be saved."""
        self.record: Callable[[], Any] | None = None
        """Tells rank 0's record so far, to be saved with the rest."""
        self.tally = EpochCounters()
        """What the epoch at hand has cost before this process went on with it."""
        self._watches = dense and world.rank == 0 and can_track_prefix_sums(len(self._loader), size)

    def _attached(self) -> tuple[Herd, MeanHook | None]:
        config = self._config
        sparsify = None
        if config.density is not None:
            sparsify = make_settings(config.sparsify, config.density, **(config.method or {}))
        herd = attach(self._ddp, order=self.sampler, sparsify=sparsify, rows=config.row_choice())
        # Ordering whole batches and sparsifying both have a hook of their own.
        taken = bool(self._ddp._comm_hooks)
        return herd, None if taken else MeanHook(self._ddp, self._world)

    def epoch(self, number: int, tick: StepCallback) -> list[EpochCounters]:
        """Train one epoch, or what is left of it."""
        tally, self.tally = self.tally, EpochCounters()
        if self.sampler.ordering.epoch < number:  # else it was saved after its last step
            self._train(number, tally, tick)
        return [tally]

    def _train(self, number: int, tally: EpochCounters, tick: StepCallback) -> None:
        before, already, means = self._costs(), tally.seconds, []
        whole = tally.steps == 0
        begin = time.perf_counter()
        set_lr(self._optimizer, self._config.lr_at(number))
        self.sampler.set_epoch(number - 1)
        self._ddp.train()
        batches = iter(self._loader)
        while True:
            fetch = time.perf_counter()
            batch = next(batches, None)
            tally.data_seconds += time.perf_counter() - fetch
            if batch is None:
                break
            self._optimizer.zero_grad()
            self._task.loss(self._ddp, *batch).backward()
            if self._watches:
                means.append(flat_grad(self._parameters))
            clip_and_step(self._optimizer, self._parameters, self._config.clip)
            tally.steps += 1
            if self._config.density is not None:
                told = self._herd.last_step()
                tally.add_sparse(told)
                self.series[0].add(told.get("density", 0.0))
            tick()
            if self.keeper is not None:

                def state() -> tuple[Callable[[], Any], Any]:
                    now = replace(tally, seconds=already + time.perf_counter() - begin)
                    self._add_costs(now, before)
                    return self.state(number, now)

                self.keeper.after_step(state)
        self._herd.finish()
        tally.seconds = already + time.perf_counter() - begin
        self._add_costs(tally, before)
        if means and whole:
            examples = self._config.batch_size * self._world.size
            tally.herding_bound = herding_bound(torch.stack(means), examples)

    def state(self, number: int, tally: EpochCounters) -> tuple[Callable[[], Any], Any]:
        """Return what decides the rest of the run: what rank 0 saves for all, and what is own."""
        told = self._herd.state_dict()
        own = {"generators": get_rng_states(self._device), "sparsify": told.pop("sparsify", None)}

        def shared() -> dict[str, Any]:
            return {
                "epoch": number,
                "tally": asdict(tally),
                "model": dict(self.model.state_dict()),
                "optimizer": self._optimizer.state_dict(),
                "herd": told,
                "series": self.series[0].state(),
                "record": None if self.record is None else self.record(),
            }

        return shared, own

    def load(self, loaded: LoadedCheckpoint) -> int:
        """Go on where a checkpoint was saved; return the epoch to go on with."""
        shared, size = loaded.shared, self._world.size
        self.model.load_state_dict(shared["model"])
        self._optimizer.load_state_dict(shared["optimizer"])
        self.tally = EpochCounters(**shared["tally"])
        self.series = [BinnedSeries.of(shared["series"])]
        if loaded.workers == size:
            own = loaded.part(self._world.rank)
            self._herd.load_state_dict(_herd_state(shared, own))
            set_rng_states(own["generators"], self._device)
        else:
            ranks = range(loaded.workers)
            self._herd.load_state_dict(
                merge_states(_herd_state(shared, loaded.part(rank)) for rank in ranks)
            )
            torch.manual_seed(worker_seed(self._config.seed + loaded.step, self._world.rank))
            self.tally.load, self.tally.load_steps = [], 0
        epoch: int = shared["epoch"]
        return epoch

    def _costs(self) -> dict[str, float]:
        """Return what was spent since the start."""
        told = self._herd.metrics()
        mean = self._mean
        return {
            "ordering_seconds": told["ordering_seconds"],
            "ordering_bytes": told["bytes_for_ordering"],
            "exchange_seconds": mean.seconds if mean else told["exchange_seconds"],
            "saving_seconds": 0.0 if self.keeper is None else self.keeper.clock.seconds,
            "exchange_bytes": mean.bytes if mean else told["total_bytes"],
            "skipped_steps": told.get("skipped_steps", 0),
            "residual_norm": told.get("residual_norm", 0.0),
        }

    def _add_costs(self, tally: EpochCounters, before: dict[str, float]) -> None:
        after = self._costs()
        spent = {name: after[name] - before[name] for name in after}
        tally.ordering_seconds += spent["ordering_seconds"]
        tally.exchange_seconds += spent["exchange_seconds"]
        tally.saving_seconds += spent["saving_seconds"]
        tally.skipped_steps += int(spent["skipped_steps"])
        sent = torch.tensor(
            [spent["ordering_bytes"], spent["exchange_bytes"]],
            dtype=torch.float64,
            device=self._device,
        )
        ordering, exchange = all_gather(sent, self._world).value.mean(0).tolist()
        tally.ordering_bytes += round(ordering)
        tally.bytes += round(ordering + exchange)
        if self._config.density is not None:
            tally.residual_norm = after["residual_norm"]

    def quality(self) -> list[Evaluation]:
        """Measure the model, all ranks together."""
        broadcast_buffers(self.model, self._world)
        chunk = chunk_size(self.model, self._config.batch_size)
        with self._herd.pause():
            loss = full_loss(self._task, self.model, self._split.train, self._world, chunk)
            value = (
                finite_metric(self._task, self.model, self._split.test)
                if not self._world.rank
                else None
            )
        return [Evaluation(loss, value)]

    def close(self) -> None:
        """Leave the model."""
        self._herd.detach()


def _herd_state(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a rank's herd."""
    sparse = own["sparsify"]
    return dict(shared["herd"]) | ({} if sparse is None else {"sparsify": sparse})
