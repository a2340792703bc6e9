"""The caching allocator of PyTorch on CUDA, simulated: what a schedule takes of a device beyond its tensors.

Blocks are handed out by the rules of c10/cuda/CUDACachingAllocator.cpp with its default settings,
or with expandable segments, for one stream. Sizes are rounded to 512 bytes. Up to 1 MiB, blocks
are cut from segments of 2 MiB; below 10 MiB, from segments of 20 MiB; above, from segments of
their own size, rounded to 2 MiB. Of the free blocks that are large enough the smallest is taken,
and its rest split off if that is worth it. Free neighbors are merged; segments are kept.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.graph import Graph
from scheduler.schedule import Compute, Schedule
from scheduler.units import format_bytes

_LEAST_BLOCK = 512
_MOST_SMALL = 2**20
_SMALL_SEGMENT = 2 * 2**20
_LARGE_SEGMENT = 20 * 2**20
_LEAST_OWN_SEGMENT = 10 * 2**20
_ADDRESSES = 2**30 * _LARGE_SEGMENT
"""Addresses of an expandable segment: more than any device has bytes."""


class OutOfDeviceMemoryError(Exception):
    """A simulated device has no block of the requested size left, also after all free segments were returned."""


@dataclass(slots=True, eq=False)
class Block:
    """A range of a segment, in bytes.

    Attributes
    ----------
    address, size : int
    is_small : bool
        Whether it belongs to the pool of small blocks.
    allocated, mapped : bool
        Whether it is handed out, and whether there is memory at its addresses.
    before, after : Block or None
        Its neighbors in the segment.
    """

    address: int
    size: int
    is_small: bool
    allocated: bool = False
    mapped: bool = True
    before: Block | None = None
    after: Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The order of free blocks: the smallest first, then the one with the lowest address."""
        return self.size, self.address


