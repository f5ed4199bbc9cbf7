"""Without the folder of any one extension everything else still works, and the core trains with none."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest
import torch

from examples.tiny_arithmetic.make_task import make_task
from tests.contracts.source_tree import (
    REPO,
    copy_without_extensions,
    is_facade,
    module_name,
    python_files,
    tree_of,
)

EXTENSIONS = sorted(path.name for path in (REPO / "slime/ext").iterdir() if (path / "__init__.py").exists())
TOOLS = {
    f"tools.{name}"
    for name in (
        "plan diff runs doctor replay replay_plan replay_rollout report report_plots report_samples report_texts "
        "watch serve_teacher serve_training ledger folder_conversion convert_hf_to_fp8 convert_hf_to_int4 "
        "convert_hf_to_int4_direct convert_k2_thinking_int4_to_bf16 convert_mxfp4_to_bf16 fp8_cast_bf16"
    ).split()
}
"""Commands of extensions, and their modules."""
PROGRAM = """
import os, sys
from examples import one_step
from slime.flags.parse import build_parser
from slime import compose

parser = build_parser(with_engine_flags=True, groups=compose.flag_groups())
assert parser.format_help()
still_known = set(os.environ["FLAGS_OF_EXTENSIONS"].split()) & parser._option_string_actions.keys()
assert not still_known, still_known
switches = {**compose.TRANSFORMS, **compose.GUIDES, **compose.SINKS, **compose.OUTPUTS}
still_chosen = {action.dest for action in parser._actions} & switches.keys()
assert not still_chosen, f"a flag that still parses asks for a missing extension: {still_chosen}"
one_step.main(sys.argv[1:])
assert not [name for name in sys.modules if name.startswith(("slime.ext.", "slime.agent"))]
"""


def flags_of(extension: str) -> list[str]:
    """The flags that an extension declares, from its source."""
    path = REPO / "slime/ext" / extension / "flags.py"
    return [
        node.args[0].value
        for node in ast.walk(tree_of(path) if path.exists() else ast.Module([], []))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    ]


def extensions_named_in(text: str) -> set[str]:
    names = re.findall(r"\bslime\.ext(?:\.| import )(\w+)", text)
    return {*names, *re.findall(r"^ *(?:from|import) slime\.(agent)\b", text, re.MULTILINE)}


def test_the_core_names_no_extension_and_the_root_only_in_its_functions():
    named = {}
    for path in [*python_files(), REPO / "examples/one_step.py"]:
        module, text = module_name(path), path.read_text()
        if module == "slime.compose":
            text = "\n".join(ast.unparse(node) for node in tree_of(path).body if isinstance(node, ast.ImportFrom))
        found = extensions_named_in(text)
        if (
            found
            and not module.startswith(("slime.ext.", "slime.agent"))
            and not is_facade(module)
            and module not in TOOLS
        ):
            named[module] = found
    assert named == {}
    assert extensions_named_in('"slime.ext.plan.fit"\nfrom slime.ext import lora') == {"plan", "lora"}


@pytest.mark.timeout(600)
def test_the_core_trains_where_every_extension_is_deleted(tmp_path):
    tree = tmp_path / "tree"
    copy_without_extensions(tree)
    make_task(tmp_path / "task", seed=2026)
    flags = [flag for extension in EXTENSIONS for flag in flags_of(extension)]
    assert "--plan" in flags
    words = ["--task", f"{tmp_path}/task", "--steps", "2", "--rollout-batch-size", "2", "--global-batch-size", "16"]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words, "--save-debug-train-data", f"{tmp_path}/{{rollout_id}}.pt"],
        cwd=tree,
        env={**os.environ, "FLAGS_OF_EXTENSIONS": " ".join(flags)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert len(re.findall(r"^step \d/2: mean reward 0\.\d+$", ended.stdout, flags=re.MULTILINE)) == 2
    for rollout_id in range(2):
        for sample in torch.load(tmp_path / f"{rollout_id}.pt", weights_only=False)["samples"]:
            # The old policy's log-probs by Megatron, and those of transformers' generation: they agree, so the push
            # was complete.
            torch.testing.assert_close(
                torch.as_tensor(sample["log_probs"]), torch.as_tensor(sample["rollout_log_probs"]), atol=1e-4, rtol=0
            )
