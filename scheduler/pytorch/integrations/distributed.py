"""Share one plan among processes: one makes it and sends it as text, each simulates and compares it.

If each process made its own, the plans could differ in random numbers, measured times and the
moment at which the time limit ended the search. Processes that follow different plans can
call their collectives in different orders and hang.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from scheduler.errors import CaptureError, ExecutionError, PlanMismatchError, SchedulerError
from scheduler.plan import Plan


def share_plan(make: Callable[[], Plan], *, group: ProcessGroup | None = None, source: int = 0) -> Plan:
    """Return, on all processes of a group, the plan that one of them makes or loads.

    Every process simulates the plan that it receives. None continues until all have the same.

    Parameters
    ----------
    make : callable
        Returns the plan: `lambda: make_plan(trace(model, args), "8GiB")`, or
        `lambda: Plan.load(path)`. Called on one process only, so it must not wait for another.
    group : ProcessGroup, optional
        All processes by default.
    source : int
        Rank in the group of the process that makes the plan.

    Returns
    -------
    Plan
        With the same `digest` on all processes.

    Raises
    ------
    ExecutionError
        If there is no process group, this process is not in it, or `make` failed on another.
    CaptureError
        If the process that makes the plan cannot capture the step.
    PlanMismatchError
        On all processes, if one of them received another plan or rejected it.
    Exception
        On the process that makes the plan, any error that `make` raises.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ExecutionError("there is no process group: call torch.distributed.init_process_group() first")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ExecutionError("this process is not in the group: call share_plan only on processes of the group")
    text, failure = None, None
    if rank == source:
        try:
            text = json.dumps(make().to_dict(), allow_nan=False)
        except Exception as error:  # whatever it is, the waiting processes must be informed
            failure = error
    reason = "" if failure is None else f"{type(failure).__name__}: {failure}"
    sent = _broadcast(_Message(text, reason, isinstance(failure, CaptureError)), group, source)
    if failure is not None:
        raise failure
    if sent.plan is None:
        cls = CaptureError if sent.cannot_capture else ExecutionError
        raise cls(f"process {source}, which makes the plan for all, failed: {sent.reason}")
    return _agreed(sent.plan, group)


class _Message(NamedTuple):
    """The text of a plan, or why there is none."""

    plan: str | None
    reason: str
    cannot_capture: bool


def _broadcast(message: _Message, group: ProcessGroup | None, source: int) -> _Message:
    messages: list[object] = [message]
    dist.broadcast_object_list(messages, group=group, group_src=source)
    return cast(_Message, messages[0])


def _agreed(text: str, group: ProcessGroup | None) -> Plan:
    """Return the plan from its text once all processes of the group have the same."""
    plan = None
    try:
        plan = Plan.from_dict(json.loads(text))
        answer = plan.digest
    except (SchedulerError, ValueError) as error:
        answer = f"{type(error).__name__}: {error}"
    answers = [""] * dist.get_world_size(group)
    dist.all_gather_object(answers, answer, group=group)
    if plan is None or len(set(answers)) > 1:
        listed = "; ".join(f"process {rank}: {entry}" for rank, entry in enumerate(answers))
        raise PlanMismatchError(
            f"the processes do not have the same plan ({listed}): install the same version of the package on all"
        )
    return plan
