"""Random training loops, and a slow reference that knows which examples made each gradient.

A loop is composed from a seed: skipped batches, exceptions, early stops, second iterators, looks at
the data, prefetching workers, accumulation, micro-batches, loops that fetch ahead, forwards without
a backward, second backwards, overflows of a GradScaler, restores in mid-epoch (skipped by the
sampler or by the loader) and frameworks' habits of set_epoch; on several ranks also `no_sync`, and
ranks that skip different batches. Weights stay as they are, so a batch has the same gradient
whenever it is trained on.
"""

import argparse
import contextlib
import copy
import random
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from gradherd import ExactRows, OrderedSampler, attach
from gradherd.lab.ranks import run_ranks
from gradherd.ordering.ordering import Ordering

DIM, CLASSES, EPOCHS = 5, 3, 3
EVENTS = ["train"] * 6 + ["skip", "raise", "forward only", "look", "again", "overflow"]
NAMING = ["each epoch", "never", "from 0 after a restore", "twice", "counter in iter", "always 0"]


class Indexed(Dataset):
    """Examples that say which ones they are."""

    def __init__(self, count):
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, DIM, dtype=torch.float64, generator=draw)
        self.y = torch.randint(CLASSES, (count,), generator=draw)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


class Model(nn.Module):
    """A small network that can also be called by a part of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()

    def forward(self, x):
        return self.body(x)


class CountingLoader:
    """Names the epoch by a counter of its own when it is iterated, as Accelerate's loader does."""

    def __init__(self, loader, sampler):
        self.loader, self.sampler, self.passes = loader, sampler, 0

    def __iter__(self):
        self.sampler.set_epoch(self.passes)
        self.passes += 1
        return iter(self.loader)


