"""Generate random deep networks: one random block, repeated, with features that make blocks hard to separate."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import scheduler as sc


def deep_graph(seed: int, *, blocks: int = 5) -> sc.Graph:
    """Return the training step of a random block repeated on a residual stream.

    Blocks may have views, also of the previous block's output; operations with two outputs;
    operations that are not repeatable; a tensor that all blocks read; backward operations that
    read inputs, outputs or nothing, and some that produce results.
    """
    random = Random(seed)
    network = _Network(random, _template(random), shared=random.random() < 0.4)
    for block in range(blocks):
        network.add_block(block)
    return network.graph(blocks)


@dataclass(frozen=True)
class _Step:
    kind: str
    time: float
    size: int
    reads: list[str]
    kept: str
    makes_result: bool


def _template(random: Random) -> list[_Step]:
    steps = []
    for number in range(random.randint(6, 9)):
        known = ["x", "view", *(str(k) for k in range(number))]
        reads = [known[-1], *random.sample(known, k=random.randint(0, 2))]
        kind = random.choices(["plain", "view", "two", "once"], [6, 2, 1, 0.4])[0]
        time = 0.0 if kind == "view" else float(random.choice([1, 1, 2, 5, 9]))
        kept = random.choice(["inputs", "outputs", "both", "nothing"])
        reads = list(dict.fromkeys(reads))
        steps.append(_Step(kind, time, random.choice([1, 4, 8, 16]), reads, kept, random.random() < 0.3))
    return steps


class _Network:
    def __init__(self, random: Random, template: list[_Step], *, shared: bool) -> None:
        self.random, self.template, self.shared = random, template, shared
        self.tensors = {tensor.name: tensor for tensor in (sc.Tensor("x", 8), sc.Tensor("memory", 4))}
        self.forward = [sc.Operation("memory", ["x"], ["memory"], 3.0)]
        self.backward: list[list[sc.Operation]] = []
        self.results = ["loss", "g0"]
        self.stream = "x"

    def add_block(self, block: int) -> None:
        names = {"x": self.stream, "view": self.stream}
        if block and self.random.random() < 0.5:
            names["view"] = self._run(f"{block}.view", [self.stream], 0.0, sc.Tensor(f"{block}.view", 8, self.stream))
        kept = []
        for number, step in enumerate(self.template):
            name = names[str(number)] = f"{block}.{number}"
            inputs = [names[read] for read in step.reads] + ["memory"] * (self.shared and number == 1)
            made = [sc.Tensor(name, step.size)]
            if step.kind == "view":
                base = self.tensors[inputs[0]]
                inputs, made = inputs[:1], [sc.Tensor(name, base.size_bytes, base.storage)]
            if step.kind == "two":
                made.append(sc.Tensor(f"{name}b", 1))
            self._run(name, inputs, step.time, *made, repeatable=step.kind != "once")
            outputs = [tensor.name for tensor in made]
            kept.append({"inputs": inputs, "outputs": outputs, "both": inputs + outputs, "nothing": []}[step.kept])
        self._add_backward(block, kept)
        last = names[str(len(self.template) - 1)]
        self.stream = self._run(f"x{block + 1}", [self.stream, last], 1.0, sc.Tensor(f"x{block + 1}", 8))

    def graph(self, blocks: int) -> sc.Graph:
        self._run("loss", [self.stream], 1.0, sc.Tensor("loss", 1))
        self.tensors[f"g{blocks}"] = sc.Tensor(f"g{blocks}", 8)
        begin = sc.Operation("begin", ["loss"], [f"g{blocks}"], 1.0, phase="backward")
        backward = [operation for block in reversed(self.backward) for operation in block]
        tensors = tuple(self.tensors.values())
        return sc.Graph([*self.forward, begin, *backward], tensors, resident=["x"], results=self.results)

    def _run(self, name: str, inputs: list[str], time: float, *made: sc.Tensor, repeatable: bool = True) -> str:
        self.tensors |= {tensor.name: tensor for tensor in made}
        outputs = [tensor.name for tensor in made]
        self.forward.append(sc.Operation(name, inputs, outputs, time, repeatable=repeatable))
        return name

    def _add_backward(self, block: int, kept: list[list[str]]) -> None:
        self.backward.append([])
        source = f"g{block + 1}"
        for number in range(len(self.template) - 1, -1, -1):
            step = self.template[number]
            made = [sc.Tensor(f"g{block}.{number}" if number else f"g{block}", 8)]
            if step.makes_result:
                made.append(sc.Tensor(f"{block}.{number}.gradient", 2))
                self.results.append(made[1].name)
            inputs = list(dict.fromkeys([source, *kept[number]]))
            outputs = [tensor.name for tensor in made]
            self.tensors |= {tensor.name: tensor for tensor in made}
            name = f"{block}.{number}.back"
            self.backward[-1].append(sc.Operation(name, inputs, outputs, 2 * step.time, phase="backward"))
            source = made[0].name
