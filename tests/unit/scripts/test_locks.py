"""The locks of ``requirements/``: complete, consistent with the packages' metadata, and with pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.contracts.source_tree import REPO

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
WITH = ("tracking", "demo", "math", "docs", "dev")
"""The extras that ``make install`` adds to the device's."""
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
UNLIKE = {
    "pymdown-extensions",  # 13 needs Python 3.11.5
    "setuptools",  # torch 2.11 needs one below 82
}
"""Packages that the two locks have at different versions."""
NOT_ON_CPU = {"torch", "torchvision"}
"""Pinned separately for the CPU: requirements/torch.txt and vision.txt."""


def pins(*files: str) -> dict[str, str]:
    """Versions by package; every line is a pin or a comment, and names no index."""
    found = {}
    for file in files:
        for line in (REPO / "requirements" / file).read_text().splitlines():
            if not line.startswith("#"):
                assert re.fullmatch(r"[a-z0-9.-]+==[\w.]+", line), line
                name, _, version = line.partition("==")
                assert canonicalize_name(name) == name and name not in found
                found[name] = version
    return found


GPU, CPU = pins("gpu.lock.txt"), pins("cpu.lock.txt", "torch.txt", "vision.txt")


def of_extras(*extras: str) -> list[Requirement]:
    """pyproject.toml's requirements, by default and for these extras."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def faults(wanted: list[Requirement], lock: dict[str, str]) -> list[str]:
    """The requirements that a lock does not satisfy."""
    return [
        f"{one} (locked: {lock.get(canonicalize_name(one.name))})"
        for one in wanted
        if not one.specifier.contains(lock.get(canonicalize_name(one.name), "0"), prereleases=True)
        or canonicalize_name(one.name) not in lock
    ]


@pytest.mark.parametrize(("device", "lock"), [("gpu", GPU), ("cpu", CPU)])
def test_a_lock_has_what_pyproject_asks_for(device, lock):
    assert faults(of_extras(device, *WITH), lock) == []


def test_what_tests_alone_need_is_pinned_beside_the_lock():
    files = ("extras.txt", "browser.txt", "trackers.txt")
    lock = CPU | {name: version for file in files for name, version in pins(file).items()}
    assert faults(of_extras("mcp", "browser", "trackio", "mlflow"), lock) == []


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_gpu_lock_fulfils_the_metadata_of_every_package_that_is_here(python):
    """Follows pyproject's requirements down to packages that are not installed here at their locked version."""
    todo = [(one, frozenset(one.extras)) for one in of_extras("gpu", *WITH)]
    seen, walked = set(), set()
    environment = LINUX | {"python_version": python, "python_full_version": f"{python}.9"}
    while todo:
        one, extras = todo.pop()
        name = canonicalize_name(one.name)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        assert faults([one], GPU) == []
        try:
            metadata = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if metadata.version.partition("+")[0] != GPU[name]:
            continue
        walked.add(name)
        for line in metadata.requires or ():
            needed = Requirement(line)
            asked = ("", *extras)
            if not needed.marker or any(needed.marker.evaluate(environment | {"extra": each}) for each in asked):
                assert faults([needed], GPU) == [], f"{name} asks for it"
                todo.append((needed, frozenset(needed.extras)))
    assert walked >= {"sglang", "sglang-router", "megatron-core", "ray", "transformers", "xgrammar", "accelerate"}
    assert {"sglang-kernel", "flashinfer-cubin", "nvidia-cutlass-dsl", "quack-kernels"} <= {name for name, _ in seen}


def test_the_locks_have_the_same_versions():
    assert set(CPU) - set(GPU) == {"uv"}
    unlike = {name for name in set(CPU) & set(GPU) if CPU[name] != GPU[name]}
    assert unlike == UNLIKE | NOT_ON_CPU


def test_extras_that_go_together_pin_a_package_alike():
    for device in ("cpu", "gpu"):
        found: dict[str, set[str]] = {}
        for extra in set(PROJECT["optional-dependencies"]) - {"cpu", "gpu"} | {device}:
            for one in of_extras(extra):
                found.setdefault(canonicalize_name(one.name), set()).add(str(one.specifier))
        assert {name: versions for name, versions in found.items() if len(versions) > 1} == {}
