"""The errors that the package raises on purpose.

SchedulerError
├── InvalidGraphError        a tensor, operation, graph, layer or chain contradicts itself
├── GraphFormatError         a graph file cannot be read
├── InvalidScheduleError     a schedule breaks a rule of the simulator
├── InvalidBudgetError       a budget or byte count cannot be understood
├── InvalidOptionError       an argument is outside its range, or unsuitable for the model
├── UnsuitableProblemError   the solver does not solve problems of this kind
├── UnknownSolverError       no solver has this name
├── UnknownModelError        no model or model factory has this name
├── UnknownDeviceError       no device has this name
├── BudgetTooSmallError      no schedule fits the budget, or none is known
├── OutOfTimeError           the time limit passed without an answer
├── PlanError                a plan cannot be used
│   ├── PlanFormatError      a file is not a plan, or has an unknown version
│   ├── PlanClaimError       a claim in a plan is untrue
│   └── PlanMismatchError    a plan belongs to another graph
├── CaptureError             a module cannot be captured as a graph
├── ExecutionError           a planned module is called in a way that its plan does not cover
└── MissingExtraError        an optional dependency is not installed

`SlowPlanWarning` is a warning: a plan is valid, but costs much more than the plain step.
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of all errors of this package."""


class InvalidGraphError(SchedulerError, ValueError):
    """A tensor, operation, graph, layer or chain contradicts itself."""


class GraphFormatError(SchedulerError, ValueError):
    """A graph file cannot be read."""


class InvalidScheduleError(SchedulerError, ValueError):
    """A schedule breaks a rule of the simulator.

    Attributes
    ----------
    index : int
        Position of the action that breaks the rule, or the length of the schedule if
        something is missing at the end.
    reason : str
        The rule and how it was broken.
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
    """An argument is outside its range, or unsuitable for the model."""


class UnsuitableProblemError(SchedulerError, ValueError):
    """The solver does not solve problems of this kind."""


class UnknownSolverError(SchedulerError, ValueError):
    """No solver has this name."""


class UnknownModelError(SchedulerError, ValueError):
    """No model or model factory has this name."""


class UnknownDeviceError(SchedulerError, ValueError):
    """No device has this name."""


class BudgetTooSmallError(SchedulerError):
    """No schedule fits the budget, or none is known.

    Attributes
    ----------
    proven : bool
        True if it is proven that no schedule fits, False if none was found.
    """

    def __init__(self, message: str, *, proven: bool = False) -> None:
        super().__init__(message)
        self.proven = proven


class OutOfTimeError(SchedulerError, TimeoutError):
    """The time limit passed without an answer."""


class PlanError(SchedulerError, ValueError):
    """A plan cannot be used."""


class PlanFormatError(PlanError):
    """A file is not a plan, or has an unknown version."""


class PlanClaimError(PlanError):
    """A claim in a plan is untrue."""


class PlanMismatchError(PlanError):
    """A plan belongs to another graph."""


class CaptureError(SchedulerError, RuntimeError):
    """A module cannot be captured as a graph."""


class ExecutionError(SchedulerError, RuntimeError):
    """A planned module is called in a way that its plan does not cover."""


class MissingExtraError(SchedulerError, ImportError):
    """An optional dependency is not installed."""


class SlowPlanWarning(UserWarning):
    """A plan takes more than twice as long as the plain step."""
