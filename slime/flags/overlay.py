"""YAML files that flags name: their reader, and the files that override flags before anything is derived.

``--custom-config-path`` sets attributes of ``args``, both those of flags and others that plug-ins read.
``--megatron-config-path`` overrides the trainer's flags by role:

    megatron:
      - name: policy
        role: actor
        overrides: {lr: 1e-6, tensor_model_parallel_size: 2}

Both roles start from the command line.  A role's overrides are set before anything is derived, so they are resolved
and checked like flags.  The other rules for a critic are in critic.py.
"""

from __future__ import annotations

import difflib
import logging
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slime.flags.group import flag_of
from slime.flags.parser import Parser
from slime.utils.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

ROLES_FLAG = "--megatron-config-path"
ROLES = ("actor", "critic")
ENTRY_KEYS = frozenset({"name", "role", "overrides", "args"})
IGNORED = ("num_nodes", "num_gpus_per_node")
"""Sizes of a role's cluster, ignored because every role has the actor's."""
MAX_BYTES = 2**20
"""Size limit of a file; a larger one is not a list of settings."""
MAX_VALUES = 100_000
"""Limit of the values in a file, with its anchors expanded."""


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that rejects duplicate keys in a map, as YAML requires and PyYAML does not."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the map of a node.

        Raises:
            ConstructorError: a key is duplicated.
        """
        seen: dict[Any, int] = {}
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = (key_node.tag, key_node.value), key_node.start_mark.line + 1
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value} is there already in line {seen[key]}", key_node.start_mark
                )
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: str, flag: str) -> Any:
    """Return the content of the YAML file of ``flag``.

    Raises:
        ConfigError: it cannot be read, is not YAML, or has a duplicate key.
    """
    where = f"{flag}: {path}"
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{where} is not a file. Give the path of a YAML file.")
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{where} has {file.stat().st_size} bytes; a file of settings has at most {MAX_BYTES}.")
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506
        num_values = _count(content, {})
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not YAML: {yaml_problem(error)}.") from error
    if num_values > MAX_VALUES:
        raise ConfigError(f"{where} has {num_values} values, its anchors written out; at most {MAX_VALUES} are read.")
    return content


def yaml_problem(error: Exception) -> str:
    """Return the line number and the problem of a PyYAML error, on one line."""
    if isinstance(error, RecursionError):
        return "maps and lists are nested too deeply, or hold themselves"
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    return problem if mark is None else f"line {mark.line + 1}: {problem}"


def _count(value: Any, known: dict[int, int]) -> int:
    """Return the number of values in ``value``, with anchors expanded."""
    if not isinstance(value, Mapping | list):
        return 1
    if id(value) not in known:
        inner = value.values() if isinstance(value, Mapping) else value
        known[id(value)] = 1 + sum(_count(one, known) for one in inner)
    return known[id(value)]


def load_yaml_mapping(path: str | None, flag: str) -> dict[str, Any]:
    """Return the mapping at the top of a YAML file; empty if ``path`` is None.

    Raises:
        ConfigError: the file of ``flag`` is missing, is not YAML (names the line), or has no mapping at the top.
    """
    content = None if path is None else read_yaml(path, flag)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{flag}: {path} holds a {type(content).__name__}; a mapping of keys to values is needed.")
    return content


def apply_overlay(args: Namespace, parser: Parser) -> None:
    """Set each top-level key of the file as an attribute of ``args``, overriding flags.

    Values of flags are checked as on the command line.  Keys that are not flags are settings of plug-ins.
    """
    source = f"--custom-config-path: {args.custom_config_path}"
    content = load_yaml_mapping(args.custom_config_path, "--custom-config-path")
    for key, value in content.items():
        name = _attribute(key, content, source)
        if name == "custom_config_path":
            raise ConfigError(f"{source} sets {key} itself; overlays do not nest.")
        if (action := parser.flag_with(name)) is not None:
            value = parser.value_from_file(action, value, f"{source}: {key}")
        else:
            _refuse_other_spelling(parser, name, source=source)
            _advise_spelling(parser, name, source=source)
        setattr(args, name, value)


def overlaid_names(settings: str | None, roles: str | None) -> set[str]:
    """Return the attributes set by the YAML files of ``--custom-config-path`` and ``--megatron-config-path``."""
    names = {*load_yaml_mapping(settings, "--custom-config-path"), *load_role_overrides(roles).get("actor", {})}
    return {str(name).replace("-", "_") for name in names}


def _attribute(key: Any, content: Mapping[Any, Any], source: str) -> str:
    """Return the attribute that a key names; dunder names are rejected, because they would break ``args``."""
    if not isinstance(key, str) or not key or key.startswith("__"):
        raise ConfigError(f"{source} has the key {key!r}; a key is the name of a flag or of a plug-in's setting.")
    name = key.replace("-", "_")
    if name != key and name in content:
        raise ConfigError(f"{source}: {key} is given twice, in two spellings; keep {name}.")
    return name


def _refuse_other_spelling(parser: Parser, name: str, *, source: str) -> None:
    """Reject a key that nothing would read: a missing flag, or a flag whose attribute has another name."""
    flag = flag_of(name)
    if (reason := parser.no_flags.get(flag)) is not None:
        raise ConfigError(f"{source} has the key {name}, and {flag} is not a flag: {reason}. Leave it out.")
    action = parser._option_string_actions.get(flag)
    if action is not None:
        value = {True: ": true", False: ": false"}.get(action.const, "") if action.nargs == 0 else ""
        raise ConfigError(
            f"{source} has the key {name}, which is a flag but no attribute; write the attribute that the flag sets, "
            f"{action.dest}{value}."
        )


def _advise_spelling(parser: Parser, name: str, *, source: str) -> None:
    """Log a key that looks like a flag's but is not; it may be a plug-in's."""
    similar = difflib.get_close_matches(name, [action.dest for action in parser._actions], n=1, cutoff=0.85)
    if similar:
        logger.warning(
            "%s sets %s, which is no flag, for plug-ins to read; if a flag was meant, it is %s.",
            source,
            name,
            similar[0],
        )


def load_role_overrides(path: str | None) -> dict[str, dict[str, Any]]:
    """Return role -> overrides from the file; empty if ``path`` is None.

    Raises:
        ConfigError: the file is missing or malformed, or has an unknown or a duplicate role.
    """
    if path is None:
        return {}
    entries = load_yaml_mapping(path, ROLES_FLAG).get("megatron")
    if not isinstance(entries, list):
        raise ConfigError(f"{ROLES_FLAG}: {path} needs a list under the key megatron, with one entry for each role.")
    by_role: dict[str, dict[str, Any]] = {}
    for position, entry in enumerate(entries):
        role, overrides = _read_entry(entry, f"{ROLES_FLAG}: {path}, entry {position}")
        if role in by_role:
            raise ConfigError(f"{ROLES_FLAG}: {path} has two entries for the role {role}; one is allowed.")
        by_role[role] = overrides
    return by_role


def set_overrides(args: Namespace, role: str, overrides: dict[str, Any], parser: Parser) -> dict[str, Any]:
    """Set a role's overrides on ``args``; return those that were set, by attribute.

    Raises:
        ConfigError: no flag has the attribute, or its flag would reject the value.
    """
    given: dict[str, Any] = {}
    source = f"{ROLES_FLAG}: {args.megatron_config_path}"
    for key, value in overrides.items():
        name = _attribute(key, overrides, source)
        if name in IGNORED:
            logger.info("%s: %s of a role is not used; every role has the actor's GPUs.", ROLES_FLAG, name)
            continue
        if not hasattr(args, name):
            hint = did_you_mean(name, vars(args))
            raise ConfigError(f"{source}: the {role}'s override {key} is no attribute of args.{hint}")
        action = parser.flag_with(name)
        if action is not None:
            value = parser.value_from_file(action, value, f"{source}: {key} of the {role}")
        given[name] = value
        setattr(args, name, value)
    return given


def _read_entry(entry: Any, where: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {entry!r}; an entry has the keys name, role and overrides.")
    unknown_keys = sorted(set(entry) - ENTRY_KEYS)
    if unknown_keys:
        raise ConfigError(f"{where} has the key {unknown_keys[0]}; an entry has the keys name, role and overrides.")
    role = entry.get("role")
    if role not in ROLES:
        raise ConfigError(f"{where} has the role {role!r}; it must be actor or critic.")
    if "overrides" in entry and "args" in entry:
        raise ConfigError(f"{where} has both overrides and args, two names of one thing; keep overrides.")
    overrides = entry.get("overrides", entry.get("args")) or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"{where} has overrides {overrides!r}; a mapping of attributes to values is needed.")
    return role, overrides
