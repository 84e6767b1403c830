"""Loops as people write them: the order follows from the true examples, or an error says why not.

Each loop trains through `Trainee.train`, which also gives the examples of the batch to a slow
reference (`loops.Reference`). Random mixtures of such loops are in test_loops.py.
"""

import contextlib
import gc
import itertools
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

import gradherd as gh
from gradherd.hooks import row_sources
from gradherd.lab.ranks import run_ranks
from tests.attach import loops, untidy_work

COUNT, BATCH, EPOCHS = 24, 4, 3


class NotingSampler(gh.OrderedSampler):
    """Notes the version of each order that it hands out."""

    def __iter__(self):
        iterator = super().__iter__()
        self.__dict__.setdefault("versions", []).append(self.ordering.version)
        return iterator


class Trainee:
    """A model, its sampler and loader, and the reference."""

    def __init__(self, unit, *, workers=0, scaler=None, part=False):
        self.dataset, self.net = loops.Indexed(COUNT), loops.Model()
        self.call = self.net.body if part else self.net
        self.unit, self.scaler, self.part = unit, scaler, part
        self.make(workers)
        apart = loops.Model()

        def gradient(indices):
            loss = F.cross_entropy(apart(self.dataset.x[indices]), self.dataset.y[indices])
            grads = torch.autograd.grad(loss, list(apart.parameters()))
            return torch.cat([grad.flatten() for grad in grads])

        self.reference = loops.Reference(self.sampler, gradient)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)

    def make(self, workers=0):
        self.sampler = NotingSampler(
            self.dataset, "cd-grab", batch_size=BATCH, unit=self.unit, seed=5
        )
        self.loader = DataLoader(
            self.dataset, BATCH, sampler=self.sampler, num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )  # fmt: skip
        rows = "batch" if self.unit > 1 else gh.ExactRows(batch_dim=0 if self.part else None)
        self.herd = gh.attach(self.net, order=self.sampler, rows=rows, scaler=self.scaler)

    def backward(self, batch, factor=1.0, version=None):
        x, y, index = batch
        loss = F.cross_entropy(self.call(x), y) * factor
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        version = version or self.sampler.versions[-1]
        self.reference.train(version, [index.tolist()], finite=factor == 1.0)

    def backward_by_parts(self, batch, parts):
        """Split a batch into micro-batches."""
        x, y, index = batch
        for inputs, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = F.cross_entropy(self.call(inputs), labels, reduction="sum") / len(x)
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        self.reference.train(self.sampler.versions[-1], [index.tolist()])

    def step(self):
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def train(self, batch, **kwargs):
        self.backward(batch, **kwargs)
        self.step()

    def next_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.reference.reach(epoch)

    def check(self):
        self.herd.finish()
        self.next_epoch(EPOCHS + 5)
        found = [order.tolist() for order in self.sampler.ordering.orders]
        assert found == [order.tolist() for order in self.reference.ordering.orders]
        self.herd.detach()


def leaves_out_a_batch(one):
    for epoch in range(EPOCHS):
        one.next_epoch(epoch)
        for number, batch in enumerate(one.loader):
            if number != 1 + epoch:
                one.train(batch)


def leaves_out_the_first_batch_of_a_named_loader(one):
    for epoch in range(EPOCHS):
        one.next_epoch(epoch)
        for number, batch in enumerate(one.herd.batches(one.loader)):
            if number >= epoch:
                one.train(batch)


def exception_and_continue(one):
    for epoch in range(EPOCHS):
        one.next_epoch(epoch)
        for number, batch in enumerate(one.loader):
            with contextlib.suppress(MemoryError):
                if number == 2:
                    one.net(batch[0])
                    raise MemoryError
                one.train(batch)


def one_ahead(one):
    for _ in range(EPOCHS):
        for batch in one.herd.batches(loops.OneAhead(one.loader)):
            one.train(batch)


class Repeated:
    """A batch sampler that goes over its sampler for ever, and does not tell which it is."""

    def __init__(self, sampler):
        self.hidden = sampler

    def __iter__(self):
        while True:
            yield from BatchSampler(self.hidden, BATCH, drop_last=False)


