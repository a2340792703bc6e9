"""How many examples a property test draws under the profiles of `tests/conftest.py`."""

from __future__ import annotations

from hypothesis import settings

ALL = 100
"""`max_examples` of the profile "ci", which draws every test's whole count."""


def examples(count: int) -> int:
    """Return the number of examples of a test that draws `count` of them under the profile "ci"."""
    return max(1, count * settings().max_examples // ALL)
