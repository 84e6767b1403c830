import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """As ranks have it: sums of many numbers depend on how many threads share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
