from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.fake_clock import SECONDS_PER_LOOK, FakeClock


@pytest.fixture(autouse=True)
def _counted_searches() -> Iterator[None]:
    """Make the time limits of searches a number of looks at the clock, the same on every machine."""
    with FakeClock(seconds_per_look=SECONDS_PER_LOOK):
        yield


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Let no test use what TorchDynamo compiled for another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
