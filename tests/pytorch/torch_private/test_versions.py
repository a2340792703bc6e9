"""A version of torch that is not tested warns once, or says what it lacks."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from scheduler.errors import MissingExtraError
from scheduler.pytorch import torch_private
from scheduler.pytorch.versions import is_tested
from tests.support.paths import ROOT


def test_the_version_that_these_tests_run_with_is_a_tested_one() -> None:
    assert is_tested(torch.__version__)


def test_a_tested_version_is_not_warned_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_private.check_version("2.13.0+cpu")


def test_an_unknown_version_that_has_everything_is_warned_about_once() -> None:
    code = (
        "import torch, warnings; torch.__version__ = '2.99.1'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    from scheduler.pytorch import checkpointed, trace\n"
        "print(*[str(w.message) for w in caught if 'tested' in str(w.message)], sep='\\n')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ran.stdout.splitlines() == [
        "torch 2.99.1 is not a tested version: if planning or training fails, install one, 2.13 to 2.15:"
        ' pip install "torch>=2.13,<2.16"'
    ]


def test_an_unknown_version_that_lacks_a_name_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "scheduler.pytorch.torch_private.profiler", raising=False)
    monkeypatch.delattr(torch._C._profiler, "_ProfilerEvent")
    with pytest.raises(MissingExtraError, match=r"torch 2\.99\.1 lacks .*profiler: cannot import name '_P"):
        torch_private.check_version("2.99.1")


def test_torch_2_12_lacks_the_backward_that_may_free_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    (base,) = (kind for kind in torch.autograd.Function.__mro__ if "boxed_grads_call" in vars(kind))
    monkeypatch.delattr(base, "boxed_grads_call")
    with pytest.raises(MissingExtraError, match=r"torch 2\.12\.1\+cpu lacks .*boxed_grads_call"):
        torch_private.check_version("2.12.1+cpu")
