"""Triton's kernels for the rows of norms, against torch's own operations.

How they run here: see `gpu`.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from gradherd.rows.triton_norms import batch_norm_rows, position_norm_rows, reads_positions
from tests.gpu import DEVICE, MARKS

pytestmark = MARKS


def tensors(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(shape, device=DEVICE) + 1, torch.randn(shape, device=DEVICE)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 7, 6), (2, 3, 40, 33), (70, 18, 1, 2)])
def test_batch_norms(shape: tuple[int, ...], channels_last: bool) -> None:
    x, g = tensors(*shape)
    if channels_last:
        x, g = (t.to(memory_format=torch.channels_last) for t in (x, g))
    normalized = F.batch_norm(x, None, None, training=True, eps=1e-5)
    scale, shift = (t.flatten(2).sum(2) for t in (g * normalized, g))
    expected = torch.cat([scale, shift], 1)
    torch.testing.assert_close(batch_norm_rows(x, g, 1e-5), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("shape", [(3, 17, 24), (2, 5, 100), (600, 3, 8)])
def test_norms_of_positions(shape: tuple[int, int, int], rms: bool, shift: bool) -> None:
    x, g = tensors(*shape)
    channels = shape[2]
    norm = F.rms_norm if rms else F.layer_norm
    parts = [(g * norm(x, (channels,), eps=1e-5)).sum(1), *([g.sum(1)] if shift else [])]
    found = position_norm_rows(x, g, 1e-5, rms=rms, shift=shift)
    torch.testing.assert_close(found, torch.cat(parts, 1), rtol=1e-4, atol=1e-4)


def test_what_kernels_cannot_read_is_left_to_torch() -> None:
    x, g = tensors(2, 3, 8)
    assert reads_positions(x, g)
    assert not reads_positions(x.transpose(1, 2), g.transpose(1, 2))
    assert not reads_positions(x[0], g[0])
    assert not reads_positions(*tensors(1, 1, 5000))
