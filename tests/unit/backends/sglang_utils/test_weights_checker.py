"""SGLang's weights checker on a CPU."""

from __future__ import annotations

import pkgutil
from types import SimpleNamespace

import pytest
import torch

from slime.backends.sglang_utils import cpu_shim

cpu_shim.install()
from sglang.srt.utils import weight_checker  # noqa: E402 - after the shim

from slime.backends.sglang_utils.cpu_shim import weights_checker  # noqa: E402


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> weight_checker.WeightChecker:
    """A checker with the shim's functions in front of SGLang's."""
    for target, name in weights_checker.HOOKED.items():
        owner, _, attribute = target.rpartition(".")
        hook, original = getattr(weights_checker, name), pkgutil.resolve_name(target)
        hooked = lambda *given, hook=hook, original=original: hook(original, *given)  # noqa: E731
        monkeypatch.setattr(pkgutil.resolve_name(owner), attribute, hooked)
    model = torch.nn.Linear(300, 7)
    model.register_buffer("count", torch.arange(5))
    return weight_checker.WeightChecker(SimpleNamespace(model=model))


@torch.no_grad()  # as SGLang's scheduler does
def test_what_changed_since_a_snapshot_is_named(checker: weight_checker.WeightChecker) -> None:
    model = checker._model_runner.model
    checker.handle("snapshot")
    checker.handle("compare")
    model.weight[6, 299] += 0.5
    with pytest.raises(Exception, match="name=weight max_abs_err=0.5 .* num_exceed=1 "):
        checker.handle("compare")
    checker.handle("snapshot")
    checker.handle("reset_tensors")
    with pytest.raises(Exception, match="(?s)name=weight .*name=bias "):
        checker.handle("compare")
