"""A DDP step with the sparse hook on a GPU: nothing waits for the host, and nothing is lost."""

import pytest
import torch
from benchmarks.hook_step import one_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradherd as gh
from tests.gpu import only_gpu

pytestmark = [
    pytest.mark.gpu,
    only_gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
METHODS = [gh.ExDyna(density=0.01), gh.SPARSIFIERS["micro"](density=0.01)]


@pytest.fixture(scope="module")
def alone():
    with one_rank(torch.device("cuda", 0)):
        yield


def net(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 10)]
    return nn.Sequential(*layers).to("cuda", dtype)


def batches(count, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(1)
    return [
        torch.randn(16, 300, device="cuda", generator=generator).to(dtype) for _ in range(count)
    ]


def flat_grads(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()]).double()


def residual_of(herd, module):
    named = herd.state_dict()["sparsify"]["residual"]
    return torch.cat([named[name].flatten() for name, _ in module.named_parameters()]).double()


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_never_waits_and_loses_nothing(alone, method, dtype):
    """Through DDP's rebuilt buckets, launched steps, the capture, and replays of the graph."""
    model, plain = DDP(net(dtype), bucket_cap_mb=0.5), net(dtype)
    herd = gh.attach(model, sparsify=gh.Sparsify(method=method))
    sent = computed = torch.zeros((), dtype=torch.float64, device="cuda")
    total = sum(p.numel() for p in plain.parameters())
    for step, x in enumerate(batches(16, dtype)):
        torch.cuda.synchronize()
        if step >= 10:
            torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).float().square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode(0)
        plain(x).float().square().mean().backward()
        sent, computed = sent + flat_grads(model), computed + flat_grads(plain)
        arrived = int((flat_grads(model) != 0).sum())
        assert arrived <= 0.01 * total + herd.metrics()["always_sent"]
        model.zero_grad()
        plain.zero_grad()
    error = (sent + residual_of(herd, plain) - computed).abs().max() / computed.abs().max()
    assert float(error) < 1e-5
    metrics = herd.metrics()
    assert metrics["steps"] == 16 and metrics["skipped_steps"] == 0
    assert sum(metrics["per_rank"]) == metrics["selected"]


def test_the_largest_are_sent(alone):
    model, plain = DDP(net()), net()
    gh.attach(model, sparsify=gh.ExDyna(density=0.01))
    kept = torch.zeros((), device="cuda", dtype=torch.float64)
    small = torch.cat([torch.full((p.numel(),), p.numel() < 256) for p in plain.parameters()])
    for x in batches(9):
        model(x).square().mean().backward()
        plain(x).square().mean().backward()
        kept = kept + flat_grads(plain)
        out = flat_grads(model)
        sent = (out != 0).cpu() & ~small
        largest = kept.abs().cpu()[~small].topk(int(sent.sum())).values[-1]
        # Sixteen leading bits decide, so magnitudes within 0.4 % of the smallest may differ.
        assert float(kept.abs().cpu()[sent].min()) >= 0.99 * float(largest)
        kept = kept * (out == 0)
        model.zero_grad()
        plain.zero_grad()


def test_an_overflow_is_called_off_on_the_device(alone):
    """With a GradScaler, whose scale the hook does not read back either."""
    model = DDP(net())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    herd = gh.attach(model, sparsify=gh.ExDyna(density=0.01), scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step, x in enumerate(batches(12)):
        before = residual_of(herd, model.module) if step else None
        loss = model(x).square().mean() * (float("inf") if step in (4, 9) else 1.0)
        scaler.scale(loss).backward()
        bad = step in (4, 9)
        assert bool(flat_grads(model).isnan().all()) is bad
        if bad:
            assert torch.equal(residual_of(herd, model.module), before)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert herd.metrics()["skipped_steps"] == 2 and herd.metrics()["steps"] == 10


def test_a_saved_state_continues(alone):
    outs = []
    for interrupted in (False, True):
        model = DDP(net())
        herd = gh.attach(model, sparsify=gh.ExDyna(density=0.01))
        for step, x in enumerate(batches(12)):
            if interrupted and step == 7:
                state = herd.state_dict()
                model = DDP(net())
                herd = gh.attach(model, sparsify=gh.ExDyna(density=0.01))
                herd.load_state_dict(state)
            model.zero_grad()
            model(x).square().mean().backward()
        outs.append((flat_grads(model), residual_of(herd, model.module)))
    for straight, resumed in zip(*outs, strict=True):
        torch.testing.assert_close(resumed, straight, rtol=1e-6, atol=1e-9)


def test_clipping_does_not_wait_either(alone):
    model, plain = DDP(net(), bucket_cap_mb=0.5), net()
    herd = gh.attach(model, sparsify=gh.Sparsify(method=gh.ExDyna(density=0.01), clip=0.01))
    sent = computed = torch.zeros((), dtype=torch.float64, device="cuda")
    for step, x in enumerate(batches(10)):
        plain.zero_grad()
        plain(x).square().mean().backward()
        own = flat_grads(plain)
        assert float(own.norm()) > 0.01
        computed = computed + own * 0.01 / own.norm()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step >= 6 else 0)
        try:
            model(x).square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode(0)
        sent = sent + flat_grads(model)
        model.zero_grad()
    error = (sent + residual_of(herd, plain) - computed).abs().max() / computed.abs().max()
    assert float(error) < 1e-4