class _FreeBlocks:
    """Free blocks, sorted by size."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}

    def __iter__(self) -> Iterator[Block]:
        return iter([self._blocks[address] for _, address in self._keys])

    def add(self, block: Block) -> None:
        bisect.insort(self._keys, block.key)
        self._blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self._keys[bisect.bisect_left(self._keys, block.key)]
        del self._blocks[block.address]

    def at_least(self, size: int) -> Iterator[Block]:
        """Yield the blocks of at least this size, the smallest first."""
        for _, address in self._keys[bisect.bisect_left(self._keys, (size, 0)) :]:
            yield self._blocks[address]


class CachingAllocator:
    """An empty device with PyTorch's caching allocator.

    Parameters
    ----------
    capacity_bytes : int or None
        What segments may take together; None for no limit.
    expandable_segments : bool
        As with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`: one segment for small and one
        for large blocks, which grow by 2 and 20 MiB.

    Attributes
    ----------
    allocated_bytes, reserved_bytes : int
        Bytes of the blocks that are handed out, and of all segments: what
        `torch.cuda.memory_allocated` and `memory_reserved` return.
    allocated_peak_bytes, reserved_peak_bytes : int
        Their largest values so far.
    """

    def __init__(self, *, capacity_bytes: int | None = None, expandable_segments: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = self.reserved_bytes = 0
        self.allocated_peak_bytes = self.reserved_peak_bytes = 0
        self._free = {is_small: _FreeBlocks() for is_small in (True, False)}
        self._heads: dict[bool, Block] = {}
        """The first block of each expandable segment."""
        self._next_address = 0

    def malloc(self, size_bytes: int) -> Block:
        """Return a block of at least so many bytes.

        Raises
        ------
        OutOfDeviceMemoryError
            If there is none within the capacity.
        """
        size = max(1, -(-size_bytes // _LEAST_BLOCK)) * _LEAST_BLOCK
        is_small = size <= _MOST_SMALL
        block = self._find(size, is_small) or self._grow(size, is_small)
        if block is None:
            self._return_segments()
            block = self._grow(size, is_small)
        if block is None:
            raise OutOfDeviceMemoryError(
                f"{format_bytes(size)} are requested, of {format_bytes(self.capacity_bytes or 0)} are"
                f" {format_bytes(self.allocated_bytes)} allocated and {format_bytes(self.reserved_bytes)} reserved"
            )
        rest = block.size - size
        if rest >= _LEAST_BLOCK if is_small or self.expandable_segments else rest > _MOST_SMALL:
            self._free[is_small].add(_cut(block, size))
        block.allocated = True
        self.allocated_bytes += block.size
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back."""
        block.allocated = False
        self.allocated_bytes -= block.size
        self._free[block.is_small].add(self._merged(block))

    def _find(self, size: int, is_small: bool) -> Block | None:
        """Take the smallest free block that is large enough; one that can grow counts with all its addresses."""
        found = next(iter(sorted(self._candidates(size, is_small), key=_size_with_growth)), None)
        if found is not None:
            self._free[is_small].remove(found)
        return found

    def _candidates(self, size: int, is_small: bool) -> Iterator[Block]:
        """Yield the smallest block that is large enough and, while that one could grow, the next."""
        for block in self._free[is_small].at_least(size):
            yield block
            if block.after is None or block.after.mapped:
                return

    def _grow(self, size: int, is_small: bool) -> Block | None:
        """Return a new segment, or the grown end of an expandable one; None if it exceeds the capacity."""
        if self.expandable_segments:
            return self._expand(size, is_small)
        if is_small:
            segment = _SMALL_SEGMENT
        else:
            segment = _LARGE_SEGMENT if size < _LEAST_OWN_SEGMENT else -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        if not self._reserve(segment):
            return None
        self._next_address += segment
        return Block(self._next_address - segment, segment, is_small)

    def _expand(self, size: int, is_small: bool) -> Block | None:
        """Map memory at the lowest addresses at which a block fits."""
        if is_small not in self._heads:
            self._heads[is_small] = Block(0 if is_small else _ADDRESSES, _ADDRESSES, is_small, mapped=False)
        block: Block | None = self._heads[is_small]
        while block is not None and _free_addresses(block) < size:
            block = block.after
        assert block is not None  # the last block is as good as endless
        if block.mapped:
            self._free[is_small].remove(block)
        while not block.mapped or block.size < size:
            unmapped = block if not block.mapped else block.after
            assert unmapped is not None
            if unmapped.mapped:
                self._free[is_small].remove(unmapped)
            elif not self._map(unmapped, size if unmapped is block else size - block.size):
                if block.mapped:
                    self._free[is_small].add(block)
                return None
            if unmapped is not block:
                _join(block, unmapped)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map memory at the begin of a block, in whole pages; return whether it is within the capacity."""
        page = _SMALL_SEGMENT if block.is_small else _LARGE_SEGMENT
        mapped = min(block.size, -(-size // page) * page)
        if not self._reserve(mapped):
            return False
        if mapped < block.size:
            _cut(block, mapped)
        block.mapped = True
        return True

    def _reserve(self, size: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes:
            return False
        self.reserved_bytes += size
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        return True

    def _return_segments(self) -> None:
        """Return free segments to the device, and free pages of expandable ones."""
        for is_small, blocks in self._free.items():
            for block in blocks:
                if self.expandable_segments:
                    self._unmap(block, _SMALL_SEGMENT if is_small else _LARGE_SEGMENT)
                elif block.before is block.after is None:
                    blocks.remove(block)
                    self.reserved_bytes -= block.size

    def _unmap(self, block: Block, page: int) -> None:
        """Return the whole pages in a free block."""
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        blocks = self._free[block.is_small]
        blocks.remove(block)
        if end < block.address + block.size:
            blocks.add(_cut(block, end - block.address))
        if begin > block.address:
            rest = _cut(block, begin - block.address)
            blocks.add(block)
            block = rest
        self.reserved_bytes -= block.size
        block.mapped = False
        self._merged(block)

    def _merged(self, block: Block) -> Block:
        """Return a free block merged with its free neighbors."""
        for neighbor in (block.before, block.after):
            if neighbor is None or neighbor.allocated or neighbor.mapped != block.mapped:
                continue
            if neighbor.mapped:
                self._free[block.is_small].remove(neighbor)
            first, second = (neighbor, block) if neighbor is block.before else (block, neighbor)
            _join(first, second)
            block = first
        return block


def _cut(block: Block, size: int) -> Block:
    """Shorten a block, and return its rest as a block of its own."""
    rest = Block(
        block.address + size, block.size - size, block.is_small, mapped=block.mapped, before=block, after=block.after
    )
    if block.after is not None:
        block.after.before = rest
    block.after, block.size = rest, size
    return rest


def _join(first: Block, second: Block) -> None:
    """Add the block that follows one to it."""
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first


def _size_with_growth(block: Block) -> tuple[int, int]:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0), block.address


def _free_addresses(block: Block) -> int:
    """Return how many bytes from the begin of a block on are not handed out, counting an unmapped block at least."""
    total, has_unmapped = 0, False
    current: Block | None = block
    while current is not None and not current.allocated:
        total += current.size
        has_unmapped |= not current.mapped
        current = current.after
    return total if has_unmapped else 0


@dataclass(frozen=True, slots=True)
class AllocatorUse:
    """What a schedule takes of a CUDA device.

    Attributes
    ----------
    requested_bytes : int
        Largest sum of the tensors and workspaces: the peak of the schedule.
    allocated_bytes : int
        Largest sum of the blocks that hold them (`torch.cuda.max_memory_allocated`).
    reserved_bytes : int
        Largest sum of the segments that hold the blocks (`torch.cuda.max_memory_reserved`).
    failed_operation : str
        The operation whose allocation exceeds the capacity, "resident tensors" if these do; ""
        if everything fits.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    failed_operation: str = ""

    @property
    def fits(self) -> bool:
        """Whether every allocation is within the capacity."""
        return not self.failed_operation


def allocator_use(
    graph: Graph,
    schedule: Schedule,
    *,
    capacity_bytes: int | None = None,
    expandable_segments: bool = False,
    steps: int = 2,
) -> AllocatorUse:
    """Return what a schedule takes of a CUDA device, by PyTorch's caching allocator.

    Resident tensors are allocated first, in their order; then each run allocates its outputs and
    its workspace. What is live at the end of a step is freed before the next one. The memory that
    the optimizer allocates temporarily in its step is not counted.

    Parameters
    ----------
    graph : Graph
    schedule : Schedule
        Valid for the graph.
    capacity_bytes : int, optional
        Bytes of the device that segments may take, such as `Device.usable_bytes`.
    expandable_segments : bool
        As for `CachingAllocator`.
    steps : int
        Steps to simulate: a later one finds the segments of those before it.
    """
    allocator = CachingAllocator(capacity_bytes=capacity_bytes, expandable_segments=expandable_segments)
    replay = _Replay(graph, allocator)
    where = "resident tensors"
    try:
        replay.begin()
        for _ in range(steps):
            for action in schedule:
                if isinstance(action, Compute):
                    where = action.operation
                    replay.compute(graph.index.operation_ids[action.operation])
                else:
                    replay.free(graph.index.tensor_ids[action.tensor])
            replay.end_step()
        where = ""
    except OutOfDeviceMemoryError:
        pass
    return AllocatorUse(replay.requested_peak, allocator.allocated_peak_bytes, allocator.reserved_peak_bytes, where)


class _Replay:
    """The blocks of the instances of a schedule, as the simulator defines instances."""

    def __init__(self, graph: Graph, allocator: CachingAllocator) -> None:
        self.graph = graph
        self.allocator = allocator
        self.requested = self.requested_peak = 0
        self.held: dict[int, _Instance] = {}
        """Instance of each live tensor that is not resident."""

    def begin(self) -> None:
        """Allocate the storages of resident tensors."""
        index = self.graph.index
        sizes = {index.storage_of[index.tensor_ids[name]]: 0 for name in self.graph.resident}
        for tensor, storage in zip(self.graph.tensors, index.storage_of, strict=True):
            if storage in sizes:  # the index counts these as 0 bytes
                sizes[storage] = max(sizes[storage], tensor.size_bytes)
        for size in sizes.values():
            self._malloc(size)

    def compute(self, i: int) -> None:
        """Allocate the outputs and the workspace of an operation, and free what is live only while it runs."""
        index = self.graph.index
        instances: dict[int, _Instance | None] = {}
        for tensor in index.inputs[i]:
            instances.setdefault(index.storage_of[tensor], self.held.get(tensor))
        created = []
        for tensor in index.outputs[i]:
            storage = index.storage_of[tensor]
            if storage not in instances:
                instances[storage] = _Instance(self._malloc(index.storage_bytes[storage]), index.storage_bytes[storage])
                created.append(instances[storage])
            instance = instances[storage]
            if instance is not None and tensor not in self.held:
                instance.holders += 1
                self.held[tensor] = instance
        size = self.graph.operations[i].workspace_bytes
        self._release(_Instance(self._malloc(size), size))
        for instance in created:
            if instance is not None and not instance.holders:  # a second copy of what is live
                self._release(instance)

    def free(self, tensor: int) -> None:
        """Free a tensor, and the block that no other tensor holds."""
        instance = self.held.pop(tensor, None)
        if instance is not None:  # not a view of a resident tensor
            instance.holders -= 1
            if not instance.holders:
                self._release(instance)

    def end_step(self) -> None:
        """Free what is live at the end of a step."""
        for tensor in [*self.held]:
            self.free(tensor)

    def _malloc(self, size: int) -> Block | None:
        self.requested += size
        self.requested_peak = max(self.requested_peak, self.requested)
        return self.allocator.malloc(size) if size else None

    def _release(self, instance: _Instance) -> None:
        self.requested -= instance.size
        if instance.block is not None:
            self.allocator.free(instance.block)


@dataclass(slots=True, eq=False)
class _Instance:
    """An allocation: its block, its own bytes, and how many live tensors are on it."""

    block: Block | None
    size: int
    holders: int = 0
