"""Imports point down, siblings do not import each other, and foreign libraries are confined to certain modules.

Lazy imports and imports for type checkers count like any other: the rule is about dependencies, not import time.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.contracts.source_tree import REPO, imports_of, is_facade, module_name, python_files, tree_of

LAYERS = (  # lowest first; a package may import only from lower rows
    ("slime.utils",),
    ("slime.isolation",),
    ("slime.algorithms",),
    ("slime.flags",),
    ("slime.observability",),
    ("slime.train_data", "slime.weights"),
    ("slime.rollout", "slime.backends.train_worker"),
    ("slime.backends.sglang_utils", "slime.backends.megatron_utils"),
    ("slime.flags.hooks", "slime.flags.family_checks", "slime.flags.files"),
    ("slime.flags.hook_checks",),
    ("slime.flags.parse",),
    ("slime.ray",),
    ("slime.agent",),
    ("slime.ext",),
    ("slime.compose",),
    ("slime_plugins", "tools", "train", "train_async"),
)
RANK = {package: rank for rank, row in enumerate(LAYERS) for package in row}

FENCES = {  # library -> who may import it
    "ray": ("slime.ray", "slime.ext", "train", "train_async"),
    "megatron": ("slime.backends.megatron_utils", "slime.ext", "slime_plugins", "tools"),
    "sglang": (
        "slime.backends.sglang_utils",
        "slime.ext",
        "slime.rollout.parsing",
        "slime.backends.megatron_utils.sglang",
        "slime.backends.megatron_utils.alignment",
        "slime_plugins.models",
    ),
    "sglang_router": ("slime.backends.sglang_utils",),
    "wandb": ("slime.ext.trackers",),
    "tensorboard": ("slime.ext.trackers",),
    "torch.utils.tensorboard": ("slime.ext.trackers",),
    "tinker": ("slime.ext.training_api",),
    "mcp": ("slime.ext.mcp",),
    "trackio": ("slime.ext.trackers",),
    "mlflow": ("slime.ext.trackers",),
}

NO_ARGS = ("slime.algorithms", "slime.train_data", "slime.weights")
"""Packages whose functions take numbers and configs, never the Namespace of flags."""

WRITES_ARGS = (
    "slime.flags",
    "slime.backends.megatron_utils.arguments",
    "slime.backends.sglang_utils.arguments",
)
"""Modules that may set attributes of args, beside ``flags.py`` of an extension."""

FAMILY = re.compile(
    r"deepseek|gemma|glm|gpt.?oss|kimi|llama(?!_)|mimo|minimax|mistral|mixtral|moonlight|nemotron|olmo|phi.?3|qwen|seed.?oss",
    re.IGNORECASE,
)
"""Names of model families, which the core knows only through their tables."""
KNOWS_FAMILIES = {  # file or folder of the core -> why
    "slime/backends/megatron_utils/models/flag_rules.py": "rope types of config.json",
    "slime/backends/sglang_utils/cpu_shim": "names of SGLang's modules and kernels, and of transformers'",
    "slime/flags/data.py": "public: values of --loss-mask-type",
    "slime/flags/historical.py": "public: flags of the original",
    "slime/flags/train.py": "public: --qwen-gdn-backend",
    "slime/utils/mask_utils.py": "public: methods of MultiTurnLossMaskGenerator, and values of --loss-mask-type",
    "slime/utils/processing_utils.py": "a package of that name",
}

BUILT_ON = {
    "deepseek_v4": {"glm5"},
    "gemma4": {"gemma3"},
    "nemotron_h": {"qwen3_next"},
    "olmo3": {"gemma3", "minimax_m2"},
    "qwen3_5": {"qwen3_next", "qwen3_vl"},
    "qwen3_5_vl": {"qwen3_5"},
}
"""Family -> the families whose tables or layers it uses; each of the others can be deleted alone."""
NO_FAMILIES = ("__init__", "shared_flags", "shared_weights")


def inside(module: str, packages: tuple[str, ...]) -> bool:
    """True if ``module`` is one of ``packages`` or inside one."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def package_of(module: str) -> str | None:
    """The longest layered package that contains ``module``; None if the module is not ours."""
    return max((p for p in RANK if inside(module, (p,))), key=len, default=None)


