"""The project's source files, their imports, and the few paths exempt from rules; for the contract tests."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPO = Path(__file__).parents[2]
PRODUCT = ("slime", "slime_plugins", "tools")
ENTRY_POINTS = ("train.py", "train_async.py")

FACADES = (
    "slime.arguments",
    "slime.utils.arguments",
    "slime.utils.data",
    "slime.utils.ppo_utils",
    "slime.utils.dp_schedule",
    "slime.utils.eval_config",
    "slime.utils.routing_replay",
    "slime.utils.reloadable_process_group",
    "slime.utils.trace_utils",
    "slime.utils.timer",
    "slime.utils.wandb_utils",
    "slime.utils.tensorboard_utils",
    "slime.observability.logging_utils",
    "slime.observability.wandb_utils",
    "slime.observability.tensorboard_utils",
    "slime.observability.profile_utils",
    "slime.utils.metric_utils",
    "slime.utils.logging_utils",
    "slime.utils.profile_utils",
    "slime.utils.external_utils.command_utils",
    "slime.ray.placement_group",
    "slime.rollout.agent_session",
    "slime.rollout.multi_turn",
    "slime.rollout.on_policy_distillation",
    "slime.rollout.verifiers_env",
    "slime.agent.aiohttp_threaded",
    "slime.agent.parsing",
    "slime.backends.sglang_utils.weight_receiver",
)
"""Import paths used by code written for slime; each re-exports names of the code, and may import upwards."""


def python_files(repo: Path = REPO) -> Iterator[Path]:
    """Every source file of the project: packages, tools and the two entry points."""
    for name in PRODUCT:
        yield from sorted((repo / name).rglob("*.py"))
    for name in ENTRY_POINTS:
        if (repo / name).is_file():
            yield repo / name


def copy_without_extensions(target: Path) -> None:
    """Copy programs and tests to ``target``; slime/ext and tests/ext are empty there, and slime/agent is missing."""
    for name in (*PRODUCT, "examples", "scripts", "tests"):
        shutil.copytree(REPO / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ENTRY_POINTS:
        shutil.copy(REPO / name, target / name)
    shutil.rmtree(target / "slime/agent")
    for extension in [*(target / "slime/ext").iterdir(), *(target / "tests/ext").iterdir()]:
        if extension.is_dir():
            shutil.rmtree(extension)


def module_name(path: Path, repo: Path = REPO) -> str:
    return ".".join(path.relative_to(repo).with_suffix("").parts).removesuffix(".__init__")


def is_facade(module: str) -> bool:
    """True for a facade and for the modules below one."""
    return any(module == facade or module.startswith(facade + ".") for facade in FACADES)


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed source of ``path``."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path: Path, repo: Path = REPO) -> Iterator[tuple[int, str]]:
    """Every (line, absolute dotted name) that ``path`` imports, including lazy and TYPE_CHECKING imports."""
    module = module_name(path, repo)
    # ``from . import x`` in a package's __init__ is relative to the package itself.
    parents = [*module.split("."), "__init__"] if path.name == "__init__.py" else module.split(".")
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*(parents[: -node.level] if node.level else []), *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
