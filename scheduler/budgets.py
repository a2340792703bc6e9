"""Budgets as they are given: bytes, a percentage, the smallest known peak, or a device's free memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from scheduler.errors import InvalidBudgetError
from scheduler.units import parse_bytes, split_quantity

SMALLEST, FREE_MEMORY = "min", "auto"


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget that has been read but not yet turned into bytes.

    Attributes
    ----------
    form : "bytes", "percent", "min" or "auto"
        "percent": the resident bytes plus a share of what the save-everything step adds to
        them. "min": the smallest known peak plus a share of the way from there to the peak of
        the save-everything step. "auto": the free memory of a device.
    bytes : int
        Only of the form "bytes".
    share : Fraction
        Only of the forms "percent" and "min"; 1 is 100 %.
    """

    form: Literal["bytes", "percent", "min", "auto"]
    bytes: int = 0
    share: Fraction = Fraction(0)

    @property
    def is_relative(self) -> bool:
        """Whether the bytes depend on what a step needs."""
        return self.form in ("percent", "min")

    def resolve(self, resident_bytes: int, baseline_peak_bytes: int, smallest_peak: Callable[[], int]) -> int:
        """Return the budget in bytes of the peak of the whole step.

        Parameters
        ----------
        resident_bytes, baseline_peak_bytes : int
            Resident bytes, and the peak of the save-everything step.
        smallest_peak : callable
            Returns the smallest known peak in bytes; called only for the form "min".

        Raises
        ------
        InvalidBudgetError
            If the form is "auto".
        """
        if self.form == "auto":
            raise InvalidBudgetError(
                'the budget "auto" is the free memory of the device of a PyTorch model, and a graph has no device: give'
                ' bytes, such as "8GiB", a percentage, such as "60%", or "min"'
            )
        if self.form == "bytes":
            return self.bytes
        start = resident_bytes if self.form == "percent" else smallest_peak()
        return start + math.floor((baseline_peak_bytes - start) * self.share)


def read_budget(budget: int | str) -> Budget:
    """Return a budget from bytes or text: "8GiB", "60%", "min", "min+10%" or "auto".

    Raises
    ------
    InvalidBudgetError
        If the text cannot be understood, or the value is negative.

    Examples
    --------
    >>> read_budget("8GiB").bytes
    8589934592
    >>> budget = read_budget("min+10%")
    >>> budget.form, budget.share
    ('min', Fraction(1, 10))
    """
    text = budget.strip().lower() if isinstance(budget, str) else ""
    if text == FREE_MEMORY:
        return Budget("auto")
    if text == SMALLEST:
        return Budget("min")
    if text.startswith(SMALLEST):
        added = text.removeprefix(SMALLEST).lstrip()
        if not (added.startswith("+") and added.endswith("%")):
            raise InvalidBudgetError(f'cannot read "{budget}": write "min", or for example "min+10%"')
        return Budget("min", share=_share(added.removeprefix("+"), budget))
    if text.endswith("%"):
        return Budget("percent", share=_share(text, budget))
    return Budget("bytes", parse_bytes(budget))


def _share(text: str, budget: int | str) -> Fraction:
    number, unit = split_quantity(text)
    if unit != "%":
        raise InvalidBudgetError(f'cannot read "{budget}": write for example "60%"')
    return number / 100
