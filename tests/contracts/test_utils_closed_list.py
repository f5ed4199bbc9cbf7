"""slime.utils holds what plug-in authors import, and nothing else; this is the complete list."""

from __future__ import annotations

from tests.contracts.source_tree import FACADES, REPO, module_name

KIT = {
    "aiohttp_threaded",
    "plugins",
    "redaction",
    "chat_template",
    "types",
    "misc",
    "http_door",
    "http_utils",
    "mask_utils",
    "processing_utils",
    "torchvision_package",
    "async_utils",
    "sglang_meta",
    "net",
    "distributed_utils",
    "accelerator",
    "memory_utils",
    "env",
    "errors",
    "files",
    "safe_pickle",
}
OLD_PATHS = {
    facade.removeprefix("slime.utils.").split(".")[0] for facade in FACADES if facade.startswith("slime.utils.")
}


def test_slime_utils_holds_only_what_is_listed():
    entries = {path.stem for path in (REPO / "slime/utils").iterdir() if path.name != "__pycache__"} - {"__init__"}
    assert entries - KIT - OLD_PATHS == set()


def test_a_facade_is_a_docstring_an_import_and_a_list_of_names():
    import ast

    from tests.contracts.source_tree import is_facade, python_files, tree_of

    problems = []
    for path in python_files():
        if not is_facade(module_name(path)) or path.name == "__init__.py":
            continue
        for node in tree_of(path).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            if not (docstring or names or isinstance(node, ast.ImportFrom)) and module_name(path) not in ADAPTERS:
                problems.append(f"{path.relative_to(REPO)}:{node.lineno}")
    assert problems == []


ADAPTERS = {
    "slime.observability.logging_utils",
    "slime.utils.arguments",
    "slime.utils.data",
    "slime.utils.ppo_utils",
    "slime.utils.dp_schedule",
    "slime.utils.external_utils.command_utils",
    "slime.ray.placement_group",
}
"""Facades whose old signatures carry ``args`` or other old parameters, or that a driver calls first, so that they
adapt calls instead of re-exporting."""
