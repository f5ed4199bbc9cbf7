"""Checks a command line before anything large is imported: help, misspelled flags, values of a wrong type.

    slime train run.yaml --lr 1e-6

A YAML file as the first word holds flags by name; flags after it on the command line take precedence.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from slime.flags.overlay import read_yaml
from slime.flags.parser import Parser
from slime.flags.table import is_declared, is_of_installed, parser_of_table, read_table
from slime.flags.words import engine_flags_are_idle, is_flag, missing_flags, refuse_unknown, split_engine_flags
from slime.utils.errors import ConfigError
from slime.utils.redaction import redacted_text

EXIT_BAD_INPUT = 2
OVERLAYS = ("custom_config_path", "megatron_config_path")
MATTER = (
    *("--hf-checkpoint", "--ref-load", "--load", "--save", "--save-interval", "--save-hf"),
    *("--prompt-data", "--input-key", "--label-key", "--apply-chat-template", "--rm-type", "--custom-rm-path"),
    *("--num-rollout", "--rollout-batch-size", "--n-samples-per-prompt", "--rollout-max-response-len"),
    *("--global-batch-size", "--max-tokens-per-gpu", "--advantage-estimator", "--lr"),
    *("--actor-num-gpus-per-node", "--rollout-num-gpus", "--colocate", "--fit", "--use-wandb"),
)
"""The flags that ``--help`` shows."""


def first_look(words: Sequence[str]) -> list[str]:
    """Return the words with YAML files expanded to flags.

    Exits after printing help, or with code 2 and the reason if a word is invalid.
    """
    table = read_table()
    for position, word in enumerate(words):
        if word in ("-h", "--help"):
            print(help_text(table, " ".join(words[position + 1 : position + 3])))
            sys.exit(0)
    try:
        parser = parser_of_table(table)
        written = _files_written_out(words, parser)
        if is_of_installed(table):
            _check(written, parser)
    except ConfigError as error:
        print(redacted_text(f"slime cannot continue this run: {error}"), file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    return written


def help_text(table: dict[str, Any], topic: str) -> str:
    """Return help on the most important flags, on the group whose title starts with ``topic``, or on all flags."""
    groups = [(group["title"], [row["names"][0] for row in group["flags"]]) for group in table["groups"]]
    wanted = topic.replace("-", " ").strip().lower()
    if wanted == "all":
        return parser_of_table(table).format_help()
    found = [names for title, names in groups if wanted and title.lower().startswith(wanted)]
    if found:
        return _help_of(table, [name for names in found for name in names])
    begins = f"No group of flags is called {topic!r}.\n\n" if wanted else _help_of(table, MATTER)
    titles = "\n".join(f"  {title} ({len(names)})" for title, names in groups)
    return f"{begins}\n--help GROUP shows one group, --help all every flag:\n{titles}"


def _help_of(table: dict[str, Any], names: Sequence[str]) -> str:
    parser = parser_of_table(table, names)
    parser.usage = "slime train [RUN.yaml] FLAGS..., or python train.py with the same words"
    return parser.format_help()


def _check(words: Sequence[str], parser: Parser) -> None:
    kept = split_engine_flags(words)[0] if engine_flags_are_idle(words) else list(words)
    args, leftover = parser.parse_known_args(kept)
    if any(is_declared(word.partition("=")[0]) for word in leftover if is_flag(word)):
        return  # a flag newer than the table; the parser will check it
    refuse_unknown(parser, kept, leftover)
    is_plan = any(word.partition("=")[0] == "--plan" for word in words)
    if not is_plan and not any(vars(args).get(name) for name in OVERLAYS):
        if missing := missing_flags(vars(args)):
            raise ConfigError("\n".join(missing))


def _files_written_out(words: Sequence[str], parser: Parser) -> list[str]:
    """Return the words with the leading YAML files expanded, without values that a later word overrides."""
    num_files = next((at for at, word in enumerate(words) if not word.endswith((".yaml", ".yml"))), len(words))
    typed = list(words[num_files:])
    later = {_setting(word.partition("=")[0], parser) for word in typed if is_flag(word)}
    for path in reversed(words[:num_files]):
        entries = [(_setting(entry[0].partition("=")[0], parser), entry) for entry in _entries_of(path, parser)]
        typed[:0] = [word for setting, entry in entries if setting is None or setting not in later for word in entry]
        later |= {setting for setting, _ in entries}
    return typed


def _setting(flag: str, parser: Parser) -> str | None:
    """Return the attribute that a flag sets; None if its values add up."""
    action = parser._option_string_actions.get(flag)
    if isinstance(action, argparse._AppendAction):
        return None
    return flag if action is None else action.dest


def _entries_of(path: str, parser: Parser) -> list[list[str]]:
    content = read_yaml(path, "run file") or {}
    if not isinstance(content, dict):
        raise ConfigError(f"run file: {path} holds a {type(content).__name__}; write `flag: value` lines.")
    words = (_flag_words(str(key).replace("_", "-"), value, parser) for key, value in content.items())
    return [entry for entry in words if entry]


def _flag_words(name: str, value: Any, parser: Parser) -> list[str]:
    """Return the command-line words for an entry of a file; null means that the flag is not given."""
    flag, known = f"--{name}", parser._option_string_actions
    if value is None:
        return []
    if value is True:
        return [flag]
    if value is False and flag in known and known[flag].nargs == 0:
        opposite = f"--no-{name}"
        return [opposite] if opposite in known else []
    if isinstance(value, list):
        if flag in known and known[flag].nargs is None and isinstance(known[flag], argparse._AppendAction):
            return [f"{flag}={_text(one)}" for one in value]
        return [flag, *map(_text, value)]
    return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
