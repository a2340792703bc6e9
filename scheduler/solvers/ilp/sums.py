"""Linear expressions, of which the rows of integer programs are made."""

from __future__ import annotations

from typing import NamedTuple

from scheduler.solvers.integer_program import Row, Variable


class Sum(NamedTuple):
    """A linear expression: the sum of coefficient x variable, and a constant."""

    terms: tuple[tuple[Variable, float], ...] = ()
    constant: float = 0.0

    def plus(self, other: Sum, factor: float = 1.0) -> Sum:
        """Return this + factor x other."""
        scaled = tuple([(variable, factor * coefficient) for variable, coefficient in other.terms])
        return Sum(self.terms + scaled, self.constant + factor * other.constant)


ZERO, ONE = Sum(), Sum(constant=1.0)


def at_least(row: Sum, demand: Sum) -> Row:
    """Return row >= demand as terms and the least value of their sum."""
    terms = dict[Variable, float]()
    for variable, coefficient in row.terms:
        terms[variable] = terms.get(variable, 0.0) + coefficient
    for variable, coefficient in demand.terms:
        terms[variable] = terms.get(variable, 0.0) - coefficient
    return list(terms.items()), demand.constant - row.constant


def term(variable: Variable) -> Sum:
    """Return a variable as a sum."""
    return Sum(((variable, 1.0),))
