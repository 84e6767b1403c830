"""One bit by kernels against `packing`: odd lengths, odd rows, several slices.

Without a GPU they run through Triton's interpreter (`tests/test_interpreted.py`).
"""

import pytest
import torch

pytest.importorskip("triton")

from gradherd.sparsify import triton_signs
from gradherd.comm.message_sizes import value_bytes
from gradherd.comm.packing import decode_values, encode_values
from tests.gpu import DEVICE, GPU, MARKS

pytestmark = MARKS
LENGTHS = [1, 7, 256, 257, 5000] + ([1_000_003] if GPU else [])


def rows_of(values, size, length):
    return torch.nn.functional.pad(values, (0, size * length - len(values))).view(size, length)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [1, 3])
def test_encode(length, size):
    count = size * length - min(size - 1, length - 1)
    values = torch.randn(count, device=DEVICE)
    message = torch.empty(size, value_bytes(length, 1), dtype=torch.uint8, device=DEVICE)
    left = torch.empty_like(values)
    triton_signs.encode_signs(values, length, message, left)
    rows = rows_of(values, size, length)
    decoded = decode_values(message, length, 1)
    # A level may be rounded the other way: its sum has another order.
    torch.testing.assert_close(
        decoded, decode_values(encode_values(rows, 1), length, 1), rtol=2**-7, atol=0
    )
    torch.testing.assert_close(left, values - decoded.reshape(-1)[:count], rtol=0, atol=0)
    in_place = values.clone()
    triton_signs.encode_signs(in_place, length, message, in_place)
    torch.testing.assert_close(in_place, left, rtol=0, atol=0)
    out = torch.full_like(values, torch.nan)
    triton_signs.decode_signs(message, length, out)
    torch.testing.assert_close(out, decoded.reshape(-1)[:count], rtol=0, atol=0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [2, 5])
def test_sum(length, size):
    rows, before = torch.randn(size, length, device=DEVICE), torch.randn(length, device=DEVICE)
    received = encode_values(rows, 1)
    real = max(1, length - 3)
    before[real:] = 0
    message = torch.empty(value_bytes(length, 1), dtype=torch.uint8, device=DEVICE)
    lost = before.clone()
    triton_signs.encode_sign_sums(received, real, message, lost)
    decoded = decode_values(received, length, 1)
    total = decoded[0].clone()
    for row in decoded[1:]:
        total += row
    total += before
    total[real:] = 0
    read = decode_values(message, length, 1)
    torch.testing.assert_close(
        read, decode_values(encode_values(total, 1), length, 1), rtol=2**-7, atol=0
    )
    torch.testing.assert_close(lost[:real], (total - read)[:real], rtol=0, atol=0)
    assert not lost[real:].any()