def a_batch_sampler_that_repeats(one, workers=0):
    loader = DataLoader(
        one.dataset, batch_sampler=Repeated(one.sampler), num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )  # fmt: skip
    for number, batch in enumerate(one.herd.batches(loader) if workers else loader):
        if number == EPOCHS * COUNT // BATCH:
            break
        one.train(batch, version=one.sampler.versions[number // (COUNT // BATCH)])


def micro_batches(one):
    for epoch in range(EPOCHS):
        one.next_epoch(epoch)
        for number, batch in enumerate(one.loader):
            one.backward_by_parts(batch, 1 + number % 3)
            one.step()


def micro_batches_of_a_loader_with_workers(one):
    for epoch in range(2):
        one.next_epoch(epoch)
        for batch in one.herd.batches(one.loader):
            one.backward_by_parts(batch, 2)
            one.step()


def micro_batches_with_accumulation(one):
    for epoch in range(EPOCHS):
        one.next_epoch(epoch)
        for number, batch in enumerate(one.loader):
            one.backward_by_parts(batch, 2 if number % 3 else 1)
            if number % 2:
                one.step()


def parts_with_accumulation(one):
    for epoch in range(EPOCHS):
        one.next_epoch(epoch)
        for number, batch in enumerate(one.loader):
            one.backward(batch)
            if number % 2:
                one.step()


def resume(one, skipped_by="sampler"):
    """Train on an epoch and a half, then begin anew as after a crash."""
    one.next_epoch(0)
    for batch in one.loader:
        one.train(batch)
    one.next_epoch(1)
    batches = iter(one.loader)
    for _ in range(3):
        one.train(next(batches))
    state = one.herd.state_dict()
    one.herd.detach()
    del batches
    one.make()
    one.herd.load_state_dict(state, skipped_by=skipped_by)


def resumed_and_named_from_0(one):
    resume(one)
    for epoch in range(EPOCHS):
        one.next_epoch(epoch)
        for batch in one.loader if epoch else []:  # The framework passes over what is done.
            one.train(batch)


def resumed_with_a_loader_that_counts(one):
    resume(one)
    loader = loops.CountingLoader(one.loader, one.sampler)
    for epoch in range(EPOCHS):
        one.reference.reach(epoch + 1)
        for batch in loader:
            one.train(batch)


def resumed_by_a_loader_that_skips(one):
    resume(one, skipped_by="loader")
    trained = []
    for epoch in range(1, EPOCHS):
        one.next_epoch(epoch)
        for number, batch in enumerate(one.loader):
            if epoch > 1 or number >= 3:
                one.train(batch)
                trained += batch[2].tolist()
    assert len(trained) == COUNT * (EPOCHS - 1) - 3 * BATCH  # Nothing was skipped twice.


def overflow_then_a_finite_batch(one):
    for epoch in range(EPOCHS):
        one.next_epoch(epoch)
        for number, batch in enumerate(one.loader):
            one.backward(batch, factor=float("inf") if number == 2 else 1.0)
            if number % 2:
                one.step()


def stepped_inside_the_backward(one):
    """As in torch's tutorial: an optimizer for each parameter, stepped when its gradient is in."""
    one.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    single = {p: torch.optim.SGD([p], lr=0.0) for p in one.net.parameters()}

    def step(parameter):
        single[parameter].step()
        single[parameter].zero_grad()

    for parameter in one.net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for epoch in range(EPOCHS):
        one.next_epoch(epoch)
        for batch in one.loader:
            one.backward(batch)
    assert "rows_left_out" not in one.herd.metrics()


def broken_off_and_looked_at(one):
    for epoch in range(EPOCHS):
        one.next_epoch(epoch)
        for number, batch in enumerate(one.loader):
            if number == 3:
                break
            if number == 1:
                next(iter(one.loader))
            one.train(batch, version=one.sampler.versions[-1])
        with torch.inference_mode():
            list(one.loader)


LOOPS = {
    leaves_out_a_batch: {},
    leaves_out_the_first_batch_of_a_named_loader: {},
    exception_and_continue: {},
    one_ahead: {},
    a_batch_sampler_that_repeats: {},
    micro_batches: {},
    micro_batches_of_a_loader_with_workers: {"workers": 1},
    micro_batches_with_accumulation: {"scaler": True},
    parts_with_accumulation: {"part": True},
    resumed_and_named_from_0: {},
    resumed_with_a_loader_that_counts: {},
    resumed_by_a_loader_that_skips: {},
    overflow_then_a_finite_batch: {"scaler": True},
    stepped_inside_the_backward: {},
    broken_off_and_looked_at: {},
}


@pytest.mark.parametrize("unit", [1, BATCH])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_order_follows_from_the_true_examples(loop, unit):
    settings = dict(LOOPS[loop])
    if settings.get("scaler"):
        settings["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0)
    one = Trainee(unit, **settings)
    loop(one)
    one.check()


@pytest.mark.parametrize("unit", [1, BATCH])
def test_a_batch_sampler_that_repeats_for_workers_is_refused(unit):
    one = Trainee(unit)
    with pytest.raises(ValueError, match="goes over this sampler again before the last gradients"):
        a_batch_sampler_that_repeats(one, workers=1)
    # Nothing was credited wrongly before it became clear.
    found = one.sampler.ordering
    assert found.epoch <= 1
    if found.epoch == 1:
        want = [order.tolist() for order in one.reference.ordering.orders]
        assert [order.tolist() for order in found.orders] == want


def test_all_batches_fetched_before_the_first_forward():
    one = Trainee(BATCH)
    batches = list(one.loader)
    with pytest.raises(RuntimeError, match=r"6 batches before .* OrderedSampler\(\.\.\., skips="):
        one.train(batches[0])


@pytest.mark.parametrize("at_end", [False, True])
def test_micro_batches_whose_gradients_are_cleared_are_of_the_batch(at_end, monkeypatch):
    """As in loops that clip each of them, and add up themselves."""
    if at_end:  # as on a GPU
        monkeypatch.setattr(row_sources, "AT_END_DEVICES", {"cpu"})
    one = Trainee(BATCH)
    for epoch in range(EPOCHS):
        one.next_epoch(epoch)
        for x, y, index in one.loader:
            for inputs, labels in zip(x.chunk(2), y.chunk(2), strict=True):
                F.cross_entropy(one.net(inputs), labels).backward()
                one.optimizer.zero_grad()
            one.reference.train(one.sampler.versions[-1], [index.tolist()])
    one.check()


def test_orders_without_gradients_count_a_batch_once():
    dataset, net = loops.Indexed(COUNT), loops.Model()
    sampler = gh.OrderedSampler(dataset, "d-rr", batch_size=BATCH)
    herd = gh.attach(net, order=sampler)
    for number, (x, y, _) in enumerate(DataLoader(dataset, BATCH, sampler=sampler), 1):
        for inputs, labels in zip(x.chunk(4), y.chunk(4), strict=True):
            F.cross_entropy(net(inputs), labels).backward()
        herd.finish()
        epoch, position = sampler.ordering.epoch, sampler.state_dict()["position"]
        assert epoch * COUNT + position == number * BATCH


def backward_of_a_half(one, batch, half):
    x, y, _ = batch
    F.cross_entropy(one.net(x.chunk(2)[half]), y.chunk(2)[half]).backward()


def test_half_a_batch_of_single_examples_is_refused():
    one = Trainee(1)
    backward_of_a_half(one, next(iter(one.loader)), 0)
    with pytest.raises(RuntimeError, match="given 2 examples, but the batch has 4: give the model"):
        one.optimizer.step()


def test_a_batch_whose_order_is_saved_between_its_parts_is_refused():
    one = Trainee(BATCH)
    batch = next(iter(one.loader))
    backward_of_a_half(one, batch, 0)
    one.herd.state_dict()
    backward_of_a_half(one, batch, 1)
    with pytest.raises(RuntimeError, match=r"saved, .* between two backwards of one batch"):
        one.optimizer.step()


# dynamo's own, about what it cannot trace and how it traces autograd functions
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("unit", [1, BATCH])
def test_micro_batches_of_a_model_that_is_compiled(unit):
    """Single examples: a compiled forward does not tell that it begins."""
    torch._dynamo.reset()
    one = Trainee(unit)
    one.net.compile(backend="aot_eager")
    batches = iter(one.loader)
    one.backward(next(batches))
    one.step()
    one.backward_by_parts(next(batches), 2)
    if unit == 1:
        with pytest.raises(RuntimeError, match="given 2 examples, but the batch has 4"):
            one.step()
        one.herd.detach()
        return
    one.step()
    for batch in batches:
        one.backward_by_parts(batch, 2)
    one.check()


def test_metrics_are_in_time_with_a_closure():
    one = Trainee(1)
    for number, (x, y, _) in enumerate(one.loader):
        if number == 4:
            break

        def closure(x=x, y=y):
            one.optimizer.zero_grad()
            loss = F.cross_entropy(one.net(x), y)
            loss.backward()
            return loss

        one.optimizer.step(closure)
        assert one.herd.metrics()["examples_fed_back"] == (number + 1) * BATCH


@pytest.mark.filterwarnings("error:epoch")
def test_an_epoch_of_which_nothing_came_back_is_a_warning():
    one, other = Trainee(BATCH), nn.Linear(loops.DIM, loops.CLASSES).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(2):
            one.sampler.set_epoch(epoch)
            for x, y, _ in one.loader:
                F.cross_entropy(other(x), y).backward()
    assert any("no gradient came back" in str(warning.message) for warning in caught)


def test_iterating_by_hand_keeps_nothing_of_the_loop_alive():
    class Large:
        pass

    def loop(sampler):
        large = Large()
        gone = weakref.ref(large)
        for _ in sampler:
            break
        iterator = iter(sampler)
        next(iterator)
        del large
        gc.collect()
        assert gone() is None
        return iterator

    loop(Trainee(1).sampler)


@pytest.fixture(scope="module")
def on_ranks():
    return run_ranks(untidy_work.every_case, 2)


@pytest.mark.parametrize("case", untidy_work.CASES)
def test_ranks_that_skip_different_batches(on_ranks, case):
    for found, wanted, logged in (rank[case] for rank in on_ranks):
        assert found == wanted
        assert logged == 1  # once, however many steps it concerns


def test_rows_that_cannot_be_read_on_one_rank(on_ranks):
    errors = [rank["unreadable"] for rank in on_ranks]
    assert "rows could not be read on rank 1, which raised an error of its own" in errors[0]
    assert "examples, but the batch has" in errors[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_end_where_a_loop_that_fetches_ahead_names_none(workers):
    """The next pass has the next order, all of it."""
    dataset = loops.Indexed(10)

    def made():
        sampler = gh.OrderedSampler(dataset, "pair-grab", batch_size=4)
        net = loops.Model()
        herd = gh.attach(net, order=sampler)
        return net, herd, DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=workers)

    def trained_on(net, herd, loader, batches=3):
        seen = []
        for x, y, index in itertools.islice(herd.batches(loops.OneAhead(loader)), batches):
            F.cross_entropy(net(x), y).backward()
            seen += index.tolist()
        return seen

    net, herd, loader = made()
    passes = [trained_on(net, herd, loader) for _ in range(4)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len({tuple(one) for one in passes}) == 4, "every pass has an order of its own"
    trained_on(net, herd, loader, batches=1)
    state = herd.state_dict()
    net, herd, loader = made()
    herd.load_state_dict(state)
    rest, *whole = [trained_on(net, herd, loader, count) for count in (2, 3, 3)]
    assert len(rest) == 6
    assert all(sorted(one) == list(range(10)) for one in whole)
    assert whole[0] != whole[1]
