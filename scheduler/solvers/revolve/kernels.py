"""Compiled kernels that emit the actions of binomial and mixed schedules, chunk by chunk.

A kernel processes a stack of intervals that are still to be run forward and backward, and
stops when the chunk is full; the stack is its only state between chunks. A row of the
stack is (first step, number of steps, slots, repetitions); a row without steps means the
backward of a step whose data is kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.solvers.jit import compiled

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int8]
Choices = npt.NDArray[np.int32]

FORWARD, SAVE, BACKWARD = 0, 1, 2
MOST_PER_INTERVAL = 3
"""Most actions that one row of the stack leads to."""


@compiled(nogil=True)
def binomials(slots: int, repetitions: int, cap: int) -> Ints:
    """Return C(c + r, r) for all c <= slots and r <= repetitions, none above `cap`."""
    table = np.ones((slots + 1, repetitions + 1), np.int64)
    for c in range(1, slots + 1):
        for r in range(1, repetitions + 1):
            table[c, r] = min(cap, table[c - 1, r] + table[c, r - 1])
    return table


@compiled(nogil=True)
def emit_revolve(binomial: Ints, stack: Ints, depth: int, codes: Codes, starts: Ints, stops: Ints) -> tuple[int, int]:
    """Fill a chunk with actions of a binomial schedule; return its length and the stack's depth.

    With B(c, r) = C(c + r, r), the most steps that c slots allow with r repetitions, an
    interval of n steps is split optimally at any i with B(c, r - 2) <= i <= B(c, r - 1) and
    B(c - 1, r - 1) <= n - i <= B(c - 1, r), where B(c, r - 1) <= n <= B(c, r): both parts then
    satisfy that with r - 1 and with r. The least such i is taken.
    """
    filled = 0
    while depth and filled + MOST_PER_INTERVAL <= len(codes):
        depth -= 1
        first, steps, slots, r = stack[depth]
        if steps == 1 or slots == 1:
            last = first + steps - 1
            if steps > 1:
                codes[filled], starts[filled], stops[filled] = FORWARD, first, last
                filled += 1
                stack[depth] = first, steps - 1, slots, r
                depth += 1
            for code in (SAVE, BACKWARD):
                codes[filled], starts[filled], stops[filled] = code, last, last + 1
                filled += 1
            continue
        before = binomial[slots, r - 2] if r > 1 else 1
        split = max(before, steps - binomial[slots - 1, r])
        codes[filled], starts[filled], stops[filled] = FORWARD, first, first + split
        filled += 1
        stack[depth] = first, split, slots, r - 1
        stack[depth + 1] = first + split, steps - split, slots - 1, r
        depth += 2
    return filled, depth


@compiled(nogil=True)
def mixed_table(steps: int, slots: int) -> tuple[Choices, int]:
    """Return the best first action of every mixed schedule, and the extra forward runs of the whole.

    E(n, s) is the least number of runs without saving for n steps and s free slots when the
    state of the first step is available: E(1, s) = 0, E(n, 1) = n (n - 1) / 2 - 1, and otherwise
    E(n, s) is the least of E(n - 1, s - 1), where the first step saves its data, and of
    i + E(n - i, s - 1) + E(i, s), where its state is kept and the next state or data is kept at
    or after step i. An entry of the table is i, or 0.

    Leaving out the step that runs most often shows E(n, s) - E(n - 1, s) >= E(n, s) / n. So
    from any i on, i + E(i, s) grows by at least 1 + E(i, s) / i per step, while E(n - i, s - 1)
    falls by at most its largest growth so far: this shows which i can be skipped.
    """
    choices = np.zeros((slots + 1, steps + 1), np.int32)
    row = np.zeros(steps + 1, np.int64)
    growth = np.zeros(steps + 1, np.int64)
    for n in range(3, steps + 1):
        row[n], choices[1, n] = n * (n - 1) // 2 - 1, n - 1
    for s in range(2, slots + 1):
        less, row = row, np.zeros(steps + 1, np.int64)
        for n in range(2, steps + 1):
            growth[n] = max(growth[n - 1], less[n] - less[n - 1])
        guess = 1
        for n in range(s + 2, steps + 1):
            best, choice = less[n - 1], 0
            value = guess + less[n - guess] + row[guess]
            if value < best:
                best, choice = value, guess
            least = max(row[n - 1] + 1, -(-n * row[n - 1] // (n - 1)))
            i = 1
            while i < n and best > least:
                value = i + less[n - i] + row[i]
                if value < best:
                    best, choice = value, i
                fall = growth[n - i] - 1 + (-row[i] // i)
                if fall <= 0:
                    break
                i += 1 + (value - best) // fall
            row[n] = best
            choices[s, n] = choice
            guess = max(choice, 1)
    return choices, row[steps]


@compiled(nogil=True)
def emit_mixed(choices: Choices, stack: Ints, depth: int, codes: Codes, starts: Ints, stops: Ints) -> tuple[int, int]:
    """Fill a chunk with actions of a mixed schedule; return its length and the stack's depth."""
    filled = 0
    while depth and filled + MOST_PER_INTERVAL <= len(codes):
        depth -= 1
        first, steps, slots, _ = stack[depth]
        split = np.int64(choices[slots, steps])
        if steps and split:
            codes[filled], starts[filled], stops[filled] = FORWARD, first, first + split
            filled += 1
            stack[depth] = first, split, slots, 0
            stack[depth + 1] = first + split, steps - split, slots - 1, 0
            depth += 2
            continue
        if steps:
            codes[filled], starts[filled], stops[filled] = SAVE, first, first + 1
            filled += 1
        if steps > 1:
            stack[depth] = first, 0, 0, 0
            stack[depth + 1] = first + 1, steps - 1, slots - 1, 0
            depth += 2
        else:
            codes[filled], starts[filled], stops[filled] = BACKWARD, first, first + 1
            filled += 1
    return filled, depth
