from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Small models gain nothing from threads, and lose much where others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_dynamo():
    """What TorchDynamo has compiled serves no other test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
