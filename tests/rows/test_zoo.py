"""Whole models: rows equal the gradients of single examples, or name what they leave out."""

import pytest
import torch
from torch import Tensor

from gradherd.rows.capture import Capture
from tests.rows.reference import loop_over_examples
from tests.rows.zoo import BATCH, TRANSFORMERS, ZOO, Case, losses


def check(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = case.make().to(dtype)
    model.train(not case.eval)
    x = case.inputs()
    x = x.to(dtype) if x.is_floating_point() else x
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def of_examples(part: slice) -> Tensor:
        model.load_state_dict(state)  # spectral norms move with every forward
        return losses(case, model, x[part])

    expected = loop_over_examples(model, of_examples, BATCH)
    model.load_state_dict(state)
    capture = Capture(model)
    for name, part in capture.spec.views(expected).items():
        if name in case.left_out:
            part.zero_()
    losses(case, model, x).mean().backward()
    rows = capture.pop_rows(BATCH)
    assert set(capture.left_out) == set(case.left_out)
    error = (rows - expected).norm() / expected.norm()
    assert error < 2e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ZOO)
def test_rows_are_right_or_left_out(name: str, dtype: torch.dtype) -> None:
    check(ZOO[name], dtype)


@pytest.mark.filterwarnings("ignore")  # not ours: of transformers and what it imports
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_rows_of_transformers_are_right_or_left_out(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    check(TRANSFORMERS[name], dtype)
