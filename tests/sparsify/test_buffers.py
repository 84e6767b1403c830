"""Buffers of local steps: averaged in slices, with the bits of the mean of all."""

import pytest
import torch

from gradherd.comm.script import run_together
from gradherd.sparsify.local import average_buffers, mean_of_buffers
from tests.sparsify.rank_work import normal, same


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 7, 256, 257, 9600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_have_the_bits_of_the_whole_mean(size, count, dtype):
    rows = normal(count, size, count, dtype=dtype)
    rows[:, ::3] = 0.1  # constants, such as masks, keep their bits
    rows[:, 1::5] = -torch.inf
    wanted, width = mean_of_buffers(rows), rows.element_size()
    for result in run_together([average_buffers(row, size) for row in rows]):
        assert same(result.value, wanted)
        # Two rounds send every slice twice; few numbers, or two workers, take one.
        whole = (size - 1) * count * width
        slices = 2 * (size - 1) * -(-count // size) * width
        assert result.bytes == (whole if count * width <= 1024 or size <= 2 else slices)
