"""Find repeated parts of a graph, such as layers or time steps: what in one part corresponds to what in the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random

import numpy as np

from scheduler.graph import Graph
from scheduler.solvers.graph_arrays import Ints

MOST_IMAGES = 3
"""Ways in which parts repeat, such as layer by layer and step by step."""
MOST_DISTANCES = 12
"""Distances between parts that are looked at for these."""
MOST_COMPARISONS = 10**8
"""At most so many pairs of operations are compared for them, which takes hundredths of a second."""
LEAST_SHARE = 0.125
"""Share of the operations that have an image at least."""
LEAST_STRETCH = 4
"""A part from which images spread has at least so many operations one after another."""
NONE = -1
"""The image of an operation that has none."""
MOST_STEPS = 8
"""Parts that an operation's image is away at most."""


class Repeats:
    """Images of a graph's operations: the corresponding ones in the next part, for each way in which parts repeat.

    Forward operations at the same distance whose inputs and outputs have the same sizes are parts
    that may repeat. From the middle of a long one, images spread along the edges: the image of
    what an operation reads is what its own image reads, and readers correspond in the same way.
    So they reach the backward, however far its operations lie from each other.

    Parameters
    ----------
    graph : Graph

    Attributes
    ----------
    images : list of ndarray of int64, shape (operations,)
        `NONE` where an operation has no image. No two operations have the same one.
    """

    def __init__(self, graph: Graph) -> None:
        index = self._index = graph.index
        self._producer = [producers[0] if producers else NONE for producers in index.producers]
        forward = [i for i, operation in enumerate(graph.operations) if operation.phase == "forward"]
        self._forward = np.array(forward, dtype=np.int64)
        sizes = [index.storage_bytes[storage] for storage in index.storage_of]
        shapes = [
            (operation.phase, operation.repeatable, *(tuple(sizes[t] for t in tensors) for tensors in ends))
            for operation, *ends in zip(graph.operations, index.inputs, index.outputs, strict=True)
        ]
        numbers = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
        self._shape = np.array([numbers[shape] for shape in shapes])
        self.images: list[Ints] = []
        for distance in self._distances():
            image = self._image(distance)
            if np.mean(image != NONE) >= LEAST_SHARE and not self._is_known(image):
                self.images.append(image)
            if len(self.images) == MOST_IMAGES:
                break

    def draw(self, random: Random) -> Ints:
        """Return images at random: in the next part or in the one before, or a few parts on."""
        image = random.choice(self.images)
        if random.random() < 0.5:
            image = _inverse(image)
        steps, found = 1, image
        while steps < MOST_STEPS and random.random() < 0.5:
            found, steps = np.where(found == NONE, NONE, image[found]), steps + 1
        return found

    def _distances(self) -> list[int]:
        """Return the distances at which most forward operations look the same.

        A multiple of a better one is among them if more do than at the multiple before it.
        """
        shape = self._shape[self._forward]
        most = min(len(shape), MOST_COMPARISONS // max(1, len(shape)))
        same = {d: np.count_nonzero(shape[d:] == shape[:-d]) for d in range(1, most)}
        found: list[int] = []
        for distance in sorted(same, key=lambda d: -same[d]):
            if len(found) == MOST_DISTANCES or same[distance] < LEAST_SHARE * len(shape):
                break
            if all(distance % other or same[distance] > same[distance - other] for other in found):
                found.append(distance)
        return found

    def _image(self, distance: int) -> Ints:
        """Return the images that spread from parts at this distance, the longest ones first."""
        image = np.full(len(self._shape), NONE)
        is_image = np.zeros(len(self._shape), dtype=np.bool_)
        for middle in self._middles(distance):
            queue = deque([(int(self._forward[middle]), int(self._forward[middle + distance]))])
            while queue:
                one, other = queue.popleft()
                is_new = image[one] == NONE and not is_image[other]
                if is_new and one != other and self._shape[one] == self._shape[other]:
                    image[one], is_image[other] = other, True
                    queue.extend(self._around(one, other))
        return image

    def _middles(self, distance: int) -> list[int]:
        """Return the middles of the stretches of forward operations that look like those at a distance."""
        shape = self._shape[self._forward]
        same = np.concatenate([[False], shape[distance:] == shape[:-distance], [False]])
        begins, ends = np.flatnonzero(same[1:] > same[:-1]), np.flatnonzero(same[1:] < same[:-1])
        stretches = sorted(zip(begins.tolist(), ends.tolist(), strict=True), key=lambda each: each[0] - each[1])
        return [(begin + end) // 2 for begin, end in stretches if end - begin >= LEAST_STRETCH]

    def _around(self, one: int, other: int) -> Iterator[tuple[int, int]]:
        """Return pairs of operations that correspond if two do: what they read from, and what reads from them."""
        index = self._index
        for tensor, image in zip(index.inputs[one], index.inputs[other], strict=True):
            if self._producer[tensor] != NONE and self._producer[image] != NONE:
                yield self._producer[tensor], self._producer[image]
        for tensor, image in zip(index.outputs[one], index.outputs[other], strict=True):
            left = list(index.readers[image])
            for reader in index.readers[tensor]:
                like = (self._shape[reader], index.inputs[reader].index(tensor))
                found = next((r for r in left if (self._shape[r], index.inputs[r].index(image)) == like), None)
                if found is not None:
                    left.remove(found)
                    yield reader, found

    def _is_known(self, image: Ints) -> bool:
        """Whether most images are those of another way, there or back."""
        known = [other for each in self.images for other in (each, _inverse(each))]
        has = image != NONE
        return any(np.mean(image[has] == other[has]) > 0.5 for other in known)


def _inverse(image: Ints) -> Ints:
    inverse = np.full_like(image, NONE)
    inverse[image[image != NONE]] = np.flatnonzero(image != NONE)
    return inverse
