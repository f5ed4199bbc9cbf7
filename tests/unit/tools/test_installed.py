"""``tools/installed.py``: packages against their pins, and recipes against what is installed."""

from __future__ import annotations

import dataclasses

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
