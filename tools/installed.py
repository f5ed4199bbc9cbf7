"""Compare the installed packages with the pinned versions, and with what the recipes of ``scripts/`` need."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slime.utils import env

REPO = Path(__file__).resolve().parents[1]
GOOD, BAD, UNKNOWN = "good", "bad", "unknown"
Row = tuple[str, str, str]
"""Verdict, subject, text."""
FEW, MANY = 10, 40
"""Differing packages are named up to the first number, recipes below the second."""
OF_CPU = re.compile(r"run-tiny-cpu.*\.sh")
MAIN = {
    "cpu": ("torch", "sglang", "sglang-router", "megatron-core", "ray", "transformers", "pyarrow", "numpy"),
    "gpu": (
        *("torch", "triton", "torchvision", "sglang", "sglang-kernel", "flashinfer-python", "flashinfer-cubin"),
        *("sgl-deep-gemm", "nvidia-cutlass-dsl", "quack-kernels", "torch-memory-saver", "transformers"),
        *("sglang-router", "megatron-core", "ray", "pyarrow", "numpy"),
    ),
}
"""Packages that get a row each; all others share one."""
HAS_ENGINES = r"\A(?!.*--debug-train-only)"


@dataclass(frozen=True)
class Part:
    """Something that an environment for GPUs may lack, and a pattern of the recipes that need it."""

    name: str
    comes_with: str
    """The package that brings it, if the lock has it; otherwise how to install it."""
    is_there: Callable[[], bool]
    wanted_by: str
    """A regular expression that matches the recipe's text without comments."""
    without: str


def has_module(name: str) -> Callable[[], bool]:
    """Return a function that tells whether a module can be found."""
    return lambda: importlib.util.find_spec(name) is not None


def has_library(module: str, pattern: str) -> Callable[[], bool]:
    """Return a function that tells whether a module's folder has a file."""

    def look() -> bool:
        spec = importlib.util.find_spec(module)
        places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
        return any(next(place.glob(pattern), None) is not None for place in places)

    return look