def upward_imports(repo: Path) -> list[str]:
    problems = []
    for path in python_files(repo):
        module = module_name(path, repo)
        importer = package_of(module)
        if importer is None or is_facade(module):
            continue
        for line, target in imports_of(path, repo):
            imported = package_of(target)
            if imported not in (None, importer) and RANK[imported] >= RANK[importer]:
                problems.append(f"{path.relative_to(repo)}:{line} ({importer}) imports {target} ({imported})")
    return problems


def extension_of(module: str) -> str | None:
    """The extension that a module belongs to; None for a core module."""
    parts = module.split(".")
    if parts[:2] == ["slime", "agent"]:
        return "agent"
    return parts[2] if parts[:2] == ["slime", "ext"] and len(parts) > 2 else None


def breaches_between_extensions(repo: Path) -> list[str]:
    return [
        f"{path.relative_to(repo)}:{line} imports {target}"
        for path in python_files(repo)
        if (importer := extension_of(module_name(path, repo))) is not None
        for line, target in imports_of(path, repo)
        if extension_of(target) not in (None, importer)
    ]


def extensions_in_tests_of_the_core(repo: Path) -> list[str]:
    """Return imports of extensions in tests that must pass without extensions."""
    return [
        f"{path.relative_to(repo)}:{line} imports {target}"
        for folder in ("unit", "e2e", "dist", "oracle", "plugin_contracts")
        for path in sorted((repo / "tests" / folder).rglob("*.py"))
        for line, target in imports_of(path, repo)
        if inside(target, ("slime.ext",)) and target != "slime.ext"
    ]


def fence_breaches(repo: Path) -> list[str]:
    """Every import of a fenced library from outside its fence."""
    problems = []
    for path in python_files(repo):
        module = module_name(path, repo)
        for line, target in imports_of(path, repo):
            for library, allowed in FENCES.items():
                if inside(target, (library,)) and not inside(module, allowed):
                    problems.append(f"{path.relative_to(repo)}:{line} imports {target}; only {', '.join(allowed)} may")
    return problems


def families_in_the_core(repo: Path) -> list[str]:
    """Return the lines of code that name a family, ignoring docstrings and comments."""
    problems = []
    for path in python_files(repo):
        place = path.relative_to(repo).as_posix()
        if not place.startswith("slime/") or extension_of(module_name(path, repo)) or place.startswith("slime/ext/"):
            continue
        if any(place == known or place.startswith(f"{known}/") for known in KNOWS_FAMILIES):
            continue
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            words = [value for _, value in ast.iter_fields(node) if isinstance(value, str) and id(node) not in prose]
            if any(FAMILY.search(word) for word in words):
                problems.append(f"{place}:{getattr(node, 'lineno', '')} {' '.join(words)[:60]}")
    return problems


def who_imports_families(repo: Path) -> dict[str, set[str]]:
    """Return the families that each other family, or other module, imports."""
    home = repo / "slime_plugins/models"
    families = {path.stem for path in home.iterdir() if path.stem not in NO_FAMILIES}
    found: dict[str, set[str]] = {}
    for path in python_files(repo):
        module = module_name(path, repo)
        importer = module.split(".")[2] if module.startswith("slime_plugins.models.") else module
        for _, target in imports_of(path, repo):
            imported = target.split(".")[2] if target.startswith("slime_plugins.models.") else ""
            if imported in families - {importer}:
                found.setdefault(importer, set()).add(imported)
    return found


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_check_finds_an_upward_and_a_lazy_sideways_import_and_nothing_else(tmp_path):
    write(tmp_path / "slime/utils/misc.py", "from slime.rollout import pool\n")
    write(tmp_path / "slime/backends/megatron_utils/actor.py", "def f():\n    from ..sglang_utils import engine\n")
    write(tmp_path / "slime/ray/rollout.py", "import slime.rollout.pool\nfrom slime.utils import misc\n")
    assert upward_imports(tmp_path) == [
        "slime/backends/megatron_utils/actor.py:2 (slime.backends.megatron_utils) imports "
        "slime.backends.sglang_utils.engine (slime.backends.sglang_utils)",
        "slime/utils/misc.py:1 (slime.utils) imports slime.rollout.pool (slime.rollout)",
    ]


