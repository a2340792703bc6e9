"""Run a function on several processes that form a gloo group on the loopback interface."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.fake_clock import SECONDS_PER_LOOK, FakeClock

Work = Callable[..., Any]


def run_on_processes(work: Work, *args: object, count: int = 2) -> list[Any]:
    """Return what `work(rank, *args)` returns on each process; raise if one fails.

    `work` is a function of a module, which is imported once, in a server that both processes are forked from.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    answers = context.SimpleQueue()
    port = _free_port()
    processes = [context.Process(target=_run, args=(rank, count, port, work, args, answers)) for rank in range(count)]
    for process in processes:
        process.start()
    found = dict(answers.get() for _ in processes)
    for process in processes:
        process.join()
    failures = [f"process {rank}:\n{answer}" for rank, (done, answer) in sorted(found.items()) if not done]
    assert not failures, "\n".join(failures)
    return [found[rank][1] for rank in range(count)]


def _run(rank: int, count: int, port: int, work: Work, args: tuple[object, ...], answers: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ |= _as_torchrun_sets(rank, count, port)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count, timeout=timedelta(minutes=10)
    )
    try:
        with FakeClock(seconds_per_look=SECONDS_PER_LOOK):
            answer = (True, work(rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    answers.put((rank, answer))
    dist.destroy_process_group()


def _as_torchrun_sets(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment by which trainers find their process group."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
