"""Errors: one tree, drawn in the docstring."""

from __future__ import annotations

import inspect
import pickle
import re

from scheduler import errors
from scheduler.errors import InvalidScheduleError, SchedulerError


def tree(error: type[SchedulerError], depth: int = 0) -> list[tuple[int, str]]:
    children = [child for child in error.__subclasses__() if child.__module__ == errors.__name__]
    return [(depth, error.__name__), *(entry for child in children for entry in tree(child, depth + 1))]


def test_the_docstring_draws_the_tree_of_the_classes() -> None:
    drawn = re.findall(r"^((?:│   )*(?:[├└]── )?)(\w+Error)", inspect.getdoc(errors) or "", flags=re.MULTILINE)
    assert [(len(branches) // 4, name) for branches, name in drawn] == tree(SchedulerError)


def test_an_invalid_schedule_error_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(InvalidScheduleError(3, "x is not live")))
    assert (copy.index, copy.reason, str(copy)) == (3, "x is not live", "action 3: x is not live")