def test_the_check_finds_a_library_outside_its_fence(tmp_path):
    write(tmp_path / "slime/rollout/pool.py", "def f():\n    import ray.util\n")
    write(tmp_path / "slime/ray/rollout.py", "import ray\n")
    assert fence_breaches(tmp_path) == [
        "slime/rollout/pool.py:2 imports ray.util; only slime.ray, slime.ext, train, train_async may"
    ]


def test_imports_point_down():
    assert upward_imports(REPO) == []


def test_the_check_finds_an_extension_that_knows_another(tmp_path):
    write(tmp_path / "slime/ext/plan/fit.py", "import slime.ext.plan.layout\n\ndef f():\n    import slime.ext.lora\n")
    assert breaches_between_extensions(tmp_path) == ["slime/ext/plan/fit.py:4 imports slime.ext.lora"]


def test_extensions_do_not_know_each_other():
    assert breaches_between_extensions(REPO) == []


def test_tests_of_the_core_need_no_extension(tmp_path):
    write(tmp_path / "tests/unit/test_x.py", "from slime.ext.plan import fit\n")
    assert extensions_in_tests_of_the_core(tmp_path)
    assert extensions_in_tests_of_the_core(REPO) == []


def test_the_check_finds_a_family_in_code_and_not_in_prose(tmp_path):
    write(tmp_path / "slime/ray/job.py", '"""As GLM-4 has it."""\nif kind.startswith("gemma"):\n    pass\n')
    write(tmp_path / "slime_plugins/models/glm4/family.py", 'KIND = "glm4"\n')
    assert families_in_the_core(tmp_path) == ["slime/ray/job.py:2 gemma"]


def test_the_core_names_no_model_family():
    assert families_in_the_core(REPO) == []


def test_a_family_can_be_deleted_with_those_that_are_built_on_it():
    assert who_imports_families(REPO) == BUILT_ON


def test_foreign_libraries_stay_behind_their_fences():
    assert fence_breaches(REPO) == []


def test_nothing_inside_imports_a_facade():
    problems = [
        f"{path.relative_to(REPO)}:{line} imports {target}"
        for path in python_files()
        if not is_facade(module_name(path))
        for line, target in imports_of(path)
        if is_facade(target) or is_facade(target.rpartition(".")[0])
    ]
    assert problems == []


def test_maths_and_data_shapes_take_no_args():
    problems = [
        f"{path.relative_to(REPO)}:{node.lineno} {node.name}"
        for path in python_files()
        if inside(module_name(path), NO_ARGS)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(a.arg == "args" for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
    ]
    assert problems == []


def test_args_is_written_only_where_flags_are_resolved():
    problems = []
    for path in python_files():
        # Tools have separate flags; plug-ins may set what they like.
        module = module_name(path)
        if inside(module, (*WRITES_ARGS, "tools", "slime_plugins")) or module.endswith(".flags"):
            continue
        for node in ast.walk(tree_of(path)):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
            targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
            for target in targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("args", "self.args"):
                    problems.append(f"{path.relative_to(REPO)}:{node.lineno} {ast.unparse(target)}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                if node.args and ast.unparse(node.args[0]) in ("args", "self.args"):
                    problems.append(f"{path.relative_to(REPO)}:{node.lineno} {ast.unparse(node)}")
    assert problems == []


def test_a_host_and_a_port_are_joined_in_one_module():
    """An IPv6 address needs brackets before a port; ``slime.utils.net`` adds them."""
    joined = re.compile(r"\{[^{}]*(host|addr|address|ip)\}:\{[^{}]*port", re.IGNORECASE)
    files = [path for path in python_files() if module_name(path) != "slime.utils.net"]
    found = [(path.name, line) for path in files for line in path.read_text().splitlines() if joined.search(line)]
    assert found == []
