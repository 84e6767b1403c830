"""Random loops that exchange less: sparse, by local steps, sharded, compiled, with an order or not.

    python -m tests.stress.loops --minutes 9 --jobs 6 --first 20261118 --compiled 20
    python -m tests.stress.loops --only 20261125 --sizes 4      # one loop again, alone

A loop is that of tests/attach/loops.py, with all its untidy parts, but weights change, and what
the ranks exchange is composed from the seed, too: the method, how values are sent, how many steps
are local, meshes of FSDP2. Each is trained twice: straight through, and saved and rebuilt in the
middle. What must hold:

- orders are those of a reference that computes every gradient itself, at the weights of its time;
- what was given plus what all ranks keep is what all have computed;
- shared weights of local steps follow from that by an outer SGD of torch;
- replicas hold the same bits after each exchange, and nothing is NaN but what was made so;
- the rebuilt run ends with the same bits.
"""

import argparse
import contextlib
import copy
import gc
import json
import os
import random
import shutil
import sys
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

import gradherd as gh
from gradherd.hooks.state import pack, unpack
from gradherd.lab.ranks import RankError, in_pool, process_pool, run_ranks
from tests.attach import loops
from tests.attach.fsdp_work import mesh_of
from tests.attach.loops import CLASSES, DIM, Loop
from tests.stress import resizes

IDLE = ("skip", "raise", "forward only")  # events without a backward
WAYS = ("sparse", "local", "sharded", "sharded sparse", "sharded local")
VALUES = ("fp32", "fp32", "bf16", "int4", "int2", "int1")
METHODS = tuple(gh.SPARSIFIERS)
BACKEND = "inductor" if shutil.which("g++") else "aot_eager"


class PlainSampler(DistributedSampler):
    """torch's sampler, with what a loop asks of an ordered one."""

    start, ordering = 0, SimpleNamespace(version="", orders=[])


class NoReference:
    """Stands in where nothing is learned."""

    skipped = ("", 0)

    def __init__(self):
        self.ordering = SimpleNamespace(length=0, steps=0, epoch=0, version="", orders=[])

    def train(self, version, batches, finite=True):
        pass

    def reach(self, epoch):
        self.ordering.epoch = epoch


class Net(nn.Module):
    """Layers of several sizes: some are sent whole, some compete; one may be frozen."""

    def __init__(self, width, frozen, dtype):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(DIM, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, CLASSES),
        )  # fmt: skip
        self.to(dtype)
        if frozen:
            self.body[0].requires_grad_(False)

    def forward(self, x):
        return self.body(x.to(self.body[4].weight.dtype))


def trained(module):
    return [p for p in module.parameters() if p.requires_grad]


