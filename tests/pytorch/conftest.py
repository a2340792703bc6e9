from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Let no test use what TorchDynamo compiled for another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
