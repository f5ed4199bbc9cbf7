"""``tools/installed.py``: packages against their pins, and recipes against what is installed."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from tools import installed

MLA = {"run-deepseek-r1.sh", "run-deepseek-v3.sh", "run-glm4.7-30B-A3B-8gpus.sh", "run-glm5.2-744B-A40B.sh"}
DEEPEP = {"run-deepseek-r1.sh", "run-deepseek-v3.sh", "low_precision/run-qwen3-235B-A22B-int4.sh"}
DSA = {"run-glm5-744B-A40B.sh", "run-glm5.2-744B-A40B.sh"}


def without_parts(monkeypatch) -> dict[str, tuple[str, str]]:
    """The rows of a GPU environment that has none of the parts."""
    missing = tuple(dataclasses.replace(part, is_there=lambda: False) for part in installed.PARTS)
    monkeypatch.setattr(installed, "PARTS", missing)
    return {name: (verdict, text) for verdict, name, text in installed.what_recipes_lack("gpu")}


@pytest.mark.parametrize(
    ("part", "verdict", "says", "stop", "do_not"),
    [
        ("cutlass", "bad", "dies on multi-latent attention", MLA, {"run-qwen3-30B-A3B.sh", "run-glm4-9B.sh"}),
        ("FlashMLA", "bad", "sglang-kernel 0.4.4", DSA, MLA - DSA),
        ("mooncake", "unknown", "pip install mooncake", {"run-glm5.2-744B-A40B.sh"}, {"run-glm5-744B-A40B.sh"}),
        ("DeepEP", "unknown", "slime refuses the flag", DEEPEP, {"run-glm4.5-106B-A12B.sh"}),
    ],
)
def test_a_part_that_is_missing_names_the_recipes_that_would_not_run(part, verdict, says, stop, do_not, monkeypatch):
    found, text = without_parts(monkeypatch)[part]
    named = set(text.partition("would not run: ")[2].split())
    assert found == verdict and says in text
    assert stop <= named <= set(installed.recipes()) and not named & do_not


@pytest.mark.parametrize("part", ["FlashAttention 3", "flashinfer", "nvcc", "C compiler"])
def test_a_part_that_most_recipes_want_counts_them(part, monkeypatch):
    verdict, text = without_parts(monkeypatch)[part]
    stopped, of = map(int, re.findall(r"(\d+) of (\d+) recipes", text)[0])
    assert verdict == ("bad" if "make install" in text else "unknown")
    assert 40 < stopped <= of == len(installed.recipes()) - 2


def test_every_part_is_wanted_by_a_recipe_and_nothing_is_missing_from_a_complete_environment(monkeypatch):
    texts = installed.recipes().values()
    assert all(any(re.search(part.wanted_by, text, re.DOTALL) for text in texts) for part in installed.PARTS)
    here = tuple(dataclasses.replace(part, is_there=lambda: True) for part in installed.PARTS)
    monkeypatch.setattr(installed, "PARTS", here)
    assert {row[0] for row in installed.what_recipes_lack("gpu")} == {"good"}


def test_the_cpu_environment_runs_the_tiny_recipes():
    ((verdict, _, text),) = installed.what_recipes_lack("cpu")
    assert verdict == "unknown" and text.startswith("run-tiny-cpu-sft.sh run-tiny-cpu.sh run here")


def test_packages_are_held_against_their_pins(monkeypatch):
    pinned = installed.pins("cpu")
    here = {name: installed._installed(name) or "1" for name in pinned}
    monkeypatch.setattr(installed, "pins", lambda name: here)
    monkeypatch.setattr(installed, "_installed", here.get)
    assert {row[0] for row in installed.packages("cpu")} == {"good"}
    others = [name for name in here if name not in installed.MAIN["cpu"]]
    old = here | dict.fromkeys(others[:12], "0.1") | {"torch": "2.0", "ray": None}
    monkeypatch.setattr(installed, "_installed", old.get)
    rows = {name: (verdict, text) for verdict, name, text in installed.packages("cpu")}
    assert rows["torch"] == ("bad", f"2.0; pinned: {here['torch']}: DEVICE=cpu make install")
    assert rows["ray"][1].startswith("missing; pinned:") and rows["numpy"][0] == "good"
    verdict, text = rows["other packages"]
    assert verdict == "unknown" and f"{len(others) - 12} of {len(others)} as pinned" in text
    assert f"{others[0]} 0.1 (pinned {here[others[0]]})" in text and text.endswith(", and 2 more")


def test_all_main_packages_are_pinned():
    for device, names in installed.MAIN.items():
        assert set(names) <= set(installed.pins(device))


def test_the_compiler_of_cuda_is_looked_for_where_flashinfer_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert not installed.has_nvcc() and not installed.has_c()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    assert installed.has_nvcc()
    for name in ("nvcc", "cc"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert installed.has_nvcc()
    monkeypatch.setattr(installed.sysconfig, "get_path", lambda name: str(tmp_path))
    assert not installed.has_c()
    (tmp_path / "Python.h").touch()
    assert installed.has_c()


def test_the_kind_is_what_was_made_else_what_the_machine_has(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for device in ("cpu", "gpu"):
        monkeypatch.setenv("DEVICE", device)
        assert installed.kind() == device
    (tmp_path / ".kind").write_text("cpu\n")
    assert installed.kind() == "cpu"
    assert installed._installed("no-such-package") is None


def test_modules_and_libraries_are_looked_for_without_importing_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_kernels").mkdir()
    Path(tmp_path, "some_kernels/__init__.py").write_text("raise ImportError('no driver')\n")
    (tmp_path / "some_kernels/flash_ops.abi3.so").touch()
    assert installed.has_module("some_kernels")() and not installed.has_module("no_kernels")()
    assert installed.has_library("some_kernels", "flash_ops*.so")()
    assert not installed.has_library("some_kernels", "flashmla_ops*.so")()
    assert not installed.has_library("no_kernels", "flash_ops*.so")()
