"""SGLang's parsers, by the names of ``--sglang-tool-call-parser`` and ``--sglang-reasoning-parser``.

Each function returns None when SGLang cannot be imported; a warning says so once.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from slime.agent.parsing.plain import ParsedTools
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)


@functools.cache
def _warn_once(what: str, cause: str) -> None:
    logger.warning("SGLang's %s parsers cannot be imported (%s); the built-in ones read the output.", what, cause)


@functools.cache
def _tool_parts() -> tuple[Any, Any] | None:
    """``(FunctionCallParser, Tool)``, or None without SGLang."""
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except Exception as error:  # a GPU part that is missing may raise anything at import
        _warn_once("tool-call", f"{type(error).__name__}: {error}")
        return None
    return FunctionCallParser, Tool


@functools.cache
def _reasoning_part() -> Any:
    """``ReasoningParser``, or None without SGLang."""
    try:
        from sglang.srt.parser.reasoning_parser import ReasoningParser
    except Exception as error:
        _warn_once("reasoning", f"{type(error).__name__}: {error}")
        return None
    return ReasoningParser


def split_reasoning(text: str, name: str) -> tuple[str, str] | None:
    """``(reasoning, rest)`` by the reasoning parser ``name``."""
    parser_class = _reasoning_part()
    if parser_class is None:
        return None
    if name.lower() not in parser_class.DetectorMap:
        raise ConfigError(f"There is no reasoning parser {name!r}; SGLang has {', '.join(parser_class.DetectorMap)}.")
    reasoning, rest = parser_class(model_type=name, stream_reasoning=False).parse_non_stream(text)
    return (reasoning or "").strip(), rest or ""


def parse_tool_uses(text: str, tools_schema: Sequence[Mapping[str, Any]], name: str) -> ParsedTools | None:
    """The calls in ``text`` by the tool-call parser ``name``."""
    parts = _tool_parts()
    if parts is None:
        return None
    parser_class, tool_class = parts
    if name not in parser_class.ToolCallParserEnum:
        known = ", ".join(parser_class.ToolCallParserEnum)
        raise ConfigError(f"There is no tool-call parser {name!r}; SGLang has {known}.")
    tools = [tool_class(type="function", function=_function_of(tool)) for tool in tools_schema]
    parser = parser_class(tools, name)
    try:
        rest, calls = parser.parse_non_stream(text)
        found = [(call.name, json.loads(call.parameters or "{}")) for call in calls]
    except Exception as error:  # the model's text may break a parser in any way; the turn counts as ill-formed
        logger.info("Tool-call parser %s: %s: %s", name, type(error).__name__, error)
        return ParsedTools(text, [], True)
    uses = [{"name": call_name, "input": arguments} for call_name, arguments in found]
    unknown = {use["name"] for use in uses} - {tool.function.name for tool in tools}
    unread = parser.has_tool_call(rest) if uses else parser.has_tool_call(text)
    return ParsedTools(rest.strip() if uses else rest, uses, bool(unknown) or unread)


def _function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    return {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters") or function.get("input_schema") or {},
    }
