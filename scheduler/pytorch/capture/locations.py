"""The submodule that each call of a captured graph comes from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch.fx.traceback
from torch import fx, nn

from scheduler.pytorch.capture.joint import Source

_KEY = "scheduler location"
"""Key of the submodule's name among the custom entries of a node's metadata."""


@contextlib.contextmanager
def noted_locations(module: nn.Module) -> Iterator[None]:
    """Note in every node that is traced meanwhile which submodule it comes from; `location` reads the note."""
    open_notes: list[contextlib.AbstractContextManager[None]] = []
    handles = []

    def enter(name: str) -> None:
        open_notes.append(torch.fx.traceback.annotate({_KEY: name}))
        open_notes[-1].__enter__()

    def leave(*_: object) -> None:
        open_notes.pop().__exit__(None, None, None)

    for name, part in module.named_modules():
        if name:
            handles.append(part.register_forward_pre_hook(lambda *_, name=name: enter(name)))
            handles.append(part.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def location(node: fx.Node, sources: Mapping[fx.Node, Source]) -> str:
    """Return the qualified name of the submodule that a call comes from, "" if it is not known.

    TorchDynamo drops these notes. Without a note, a call that reads a parameter gets the
    parameter's submodule.
    """
    noted = node.meta.get("custom", {}).get(_KEY)
    if noted is not None:
        return str(noted)
    read = [sources[argument] for argument in node.all_input_nodes if argument in sources]
    return next((source.names[0].rpartition(".")[0] for source in read if source.kind == "parameter"), "")
