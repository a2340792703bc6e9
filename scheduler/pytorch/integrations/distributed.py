"""One plan for all processes: made once, sent as text, simulated and compared by each.

A plan that each process made for itself could differ in its random numbers, in what its clock
measured and in when its time was up; processes that follow different plans meet in different
collectives, and hang.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from scheduler.errors import ExecutionError, PlanMismatchError, SchedulerError
from scheduler.plan import Plan


def share_plan(make: Callable[[], Plan], *, group: ProcessGroup | None = None, source: int = 0) -> Plan:
    """Return the plan that one process makes or loads, on all processes of a group.

    Every process judges the text that it receives. None goes on before all have the same plan.

    Parameters
    ----------
    make : callable
        Returns the plan: `lambda: make_plan(trace(model, args), "8GiB")`, or
        `lambda: Plan.load(path)`. Called on one process only: nothing in it may wait for
        another.
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
    PlanMismatchError
        On all processes, if one of them received another plan, or refused it.
    Exception
        On the process that makes the plan, what `make` raised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ExecutionError("there is no process group: call torch.distributed.init_process_group() before")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ExecutionError("this process is not in the group: only those in it share the plan")
    text, failure = None, None
    if rank == source:
        try:
            text = json.dumps(make().to_dict(), allow_nan=False)
        except Exception as error:  # the others wait: they must hear of it, whatever it is
            failure = error
    sent = _broadcast((text, "" if failure is None else f"{type(failure).__name__}: {failure}"), group, source)
    if failure is not None:
        raise failure
    received, why = sent
    if received is None:
        raise ExecutionError(f"process {source}, which makes the plan for all, failed: {why}")
    return _agreed(received, group)


def _broadcast(message: tuple[str | None, str], group: ProcessGroup | None, source: int) -> tuple[str | None, str]:
    messages: list[object] = [message]
    dist.broadcast_object_list(messages, group=group, group_src=source)
    return cast(tuple[str | None, str], messages[0])


def _agreed(text: str, group: ProcessGroup | None) -> Plan:
    """Return the plan in a text, once all processes of the group have the same."""
    plan, mine = None, ""
    try:
        plan = Plan.from_dict(json.loads(text))
        mine = plan.digest
    except (SchedulerError, ValueError) as error:
        mine = f"{type(error).__name__}: {error}"
    found = [""] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    if plan is None or len(set(found)) > 1:
        listed = "; ".join(f"process {rank}: {entry}" for rank, entry in enumerate(found))
        raise PlanMismatchError(f"the processes do not have the same plan ({listed}): run the same package on all")
    return plan
