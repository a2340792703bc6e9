"""Every error that the package raises on purpose.

SchedulerError
├── InvalidGraphError        a tensor, operation, graph, layer or chain that contradicts itself
├── GraphFormatError         a graph file that cannot be read
├── InvalidScheduleError     a schedule that breaks a rule of the judge
├── InvalidBudgetError       a budget or byte count that cannot be understood
├── InvalidOptionError       a parameter outside its range
├── UnsuitableProblemError   a solver asked for a problem of a kind that it does not solve
├── UnknownSolverError       a solver name that is not registered
├── UnknownModelError        a model name or factory that cannot be found
├── BudgetTooSmallError      no schedule fits, or none is known
├── OutOfTimeError           the time limit passed without an answer
├── PlanError                a plan that cannot be used
│   ├── PlanFormatError      not a plan file, or of an unknown version
│   ├── PlanClaimError       a claim in the plan is untrue
│   └── PlanMismatchError    the plan belongs to another graph
├── CaptureError             a module that cannot be captured as a graph
├── ExecutionError           a planned module called in a way that its plan does not cover
└── MissingExtraError        an optional dependency that is not installed
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of all errors of this package."""


class InvalidGraphError(SchedulerError, ValueError):
    """A tensor, operation, graph, layer or chain contradicts itself."""


class GraphFormatError(SchedulerError, ValueError):
    """A graph file cannot be read."""


class InvalidScheduleError(SchedulerError, ValueError):
    """A schedule breaks a rule of the judge.

    Attributes
    ----------
    index : int
        Position of the action that breaks the rule; the schedule's length when it is only
        at the end that something is missing.
    reason : str
        The rule, and what broke it.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"action {index}: {reason}")
        self.index = index
        self.reason = reason

    def __reduce__(self) -> tuple[type[InvalidScheduleError], tuple[int, str]]:
        return (type(self), (self.index, self.reason))


class InvalidBudgetError(SchedulerError, ValueError):
    """A budget or byte count cannot be understood."""


class InvalidOptionError(SchedulerError, ValueError):
    """A parameter is outside its range."""


class UnsuitableProblemError(SchedulerError, ValueError):
    """A solver was asked for a problem of a kind that it does not solve."""


class UnknownSolverError(SchedulerError, ValueError):
    """A solver name is not registered."""


class UnknownModelError(SchedulerError, ValueError):
    """A model name or factory cannot be found."""


class BudgetTooSmallError(SchedulerError):
    """No schedule fits the budget, or none is known.

    Attributes
    ----------
    proven : bool
        True if no schedule can fit; False if none was found.
    """

    def __init__(self, message: str, *, proven: bool = False) -> None:
        super().__init__(message)
        self.proven = proven


class OutOfTimeError(SchedulerError, TimeoutError):
    """The time limit passed without an answer."""


class PlanError(SchedulerError, ValueError):
    """A plan cannot be used."""


class PlanFormatError(PlanError):
    """Not a plan file, or a plan of an unknown version."""


class PlanClaimError(PlanError):
    """A claim in a plan is untrue."""


class PlanMismatchError(PlanError):
    """A plan belongs to another graph."""


class CaptureError(SchedulerError, RuntimeError):
    """A module cannot be captured as a graph."""


class ExecutionError(SchedulerError, RuntimeError):
    """A planned module was called in a way that its plan does not cover."""


class MissingExtraError(SchedulerError, ImportError):
    """An optional dependency is not installed."""
