"""Reasoning and tool calls in the formats that most open models write, read with nothing but ``re`` and ``json``.

A call lies in ``<tool_call> ... </tool_call>`` (or stands alone, in the second form), and is one of::

    {"name": "add", "arguments": {"a": 1}}                                               Hermes, Qwen
    <function=add><parameter=a>1</parameter></function>                                  Qwen3-Coder
    add<arg_key>a</arg_key><arg_value>1</arg_value>                                      GLM
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

THINK_BEGIN, THINK_END = "<think>", "</think>"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_BARE_FUNCTION = re.compile(r"<function=[^>]+>.*?</function>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)\s*>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>(.*?)</parameter>", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_LEFT_OVER = re.compile(r"</?tool_call>|<function=|</function>|<arg_key>|<parameter=")


class ParsedTools(NamedTuple):
    """Tool calls and what is left beside them."""

    text: str
    """The text without the calls."""
    tool_uses: list[dict[str, Any]]
    """``{"name": str, "input": dict}`` in the order of the text."""
    ill_formed: bool
    """Whether something that looks like a call could not be read, or calls a tool that was not offered."""


def split_reasoning(text: str) -> tuple[str, str, bool]:
    """``(reasoning, rest, is unfinished)``.  The opening mark may be missing: many templates write it."""
    begin, end = text.find(THINK_BEGIN), text.find(THINK_END)
    if end >= 0:
        start = begin + len(THINK_BEGIN) if 0 <= begin < end else 0
        return text[start:end].strip(), text[end + len(THINK_END) :].lstrip("\n"), False
    if begin >= 0:
        return text[begin + len(THINK_BEGIN) :].strip(), text[:begin].strip(), True
    return "", text, False


def tool_schemas(tools_schema: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Tool name -> JSON schema of its arguments, from OpenAI's or Anthropic's description of the tools."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools_schema or []:
        function = tool.get("function", tool)
        if function.get("name"):
            schemas[function["name"]] = function.get("parameters") or function.get("input_schema") or {}
    return schemas


def parse_xml_tool_uses(text: str, tools_schema: Sequence[Mapping[str, Any]] | None = None) -> ParsedTools:
    """The calls in ``text``, in any of the module's formats.

    Values in the two formats without JSON are strings; ``tools_schema`` says which of them mean numbers, booleans,
    arrays or objects.
    """
    schemas = tool_schemas(tools_schema)
    uses: list[dict[str, Any]] = []
    ill_formed = False

    def take(body: str, whole: str) -> str:
        nonlocal ill_formed
        use = _read_call(body.strip(), schemas)
        if use is None:
            ill_formed = True
            return whole
        ill_formed = ill_formed or bool(schemas) and use["name"] not in schemas
        uses.append(use)
        return ""

    rest = _CALL.sub(lambda match: take(match[1], match[0]), text)
    rest = _BARE_FUNCTION.sub(lambda match: take(match[0], match[0]), rest)
    return ParsedTools(rest.strip() if uses else rest, uses, ill_formed or _LEFT_OVER.search(rest) is not None)


def _read_call(body: str, schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """One call without its outer tags; None when it cannot be read."""
    function = _FUNCTION.fullmatch(body)
    if function:
        pairs = _PARAMETER.findall(function[2])
        return _use(function[1], pairs, schemas) if not _PARAMETER.sub("", function[2]).strip() else None
    if body.startswith("{"):
        try:
            call = json.loads(body)
        except json.JSONDecodeError:
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except json.JSONDecodeError:
                return None
        if isinstance(call.get("name"), str) and isinstance(arguments, dict):
            return {"name": call["name"], "input": arguments}
        return None
    name = body.partition("<arg_key>")[0].strip()
    is_name = re.fullmatch(r"[\w.:-]+", name) is not None
    if not is_name or _PAIR.sub("", body[len(name) :]).strip():
        return None
    return _use(name, _PAIR.findall(body), schemas)


def _use(name: str, pairs: list[tuple[str, str]], schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    properties = schemas.get(name, {}).get("properties") or {}
    return {"name": name, "input": {key.strip(): _value(text, properties.get(key.strip())) for key, text in pairs}}


def _value(text: str, schema: Any) -> Any:
    """A value that was written without quotes, as its schema's type; text when it is none of that type."""
    # The newline after the opening and before the closing tag belongs to the tags.
    text = text.removeprefix("\n").removesuffix("\n")
    wanted = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [wanted] if isinstance(wanted, str) else list(wanted or [])
    if not kinds or "string" in kinds:
        return text
    try:
        return json.loads(text.strip())
    except json.JSONDecodeError:
        lowered = text.strip().lower()
        if "boolean" in kinds and lowered in ("true", "false"):
            return lowered == "true"
        return None if "null" in kinds and lowered == "none" else text
