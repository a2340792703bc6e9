"""Which private names of torch there are, and what is expected of each."""

from __future__ import annotations

import ast
from collections.abc import Callable

from tests.support.paths import ROOT

HOME = ROOT / "scheduler" / "pytorch" / "torch_private"
MODULES = {path.stem for path in HOME.glob("[a-z]*.py")}
VALUES = {"autograd", "guards", "modules", "operators", "pytree", "tensor_words", "tensors"}
"""Those that are about values; the others are about compilers and the profiler."""


class Expectations(dict[str, Callable[[], None]]):
    """A function that checks what is expected of a name, for each name of some modules."""

    def of(self, *names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Register a function that checks these names."""

        def register(check: Callable[[], None]) -> Callable[[], None]:
            self.update(dict.fromkeys(names, check))
            return check

        return register


def public_names(modules: set[str]) -> list[str]:
    """Return every name that modules of the folder define or list in `__all__`."""
    found = set()
    for module in modules:
        for node in ast.parse((HOME / f"{module}.py").read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            if "__all__" in names:
                names |= set(ast.literal_eval(node.value))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = {node.name}
            found |= {f"{module}.{name}" for name in names if not name.startswith("_")}
    return sorted(found)