def local(tensor):
    """Return this rank's part of a tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def flat(tensors):
    return torch.cat([local(tensor).flatten() for tensor in tensors]).clone()


class Composed(Loop):
    """A loop with an exchange of its own kind; `wrong` says what did not hold on this rank."""

    def __init__(self, seed, *, restores, compiled=False):
        self.restores, self.compiled, self.wrong = restores, compiled, []
        self.rows, self.mesh, self.birth = {}, None, 0
        super().__init__(seed)

    def compose(self):
        pick = random.Random(f"composed {self.seed}")
        self.way = "sparse" if self.compiled else pick.choice(WAYS)
        self.ordered = pick.random() < 0.6
        self.sharded = self.way.startswith("sharded")
        self.is_local = self.way.endswith("local")
        self.is_sparse = self.way.endswith("sparse")
        self.dtype = pick.choice([torch.float64, torch.float64, torch.float32])
        self.width, self.frozen = pick.choice([6, 17, 40]), pick.random() < 0.25
        self.in_ddp = self.is_sparse or pick.random() < 0.3
        self.lr, self.adam = pick.choice([0.02, 0.1]), self.is_local and pick.random() < 0.5
        self.gathered = not self.sharded and pick.random() < 0.5
        self.syncs = pick.random() < 0.3
        if self.way == "sharded":
            self.ordered = True
        if self.is_local or self.sharded:
            self.scaled = False  # refused, or a scaler would have to know of shards
        if self.sharded:
            self.no_sync = False  # FSDP would keep what a loop that stops has not synced
        if self.is_sparse or (self.is_local and (self.in_ddp or self.sharded)):
            self.unit = 1  # whole gradients are not read beside what is exchanged
        self.parts_sync = self.parts_sync and not self.is_sparse  # each sync is an exchange
        if self.compiled or self.way == "sharded sparse":
            self.parts = 1
        if self.compiled:
            self.unit, self.ordered, self.count = 1, False, self.count - self.count % self.batch
        if not self.ordered:
            self.naming, self.ahead, self.skipped_by = "each epoch", 0, "loader"
        if self.sharded:
            shapes = [(self.size, 1), (1, self.size), *[(2, 2)] * (self.size == 4)]
            self.shape = pick.choice([s for s in shapes if s[0] > 1 or self.way == "sharded"])
        density = pick.choice([0.05, 0.2, 1.0])
        name = pick.choice(["exdyna", "exdyna", *METHODS])
        method = gh.SPARSIFIERS[name]() if name == "dense" else gh.SPARSIFIERS[name](density)
        values = VALUES if self.is_local or name != "dense" else VALUES[:3]
        sent = {"values": pick.choice(values)}
        sent["dense_below"] = pick.choice([0, 8, 100, 10_000 if self.is_local else 100])
        if self.is_sparse:
            more = {}
            if pick.random() < 0.2:
                more["momentum"] = 0.5
            if pick.random() < 0.2:
                more["clip"] = 0.3
            if pick.random() < 0.2 and name != "dense" and density < 0.5:
                more |= {"warmup_steps": 4, "warmup_from": 0.5}
            self.settings = gh.Sparsify(method=method, **sent, **more)
        elif self.is_local:
            more = {"every": pick.choice([1, 2, 3, 5])}
            if sent["values"] != "fp32":
                more["keep_residual"] = pick.choice([True, True, False])
            if pick.random() < 0.4:
                more |= {"outer_lr": 0.7, "outer_momentum": 0.6}
            if pick.random() < 0.4 and not self.sharded:
                more["overlap"] = True
            self.settings = gh.LocalSteps(**sent, **more)

    @property
    def kind(self):
        return self.way + ("+order" if self.ordered else "") + (" compiled" * self.compiled)

    # What is built and attached.

    def build(self):
        torch.manual_seed(1000 * self.birth + (self.rank if self.is_local else 0))
        if self.sharded:  # replicas begin alike, ranks of one must not differ
            torch.manual_seed(1000 * self.birth)
        self.birth += 1
        self.net = Net(self.width, self.frozen, self.dtype)
        self.apart = Net(self.width, self.frozen, self.dtype)
        self.model = self.net
        if self.sharded:
            self.mesh = mesh_of(self.shape)
            inside = self.mesh["shard"] if self.way != "sharded" else self.mesh
            for layer in (self.net.body[0], self.net.body[2]):
                fully_shard(layer, mesh=inside)
            self.model = fully_shard(self.net, mesh=inside)
        elif self.in_ddp:
            # Several buckets; those of a compiled model are torch's to choose.
            self.model = DDP(self.net, bucket_cap_mb=None if self.compiled else 0.001)
        # Now: after a forward alone, FSDP's root has its whole parameters in the place of these.
        self.params, self.all_params = trained(self.net), list(self.net.parameters())
        self.call = self.model
        make = torch.optim.AdamW if self.adam else torch.optim.SGD
        more = {"lr": 0.01} if self.adam else {"lr": self.lr}
        self.optimizer = make(self.params, **more)
        if self.is_local:  # before that of the exchange
            self.optimizer.register_step_post_hook(self.note_weights)

    def make_sampler(self):
        if self.ordered:
            return super().make_sampler()
        return PlainSampler(self.dataset, self.size, self.rank, seed=self.seed)

    def make_reference(self):
        return super().make_reference() if self.ordered else NoReference()

    def attach(self):
        given = {}
        if self.ordered:
            given = {"order": self.sampler, "rows": "batch" if self.unit > 1 else "exact"}
        if self.is_sparse:
            given |= {"sparsify": self.settings}
        if self.is_local:
            given |= {"local": self.settings, "optimizer": self.optimizer}
        if self.sharded and self.way != "sharded":
            given["mesh"] = self.mesh
        if self.scaler is not None:
            given["scaler"] = self.scaler
        herd = gh.attach(self.model, **given)
        if self.compiled:
            self.call = torch.compile(self.model, backend=BACKEND)
        if self.birth == 1:  # A rebuilt run goes on with the books of the first.
            self.herd = herd
            self.open_books()
        return herd

    @property
    def peers(self):
        """The ranks that hold the same numbers: all, or those with the same shard."""
        return self.mesh["replicate"].get_group() if self.mesh is not None else None

    @property
    def copies(self):
        return self.shape[0] if self.sharded else self.size

    def can_restore(self, epoch):
        """Not behind the last batch: a new loop would begin with the next pass, this one ends."""
        return super().can_restore(epoch) and not self.at_last_batch

    def choose(self, event):
        """Train on a batch of the rest of a resumed epoch, at the latest on the last one.

        Where epochs have no names, a pass that trains on nothing may be a look at the data: the
        next one hands out that rest again, but the whole epoch in a run that was not stopped.
        """
        if self.resumes and event in IDLE and self.at_last_batch:
            event = "train"
        self.resumes = self.resumes and event in IDLE
        return event

    def forget_forward(self, output):
        """FSDP leaves the root's weights gathered: a step would not reach them."""
        if self.sharded:
            self.model.reshard()

    # References and books.

    def open_books(self):
        """Begin to count what is computed, given and kept."""
        self.own, self.given = 0.0, 0.0
        if self.is_sparse:
            self.kept = self.sum_of_kept()
            self.accumulated = 0.0
        if self.is_local:
            self.follow_shared()

    def said_wrong(self, what):
        self.wrong.append(what)
        self.said.append(f"WRONG: {what}")

    def same_bits(self, what, tensor):
        """Check that all replicas hold the same bits."""
        every = [torch.empty_like(tensor) for _ in range(self.copies)]
        dist.all_gather(every, tensor.contiguous(), group=self.peers)
        if not all(torch.equal(one, tensor) for one in every):
            if bool(tensor.isfinite().all()):
                self.said_wrong(f"{what} differ between ranks")

    def close_to(self, what, have, want, size):
        """Check to rounding, relative to numbers of a size."""
        tolerance = (1e-9 if self.dtype == torch.float64 else 3e-5) * max(1e-3, float(size))
        error = float((have.double() - want.double()).abs().max()) if have.numel() else 0.0
        if not error <= tolerance:
            self.said_wrong(f"{what}: off by {error:.3g} of {float(size):.3g}")

    def sum_of(self, tensor):
        total = tensor.double().clone()
        dist.all_reduce(total, group=self.peers)
        return total

    def vectors(self):
        """Return what this rank keeps between exchanges, flat, by kind."""
        # Not through the herd: that would feed back what waits for the order.
        state = self.herd._exchange.state_dict(gather=False)
        names = ("residual", "owner_error", "shared", "outer_momentum", "arrival")
        return {key: flat(state[key].values()) for key in names if key in state}

    def sum_of_kept(self):
        return self.sum_of(self.vectors()["residual"])

    def own_gradient(self, x, y, factor):
        """Return the flat gradient of a loss at the weights of now, computed apart."""
        self.copy_weights()
        loss = F.cross_entropy(self.apart(x), y) * factor
        grads = torch.autograd.grad(loss, trained(self.apart))
        return torch.cat([grad.flatten() for grad in grads])

    @torch.no_grad()
    def copy_weights(self):
        for mine, theirs in zip(self.apart.parameters(), self.all_params, strict=True):
            mine.copy_(theirs.full_tensor() if self.sharded else theirs)

    def shard_of(self, vector):
        """Return this rank's shards of a flat vector of all parameters."""
        if not self.sharded:
            return vector
        count, own = self.mesh["shard"].size(), self.mesh["shard"].get_local_rank()
        parts, at = [], 0
        for p in trained(self.apart):
            chunks = vector[at : at + p.numel()].view(p.shape).chunk(count)
            parts.append(chunks[own].flatten() if own < len(chunks) else vector[:0])
            at += p.numel()
        return torch.cat(parts)

    def grads(self):
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        return flat(parts)

    def backward(self, x, y, factor):
        if not self.is_sparse:
            return super().backward(x, y, factor)
        scale = self.scaler.get_scale() if self.scaler else 1.0
        own = self.own_gradient(x, y, factor * scale)
        before = self.grads()
        super().backward(x, y, factor)
        if self.sharded:  # what is accumulated without a sync is not in .grad
            group = self.mesh["shard"].get_group()
            dist.all_reduce(own, group=group)
            self.accumulated = self.accumulated + self.shard_of(own) / self.shape[1]
            if not self.is_synced:
                return None
            after = self.grads()
            computed, given = self.accumulated, after - before
            self.accumulated = 0.0
        elif not self.is_synced:
            return None
        else:
            self.unsent = False
            after = self.grads()
            computed, given = before + own, after
        finite = self.sum_of(torch.tensor([float(not computed.isfinite().all())])).item() == 0
        if self.sharded:
            flag = torch.tensor([float(finite)])
            dist.all_reduce(flag, op=dist.ReduceOp.MIN)
            finite = bool(flag)
        if bool(given.isfinite().all()) != finite and given.numel():
            self.said_wrong(f"gradients are finite: {finite}, what arrived is not so")
        self.same_bits("gradients", after)
        if finite:
            self.own, self.given = self.own + computed.double() / scale, self.given + given / scale
        return None

    def balance(self):
        """Check that nothing is lost: copies x given + kept = computed."""
        plain = self.is_sparse and not self.settings.momentum and self.settings.clip is None
        if plain and isinstance(self.own, torch.Tensor):
            kept, computed = self.sum_of_kept(), self.sum_of(self.own)
            have = self.copies * self.given.double() + kept - self.kept
            size = self.sum_of(self.own.abs()).max() if len(kept) else 0.0
            self.close_to("what is given and kept", have, computed, size)

    # Local steps.

    def follow_shared(self):
        """Take the shared weights as they are, and follow them from here."""
        kept = self.vectors()
        self.owed, self.lost = kept["residual"], kept.get("owner_error", torch.zeros(()))
        self.shared = nn.Parameter(kept["shared"].clone())
        momentum = self.settings.outer_momentum
        self.outer = torch.optim.SGD([self.shared], self.settings.outer_lr, momentum=momentum,
                                     nesterov=momentum > 0)  # fmt: skip
        if "outer_momentum" in kept:
            self.outer.state[self.shared]["momentum_buffer"] = kept["outer_momentum"].clone()
        self.taken, self.pending = 0, None

    def note_weights(self, *_):
        self.before = flat(self.params)

    def follow_step(self):
        """Do what the definition says, but for how values were rounded."""
        settings, after = self.settings, flat(self.params)
        self.taken += 1
        if self.pending is not None and self.taken >= settings.steps_until_applied:
            self.apply_pending()
        if self.taken < settings.every:
            return
        # With overlap, what has arrived is applied before the next exchange begins.
        own = after if settings.overlap else self.before
        self.taken, shared = 0, self.shared.detach().clone()
        difference = shared.double() - own.double() + self.owed.double()
        kept = self.vectors()  # waits for the exchange
        lost = kept.get("owner_error", torch.zeros(()))
        if not settings.keep_residual:
            left = kept["residual"]
        elif settings.overlap:  # what is to be added to the weights takes it from them
            left = kept["shared"] - own - kept["arrival"]
        else:  # in the own weights
            left = kept["shared"] - after
        sent = difference + self.lost.double() - left.double() - lost.double()
        self.shared.grad = (self.sum_of(sent) / self.copies).to(self.shared)
        self.outer.step()
        size = self.shared.detach().abs().max()
        self.close_to("shared weights", kept["shared"], self.shared.detach(), size)
        if settings.values == "fp32":
            self.close_to("what is left of exact values", left, torch.zeros_like(left), size)
        stays = settings.keep_residual
        self.owed, self.lost = torch.zeros_like(left) if stays else left, lost
        self.close_to("what waits beside weights", kept["residual"], self.owed, size)
        self.pending = own, self.shared.detach() - (left if stays else 0)
        if not settings.overlap:
            self.apply_pending()
            with self.herd.shared_weights():
                self.same_bits("shared weights", flat(self.params))

    def apply_pending(self):
        (then, wanted), self.pending = self.pending, None
        if self.settings.overlap:
            wanted = wanted + (self.before - then)
        self.close_to("weights after an exchange", flat(self.params), wanted, wanted.abs().max())

    # Parts of the loop.

    @contextlib.contextmanager
    def unsynced(self):
        self.is_synced = False
        with contextlib.ExitStack() as stack:
            if self.sharded:
                self.model.set_requires_gradient_sync(False)
            elif self.in_ddp:
                stack.enter_context(self.model.no_sync())
            yield
        if self.sharded:
            self.model.set_requires_gradient_sync(True)
        self.is_synced = True
        self.unsent = True

    @contextlib.contextmanager
    def evaluating(self):
        # Sharded parameters are gathered into tensors that later backwards use.
        with torch.no_grad() if self.sharded else torch.inference_mode():
            with self.herd.shared_weights():
                yield

    def step(self):
        if self.is_sparse and self.unsent:  # The loop has stopped between two batches of a step.
            self.optimizer.zero_grad()
        self.unsent = False
        super().step()
        if self.is_local:
            self.follow_step()
        else:
            self.same_bits("weights", flat(self.params))
        if not bool(flat(self.params).isfinite().all()) and not self.broken:
            self.broken = True
            self.said_wrong("weights are not finite")

    broken = unsent = resumes = False

    def run_epoch(self, epoch):
        super().run_epoch(epoch)
        if self.is_sparse:
            self.balance()
        if self.is_local and self.syncs:
            self.herd.sync()
            self.same_bits("weights after sync()", flat(self.params))
            self.follow_shared()
        self.kept_in_the_end = self.vectors() if self.is_sparse or self.is_local else {}

    def gather(self, index):
        every = super().gather(index)
        if self.ordered:
            self.copy_weights()
            x, y = self.dataset.x, self.dataset.y
            rows = torch.zeros(self.batch, sum(p.numel() for p in trained(self.apart)),
                               dtype=torch.float64)  # fmt: skip
            for row, at in enumerate(range(0, len(index), self.unit)):
                own = index[at : at + self.unit]
                loss = F.cross_entropy(self.apart(x[own]), y[own])
                grads = torch.autograd.grad(loss, trained(self.apart))
                rows[row] = torch.cat([grad.flatten() for grad in grads])
            parts = [torch.empty_like(rows) for _ in range(self.size)]
            dist.all_gather(parts, rows)
            self.rows = {
                tuple(own[at : at + self.unit]): part[row]
                for own, part in zip(every, parts, strict=True)
                for row, at in enumerate(range(0, len(own), self.unit))
            }
        return every

    def gradient(self, indices):
        return self.rows[tuple(indices)]

    def run(self):
        found, wanted = super().run()
        if self.dtype == torch.float32:  # Signs may be those of rounding.
            wanted = found if all(sorted(o) == list(range(len(o))) for o in found) else wanted
        self.end = flat(self.params)
        return found, wanted

    # Saving and loading.

    def restore(self, epoch):
        if self.restores:
            super().restore(epoch)
        else:  # The run that goes straight through saves, too: that feeds back what waits.
            self.restored = True
            self.step()
            self.save()
        self.resumes = self.naming in ("never", "always 0")

    def save(self):
        if self.is_sparse:
            self.balance()
        state = self.herd.state_dict(gather=self.gathered)
        weights, moments = flat(self.all_params), self.optimizer.state_dict()
        if self.sharded:  # each rank keeps its own shards
            return [weights, copy.deepcopy(moments), unpack(pack(state))]
        kept = unpack(pack([weights, moments, state]))
        if self.gathered:
            everyone = [kept]
            dist.broadcast_object_list(everyone, src=0)  # Only rank 0 saves.
            kept = everyone[0]
        return kept

    @torch.no_grad()
    def load(self, state):
        weights, moments, herd = state
        at = 0
        self.build()
        for p in self.all_params:
            own = local(p)
            own.copy_(weights[at : at + own.numel()].view(own.shape))
            at += own.numel()
        self.optimizer.load_state_dict(moments)
        self.make(0)
        if not self.ordered:
            self.sampler.set_epoch(self.reference.ordering.epoch)
        more = {"skipped_by": self.skipped_by} if self.ordered else {}
        self.herd.load_state_dict(herd, **more)

    def position(self, state):
        if self.ordered:
            return state[2]["sampler"]["position"]
        return self.fetched * self.batch


