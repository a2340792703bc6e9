"""Sequence networks: a residual stream through blocks of attention and MLP."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.errors import InvalidOptionError
from scheduler.graph import Graph
from scheduler.zoo.tape import Tape, check_sizes


def transformer(
    layers: int = 12,
    *,
    width: int = 768,
    heads: int = 12,
    length: int = 512,
    batch_size: int = 1,
    vocabulary: int = 8192,
    separate_heads: bool = False,
    backward: bool = True,
) -> Graph:
    """Return a language model: embedding, blocks of attention and MLP on a residual stream, loss.

    Parameters
    ----------
    layers : int
        Blocks.
    width : int
        Elements of the residual stream per token, a multiple of `heads`; the MLP has four
        times as many.
    heads, length, batch_size, vocabulary : int
    separate_heads : bool
        Whether each head has operations of its own: a block then has 28 operations, forward and
        backward, and six more for each head, so 124 with 16 heads.
    backward : bool
        Whether the graph is the whole step, or its forward alone.

    Raises
    ------
    InvalidOptionError
        If a size is below 1, or the width is not a multiple of the heads.

    References
    ----------
    Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2: norms
    come before attention and MLP).
    """
    check_sizes(layers=layers)
    model = _Model(Tape(), width, heads, length, batch_size, vocabulary, separate_heads)
    model.tape.scope = "stem"
    x = model.embedding("tokens")
    for layer in range(layers):
        model.tape.scope = f"block{layer}"
        x = model.mlp(model.attention(x))
    return model.graph(x, f"transformer_{layers}", backward)


def encoder_decoder(
    layers: int = 6,
    *,
    width: int = 512,
    heads: int = 8,
    length: int = 256,
    batch_size: int = 1,
    vocabulary: int = 8192,
    separate_heads: bool = False,
    backward: bool = True,
) -> Graph:
    """Return a model of two stacks of blocks; every block of the second reads the first's output.

    Parameters
    ----------
    layers : int
        Blocks of the encoder, and as many of the decoder.
    width, heads, length, batch_size, vocabulary, separate_heads, backward
        As for `transformer`; both sequences have the same length.

    Raises
    ------
    InvalidOptionError
        If a size is below 1, or the width is not a multiple of the heads.

    References
    ----------
    Vaswani et al., Attention Is All You Need, NeurIPS 2017; here with norms before attention
    and MLP.
    """
    check_sizes(layers=layers)
    model = _Model(Tape(), width, heads, length, batch_size, vocabulary, separate_heads)
    model.tape.scope = "encoder"
    encoded = model.embedding("source")
    for layer in range(layers):
        model.tape.scope = f"encoder{layer}"
        encoded = model.mlp(model.attention(encoded))
    model.tape.scope = "encoder"
    encoded = model.norm(encoded)
    model.tape.scope = "decoder"
    x = model.embedding("tokens")
    for layer in range(layers):
        model.tape.scope = f"decoder{layer}"
        x = model.mlp(model.attention(model.attention(x), encoded))
    return model.graph(x, f"encoder_decoder_{layers}", backward)


@dataclass(frozen=True)
class _Model:
    """The sizes of a model, and the parts of its blocks."""

    tape: Tape
    width: int
    heads: int
    length: int
    batch_size: int
    vocabulary: int
    separate_heads: bool

    def __post_init__(self) -> None:
        check_sizes(
            width=self.width,
            heads=self.heads,
            length=self.length,
            batch_size=self.batch_size,
            vocabulary=self.vocabulary,
        )
        if self.width % self.heads:
            raise InvalidOptionError(f"width must be a multiple of heads = {self.heads}, got {self.width}")

    def embedding(self, name: str) -> str:
        tokens = self.tape.batch(name, (self.batch_size, self.length))
        shape = (self.batch_size, self.length, self.width)
        return self.tape.run("embedding", [tokens], shape, parameters=self.vocabulary * self.width)

    def norm(self, x: str) -> str:
        return self.tape.run("norm", [x], self.tape.shapes[x], parameters=2 * self.width)

    def linear(self, x: str, width: int, *, bias: bool = True) -> str:
        *others, before = self.tape.shapes[x]
        shape = (*others, width)
        flops = 2 * math.prod(shape) * before
        return self.tape.run("linear", [x], shape, flops=flops, parameters=(before + bias) * width)

    def attention(self, x: str, memory: str = "") -> str:
        """Return x plus what attention reads from x itself, or from `memory`."""
        normed = self.norm(x)
        if memory:
            queries = [self.linear(normed, self.width)]
            keys, values = self.tape.split(self.linear(memory, 2 * self.width), 2)
        else:
            query, keys, values = self.tape.split(self.linear(normed, 3 * self.width), 3)
            queries = [query]
        if self.separate_heads and self.heads > 1:
            triples = zip(*(self.tape.split(part, self.heads) for part in (queries[0], keys, values)), strict=True)
            read = self.tape.concatenate([self._head(*triple, heads=1) for triple in triples], axis=-1)
        else:
            read = self._head(queries[0], keys, values, heads=self.heads)
        return self.tape.add(x, self.linear(read, self.width))

    def _head(self, queries: str, keys: str, values: str, *, heads: int) -> str:
        """Return what a number of heads read from the values."""
        shape = self.tape.shapes[queries]
        square = (self.batch_size, heads, self.length, self.length)
        flops = 2 * math.prod(shape) * self.length
        scores = self.tape.run("scores", [queries, keys], square, flops=flops)
        weights = self.tape.run("softmax", [scores], square, keeps="output")
        return self.tape.run("read", [weights, values], shape, flops=flops)

    def mlp(self, x: str) -> str:
        """Return x plus the MLP of x."""
        hidden = self.linear(self.norm(x), 4 * self.width)
        active = self.tape.run("gelu", [hidden], self.tape.shapes[hidden])
        return self.tape.add(x, self.linear(active, self.width))

    def graph(self, x: str, name: str, backward: bool) -> Graph:
        """Return the graph of a model whose residual stream ends with x."""
        self.tape.scope = "head"
        logits = self.linear(self.norm(x), self.vocabulary, bias=False)
        targets = self.tape.batch("targets", (self.batch_size, self.length))
        return self.tape.graph(self.tape.run("loss", [logits, targets], ()), name, backward=backward)
