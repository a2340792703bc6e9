"""The simulated allocator of CUDA: cases counted by hand from the rules of c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import itertools
import random

import pytest

import scheduler as sc
from scheduler.planning.caching_allocator import (
    AllocatorUse,
    Block,
    CachingAllocator,
    OutOfDeviceMemoryError,
    allocator_use,
)
from scheduler.problem import save_everything
from tests.support.training_graphs import uniform_chain

KIB, MIB = 2**10, 2**20


def after(*sizes: int, expandable: bool = False) -> tuple[int, int]:
    """Return the allocated and reserved bytes after allocations on an empty device."""
    allocator = CachingAllocator(expandable_segments=expandable)
    for size in sizes:
        allocator.malloc(size)
    return allocator.allocated_bytes, allocator.reserved_bytes


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        # round_size: multiples of kMinBlockSize = 512. kSmallSize = 1 MiB and less is cut from kSmallBuffer = 2 MiB.
        ([1], 512, 2 * MIB),
        ([512, 513], 512 + 1024, 2 * MIB),
        ([MIB, MIB], 2 * MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        # Above, and below kMinLargeAlloc = 10 MiB, from kLargeBuffer = 20 MiB.
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([10 * MIB - 512], 10 * MIB - 512, 20 * MIB),
        ([9 * MIB, 9 * MIB, 3 * MIB], 21 * MIB, 40 * MIB),
        # From 10 MiB on, segments of their own, rounded to kRoundLarge = 2 MiB.
        ([10 * MIB], 10 * MIB, 10 * MIB),
        ([10 * MIB + 1, 30 * MIB], 40 * MIB + 512, 42 * MIB),
        # should_split: a large block is split if more than kSmallSize = 1 MiB remains, else handed out whole.
        ([11 * MIB], 12 * MIB, 12 * MIB),
        ([11 * MIB - 512], 11 * MIB - 512, 12 * MIB),
        ([10 * MIB - 512, 10 * MIB - 512], 20 * MIB, 20 * MIB),
        # Small and large blocks have pools of their own.
        ([MIB + 1, 1], MIB + 512 + 512, 22 * MIB),
        ([0], 512, 2 * MIB),
    ],
)
def test_sizes_are_rounded_and_segments_opened_as_in_the_source(
    sizes: list[int], allocated: int, reserved: int
) -> None:
    assert after(*sizes) == (allocated, reserved)


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MIB) for size in (40, 16, 24)]
    for block in blocks:
        allocator.free(block)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 80 * MIB)
    first = allocator.malloc(20 * MIB)  # of 24 MiB; 4 MiB remain
    assert first.address == blocks[2].address
    assert allocator.malloc(3 * MIB).address == first.address + 20 * MIB
    assert allocator.malloc(10 * MIB).address == blocks[1].address
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (34 * MIB, 80 * MIB)  # 4 MiB for 3
    assert (allocator.allocated_peak_bytes, allocator.reserved_peak_bytes) == (80 * MIB, 80 * MIB)


def test_free_neighbors_are_merged() -> None:
    allocator = CachingAllocator()
    left, middle, right = (allocator.malloc(size * MIB) for size in (6, 6, 8))
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(left)
    allocator.free(right)
    assert allocator.malloc(9 * MIB).address == 20 * MIB  # neither gap has 9 MiB: a second segment
    allocator.free(middle)  # one gap of 20 MiB
    assert allocator.malloc(20 * MIB).address == left.address
    assert allocator.reserved_bytes == 40 * MIB


def test_growing_tensors_leave_segments_behind_unless_segments_expand() -> None:
    # Each tensor is larger than every segment before it.
    def reserved(*, expandable: bool) -> int:
        allocator = CachingAllocator(expandable_segments=expandable)
        for size in (12, 14, 16, 18):
            allocator.free(allocator.malloc(size * MIB))
        return allocator.reserved_bytes

    assert reserved(expandable=False) == (12 + 14 + 16 + 18) * MIB
    assert reserved(expandable=True) == 20 * MIB


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),  # small blocks map pages of 2 MiB
        ([MIB + 1], MIB + 512, 20 * MIB),  # large ones pages of 20 MiB
        ([11 * MIB], 11 * MIB, 20 * MIB),  # any rest of 512 bytes is split off
        ([30 * MIB, 11 * MIB], 41 * MIB, 60 * MIB),
    ],
)
def test_expandable_segments_grow_by_pages(sizes: list[int], allocated: int, reserved: int) -> None:
    assert after(*sizes, expandable=True) == (allocated, reserved)


def test_a_block_that_can_grow_is_the_last_choice() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    first, second, last = (allocator.malloc(size * MIB) for size in (19, 2, 12))
    allocator.free(first)
    # The gap of 19 MiB, and the end of the segment, of 7 MiB, which can grow: the gap is taken for 5 MiB.
    assert allocator.malloc(5 * MIB).address == first.address
    assert second.address < last.address


def test_a_full_device_gets_its_unsplit_segments_back_before_it_refuses() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    kept = allocator.malloc(5 * MIB)  # the other 15 MiB of its segment cannot be returned
    allocator.free(allocator.malloc(20 * MIB))
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.malloc(16 * MIB).size == 20 * MIB - 4 * MIB
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    kept = allocator.malloc(5 * MIB)
    allocator.free(allocator.malloc(12 * MIB))
    allocator.free(allocator.malloc(18 * MIB))
    assert allocator.reserved_bytes == (20 + 18) * MIB
    with pytest.raises(OutOfDeviceMemoryError, match=r"22.00 MiB are requested, of 40.00 MiB are 5.00 MiB allocated"):
        allocator.malloc(22 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    assert kept.allocated


def test_pages_of_expandable_segments_are_returned_wherever_they_are_free() -> None:
    allocator = CachingAllocator(capacity_bytes=60 * MIB, expandable_segments=True)
    first = allocator.malloc(40 * MIB)
    kept = allocator.malloc(20 * MIB)
    allocator.free(first)
    assert allocator.malloc(40 * MIB).address == first.address
    allocator = CachingAllocator(capacity_bytes=60 * MIB, expandable_segments=True)
    first, kept = allocator.malloc(30 * MIB), allocator.malloc(10 * MIB)
    allocator.free(first)
    # 40 MiB do not fit before the kept block, and behind it only after the first page was returned.
    assert allocator.malloc(40 * MIB).address == kept.address + 10 * MIB
    assert allocator.reserved_bytes == 60 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_never_overlap_and_segments_are_never_lost(seed: int, expandable: bool) -> None:
    print("seed", seed)
    generator = random.Random(seed)
    allocator = CachingAllocator(expandable_segments=expandable, capacity_bytes=300 * MIB)
    live: list[Block] = []
    for _ in range(400):
        if live and generator.random() < 0.5:
            allocator.free(live.pop(generator.randrange(len(live))))
        else:
            try:
                live.append(allocator.malloc(int(2 ** generator.uniform(0, 25.5))))
            except OutOfDeviceMemoryError:
                allocator.free(live.pop())
        spans = sorted((block.is_small, block.address, block.address + block.size) for block in live)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
        assert allocator.allocated_bytes == sum(block.size for block in live)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= 300 * MIB
    for block in live:
        allocator.free(block)
    allocator._return_segments()
    assert allocator.reserved_bytes == 0


def chain_of(size: int, *, workspace: int = 0) -> sc.Graph:
    """Return a -> b -> c, where c is the result."""
    return sc.Graph(
        [
            sc.Operation("f", ["a"], ["b"], 1.0),
            sc.Operation("g", ["b"], ["c"], 1.0, workspace_bytes=workspace),
        ],
        [sc.Tensor("a", 100), sc.Tensor("b", size), sc.Tensor("c", 100)],
        resident=["a"],
        results=["c"],
    )


def test_a_schedule_allocates_outputs_and_workspaces_in_its_order() -> None:
    graph = chain_of(11 * MIB, workspace=3 * MIB)
    schedule = save_everything(graph)
    # Small: 100 bytes each for a and c. Large: b takes a segment of 12 MiB whole, the workspace one of 20 MiB.
    assert allocator_use(graph, schedule, steps=1) == AllocatorUse(
        requested_bytes=14 * MIB + 200, allocated_bytes=15 * MIB + 1024, reserved_bytes=34 * MIB
    )
    # In the second step, b is cut from the free segment of 20 MiB only if its own, of 12 MiB, is gone: it is not.
    assert allocator_use(graph, schedule).reserved_bytes == 34 * MIB


def test_what_exceeds_the_capacity_is_named() -> None:
    graph = chain_of(11 * MIB, workspace=3 * MIB)
    use = allocator_use(graph, save_everything(graph), capacity_bytes=33 * MIB)
    assert (use.fits, use.failed_operation) == (False, "g")
    assert allocator_use(graph, save_everything(graph), capacity_bytes=MIB).failed_operation == "resident tensors"
    assert allocator_use(graph, save_everything(graph), capacity_bytes=34 * MIB).fits


def test_requested_bytes_are_the_peak_of_the_simulator_also_with_recomputation() -> None:
    graph = uniform_chain(4)
    for budget in ("100%", "min"):
        solution = sc.solve(graph, budget, time_limit=5.0)
        assert solution.schedule is not None
        assert allocator_use(graph, solution.schedule).requested_bytes == solution.peak_bytes