def run_one(seed, compiled=False):
    """Run a loop straight through, and again with a restore if it has one; return what is wrong."""
    straight = Composed(seed, restores=False, compiled=compiled)
    runs = [straight]
    try:
        found, wanted = straight.run()
        wrong = straight.wrong + ["orders are not those of the reference"] * (found != wanted)
        if straight.restored:
            again = Composed(seed, restores=True, compiled=compiled)
            runs.append(again)
            found, wanted = again.run()
            wrong += [f"rebuilt: {one}" for one in again.wrong]
            wrong += ["rebuilt: orders are not those of the reference"] * (found != wanted)
            kept = {"weights": straight.end} | straight.kept_in_the_end
            for name, tensor in ({"weights": again.end} | again.kept_in_the_end).items():
                wrong += [f"rebuilt: other bits of {name}"] * (not torch.equal(tensor, kept[name]))
    except Exception as error:
        error.add_note(f"in loop {seed}, {straight.kind}:\n" + "\n".join(runs[-1].said))
        raise
    said = "\n".join(line for run in runs for line in run.said) if wrong else ""
    return straight.kind, straight.restored, wrong, said


def usage():
    """Return what this process holds: KiB of memory, threads, open files."""
    gc.collect()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = int(lines["VmRSS"].split()[0]), int(lines["Threads"])
    return [*held, len(os.listdir("/proc/self/fd"))]


