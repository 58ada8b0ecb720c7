"""What every test shares: fixed seeds, and a clean slate for torch.compile."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo():
    """Forget what earlier tests compiled, so that frames can be counted."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def threads():
    """Set the number of threads; the old number comes back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
