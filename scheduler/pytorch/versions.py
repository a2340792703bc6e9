"""The versions of torch and Python that the tests run with."""

from __future__ import annotations

TESTED_TORCH = ("2.13", "2.14", "2.15")
"""Minor versions of torch with which all PyTorch tests were run; the extra `torch` allows those between, too."""
TESTED_PYTHON = ("3.11", "3.12", "3.13")


def is_tested(torch_version: str) -> bool:
    """Return whether the minor version of a version of torch, such as "2.13.0+cpu", is a tested one."""
    return ".".join(torch_version.split(".")[:2]) in TESTED_TORCH


def describe_tested() -> str:
    """Return the tested versions of torch, and how to install one."""
    first, last = TESTED_TORCH[0], TESTED_TORCH[-1]
    major, minor = last.split(".")
    return f'{first} to {last}: pip install "torch>={first},<{major}.{int(minor) + 1}"'
