"""Models that people train, ordered by example with two-sided rows; whole batches read at once."""

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.hooks.row_sources import BatchGradientSource
from tests.rows.zoo import TRANSFORMERS, ZOO, losses

EXAMPLES, BATCH = 12, 4


@pytest.mark.filterwarnings("ignore")  # not ours: of transformers and what it imports
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama", "hf-vit", "resnet", "vit"])
def test_training_visits_everything_and_learns_an_order(name: str) -> None:
    if name in TRANSFORMERS:
        pytest.importorskip("transformers")
    case = (TRANSFORMERS | ZOO)[name]
    torch.manual_seed(0)
    model = case.make().float()
    model.train(not case.eval)
    x = case.inputs()
    x = torch.cat([x, x.flip(0), x.roll(1, 0)])
    x = x.float() + torch.randn(x.shape) if x.is_floating_point() else x
    data = TensorDataset(x, torch.arange(EXAMPLES))
    sampler = gh.OrderedSampler(data, "grab", batch_size=BATCH, unit=1)
    herd = gh.attach(model, order=sampler, rows="two-sided")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    orders = []
    for _ in range(3):
        order = []
        for batch, index in DataLoader(data, batch_size=BATCH, sampler=sampler):
            optimizer.zero_grad()
            losses(case, model, batch).mean().backward()
            optimizer.step()
            order += index.tolist()
        assert sorted(order) == list(range(EXAMPLES))
        orders.append(order)
    assert orders[0] != orders[1]
    assert "two-sided" not in str(herd.metrics().get("rows_left_out", ""))


class Sometimes(nn.Module):
    """A model of which a part is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out: Tensor = self.always(x)
        return self.sometimes(out) if both else out


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_read_at_the_end_are_those_that_arrived(to_none: bool, monkeypatch) -> None:
    torch.manual_seed(0)
    model, x = Sometimes(), torch.randn(BATCH, 3)
    arriving = BatchGradientSource(model, None)
    monkeypatch.setattr(sys.modules[BatchGradientSource.__module__], "AT_END_DEVICES", {"cpu"})
    at_end = BatchGradientSource(model, None)
    for both, accumulate in ((True, False), (False, False), (True, True), (False, True)):
        if not accumulate:
            model.zero_grad(set_to_none=to_none)
        model(x, both).square().mean().backward()
        torch.testing.assert_close(at_end.take(BATCH, 2.0), arriving.take(BATCH, 2.0))
        for p in model.parameters():  # clipping must not change what was read
            if p.grad is not None and not accumulate:
                p.grad.mul_(0.5)
    model(x, True).square().mean().backward()
    model(2 * x, True).square().mean().backward()
    torch.testing.assert_close(at_end.take(BATCH, 1.0), arriving.take(BATCH, 1.0))
