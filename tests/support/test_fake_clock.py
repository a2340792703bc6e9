"""The clock of tests."""

from __future__ import annotations

from scheduler.solvers.deadline import clock
from tests.support.fake_clock import FakeClock


def test_a_clock_begins_at_0_and_leaves_the_one_around_it_as_it_was() -> None:
    with FakeClock() as outer:
        with clock.paused():
            outer.advance(0.3)
        outer.advance(2.0)
        before = clock.now()
        with FakeClock() as inner:
            assert clock.now() == 0.0
            with clock.paused():
                inner.advance(0.7)
            assert clock.now() == 0.0
        assert clock.now() == before > 0.0
