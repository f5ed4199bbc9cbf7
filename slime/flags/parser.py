"""The parser of flags, which also checks the values of YAML files."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from slime.flags.group import FlagGroup, declare_all
from slime.flags.kinds import Number, WholeNumber, any_float, any_int, text
from slime.flags.words import PEERS_VALUES
from slime.utils.errors import ConfigError

_LONG_WORD = re.compile(r"\S{400,}")
UNSET = "none"
"""Value that unsets a number or an engine setting that was given earlier in the command."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError and does not accept abbreviated flags."""

    def __init__(self, groups: Sequence[FlagGroup] = (), **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.groups = groups
        self.no_flags: dict[str, str] = {}
        """Name that may be mistaken for a flag -> why it is not a flag, or what to use instead."""
        # For every flag: numbers are finite, integers fit into 64 bits, and texts contain no NUL.
        for kind, checked in ((int, any_int), (float, any_float), (str, text), (None, text)):
            self.register("type", kind, checked)
        # argparse treats -1 as a value, but -1e-6 as a flag.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
        declare_all(self, groups)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a ConfigError, on one line and shortened."""
        raise ConfigError(_one_line(message))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert a value like argparse, but also handle exceptions that argparse does not expect from a type."""
        if arg_string == UNSET and _can_be_unset(action):
            return None
        try:
            return super()._get_value(action, arg_string)
        except (ArithmeticError, AssertionError, LookupError, AttributeError, RecursionError, MemoryError) as error:
            raise argparse.ArgumentError(
                action, f"{arg_string[:200]!r} is no value of this flag ({type(error).__name__}: {error})"
            ) from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value is None:  # it was unset
            return
        if action.dest == "advantage_estimator" and (ours := PEERS_VALUES.get(str(value).lower())) is not None:
            raise argparse.ArgumentError(action, f"{value!r} is not a value of this flag; {ours}")
        super()._check_value(action, value)

    def flag_with(self, attribute: str) -> argparse.Action | None:
        """Return the flag that sets an attribute; if there are several, the one that takes a value."""
        found = [action for action in self._actions if action.dest == attribute and attribute != "help"]
        return next((action for action in found if action.nargs != 0), found[0] if found else None)

    def defaults(self) -> dict[str, Any]:
        """Return attribute -> default for every flag that has a default."""
        of_flags = {action.dest: action.default for action in reversed(self._actions) if action.default is not None}
        return self._defaults | of_flags

    def value_from_file(self, action: argparse.Action, value: Any, source: str) -> Any:
        """Convert a flag's value in a YAML file as the command line would.

        Args:
            action: the flag.
            value: the value parsed by YAML.
            source: file and key, for errors.

        Raises:
            ConfigError: the flag rejects the value.
        """
        try:
            return self._from_file(action, value)
        except argparse.ArgumentError as error:
            raise ConfigError(_one_line(f"{source} is {value!r}: {error.message}.")) from error

    def _from_file(self, action: argparse.Action, value: Any) -> Any:
        if value is None and action.default is None:
            return None
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise argparse.ArgumentError(action, "it must be true or false, without quotes")
            return value
        takes_many = action.nargs not in (None, "?") or isinstance(action, argparse._AppendAction)
        several = list(value) if takes_many and isinstance(value, list | tuple) else [value]
        words = [_word(action, one) for one in several]
        if action.nargs == "+" and not words or isinstance(action.nargs, int) and len(words) != action.nargs:
            raise argparse.ArgumentError(action, f"it must be a list of {action.nargs} values (+: one or more)")
        if isinstance(action, argparse._AppendAction):
            return [self._get_values(action, [word]) for word in words]
        read = self._get_values(action, words)
        for one, made in zip(several, read if takes_many else [read], strict=True):
            if not isinstance(one, str) and isinstance(one, Mapping | Sequence) and isinstance(made, str):
                raise argparse.ArgumentError(action, "it must be a text or a number, not a list or a map")
        namespace = argparse.Namespace()
        action(self, namespace, read, "")
        return vars(namespace)[action.dest]


def _word(action: argparse.Action, value: Any) -> str:
    """Return a value of a YAML file as a command-line word."""
    if value is None or isinstance(value, bool):
        shown = "null" if value is None else str(value).lower()
        raise argparse.ArgumentError(action, f"it must be a text or a number, not {shown}; a text goes in quotes")
    if not isinstance(value, Mapping | Sequence) or isinstance(value, str):
        return str(value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise argparse.ArgumentError(action, f"it cannot be written as JSON ({error})") from error


def _can_be_unset(action: argparse.Action) -> bool:
    """Return True for a number without a default, or an engine setting for which "none" is not a value."""
    if action.default is not None or UNSET in (action.choices or ()):
        return False
    is_number = action.type in (int, float) or isinstance(action.type, WholeNumber | Number)
    return is_number or action.dest.startswith("sglang_")


def _one_line(message: str) -> str:
    words = _LONG_WORD.sub(lambda word: f"{word[0][:80]}... ({len(word[0])} characters)", message)
    return " ".join(words.splitlines())
