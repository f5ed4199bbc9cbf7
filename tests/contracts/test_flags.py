"""Every flag that slime accepts has an effect or says that it has none; the founding documents' commands parse."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator

import pytest

from slime.backends.megatron_utils.flags.check_arguments import RULES as TRAINER
from slime.backends.sglang_utils.arguments import RULES as ENGINES
from slime.compose import flag_groups, parse_flags
from slime.flags.historical import HISTORICAL, NOT_YET
from slime.flags.hooks import HOOKS
from slime.flags.parser import Parser
from tests.contracts.seed_commands import SEED_COMMANDS
from tests.contracts.source_tree import REPO, module_name, python_files, tree_of

READS_IN_THE_FLAGS_PACKAGE = tuple(f"slime.flags.{name}" for name in ("parse", "overlay", "hook_checks", "evaluation"))
"""Modules of slime.flags that act on a flag; declaring or checking a flag does not count."""

READ_BY_A_COMPUTED_NAME = {
    "train_backend": "one choice so far; chosen by the parser",
    "supervise": "slime/compose.py looks for the word",
    "fit": "slime/compose.py looks for the word",
}
"""Flags whose reader does not spell the attribute, and the reader."""


def slime_flags() -> dict[str, str]:
    """Attribute -> flag, of every flag that slime itself declares."""
    parser = Parser(flag_groups())
    return {action.dest: action.option_strings[0] for action in parser._actions if action.dest != "help"}


def deriving_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node of the functions ``derive_*`` of a flag group, and of the functions they call in their file."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    wanted, found = [name for name in functions if name.startswith("derive_")], set()
    while wanted:
        name = wanted.pop()
        found.add(name)
        for node in ast.walk(functions[name]):
            yield node
            if isinstance(node, ast.Name) and node.id in functions and node.id not in {*found, *wanted}:
                wanted.append(node.id)


def names_read() -> set[str]:
    """Every attribute read anywhere, and every string that may name one (getattr, tables of names)."""
    found = set()
    paths = [*python_files(), *sorted((REPO / "examples").rglob("*.py"))]
    for path in paths:
        module = module_name(path)
        tree = tree_of(path)
        acts = not module.startswith("slime.flags") or module in READS_IN_THE_FLAGS_PACKAGE
        for node in ast.walk(tree) if acts else deriving_nodes(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_every_flag_has_a_reader_or_is_refused_or_says_that_it_does_nothing():
    read = names_read()
    excused = {*NOT_YET, *HISTORICAL, *READ_BY_A_COMPUTED_NAME}
    unread = {flag for name, flag in slime_flags().items() if name not in read and name not in excused}
    assert unread == set()


def test_no_table_names_a_flag_that_does_not_exist():
    assert {*NOT_YET, *HISTORICAL, *READ_BY_A_COMPUTED_NAME} - set(slime_flags()) == set()


def test_rules_between_flags_name_flags_that_exist():
    rules = [rule for group in (*flag_groups(), ENGINES, TRAINER) for rule in (*group.needs, *group.excludes)]
    names = {one.partition("=")[0] for first, others, _ in rules for one in (first, *others.split())}
    assert names - vars(parse_flags([])).keys() == set()


def test_every_path_flag_is_a_row_of_the_hook_table():
    not_hooks = {"custom_config_path", "megatron_config_path", *HISTORICAL}
    named_otherwise = {"sglang_custom_pull_weights_pre_read_hook"}
    paths = {name for name in slime_flags() if name.endswith("_path")}
    assert (paths - not_hooks) | named_otherwise == {hook.dest for hook in HOOKS}


def test_every_flag_has_a_help_text():
    parser = Parser(flag_groups())
    assert [action.option_strings[0] for action in parser._actions if not action.help] == []
    assert "--rollout-batch-size" in parser.format_help()


@pytest.mark.parametrize("name", SEED_COMMANDS)
def test_founding_commands_parse(name):
    parse_flags(shlex.split(SEED_COMMANDS[name]))  # an unknown flag or a wrong value would raise


def test_founding_commands_mean_what_they_say():
    args = parse_flags(shlex.split(SEED_COMMANDS["GLM4 9B"]))
    assert (args.tensor_model_parallel_size, args.context_parallel_size, args.sequence_parallel) == (2, 2, True)
    assert (args.rotary_base, args.lr, args.adam_beta2) == (10000, 1e-6, 0.98)
    assert args.eval_prompt_data == ["/root/aime-2024/aime-2024.jsonl"]
    assert (args.eps_clip, args.eps_clip_high, args.rollout_temperature) == (0.2, 0.28, 0.8)
    assert args.sglang_server_concurrency == 512