class Reference:
    """Learns the order from true identities: the examples of each gradient are given."""

    def __init__(self, sampler, gradient):
        sharding, ordering = sampler.sharding, sampler.ordering
        self._sharding, self._gradient = sharding, gradient
        self.skipped = ("", 0)  # an order, and the position up to which a loader should skip it
        self.ordering = Ordering(
            ordering.policy, sharding.sizes, seed=ordering.random.seed, length=sharding.length
        )

    def train(self, version, batches, finite=True):
        """Learn from every worker's batch, given by its examples, of a pass with that order.

        Return whether it belongs to the order.
        """
        if version != self.ordering.version:
            return False  # a batch of an order that is over
        orders = self.ordering.orders
        walks = [self._sharding.indices(w, order).tolist() for w, order in enumerate(orders)]
        starts = [walk.index(own[0]) for walk, own in zip(walks, batches, strict=True)]
        unit = self._sharding.unit
        if version == self.skipped[0] and starts[0] < self.skipped[1]:
            return False  # The loader has not skipped it: it was trained on before the restart.
        if len(set(starts)) > 1:  # Ranks are at different batches: nothing is learned.
            ends = (at + len(own) for at, own in zip(starts, batches, strict=True))
            self.ordering.skip_to(max(self.ordering.steps, min(ends) // unit))
            return True
        for at in range(0, len(batches[0]), unit):
            rows = torch.stack([self._gradient(own[at : at + unit]) for own in batches])
            seen = torch.full((1, len(batches)), finite)
            self.ordering.observe(rows.unsqueeze(0), seen, first=(starts[0] + at) // unit)
        if self.ordering.steps == self.ordering.length:
            self.ordering.end_epoch()
        return True

    def reach(self, epoch):
        """End epochs until that one."""
        if self.ordering.epoch < epoch:
            self.ordering.end_epoch(epoch)


class OneAhead:
    """Fetches the next batch before the one at hand is trained on, as copies to a GPU do."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        batches = iter(self.loader)
        following = next(batches, None)
        while following is not None:
            current, following = following, next(batches, None)
            yield current


class Loop:
    """One loop, composed from a seed; the same on every rank but for what it says."""

    is_synced = True  # whether the next backward averages gradients

    def __init__(self, seed, noise=None):
        self.noise = noise
        """A generator of noise of rounding's size for the reference's gradients, or None."""
        self.pick = pick = random.Random(seed)
        self.size = size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if size > 1 else 0
        self.seed, self.batch = seed, pick.choice([2, 3, 4])
        self.unit = unit = pick.choice([1, self.batch])
        count = size * self.batch * pick.choice([3, 5])
        self.count = count + (0 if unit > 1 else pick.choice([0, 1]) * size)
        self.workers = pick.choice([0, 0, 0, 0, 0, 1, 2]) if size == 1 else 0
        self.ahead = pick.choice([0, 0, 0, 1])
        self.accumulate, self.no_sync = pick.choice([1, 1, 2]), pick.random() < 0.5
        self.policy = pick.choice(["cd-grab", "cd-grab", "id-grab", "pair-grab"])
        self.naming = pick.choice(NAMING)
        self.part = size == 1 and pick.random() < 0.2
        self.scaled = pick.random() < 0.3
        self.ranks_differ = size > 1 and pick.random() < 0.3
        if self.ranks_differ:
            self.ahead = 0
        self.skipped_by = pick.choice(["sampler", "loader"])
        self.persistent = self.workers > 0 and pick.random() < 0.5
        self.parts, self.parts_sync = self.choose_parts()
        self.compose()
        hidden = ("pick", "rank", "noise")
        self.said = [str({k: v for k, v in vars(self).items() if k not in hidden})]
        self.dataset = Indexed(self.count)
        self.scaler = None
        if self.scaled:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.build()
        self.make(self.workers)
        self.reference = self.make_reference()
        self.named_from, self.restored = 0, False

    def choose_parts(self):
        """Return into how many micro-batches a batch is split, and whether all of them sync."""
        pick = random.Random(f"parts {self.seed}")  # so that the rest of a loop stays as it was
        parts, sync = pick.choice([1, 1, 2, 3]), pick.random() < 0.5
        # The model's batch is not known where a part of it is called; and ranks must have as many.
        uneven = self.ranks_differ and self.count % (self.size * self.batch)
        return 1 if (self.part and self.unit == 1) or uneven else parts, sync

    def compose(self):
        """Choose more; for loops with more than an order (tests/stress/loops.py)."""

    def build(self):
        """Make the model, what is called, and the optimizer."""
        self.net = Model()
        self.model = DDP(self.net) if self.size > 1 else self.net
        self.call = self.net.body if self.part else self.model
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)
        self.apart = copy.deepcopy(self.net)  # the reference's own backwards are not observed

    def make(self, workers):
        """Make sampler, loader and herd."""
        self.workers, self.sampler = workers, self.make_sampler()
        self.loader = DataLoader(
            self.dataset, batch_size=self.batch, sampler=self.sampler, num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            persistent_workers=self.persistent and workers > 0,
        )  # fmt: skip
        if self.naming == "counter in iter":
            self.named_loader = CountingLoader(self.loader, self.sampler)
        else:
            self.named_loader = self.loader
        self.herd = self.attach()
        if self.ahead:
            self.named_loader = OneAhead(self.named_loader)
        if workers or self.ahead:  # A loader that fetches ahead is named.
            self.named_loader = self.herd.batches(self.named_loader)

    def make_sampler(self):
        return OrderedSampler(
            self.dataset, self.policy, batch_size=self.batch, unit=self.unit, seed=self.seed,
            skips=True,
        )  # fmt: skip

    def make_reference(self):
        return Reference(self.sampler, self.gradient)

    def attach(self):
        rows = "batch" if self.unit > 1 else ExactRows(batch_dim=0 if self.part else None)
        return attach(self.model, order=self.sampler, rows=rows, scaler=self.scaler)

    def gradient(self, indices):
        loss = F.cross_entropy(self.apart(self.dataset.x[indices]), self.dataset.y[indices])
        grads = torch.autograd.grad(loss, list(self.apart.parameters()))
        row = torch.cat([grad.flatten() for grad in grads])
        if self.noise is not None:
            row *= 1 + 1e-13 * torch.randn(len(row), generator=self.noise, dtype=row.dtype)
        return row

    def run(self):
        """Run the loop; return this rank's orders and the true ones."""
        for epoch in range(EPOCHS):
            self.name(epoch)
            missing = (self.reference.ordering.length - self.reference.ordering.steps) * self.unit
            if 0 < missing < self.batch:
                self.reference.ordering.end_epoch()  # a short last batch may be missing
            self.run_epoch(epoch)
            if self.credited:  # the rest of a resumed epoch is done: passes begin at its start
                self.reference.skipped = ("", 0)
        self.herd.finish()
        self.sampler.set_epoch(EPOCHS + 10)
        self.reference.reach(EPOCHS + 10)
        found = [order.tolist() for order in self.sampler.ordering.orders]
        wanted = [order.tolist() for order in self.reference.ordering.orders]
        self.herd.detach()
        return found, wanted

    def name(self, epoch):
        """Name the epoch as some framework would."""
        if self.naming in ("each epoch", "twice"):
            for _ in range(1 + (self.naming == "twice")):
                self.sampler.set_epoch(epoch)
            self.reference.reach(epoch)
        elif self.naming == "from 0 after a restore":
            self.sampler.set_epoch(max(0, epoch - self.named_from))
            self.reference.reach(epoch)
        elif self.naming == "counter in iter":
            self.reference.reach(epoch)  # `iter(loader)` follows
        elif self.naming == "always 0":
            self.sampler.set_epoch(0)

    def run_epoch(self, epoch):
        """Iterate over the loader once, perhaps with a restore in between."""
        pick = self.pick
        stop = pick.choice([None, None, None, 1, 2])
        if self.naming in ("never", "always 0"):
            stop = None  # without a name, a loop that starts over is the same epoch
        restore_at = pick.choice([None, None, 1, 2])
        self.begin_pass()
        steps = trained = 0
        while True:
            with contextlib.suppress(StopIteration):
                if not self.waiting:
                    self.fetch()
            over = not self.waiting or (stop is not None and trained >= stop)
            if self.any_rank(over):
                break
            self.version = self.version or self.sampler.ordering.version
            event = self.choose(pick.choice(EVENTS))
            lonely = pick.randrange(self.size) if self.ranks_differ else None
            x, y, index = self.waiting.pop(0)
            index = index.tolist()
            self.said.append(
                f"epoch {epoch} {event} {index} {lonely if lonely is not None else ''}"
            )
            if event == "skip" and lonely is not None:
                # One rank skips: it goes on with its next batch, if all have one.
                if self.rank == lonely:
                    with contextlib.suppress(StopIteration):
                        self.fetch()
                if self.any_rank(self.rank == lonely and not self.waiting):
                    break
                if self.rank == lonely:
                    x, y, index = self.waiting.pop(0)
                    index = index.tolist()
            elif event == "skip":
                continue
            if event == "raise":
                with contextlib.suppress(ArithmeticError):
                    with torch.no_grad():
                        self.forget_forward(self.model(x))
                    raise ArithmeticError
                continue
            if event == "forward only":
                if self.size == 1:
                    self.call(x)
                continue
            if event == "look":
                with self.evaluating():
                    for other, _, _ in self.loader if self.workers == 0 else []:
                        self.net(other)
            finite = event != "overflow" or not self.scaled
            here = lonely in (None, self.rank)  # An overflow on one rank is one for all.
            synced = (steps + 1) % self.accumulate == 0 or not self.no_sync
            with contextlib.nullcontext() if synced or self.size == 1 else self.unsynced():
                self.backward(x, y, float("inf") if here and not finite else 1.0)
            every = self.gather(index)
            self.credited |= bool(self.reference.train(self.version, every, finite))
            trained, steps = trained + 1, steps + 1
            if event == "again" and self.size == 1:
                self.step()
                self.backward(x, y, 2.0)  # e.g. SAM: the first one counts
            if steps % self.accumulate == 0:
                self.step()
            if restore_at == trained and not self.restored and not self.ranks_differ:
                if self.can_restore(epoch):
                    self.restore(epoch)
                    stop = None if stop is None else stop + 1  # something is trained on after it
        self.step()
        del self.batches

    def evaluating(self):
        return torch.inference_mode()

    def can_restore(self, epoch):
        """Return whether the loop may be stopped here, and go on in a new one."""
        return self.reference.ordering.epoch == epoch

    @property
    def at_last_batch(self):
        """Whether the loader has handed out this pass's last batch."""
        return self.fetched == -(-self.left // self.batch)

    def choose(self, event):
        """Return what happens to the next batch, given what was drawn."""
        return event

    def forget_forward(self, output):
        """Undo what a forward without a backward leaves in the model."""

    @contextlib.contextmanager
    def unsynced(self):
        self.is_synced = False
        with self.model.no_sync():
            yield
        self.is_synced = True

    def begin_pass(self, skip=0):
        """Begin to iterate, perhaps as a framework that skips the first batches itself."""
        self.batches, self.waiting, self.fetched = iter(self.named_loader), [], 0
        self.credited = False  # whether a gradient of this pass belongs to its examples
        for _ in range(skip):
            next(self.batches)
        self.left = len(self.sampler) - self.sampler.start
        self.version = None  # of the order that this pass hands out

    def fetch(self):
        self.waiting.append(next(self.batches))
        if not self.fetched:  # only now the pass has begun, perhaps with a new epoch
            self.left = len(self.sampler) - self.sampler.start
        self.fetched += 1

    def backward(self, x, y, factor):
        pieces = list(zip(x.chunk(self.parts), y.chunk(self.parts), strict=True))
        for at, (inputs, labels) in enumerate(pieces):
            waits = self.size > 1 and at < len(pieces) - 1 and not self.parts_sync
            with self.unsynced() if waits and self.is_synced else contextlib.nullcontext():
                loss = F.cross_entropy(self.call(inputs), labels, reduction="sum")
                loss = loss * factor / len(x)
                (self.scaler.scale(loss) if self.scaler else loss).backward()

    def step(self):
        if self.scaler and any(p.grad is not None for p in self.net.parameters()):
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif not self.scaler:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def restore(self, epoch):
        """Save, begin anew as after a crash, and load."""
        self.restored = True
        self.step()
        state = self.save()
        self.herd.detach()
        self.batches = None
        self.load(state)
        self.said.append("restored")
        if self.naming == "from 0 after a restore":
            self.named_from = epoch
            self.sampler.set_epoch(0)
        position = self.position(state) if self.skipped_by == "loader" else 0
        self.reference.skipped = (self.reference.ordering.version, position)
        self.begin_pass(-(-position // self.batch))

    def save(self):
        return copy.deepcopy(self.herd.state_dict())

    def load(self, state):
        self.make(0)
        self.herd.load_state_dict(state, skipped_by=self.skipped_by)

    def position(self, state):
        """Return how many examples of the epoch a loader has to skip."""
        return state["sampler"]["position"]

    def any_rank(self, this):
        """Return whether it is so on any rank."""
        if not self.ranks_differ:
            return this
        flag = torch.tensor(float(this))
        dist.all_reduce(flag)
        return bool(flag)

    def gather(self, index):
        """Return the examples of every rank's batch."""
        if self.size == 1:
            return [index]
        own = torch.tensor(index + [-1] * (self.batch - len(index)))
        every = [torch.zeros_like(own) for _ in range(self.size)]
        dist.all_gather(every, own)
        return [[i for i in one.tolist() if i >= 0] for one in every]


def run_loops(seeds):
    """Run some loops on this rank; return those that went wrong."""
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            loop = Loop(seed)
            try:
                found, wanted = loop.run()
            except Exception as error:
                if loop.size > 1:
                    error.add_note(f"in loop {seed}:\n" + "\n".join(loop.said))
                    raise
                found, wanted = repr(error), "no error"
                loop.herd.detach()
            # Workers of a loader end at once when it is dropped, but take seconds when the garbage
            # collector finds it, and a loop refers to itself.
            vars(loop).pop("batches", None)
            del loop.loader, loop.named_loader
            if found != wanted and not (loop.size == 1 and is_tie(seed, found)):
                wrong.append((seed, "\n".join(loop.said), found, wanted))
    return wrong


def is_tie(seed, found):
    """Return whether noise of rounding's size in the reference also leads to the orders found.

    Centred gradients of units that all got the same sign add up to zero, about: the next sign is
    then one of rounding.
    """
    for number in range(16):
        loop = Loop(seed, torch.Generator().manual_seed(number))
        try:
            if loop.run()[1] == found:
                print(f"seed {seed}: a tie", flush=True)
                return True
        except ValueError:  # The reference's orders are not the loop's any more: no answer.
            loop.herd.detach()
    return False


def main():
    """Run random loops: `python -m tests.attach.loops --loops 2000`, a fifth of them on ranks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--loops", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--ranks", type=int, help="run all of them on that many ranks")
    args = parser.parse_args()
    shares = {args.ranks: args.loops} if args.ranks else {
        3: args.loops // 10, 2: args.loops // 10, 1: args.loops - 2 * (args.loops // 10)
    }  # fmt: skip
    failures, first = 0, args.first
    for ranks, count in shares.items():
        begin, wrong = time.monotonic(), []
        for start in range(first, first + count, 50):
            seeds = range(start, min(start + 50, first + count))
            if ranks == 1:
                found = [run_loops(seeds)]
            else:
                found = run_ranks(run_loops, ranks, seeds, timeout=600)
            wrong += {one[0]: one for each in found for one in each}.values()
            for seed, said, got, wanted in {one[0]: one for each in found for one in each}.values():
                print(f"seed {seed} on {ranks} ranks: {got}, wanted {wanted}\n{said}")
            print(f"{ranks} ranks: {seeds.stop - first} of {count}, {len(wrong)} wrong", flush=True)
        seconds = time.monotonic() - begin
        print(f"{ranks} ranks: {count} loops in {seconds:.0f} s, {len(wrong)} wrong", flush=True)
        failures, first = failures + len(wrong), first + count
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
