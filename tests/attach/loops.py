"""Random training loops, and a slow reference that knows which examples made each gradient.

A loop is composed from a seed: skipped batches, exceptions, early stops, second iterators, looks at
the data, prefetching workers, accumulation, loops that fetch ahead, forwards without a backward,
second backwards, overflows of a GradScaler, restores in mid-epoch and frameworks' habits of
set_epoch. Weights stay as they are, so a batch has the same gradient whenever it is trained on.
"""

import argparse
import contextlib
import copy
import random
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from gradherd import OrderedSampler, attach
from gradherd.ordering import Ordering

DIM, CLASSES = 5, 3


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


class Reference:
    """Learns the order from true identities: the examples of each gradient are given."""

    def __init__(self, sampler, gradient):
        sharding, ordering = sampler.sharding, sampler.ordering
        self._sharding, self._gradient = sharding, gradient
        self.ordering = Ordering(
            ordering.policy, sharding.sizes, seed=ordering.random.seed, length=sharding.length
        )

    def restore(self, saved):
        self.ordering = copy.deepcopy(saved)

    def train(self, version, batches):
        """Learn from every worker's batch, given by its examples, of a pass with that order."""
        if version != self.ordering.version:
            return  # a batch of an order that is over
        orders = self.ordering.orders
        walks = [self._sharding.indices(w, order).tolist() for w, order in enumerate(orders)]
        starts = {walk.index(own[0]) for walk, own in zip(walks, batches, strict=True)}
        assert len(starts) == 1
        unit, start = self._sharding.unit, starts.pop()
        for at in range(0, len(batches[0]), unit):
            step = (start + at) // unit
            rows = torch.stack([self._gradient(own[at : at + unit]) for own in batches])
            self.ordering.observe(rows.unsqueeze(0), first=step)
        if self.ordering.steps == self.ordering.length:
            self.ordering.end_epoch()


