"""From the prompt of a data row to what the model reads: messages, placeholders, tools, chat template.

Every error names the row through ``where``, for example ``train.jsonl line 7``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from slime.utils.errors import DataError
from slime.utils.types import MultimodalTypes


def as_messages(prompt: Any, where: str) -> list[dict[str, Any]]:
    """Return chat messages: a string becomes one user message, messages stay as they are.

    Raises:
        DataError: the prompt is neither.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    check_prompt(prompt, where)
    return [dict(message) for message in prompt]


def check_prompt(prompt: Any, where: str) -> None:
    """Check that a prompt is a non-empty string or a non-empty list of messages, each a dict with a role.

    Raises:
        DataError: it is something else.
    """
    if isinstance(prompt, str) and prompt:
        return
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: the prompt is {_short(prompt)}; it must be text or a list of chat messages.")
    for number, message in enumerate(prompt):
        if not isinstance(message, Mapping) or "role" not in message:
            raise DataError(f"{where}: message {number} of the prompt is {_short(message)}; it must have a role.")


def parse_tools(value: Any, where: str) -> list[Any] | None:
    """Return the tools of a row, from a list or from JSON text; None when the row has none."""
    if isinstance(value, str):
        value = parse_json(value, "tools", where) if value.strip() else None
    if value is None:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list):
        raise DataError(f"{where}: tools are {_short(value)}; they must be a list, or JSON text of one.")
    return value


def parse_metadata(value: Any, where: str) -> dict[str, Any]:
    """Return the metadata of a row, from a dict or from JSON text; {} when the row has none."""
    if isinstance(value, str):
        value = parse_json(value, "metadata", where) if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: metadata is {_short(value)}; it must be an object, or JSON text of one.")
    return dict(value)


def parse_json(text: str, name: str, where: str) -> Any:
    """Return the value that JSON ``text`` stands for."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: {name} is text but not JSON ({error}): {_short(text)}.") from error


def render(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None, where: str, **kwargs: Any) -> str:
    """Render messages as text by the tokenizer's chat template, up to the point where the response begins."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
        )
    except (ValueError, TypeError, TemplateError) as error:
        raise DataError(
            f"{where}: the chat template cannot render the prompt ({error}): {_short(messages)}."
        ) from error


def insert_multimodal(
    messages: list[dict[str, Any]], row: Mapping[str, Any], multimodal_keys: Mapping[str, str], where: str
) -> list[dict[str, Any]]:
    """Return messages in which each placeholder is replaced by the row's next item of its kind.

    Args:
        messages: chat messages; only contents that are strings are searched.
        row: the data row.
        multimodal_keys: kind (``image``) -> key of the row that lists the items.
        where: the row, for errors.

    Returns:
        New messages.  ``"a <image> b"`` becomes ``[{"type": "text", "text": "a "}, {"type": "image", "image": item},
        {"type": "text", "text": " b"}]``; items that are dicts are taken as they are.
    """
    kinds = {}
    waiting: dict[str, list[Any]] = {}
    for name, key in multimodal_keys.items():
        kind = MultimodalTypes.get(name)
        if kind is None:
            allowed = ", ".join(known.name for known in MultimodalTypes.all())
            raise DataError(f"--multimodal-keys has the kind {name!r}; it must be one of {allowed}.")
        kinds[kind.placeholder] = kind.name
        items: Any = row.get(key)
        if hasattr(items, "tolist"):
            items = items.tolist()
        waiting[kind.name] = list(items) if isinstance(items, (list, tuple)) else [] if items is None else [items]
    pattern = re.compile("(" + "|".join(re.escape(mark) for mark in kinds) + ")")

    def part(piece: str) -> dict[str, Any]:
        if piece not in kinds:
            return {"type": "text", "text": piece}
        kind = kinds[piece]
        if not waiting[kind]:
            raise DataError(f"{where}: the prompt has more {piece} than the row has items of kind {kind}.")
        item = waiting[kind].pop(0)
        return item if isinstance(item, dict) else {"type": kind, kind: item}

    filled = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            content = [part(piece) for piece in pattern.split(content) if piece]
        filled.append({**message, "content": content})
    left = {kind: len(items) for kind, items in waiting.items() if items}
    if left:
        raise DataError(f"{where}: items without a placeholder in the prompt: {left}.")
    return filled


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
