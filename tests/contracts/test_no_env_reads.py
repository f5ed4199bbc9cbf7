"""Environment variables are read and set in one module, which is therefore their complete list."""

from __future__ import annotations

import ast

from tests.contracts.source_tree import REPO, module_name, python_files, tree_of

HOME = "slime.utils.env"
EXEMPT = ("slime.backends.sglang_utils.cpu_shim", "slime.ext.agent.taskset_worker")
"""Files that run without slime: inside SGLang's own processes, and in the interpreter of verifiers."""
NAMES = ("environ", "getenv", "putenv", "unsetenv", "environb")


def test_only_env_py_touches_the_environment():
    problems = []
    for path in python_files():
        module = module_name(path)
        if module == HOME or module.startswith(EXEMPT):
            continue
        for node in ast.walk(tree_of(path)):
            uses = isinstance(node, ast.Attribute) and node.attr in NAMES and ast.unparse(node.value) == "os"
            imports = (
                isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & {*NAMES}
            )
            if uses or imports:
                problems.append(f"{path.relative_to(REPO)}:{node.lineno}")
    assert problems == []
