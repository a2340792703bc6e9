"""What was tried, and what must never come of it: counted as the tests go, and printed when they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from scheduler.errors import SchedulerError

Answer = TypeVar("Answer")
COUNTS = ("tried", "refused", "accepted_falsely", "crashed", "lost")


@dataclass
class Tally:
    """The counts of one area.

    Attributes
    ----------
    tried : int
        Cases.
    refused : int
        Those that met one of our errors.
    accepted_falsely, crashed, lost : int
        An untrue answer or file taken for a true one; an error that is none of ours; a file or
        an answer gone or halved. A test fails at the first of these.
    """

    area: str
    tried: int = 0
    refused: int = 0
    accepted_falsely: int = 0
    crashed: int = 0
    lost: int = 0

    def attempt(self, act: Callable[..., Answer], *arguments: object, **options: object) -> Answer | SchedulerError:
        """Return what an act returns, or the error of ours that it raises."""
        self.tried += 1
        try:
            return act(*arguments, **options)
        except SchedulerError as error:
            self.refused += 1
            self.accept(bool(str(error).strip()), "an error says what is wrong")
            return error
        except BaseException:
            self.crashed += 1
            raise

    def accept(self, is_true: bool, what: object = "") -> None:
        """Check what was accepted."""
        self.accepted_falsely += not is_true
        assert is_true, what

    def keep(self, is_whole: bool, what: object = "") -> None:
        """Check what should have been kept."""
        self.lost += not is_whole
        assert is_whole, what


@dataclass
class Book:
    """The tallies of a run, by area."""

    areas: dict[str, Tally] = field(default_factory=dict)

    def of(self, area: str) -> Tally:
        """Return the tally of an area, begun if need be."""
        return self.areas.setdefault(area, Tally(area))

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the counts by area, as plain data for another process."""
        return {area: {name: getattr(tally, name) for name in COUNTS} for area, tally in self.areas.items()}

    def add(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Add the counts of another book."""
        for area, numbers in counts.items():
            for name, number in numbers.items():
                setattr(self.of(area), name, getattr(self.of(area), name) + number)

    def lines(self) -> list[str]:
        """Return a line per area and one for all."""
        rows = [(area, *(getattr(tally, count) for count in COUNTS)) for area, tally in self.areas.items()]
        rows.append(("all", *(sum(row[k] for row in rows) for k in range(1, len(COUNTS) + 1))))
        head = ("area", *(count.replace("_", " ") for count in COUNTS))
        return [f"{row[0]:<32}" + "".join(f"{cell:>18}" for cell in row[1:]) for row in (head, *rows)]


BOOK = Book()
