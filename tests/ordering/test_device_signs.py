"""Signs of single examples that stay on a GPU; how they run here: see `test_triton_kernels`."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("triton")

import gradherd as gh
from gradherd.hooks import transports
from gradherd.ordering import balance, coordination, triton_gram
from gradherd.ordering.grab import GraB
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.pair_grab import CDGraB, PairGraB
from tests.gpu import DEVICE, MARKS, only_gpu

pytestmark = [
    *MARKS,
    # The interpreter computes in numpy, which tells what a GPU does in silence.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def stay(monkeypatch, *, here: bool) -> None:
    """Sign on the device of the tests, or as if it were none."""
    devices = {DEVICE} if here else set()
    for module in (balance, transports):
        monkeypatch.setattr(module, "KERNEL_DEVICES", devices)
    # Several blocks of a few vectors: the interpreter is slow.
    monkeypatch.setattr(balance, "MOST", 64 if DEVICE == "cuda" else 4)
    monkeypatch.setattr(balance, "_MOST_ROWS", 128 if DEVICE == "cuda" else 8)
    monkeypatch.setattr(coordination, "ROWS_PER_BLOCK", 8)


def epochs_of_whole_numbers(workers=1):
    """Rows whose means and products are exact in float32, so that all ways give the same signs."""
    torch.manual_seed(0)
    epochs = (3 * torch.randn(2, 16, workers, 37)).round() + 1
    epochs[1, 10, 0, 3] = torch.inf
    epochs[1, 5, workers - 1, 0] = torch.nan
    return epochs


def learn(epochs, *, device, policy=None, cuts=(0, 9, 16)):
    """Orders after each epoch, and the state before the last ends."""
    ordering = Ordering(policy or GraB(), [epochs.shape[1]] * epochs.shape[2], seed=0)
    orders = []
    for rows in epochs.to(device):
        for begin, end in itertools.pairwise(cuts):
            ordering.observe(rows[begin:end])
        state = ordering.state_dict()["balance"]
        ordering.end_epoch()
        orders.append([order.tolist() for order in ordering.orders])
    return orders, state, ordering


def test_orders_are_those_of_the_host(monkeypatch):
    epochs = epochs_of_whole_numbers(workers=2)
    stay(monkeypatch, here=False)
    wanted, host, _ = learn(epochs, device="cpu")
    stay(monkeypatch, here=True)
    found, late, ordering = learn(epochs, device=DEVICE)
    assert found == wanted and wanted[0] != wanted[1]
    assert torch.equal(late["sides"].cpu(), host["sides"])
    for name in ("running", "total", "mean"):
        torch.testing.assert_close(late[name].cpu(), host[name], rtol=1e-5, atol=1e-4)
    assert ordering._state.signer is not None


@pytest.mark.parametrize("policy", [CDGraB(), PairGraB()], ids=str)
def test_pairs_are_those_of_the_host(policy, monkeypatch):
    epochs = epochs_of_whole_numbers(workers=2)[1:, :15]  # an odd number: one has no partner
    runs = {}
    for here in (False, True):
        stay(monkeypatch, here=here)
        device = DEVICE if here else "cpu"
        runs[here] = learn(epochs, device=device, policy=policy, cuts=(0, 7, 8, 15))
        assert (runs[here][2]._state.signer is not None) == here
    assert runs[True][0] == runs[False][0]
    for name in ("sides", "running"):
        torch.testing.assert_close(runs[True][1][name].cpu(), runs[False][1][name])


def test_a_saved_state_goes_on_elsewhere(monkeypatch):
    epochs = epochs_of_whole_numbers()
    stay(monkeypatch, here=False)
    whole, _, _ = learn(epochs, device="cpu")
    stay(monkeypatch, here=True)
    first, second = Ordering(GraB(), [16], seed=0), Ordering(GraB(), [16], seed=0)
    first.observe(epochs[0].to(DEVICE))
    first.end_epoch()
    first.observe(epochs[1, :8].to(DEVICE))
    stay(monkeypatch, here=False)
    second.load_state_dict(first.state_dict())
    second.observe(epochs[1, 8:])
    second.end_epoch()
    assert second.orders[0].tolist() == whole[1][0]


def test_a_device_that_refuses_kernels(monkeypatch, caplog):
    epochs = epochs_of_whole_numbers()
    stay(monkeypatch, here=False)
    wanted, _, _ = learn(epochs, device="cpu")
    stay(monkeypatch, here=True)

    def refuse(*args):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(balance, "_HAS_TRITON", True)  # restored after the test
    monkeypatch.setattr(triton_gram, "sign_greedily", refuse)
    found, _, ordering = learn(epochs, device=DEVICE)
    assert found == wanted and ordering._state.signer is None
    assert "without Triton" in caplog.text and "out of shared memory" in caplog.text


def test_a_later_part_that_is_refused(monkeypatch):
    """Rows of one call count once, also if the kernels for the last of them are refused."""
    epochs = epochs_of_whole_numbers()
    stay(monkeypatch, here=False)
    wanted, host, _ = learn(epochs, device="cpu", cuts=(0, 5, 16))
    stay(monkeypatch, here=True)
    monkeypatch.setattr(balance, "_HAS_TRITON", True)  # restored after the test
    make = balance._Block

    def refuse_short(rows):
        if len(rows) == 3:  # 11 rows in parts of 8
            raise RuntimeError("out of shared memory")
        return make(rows)

    monkeypatch.setattr(balance, "_Block", refuse_short)
    found, state, _ = learn(epochs, device=DEVICE, cuts=(0, 5, 16))
    assert found == wanted
    assert torch.equal(state["sides"].cpu(), host["sides"])
    torch.testing.assert_close(state["total"].cpu(), host["total"])


@pytest.mark.parametrize("rows", [False, True])
def test_watching_rows_does_not_change_the_path(rows, monkeypatch):
    stay(monkeypatch, here=True)
    data, model = TensorDataset(torch.randn(36, 6)), nn.Linear(6, 5).to(DEVICE)
    sampler = gh.OrderedSampler(data, "grab", batch_size=12)
    herd = gh.attach(model, order=sampler, rows=gh.TwoSidedRows(size=64))
    herd.scalars(rows=rows)
    steps = []
    for (x,) in DataLoader(data, batch_size=12, sampler=sampler):
        model.zero_grad()
        loss = model(x.to(DEVICE)).square().sum(1).mean()
        steps.append(sampler.ordering.steps)
        loss.backward()
    assert steps == [0, 12, 24]  # signed at once, not when many batches have come together
    herd.detach()


@pytest.mark.parametrize(("policy", "batch"), [("grab", 12), ("cd-grab", 4)])
def test_a_training_loop_with_a_batch_that_overflows(policy, batch, monkeypatch):
    """Rows of the whole batch are left out, as the optimizer leaves out its gradient."""
    data = TensorDataset(torch.arange(24))
    inputs = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
    inputs[15] = torch.inf
    orders = {}
    for here in (False, True):
        stay(monkeypatch, here=here)
        torch.manual_seed(1)
        model = nn.Linear(6, 5).to(DEVICE)
        sampler = gh.OrderedSampler(data, policy, batch_size=batch)
        herd = gh.attach(model, order=sampler, rows=gh.TwoSidedRows(size=64))
        for _ in range(2):
            for (indices,) in DataLoader(data, batch_size=batch, sampler=sampler):
                model.zero_grad()
                model(inputs[indices].to(DEVICE)).square().sum(1).mean().backward()
        herd.detach()
        orders[here] = sampler.indices()
    assert orders[True] == orders[False]


@only_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_many_batches_are_signed_without_waiting():
    torch.manual_seed(0)
    rows = torch.randn(64, 128, 1, 8192)
    wanted = Ordering(GraB(), [64 * 128], seed=0)
    found = Ordering(GraB(), [64 * 128], seed=0)
    for at, batch in enumerate(rows):
        wanted.observe(batch.double())
        there = batch.cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if at > balance._RUNS_BEFORE_GRAPH else 0)
        try:
            found.observe(there)
        finally:
            torch.cuda.set_sync_debug_mode(0)
    there, here = (o.state_dict()["balance"]["sides"] for o in (found, wanted))
    # A sign near a tie may differ, and those after it then may as well.
    first = int((there != here).flatten().int().argmax()) if (there != here).any() else len(here)
    assert first > 64
    signer = found._state.signer
    assert signer is not None and all(block._graph for block in signer._blocks.values())
    torch.testing.assert_close(
        signer.running.cpu(), (there.float().T @ rows.view(-1, 8192)), rtol=1e-3, atol=1e-2
    )
