"""The values of a data row: what a prompt, a label, metadata and tools may be.

Every error names the row through ``where``, for example ``train.jsonl line 7``, and shows the value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any

from slime.flags.reward import BOXED_PREFIX, GRADERS_WITH_LABEL, GRADERS_WITH_LABELS
from slime.rollout.prompt_files import decode_json, short
from slime.utils.chat_template import template_messages
from slime.utils.errors import DataError

MAX_PROMPT_CHARS = 4_000_000
"""About a million tokens.  Tokenizers take minutes and more for what is much longer."""


def check_prompt(prompt: Any, where: str) -> None:
    """Check that a prompt is text, or a non-empty list of messages, and says something.

    Raises:
        DataError: it is something else, is blank, or is longer than any model reads.
    """
    if isinstance(prompt, str):
        if _is_blank(prompt):
            raise DataError(
                f"{where}: the prompt is {short(prompt)}, which is blank; it must be text or a list of chat messages. "
                "Fill it in, or remove the row."
            )
        num_chars = len(prompt)
    elif isinstance(prompt, list) and prompt:
        places = (f"{where}: message {number} of the prompt" for number in itertools.count())
        num_chars = sum(map(_check_message, prompt, places))
        if all(_says_nothing(message) for message in prompt if message["role"] != "system"):
            raise DataError(f"{where}: the prompt is {short(prompt)}, which is blank. Fill it in, or remove the row.")
    else:
        raise DataError(f"{where}: the prompt is {short(prompt)}; it must be text or a list of chat messages.")
    if num_chars > MAX_PROMPT_CHARS:
        raise DataError(
            f"{where}: the prompt has {num_chars:,} characters ({short(prompt)}); at most {MAX_PROMPT_CHARS:,} are "
            "tokenized. Shorten it, or remove the row."
        )


def _check_message(message: Any, where: str) -> int:
    """Check one message; return the characters of its text."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise DataError(f"{where} is {short(message)}; it must have a role.")
    role, content = message["role"], message.get("content")
    if not isinstance(role, str) or _is_blank(role):
        raise DataError(
            f"{where} has the role {short(role)}; a role is a word such as user, assistant, system or tool."
        )
    if not isinstance(message.get("tool_calls"), list | None):
        raise DataError(f"{where} has the tool_calls {short(message['tool_calls'])}; they are a list of objects.")
    try:
        template_messages([message])
    except ValueError as error:
        raise DataError(f"{where}: {error}. Write an object such as {{...}}, or JSON text of one.") from error
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        if wrong := [part for part in content if not _is_part(part)]:
            raise DataError(
                f"{where} has the part {short(wrong[0])}; a part of a content is text, or an object such as "
                '{"type": "text", "text": ...}.'
            )
        return sum(len(part) if isinstance(part, str) else len(str(part.get("text") or "")) for part in content)
    is_asked = role in ("user", "system")
    others = {key for key, value in message.items() if value is not None} - {"role", "name"}
    if content is None and others and not (is_asked and "content" in message):
        return 0  # tool calls, or what a template of one's own reads
    if content is None or not isinstance(content, Mapping) or is_asked:
        raise DataError(
            f"{where} has the content {short(content)}; it must be text, or a list of parts such as "
            '{"type": "text", "text": ...}.'
        )
    return 0


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return isinstance(part, str)
    return isinstance(part.get("text"), str if part.get("type") == "text" else str | None)


def _says_nothing(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, str):
        return _is_blank(content)
    if content is None:
        return not any(message[key] for key in message.keys() - {"role", "name"})
    return not content


def _is_blank(text: str) -> bool:
    return not any(char.isprintable() and not char.isspace() for char in text)


def check_label(label: Any, where: str, name: str, grader: Any = None) -> None:
    """Check that a label is of use: finite, and for a built-in grader that compares answers with it, text or a number.

    Args:
        label: of the row.
        where: the row.
        name: column and flag of the label, for the error.
        grader: ``rm_type`` of the row; None when something else judges answers.

    Raises:
        DataError: it is not.
    """
    parts = label if isinstance(label, list | tuple) else [label]
    if any(isinstance(part, float | Decimal) and not math.isfinite(part) for part in parts):
        raise DataError(
            f"{where}: {name} is {short(label)}, which no answer equals; a label is text, a finite number, or null "
            "where the reward needs none. Fill it in, or remove the row."
        )
    grader = grader.removeprefix(BOXED_PREFIX) if isinstance(grader, str) else None
    if grader not in GRADERS_WITH_LABEL:
        return
    is_list = isinstance(label, list | tuple)
    is_allowed = parts and (not is_list or grader in GRADERS_WITH_LABELS)
    if not is_allowed or any(not _is_answer(part) for part in parts):
        value = "null" if label is None else short(label)
        raise DataError(
            f"{where}: {name} is {value}, and --rm-type {grader} compares answers with it, so it must be text or a "
            "number; name another column, or fill it in."
        )


def check_grader(metadata: Mapping[str, Any], where: str, allowed: Collection[str]) -> None:
    """Check that a row which names its grader names a built-in one.

    Raises:
        DataError: it does not.
    """
    name = metadata.get("rm_type") or ""
    if name and (not isinstance(name, str) or name.strip().removeprefix(BOXED_PREFIX) not in allowed):
        raise DataError(
            f"{where}: rm_type in its metadata is {short(name)}; it may be {', '.join(allowed)}, each also with the "
            f"prefix {BOXED_PREFIX}. Correct the row, or give --custom-rm-path."
        )


def _is_answer(value: Any) -> bool:
    if isinstance(value, str):
        return not _is_blank(value)
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def parse_tools(value: Any, where: str) -> list[Any] | None:
    """Return the tools of a row, from a list or from JSON text; None when the row has none."""
    if isinstance(value, str):
        value = parse_json(value, "tools", where) if value.strip() else None
    if value is None:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list):
        raise DataError(f"{where}: tools are {short(value)}; they must be a list, or JSON text of one.")
    if wrong := [tool for tool in value if not _is_tool(tool)]:
        raise DataError(f"{where} has the tool {short(wrong[0])}; a tool is an object that names a function.")
    return value


def _is_tool(tool: Any) -> bool:
    if not isinstance(tool, Mapping):
        return isinstance(tool, str) and not _is_blank(tool)
    function = tool.get("function")
    named = function if isinstance(function, Mapping) else tool
    return isinstance(named.get("name") or (named is tool and named.get("type")), str)


def parse_metadata(value: Any, where: str) -> dict[str, Any]:
    """Return the metadata of a row, from a dict or from JSON text; {} when the row has none."""
    if isinstance(value, str):
        value = parse_json(value, "metadata", where) if value.strip() else None
    if not value:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: metadata is {short(value)}; it must be an object, or JSON text of one.")
    return dict(value)


def parse_json(text: str, name: str, where: str) -> Any:
    """Return the value of JSON ``text``."""
    try:
        return decode_json(text)
    except ValueError as error:
        raise DataError(f"{where}: {name} is text but not JSON ({error}): {short(text)}.") from error