def run_loop(seed, said=None):
    """Run the loop of a seed on this rank; return a description, its orders, and the true ones."""
    said = [] if said is None else said
    pick = random.Random(seed)  # the same on every rank: ranks of DDP take the same path
    size = dist.get_world_size() if dist.is_initialized() else 1
    batch = pick.choice([2, 3, 4])
    unit = pick.choice([1, batch])
    count = size * batch * pick.choice([3, 5]) + (0 if unit > 1 else pick.choice([0, 1]) * size)
    workers = pick.choice([0, 0, 0, 1, 2])
    ahead = pick.choice([0, 0, 0, 1])
    epochs = 3
    options = {
        "batch": batch, "unit": unit, "count": count, "workers": workers, "ahead": ahead,
        "accumulate": pick.choice([1, 1, 2]), "no_sync": pick.random() < 0.5,
        "policy": pick.choice(["cd-grab", "cd-grab", "id-grab", "pair-grab"]),
        "naming": pick.choice(["each epoch", "never", "from 0 after a restore", "twice"]),
        "part": unit > 1 and size == 1 and pick.random() < 0.2,
        "persistent": workers > 0 and pick.random() < 0.5,
    }  # fmt: skip
    dataset, net = Indexed(count), Model()
    sampler = OrderedSampler(
        dataset, options["policy"], batch_size=batch, unit=unit, seed=seed, ahead=ahead
    )
    loader = DataLoader(
        dataset, batch_size=batch, sampler=sampler, num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        persistent_workers=options["persistent"],
    )  # fmt: skip
    parameters = list(net.parameters())

    apart = copy.deepcopy(net)  # so that the reference's own backwards are not observed

    def gradient(indices):
        loss = F.cross_entropy(apart(dataset.x[indices]), dataset.y[indices])
        grads = torch.autograd.grad(loss, list(apart.parameters()))
        return torch.cat([grad.flatten() for grad in grads])

    model = DDP(net) if size > 1 else net
    call = net.body if options["part"] else model
    reference = Reference(sampler, gradient)
    herd = attach(model, order=sampler, rows="batch" if unit > 1 else "exact")
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    saved = None
    said.append(str(options))
    offset = 0
    for epoch in range(epochs):
        if options["naming"] in ("each epoch", "twice"):
            sampler.set_epoch(epoch)
            _end(reference, epoch)
            if options["naming"] == "twice":
                sampler.set_epoch(epoch)
        elif options["naming"] == "from 0 after a restore":
            sampler.set_epoch(max(0, epoch - offset))
            _end(reference, epoch)
        missing = (reference.ordering.length - reference.ordering.steps) * unit
        if 0 < missing < batch:
            reference.ordering.end_epoch()  # a short last batch may be missing
        stop = pick.choice([None, None, None, 1, 2])
        if options["naming"] == "never":
            stop = None  # without a name, a loop that starts over is the same epoch
        restore_at = pick.choice([None, None, 1, 2])
        batches, waiting, steps = iter(loader), [], 0
        version = None  # of the order that this pass hands out
        fetched, left = 0, len(sampler) - sampler.start
        trained = 0
        while True:
            with contextlib.suppress(StopIteration):
                while len(waiting) <= ahead:
                    waiting.append(next(batches))
                    fetched += 1
            if not waiting or (stop is not None and trained >= stop):
                break
            version = version or sampler.ordering.version
            x, y, index = waiting.pop(0)
            index = index.tolist()
            every = _all(index, size)
            event = pick.choice(["train"] * 5 + ["skip", "raise", "forward only", "look", "again"])
            said.append(f"epoch {epoch} {event} {index}")
            if event == "skip":
                continue
            if event == "raise":
                with contextlib.suppress(ArithmeticError):
                    with torch.no_grad():
                        model(x)
                    raise ArithmeticError
                continue
            if event == "forward only":
                if size == 1:
                    call(x)
                continue
            if event == "look":
                with torch.inference_mode():
                    for other, _, _ in loader if workers == 0 else []:
                        net(other)
            synced = (steps + 1) % options["accumulate"] == 0 or not options["no_sync"]
            with contextlib.nullcontext() if synced or size == 1 else model.no_sync():
                F.cross_entropy(call(x), y).backward()
            # Where the loop fetches ahead, its last batches cannot be told apart in all cases: then
            # nothing is learned from them.
            tail = ahead and fetched == -(-left // batch)
            if not (tail and (workers or left % batch)):
                reference.train(version, every)
            trained += 1
            if event == "again" and size == 1:
                optimizer.step()
                optimizer.zero_grad()
                F.cross_entropy(call(x) * 2, y).backward()  # e.g. SAM: the first one counts
            steps += 1
            if steps % options["accumulate"] == 0:
                optimizer.step()
                optimizer.zero_grad()
            if restore_at == trained and saved is None and reference.ordering.epoch == epoch:
                saved = True
                state = copy.deepcopy(herd.state_dict())
                herd.detach() if size == 1 else None
                if size == 1:
                    sampler = OrderedSampler(
                        dataset,
                        options["policy"],
                        batch_size=batch,
                        unit=unit,
                        seed=seed,
                        ahead=ahead,
                    )
                    loader = DataLoader(dataset, batch_size=batch, sampler=sampler)
                    workers = 0
                    herd = attach(model, order=sampler, rows="batch" if unit > 1 else "exact")
                    herd.load_state_dict(state)
                    said.append(f"restored after {index}")
                    stop = None if stop is None else stop + 1  # something is trained on after it
                    offset = epoch if options["naming"] == "from 0 after a restore" else 0
                    if options["naming"] == "from 0 after a restore":
                        sampler.set_epoch(0)
                    batches, waiting = iter(loader), []
                    fetched, left = 0, len(sampler) - sampler.start
        optimizer.step()
        optimizer.zero_grad()
        del batches
    herd.finish()
    sampler.set_epoch(epochs)
    _end(reference, epochs)
    found = [order.tolist() for order in sampler.ordering.orders]
    wanted = [order.tolist() for order in reference.ordering.orders]
    herd.detach()
    return "\n".join(said), found, wanted


def _end(reference, epoch):
    if reference.ordering.epoch < epoch:
        reference.ordering.end_epoch(epoch)


def _all(index, size):
    """Return the examples of every rank's batch."""
    if size == 1:
        return [index]
    own, every = (
        torch.tensor(index),
        [torch.zeros(len(index), dtype=torch.int64) for _ in range(size)],
    )
    dist.all_gather(every, own)
    return [one.tolist() for one in every]


def run_loops(seeds):
    """Run some loops on this rank; return those that went wrong."""
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            said, found, wanted = run_loop(seed)
            if found != wanted:
                wrong.append((seed, said, found, wanted))
    return wrong


def main():
    """Run random loops in this process: `python -m tests.attach.loops --loops 2000`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--loops", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    args = parser.parse_args()
    wrong = run_loops(range(args.first, args.first + args.loops))
    for seed, said, found, wanted in wrong:
        print(f"seed {seed}: {found}, wanted {wanted}\n{said}")
    print(f"{args.loops} loops, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