def has_nvcc() -> bool:
    """Look for CUDA's compiler where flashinfer looks."""
    home = env.get_str("CUDA_HOME") or env.get_str("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or Path(home, "bin/nvcc").is_file()


def has_c() -> bool:
    """Look for a C compiler and Python's headers, which Triton needs to start its kernels."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    return header.is_file() and any(shutil.which(name) for name in ("cc", "gcc", "clang"))


PARTS = (
    Part(
        "C compiler",
        "apt-get install build-essential python3-dev, for the Python of .venv",
        has_c,
        "",
        "cc or Python.h: Triton's kernels cannot start",
    ),
    Part(
        "nvcc",
        "install the CUDA 13 toolkit, or set CUDA_HOME",
        has_nvcc,
        HAS_ENGINES,
        "engines compile kernels of flashinfer when they start",
    ),
    Part(
        "cutlass",
        "nvidia-cutlass-dsl",
        has_module("cutlass"),
        r"models/(?:deepseek|glm4\.[5-9]|glm5|kimi|moonlight)",
        "SGLang skips its deepseek_v2, glm4_moe and glm4_moe_lite and serves the model by its generic Transformers "
        "backend, which dies on multi-latent attention",
    ),
    Part(
        "FlashAttention 3",
        "sglang-kernel",
        has_library("sgl_kernel", "flash_ops*.so"),
        rf"{HAS_ENGINES}(?!.*--sglang-attention-backend (?!fa3\b))",
        "engines on Hopper choose fa3; add --sglang-attention-backend triton",
    ),
    Part(
        "flashinfer",
        "flashinfer-python",
        has_module("flashinfer"),
        rf"{HAS_ENGINES}(?!.*--sglang-sampling-backend pytorch)",
        "engines sample with it; add --sglang-sampling-backend pytorch",
    ),
    Part(
        "FlashMLA",
        "sglang-kernel",
        has_library("sgl_kernel", "flashmla_ops*.so"),
        r"--sglang-\S*backend flashmla",
        "SGLang has no kernel for the sparse attention that the recipe names",
    ),
    Part(
        "mooncake",
        "pip install mooncake-transfer-engine-cuda13==0.3.14",
        has_module("mooncake"),
        r"transfer-backend mooncake|worker_type: prefill|--prefill-num-servers",
        "prefill and decode cannot be apart",
    ),
    Part(
        "DeepEP",
        "build DeepEP against this torch",
        has_module("deep_ep"),
        r"--sglang-moe-a2a-backend deepep|--sglang-enable-deepep-moe",
        "slime refuses the flag",
    ),
)
"""--moe-enable-deepep has no row: without DeepEP, the trainer uses its own dispatcher."""


def kind() -> str:
    """Return the kind of this environment, cpu or gpu: as ``make install`` noted it, else by the machine."""
    note = Path(sys.prefix) / ".kind"
    if note.is_file():
        return note.read_text(encoding="utf-8").strip()
    return subprocess.run([REPO / "scripts/device.sh"], capture_output=True, text=True, check=True).stdout.strip()


def pins(name: str) -> dict[str, str]:
    """Return package -> version from an environment's lock."""
    files = ("cpu.lock.txt", "torch.txt") if name == "cpu" else ("gpu.lock.txt",)
    lines = [line for file in files for line in (REPO / "requirements" / file).read_text(encoding="utf-8").split("\n")]
    return dict(line.split("==", 1) for line in lines if re.match(r"[\w.-]+==", line))


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def packages(name: str) -> Iterator[Row]:
    """Yield a row for each main package, and one for all others: the installed version and the pinned one.

    Args:
        name: the environment, cpu or gpu.
    """
    pinned = pins(name)
    found = {package: _installed(package) for package in pinned}
    for package in MAIN[name]:
        if found[package] == pinned[package]:
            yield GOOD, package, f"{pinned[package]}, as pinned"
        else:
            here = found[package] or "missing"
            yield BAD, package, f"{here}; pinned: {pinned[package]}: DEVICE={name} make install"
    others = [package for package in pinned if package not in MAIN[name]]
    unlike = [
        f"{package} {found[package] or 'missing'} (pinned {pinned[package]})"
        for package in others
        if found[package] != pinned[package]
    ]
    more = f", and {len(unlike) - FEW} more" if len(unlike) > FEW else ""
    text = f"{len(others) - len(unlike)} of {len(others)} as pinned (requirements/{name}.lock.txt)"
    if unlike:
        text += f"; {', '.join(unlike[:FEW])}{more}"
    yield UNKNOWN if unlike else GOOD, "other packages", text


def recipes() -> dict[str, str]:
    """Return each recipe's text without comments, followed by that of the recipe that it calls at its end."""
    texts = {
        str(path.relative_to(REPO / "scripts")): re.sub(r"^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.M)
        for pattern in ("run-*.sh", "low_precision/run-*.sh")
        for path in sorted((REPO / "scripts").glob(pattern))
    }
    return {
        name: text + "".join(texts[other] for other in re.findall(r"^exec .*/(run-[\w.-]+\.sh)", text, re.M))
        for name, text in texts.items()
    }


def what_recipes_lack(name: str) -> Iterator[Row]:
    """Yield a row for each part that recipes need: whether it is installed, and which recipes need it.

    Args:
        name: the environment, cpu or gpu.
    """
    texts = recipes()
    of_cpu = [recipe for recipe in texts if OF_CPU.fullmatch(recipe)]
    if name == "cpu":
        remedy = f"the {len(texts) - len(of_cpu)} others need GPUs and DEVICE=gpu make install"
        yield UNKNOWN, "recipes", f"{' '.join(of_cpu)} run here; {remedy}"
        return
    pinned = pins(name)
    for part in PARTS:
        if part.is_there():
            yield GOOD, part.name, "here"
            continue
        wanting = [one for one in texts if one not in of_cpu and re.search(part.wanted_by, texts[one], re.DOTALL)]
        version = pinned.get(part.comes_with)
        remedy = f"DEVICE=gpu make install brings {part.comes_with} {version}" if version else part.comes_with
        which = " ".join(wanting) if len(wanting) < MANY else f"{len(wanting)} of {len(texts) - len(of_cpu)} recipes"
        yield BAD if version else UNKNOWN, part.name, f"missing: {part.without}; {remedy}; would not run: {which}"


def table() -> Iterator[Row]:
    """Yield all rows."""
    name = kind()
    yield GOOD, "environment", f"{name}, in {sys.prefix}"
    yield from packages(name)
    yield from what_recipes_lack(name)
