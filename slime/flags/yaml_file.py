"""Reader of the YAML files that flags name: each mistake is an error of one line, with the file and the line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slime.utils.errors import ConfigError

MAX_BYTES = 2**20
"""Of a file; a larger one is no list of settings."""
MAX_VALUES = 100_000
"""In a file, its anchors written out."""


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses duplicate keys in one map; YAML's own rule, which PyYAML leaves out."""

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
    """Return what the YAML file of ``flag`` holds.

    Raises:
        ConfigError: it cannot be read, is not YAML, or has a key twice.
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
    """Return the line and the problem of an error of PyYAML, on one line."""
    if isinstance(error, RecursionError):
        return "maps and lists are nested too deeply, or hold themselves"
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    return problem if mark is None else f"line {mark.line + 1}: {problem}"


def _count(value: Any, known: dict[int, int]) -> int:
    """Return how many values there are in ``value``, as often as each is written out."""
    if not isinstance(value, Mapping | list):
        return 1
    if id(value) not in known:
        inner = value.values() if isinstance(value, Mapping) else value
        known[id(value)] = 1 + sum(_count(one, known) for one in inner)
    return known[id(value)]
