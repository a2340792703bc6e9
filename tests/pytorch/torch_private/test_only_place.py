"""No other module names a private part of torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from torch import nn

from tests.pytorch.torch_private.expectations import HOME
from tests.support.paths import ROOT

OTHERS = sorted(path for path in HOME.parent.rglob("*.py") if HOME not in path.parents)
NOT_OF_TORCH = {"_fields", "_replace", "sys._getframe", "random._inst", "ctypes._SimpleCData"}
"""Private names of the standard library."""
OF_MODULES = {name for name in vars(nn.Module()) if name.startswith("_")}
"""Attributes of a module, which code may look up by name."""


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module uses and does not define."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_of_self(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            yield from (name for a in node.names if is_private(name := f"{node.module}.{a.name}"))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            text = ast.unparse(node)
            if not {node.attr, text} & NOT_OF_TORCH and not text.startswith(("aten.", "torch.ops.")):
                yield text
        elif isinstance(node, ast.Constant) and node.value in OF_MODULES:
            yield node.value


def is_private(path: str) -> bool:
    return any(name.startswith("_") and not name.startswith("__") for name in path.split("."))


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_no_other_module_uses_a_private_name_that_it_does_not_define() -> None:
    found = {str(path.relative_to(ROOT)): set(private_names(ast.parse(path.read_text()))) for path in OTHERS}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree as pytree",
        "from torch.nn.modules.batchnorm import _NormBase",
        "with torch._C._DisableAutocast(): pass",
        "buffers = module._buffers",
        "version = self.tensor._version",
        "held = vars(module)['_buffers']",
    ],
)
def test_the_check_sees_a_private_name(code: str) -> None:
    assert len(set(private_names(ast.parse(code)))) > 0


def test_the_check_lets_a_module_use_its_own_private_names_and_operators_of_aten() -> None:
    code = "class A:\n def __init__(self, other):\n  self._x = other._x\n  self.__class__ = aten._to_copy"
    assert list(private_names(ast.parse(code))) == []
