"""What the tests of Triton's programs share: where they run, and when they cannot."""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not GPU and os.environ.get("TRITON_INTERPRET") != "1",
        reason="there is no GPU, and Triton does not interpret",
    ),
]
only_gpu = pytest.mark.skipif(not GPU, reason="there is no GPU")