def run_seeds(seeds, end, log, compiled=False):
    """Run loops on this rank until `end` on this machine's clock; return counts and usage."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = {"loops": 0, "restored": 0, "kinds": Counter(), "wrong": [], "usage": []}
    with warnings.catch_warnings(), Path(log).open("a") as begun:
        warnings.simplefilter("ignore")
        for seed in seeds:
            over = [time.monotonic() > end]
            if dist.is_initialized():
                dist.broadcast_object_list(over, src=0)
            if over[0]:
                break
            if rank == 0:
                print(seed, file=begun, flush=True)
            if dist.is_initialized():
                kind, restored, wrong, said = run_one(seed, compiled)
            else:
                wrong, said, kind, restored = loops.run_loops([seed]), "", "order", False
                wrong = [f"{have}, wanted {want}\n{text}" for _, text, have, want in wrong]
            torch._dynamo.reset()
            found["loops"] += 1
            found["restored"] += restored
            found["kinds"][kind] += 1
            found["wrong"] += [(seed, kind, one, said) for one in wrong]
            if found["loops"] % 10 == 0:
                found["usage"].append([found["loops"], *usage()])
    return found


def job(size, seeds, minutes, compiled=False):
    """Run loops on ranks, again after each that has ended them; return their counts."""
    end, left = time.monotonic() + 60 * minutes, list(seeds)
    total = {"loops": 0, "restored": 0, "kinds": Counter(), "wrong": [], "usage": []}
    with TemporaryDirectory(prefix="gradherd-loops-") as name:
        log = Path(name) / "begun"
        log.touch()
        while left and time.monotonic() < end:
            try:
                if size == 1:
                    ranks = [run_seeds(left, end, log)]
                else:
                    limits = {"timeout": 60 * minutes + 200, "collective_timeout": 100.0}
                    ranks = run_ranks(run_seeds, size, left, end, log, compiled, **limits)
            except (RankError, TimeoutError) as error:
                last = int(log.read_text().split()[-1])
                total["loops"] += left.index(last) + 1
                total["wrong"].append((last, f"{size} ranks", str(error)[-6000:], ""))
                left = left[left.index(last) + 1 :]
                continue
            first = ranks[0]
            for key in ("loops", "restored"):
                total[key] += first[key]
            total["kinds"] += first["kinds"]
            for found in ranks:
                seen = {(seed, kind) for seed, kind, *_ in total["wrong"]}
                total["wrong"] += [one for one in found["wrong"] if tuple(one[:2]) not in seen]
            total["usage"].append([found["usage"] for found in ranks])
            break
    return total


def resized(seed):
    """Let other numbers of ranks go on with a run; return what is wrong."""
    chance = random.Random(f"resized {seed}")
    worlds = [chance.randint(1, 5) for _ in range(3)]
    methods = [("exdyna", 1), ("topk", 1), ("micro", 4), ("dense", resizes.BATCH)]
    try:
        resizes.chain(worlds, *chance.choice(methods), chance)
    except (AssertionError, RankError, TimeoutError):
        return traceback.format_exc()
    return ""


def resize_job(seeds, minutes):
    """Resize runs until the minutes are over."""
    end = time.monotonic() + 60 * minutes
    total = {"loops": 0, "restored": 0, "kinds": Counter(), "wrong": [], "usage": []}
    for seed in seeds:
        if time.monotonic() > end:
            break
        wrong = resized(seed)
        total["loops"] += 1
        total["kinds"]["resized"] += 1
        total["wrong"] += [(seed, "resized", wrong, "")] if wrong else []
    return total


def growth(samples):
    """Return the first and last usage of each rank that ran 30 loops at least, and the growth."""
    grown = []
    for ranks in samples:
        for rank, usages in enumerate(ranks):
            if len(usages) >= 3:
                first, last = usages[min(2, len(usages) // 2)], usages[-1]
                grown.append({"rank": rank, "from": first, "to": last})
    return grown


def main():
    """Run random loops side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loops", type=int, default=100_000, help="in all, at most")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no loop after these")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="groups of ranks side by side")
    parser.add_argument("--sizes", default="2,4,3,1", help="ranks of groups, in turn; 1: orders")
    parser.add_argument("--compiled", type=int, default=0, help="compiled loops, in one more")
    parser.add_argument("--resizes", type=int, default=0, help="runs on other ranks, in one more")
    parser.add_argument("--only", type=int, help="run this seed alone, on the first of --sizes")
    args = parser.parse_args()
    begin, sizes = time.monotonic(), [int(size) for size in args.sizes.split(",")]
    tasks = [
        (job, sizes[at % len(sizes)], range(args.first + at, args.first + args.loops, args.jobs),
         args.minutes)
        for at in range(args.jobs)
    ]  # fmt: skip
    if args.only is not None:
        tasks = [(job, sizes[0], [args.only], args.minutes, args.compiled > 0)]
    else:
        more = range(args.first, args.first + args.compiled)
        tasks += [(job, 2, more, args.minutes, True)] if args.compiled else []
        more = range(args.first, args.first + args.resizes)
        tasks += [(resize_job, more, args.minutes)] if args.resizes else []
    total = {"loops": 0, "restored": 0, "kinds": Counter(), "wrong": {}, "growth": []}
    with process_pool(len(tasks), "spawn") as pool:
        for done in as_completed([pool.submit(in_pool, *task) for task in tasks]):
            found = done.result()
            for seed, kind, wrong, said in found["wrong"]:
                print(f"seed {seed}, {kind}: {wrong}\n{said}", flush=True)
                total["wrong"].setdefault(f"{kind}: {seed}", wrong.strip().splitlines()[-1][-200:])
            for key in ("loops", "restored"):
                total[key] += found[key]
            total["kinds"] += found["kinds"]
            total["growth"] += growth(found["usage"])
    total["seconds"] = round(time.monotonic() - begin)
    print(json.dumps(total))
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
