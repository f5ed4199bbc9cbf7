"""The site's page of what a plug-in touches, made of docstrings; nothing is imported."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[1]
SECTIONS = (
    ("Sample", "slime.utils.types", "slime/utils/types.py", ("Sample",)),
    ("Groups and outputs of a rollout", "slime.rollout.base_types", "slime/rollout/base_types.py",
     ("RolloutFnTrainOutput", "RolloutFnEvalOutput")),
    ("Conversations", "slime.rollout.multi_turn", "slime/ext/environments/multi_turn.py",
     ("converse", "TextEnvironment", "observation_text")),
    ("Requests to engines and other servers", "slime.utils.http_utils", "slime/utils/http_utils.py", ("post", "get")),
    ("The protocol of remote_rm", "slime.rollout.rm_hub", "slime/rollout/rm_hub/remote.py", ("remote_rm",)),
    ("Filters", "slime.rollout.filter_hub.base_types", "slime/rollout/filter_hub/base_types.py",
     ("DynamicFilterOutput", "call_dynamic_filter")),
    ("Stock filters", "slime.rollout.filter_hub.dynamic_sampling_filters",
     "slime/rollout/filter_hub/dynamic_sampling_filters.py",
     ("check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback")),
    ("The batch of a loss", "slime.train_data.device_batch", "slime/train_data/device_batch.py", ("DeviceBatch",)),
    ("Estimators", "slime.algorithms.advantages", "slime/algorithms/advantages/__init__.py", ("Estimator",)),
    ("Inputs of an estimator", "slime.algorithms.advantages.inputs", "slime/algorithms/advantages/inputs.py",
     ("AdvantageInputs", "AdvantageConfig")),
    ("Group baselines", "slime.algorithms.group_baselines", "slime/algorithms/group_baselines.py",
     ("Baseline", "GroupConfig")),
    ("Policy losses", "slime.algorithms.policy_losses.inputs", "slime/algorithms/policy_losses/inputs.py",
     ("PolicyLossInputs", "ClipConfig")),
)  # fmt: skip
"""(heading, import path, file, names)."""

HEAD = """# Python reference

What a plug-in touches, made of the docstrings. [Hooks](hooks.md) has the calls, [plug-ins](plugins.md) begins with
examples.
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for heading, module, file, names in SECTIONS:
        tree = ast.parse((REPO / file).read_text(encoding="utf-8"))
        nodes = {node.name: node for node in tree.body if isinstance(node, Function | ast.ClassDef)}
        parts.append(f"## {heading}\n\n`from {module} import {', '.join(names)}`\n")
        parts += [_section(nodes[name]) for name in names]
    return "\n".join(parts)


def _section(node: Function | ast.ClassDef) -> str:
    if isinstance(node, Function):
        return f"### {node.name}\n\n{_function(node)}"
    lines = [f"### {node.name}\n\n{_text(node)}"]
    fields = list(_fields(node))
    if fields:
        lines.append("| field | type | default | |\n|---|---|---|---|\n" + "\n".join(fields) + "\n")
    methods = [child for child in node.body if isinstance(child, Function) and not child.name.startswith("_")]
    lines += [f"#### {node.name}.{method.name}\n\n{_function(method)}" for method in methods]
    return "\n".join(lines)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield a row for each annotated field, and for each entry of a batch (``name = _Always[type]()``)."""
    for child, follows in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            if child.value is not None and "init=False" in ast.unparse(child.value):
                continue  # what only slime's own code sets
            name, kind, default = child.target.id, ast.unparse(child.annotation), _default(child.value)
        elif isinstance(child, ast.Assign) and isinstance(child.value, ast.Call) and "_" in ast.unparse(child.value):
            entry = ast.unparse(child.value)
            name, default = ast.unparse(child.targets[0]), ""
            kind = entry.partition("[")[2].rpartition("]")[0] + (" or None" if entry.startswith("_Sometimes") else "")
        else:
            continue
        kind = kind.removeprefix("_").removesuffix("Field")
        says = follows.value.value if _is_text(follows) else ""
        yield f"| `{name}` | `{_cell(kind)}` | {f'`{_cell(default)}`' if default else ''} | {_cell(_prose(says))} |"


def _default(value: ast.expr | None) -> str:
    text = "" if value is None else ast.unparse(value)
    found = re.search(r"default_factory=(\w+)", text)
    return f"{found[1]}()" if found else "" if text.startswith("_") else text


def _function(node: Function) -> str:
    text = _text(node)
    if any(ast.unparse(mark) == "property" for mark in node.decorator_list):
        return text
    words = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = ast.unparse(node.args)
    if len(arguments) > 80:
        arguments = "\n    " + re.sub(r", (?=\*|\w+\b[:=]|\w+(?:, |$))(?![^\[]*\])", ",\n    ", arguments) + ",\n"
    return f"```python\n{words} {node.name}({arguments}){returns}\n```\n\n{text}"


def _text(node: Function | ast.ClassDef) -> str:
    """Return a docstring as Markdown: arguments and errors as lists."""
    lines = []
    for line in (ast.get_docstring(node) or "").splitlines():
        if line in ("Args:", "Raises:"):
            lines.append(f"**{line[:-1]}**\n")
        elif found := re.match(r"    (\w+): (.*)", line):
            lines.append(f"* `{found[1]}`: {found[2]}")
        else:
            lines.append(line)
    return _prose("\n".join(lines)) + "\n"


def _prose(text: str) -> str:
    return re.sub(r":\w+:``?|``", "`", inspect.cleandoc(text))


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
