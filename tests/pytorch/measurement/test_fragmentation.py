"""A plan whose tensors fit a device, but not the segments of its allocator."""

from __future__ import annotations

import warnings

import pytest

import scheduler as sc
from scheduler.pytorch.measurement.fragmentation import has_expandable_segments, warn_of_fragmentation

MIB = 2**20


@pytest.fixture(autouse=True)
def _default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def pieces_of_segments() -> sc.Plan:
    """Return the plan of 12 tensors of 2 MiB, of which two lie in the segment of a workspace of 40 MiB.

    Ten fill a segment of 20 MiB. The next is cut from the segment of the workspace, and the next
    workspace needs another one: 20 + 40 + 40 MiB, for 12 * 2 + 40 MiB.
    """
    count = 12
    operations = [sc.Operation(f"make{i}", ["x"], [f"y{i}"], 1.0, workspace_bytes=40 * MIB) for i in range(count)]
    join = sc.Operation("join", [f"y{i}" for i in range(count)], ["z"], 1.0)
    tensors = [sc.Tensor("x", 512), *(sc.Tensor(f"y{i}", 2 * MIB) for i in range(count)), sc.Tensor("z", 512)]
    graph = sc.Graph([*operations, join], tensors, resident=["x"], results=["z"])
    return sc.make_plan(graph, "100%")


def warning_within(room_bytes: int) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_fragmentation(pieces_of_segments(), room_bytes, stacklevel=1)
    return "".join(str(one.message) for one in caught)


def test_segments_of_fixed_sizes_need_more_than_the_tensors() -> None:
    assert pieces_of_segments().peak_bytes == 64 * MIB + 512
    assert warning_within(104 * MIB) == ""
    found = warning_within(90 * MIB)
    assert "take 64.00 MiB of the 90.00 MiB" in found
    assert "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts, or" in found


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_that_grow_fit_where_fixed_ones_do_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512, expandable_segments: True")
    assert has_expandable_segments()
    assert warning_within(90 * MIB) == ""
    found = warning_within(64 * MIB + 512)  # rounding takes more
    assert "give a smaller budget" in found
    assert "expandable" not in found


def test_both_are_advised_where_neither_suffices() -> None:
    assert "before Python starts, and give a smaller budget" in warning_within(64 * MIB + 512)


def test_a_budget_beyond_the_device_is_left_alone() -> None:
    assert warning_within(64 * MIB) == ""
