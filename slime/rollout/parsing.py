"""Splits a model's output into reasoning, text and tool calls.

If a parser name is given, SGLang's parser of that name is used, so training sees what serving sees; it is imported on
first use.  Without a name, or without SGLang, the built-in parsers read the formats of most open models.  A call is in
``<tool_call> ... </tool_call>`` (optional for the second form) and is one of::

    {"name": "add", "arguments": {"a": 1}}                                               Hermes, Qwen
    <function=add><parameter=a>1</parameter></function>                                  Qwen3-Coder
    add<arg_key>a</arg_key><arg_value>1</arg_value>                                      GLM
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slime.utils.errors import ConfigError
from slime.utils.files import parse_object, parse_value

__all__ = [
    "ParsedModelOutput",
    "ParsedTools",
    "check_parsers",
    "opens_reasoning",
    "parse_model_output",
    "parse_tool_uses",
    "parse_xml_tool_uses",
]

logger = logging.getLogger(__name__)

MAX_CALLS = 128
"""Maximum opening tool-call tags in a turn.  SGLang's parsers take time quadratic in the number of unclosed ones."""
THINK_BEGIN, THINK_END = "<think>", "</think>"
END_OF_PROMPT_TOKENS = 32
"""Enough tokens for ``THINK_BEGIN`` spelled letter by letter, plus whitespace."""
# (opening tag with the block's name, closing tag).  Names never contain "<", so a search ends at the next tag.
_CALL = re.compile(r"<tool_call()>"), "</tool_call>"
_FUNCTION = re.compile(r"<function=([^<>\s]+)\s*>"), "</function>"
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)\s*>"), "</parameter>"
_PAIR = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>"), "</arg_value>"
_LEFT_OVER = re.compile(r"</?tool_call>|<function=|</function>|<arg_key>|<parameter=")


class ParsedTools(NamedTuple):
    """Calls of offered tools, and the remaining text."""

    text: str
    """The text without the calls."""
    tool_uses: list[dict[str, Any]]
    """``{"name": str, "input": dict}`` per call, in text order."""
    ill_formed: bool
    """True if something that looks like a call could not be parsed or calls a tool that was not offered."""


@dataclass
class ParsedModelOutput:
    """The parts of a model's output."""

    reasoning: str = ""
    text: str = ""
    tool_uses: list[dict[str, Any]] = field(default_factory=list)
    """``{"name": str, "input": dict}`` per call."""
    ill_formed: bool = False
    """True if reasoning was not closed, or a tool call was malformed or names a tool that was not offered."""


def check_parsers(tool_parser_name: str | None, reasoning_parser_name: str | None) -> None:
    """Import the named parsers, which may take seconds; raise ConfigError for names that SGLang does not have."""
    if tool_parser_name:
        _sglang_tool_uses("", [], tool_parser_name)
    if reasoning_parser_name:
        _sglang_reasoning("", reasoning_parser_name)


def parse_tool_uses(
    text: str, tools_schema: Sequence[Mapping[str, Any]] | None, tool_parser_name: str | None = None
) -> ParsedTools:
    """Parse the tool calls in ``text``; without a tools schema, no calls are parsed."""
    if not tools_schema:
        return ParsedTools(text, [], False)
    parsed = _sglang_tool_uses(text, tools_schema, tool_parser_name) if tool_parser_name else None
    if parsed is not None:
        return parsed
    rest, uses = parse_xml_tool_uses(text, tools_schema)
    return ParsedTools(rest, uses, _LEFT_OVER.search(rest) is not None)


def parse_model_output(
    raw: str,
    *,
    tools_schema: Sequence[Mapping[str, Any]] | None = None,
    tool_parser_name: str | None = None,
    reasoning_parser_name: str | None = None,
    in_reasoning: bool = False,
) -> ParsedModelOutput:
    """Split a model's output into reasoning, text and tool calls.

    Args:
        raw: The output text without its stop token.
        tools_schema: The tools offered to the model, in OpenAI or Anthropic format.
        tool_parser_name: SGLang's name for the model's tool-call format; None uses the built-in formats.
        reasoning_parser_name: SGLang's name for the model's reasoning format; None looks for ``<think>`` blocks.
        in_reasoning: Whether the prompt ends with an open ``<think>``.  SGLang's parsers infer this from their format.

    Raises:
        ConfigError: SGLang has no parser of that name.
    """
    reasoning, rest, unfinished = split_reasoning(raw, in_reasoning)
    if reasoning_parser_name:
        split = _sglang_reasoning(raw, reasoning_parser_name)
        if split is not None:
            reasoning, rest = split
            unfinished = bool(reasoning) and not rest.strip() and THINK_END not in raw
    tools = parse_tool_uses(rest, tools_schema, tool_parser_name)
    return ParsedModelOutput(
        reasoning=reasoning, text=tools.text, tool_uses=tools.tool_uses, ill_formed=unfinished or tools.ill_formed
    )


def opens_reasoning(tokenizer: Any, prompt_ids: Sequence[int]) -> bool:
    """Return True if the prompt ends with an open ``<think>``."""
    end = tokenizer.decode(list(prompt_ids[-END_OF_PROMPT_TOKENS:]), skip_special_tokens=False)
    return bool(end.rstrip().endswith(THINK_BEGIN))


# The built-in parsers


def split_reasoning(text: str, in_reasoning: bool = False) -> tuple[str, str, bool]:
    """Split text into ``(reasoning, rest, is_unfinished)``.

    The opening tag may be missing because many chat templates put it in the prompt.  With ``in_reasoning``, the text
    starts inside the reasoning.
    """
    begin, end = text.find(THINK_BEGIN), text.find(THINK_END)
    if end >= 0:
        start = begin + len(THINK_BEGIN) if 0 <= begin < end else 0
        return text[start:end].strip(), text[end + len(THINK_END) :].lstrip("\n"), False
    if in_reasoning:
        return text.strip().removeprefix(THINK_BEGIN).strip(), "", True
    if begin >= 0:
        return text[begin + len(THINK_BEGIN) :].strip(), text[:begin].strip(), True
    return "", text, False


def tool_schemas(tools_schema: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Return tool name -> JSON schema of its arguments, from tools in OpenAI or Anthropic format."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools_schema or []:
        function = tool.get("function", tool)
        if function.get("name"):
            schemas[function["name"]] = function.get("parameters") or function.get("input_schema") or {}
    return schemas


def parse_xml_tool_uses(
    text: str, tools_schema: Sequence[Mapping[str, Any]] | None
) -> tuple[str, list[dict[str, Any]]]:
    """Parse the calls of offered tools in ``text``, in any of the module's formats.

    Args:
        text: The model's output without reasoning.
        tools_schema: The offered tools.  For the two non-JSON formats, their schemas also say which values to parse as
            numbers, booleans, arrays or objects; all others are strings.

    Returns:
        ``(text without the calls, [{"name": str, "input": dict}])``.  Calls that cannot be parsed or name a tool that
        was not offered stay in the text.
    """
    schemas = tool_schemas(tools_schema)
    uses: list[dict[str, Any]] = []

    def take(body: str, whole: str) -> str:
        use = _read_call(body.strip(), schemas)
        if use is None or use["name"] not in schemas:
            return whole
        uses.append(use)
        return ""

    rest = _replace(text, *_CALL, lambda name, body, whole: take(body, whole))
    rest = _replace(rest, *_FUNCTION, lambda name, body, whole: take(whole, whole))
    return rest.strip() if uses else rest, uses


def _replace(text: str, begin: re.Pattern[str], end: str, replacement: Callable[[str, str, str], str]) -> str:
    """Replace each block in the text by ``replacement(name, content, whole)``.

    Takes linear time for any text, because it never searches for the same closing tag twice.
    """
    parts, position = [], 0
    for match in begin.finditer(text):
        if match.start() < position:
            continue  # inside the previous block
        close = text.find(end, match.end())
        if close < 0:
            break
        whole = text[match.start() : close + len(end)]
        parts += [text[position : match.start()], replacement(match[1], text[match.end() : close], whole)]
        position = close + len(end)
    return "".join([*parts, text[position:]])


def _pairs(body: str, begin: re.Pattern[str], end: str) -> tuple[list[tuple[str, str]], str]:
    """Return (name, content) of each block, and the text outside the blocks."""
    pairs: list[tuple[str, str]] = []

    def take(name: str, content: str, whole: str) -> str:
        pairs.append((name, content))
        return ""

    rest = _replace(body, begin, end, take)
    return pairs, rest.strip()


def _read_call(body: str, schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Parse one call without its outer tags; return None if it is malformed."""
    function = _FUNCTION[0].match(body)
    if function and body.endswith(_FUNCTION[1]):
        pairs, rest = _pairs(body[function.end() : -len(_FUNCTION[1])], *_PARAMETER)
        return None if rest else _use(function[1], pairs, schemas)
    if body.startswith("{"):
        try:
            call = parse_object(body)
            arguments = call.get("arguments", call.get("parameters", {}))
            arguments = parse_value(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            return None
        if isinstance(call.get("name"), str) and isinstance(arguments, dict):
            return {"name": call["name"], "input": arguments}
        return None
    name = body.partition("<arg_key>")[0].strip()
    pairs, rest = _pairs(body[len(name) :], *_PAIR)
    return None if rest or re.fullmatch(r"[\w.:-]+", name) is None else _use(name, pairs, schemas)


def _use(name: str, pairs: list[tuple[str, str]], schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    schema = schemas.get(name, {})
    properties = schema.get("properties") or {}
    written = {key.strip(): text for key, text in pairs}
    return {
        "name": name,
        "input": {key: _value(text, _kinds(properties.get(key), schema)) for key, text in written.items()},
    }


def _kinds(schema: Any, root: Any) -> set[str]:
    """Return the JSON types that a schema allows, including its members and references; empty if it names none.

    Args:
        schema: Schema of one argument.
        root: Schema of the tool, in which references are resolved.
    """
    kinds: set[str] = set()
    followed: set[str] = set()  # references may be circular
    waiting = [(schema, False)]
    while waiting:
        one, is_alternative = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        reference = one.get("$ref")
        members = [
            (member, key != "allOf") for key in ("anyOf", "oneOf", "allOf") for member in _as_list(one.get(key))
        ]
        if "type" in one:
            kinds |= {kind for kind in _as_list(one["type"]) if isinstance(kind, str)}
        elif members:
            waiting += members
        elif isinstance(reference, str):
            if reference not in followed:
                followed.add(reference)
                waiting.append((_referred(reference, root), is_alternative))
        elif is_alternative:
            kinds.add("string")  # an untyped alternative allows any value, including strings
    return kinds


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _referred(reference: str, root: Any) -> Any:
    """Resolve a reference such as ``#/$defs/Name`` in ``root``; return None if it does not resolve."""
    start, *keys = reference.split("/")
    for key in keys:
        root = root.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root if start == "#" else None


def _value(text: str, kinds: set[str]) -> Any:
    """Parse an unquoted value as one of the types ``kinds``; return the text if that fails or strings are allowed."""
    # The newlines next to the opening and closing tags belong to the tags.
    text = text.removeprefix("\n").removesuffix("\n")
    if not kinds or "string" in kinds:
        return text
    try:
        return parse_value(text.strip())
    except ValueError:
        lowered = text.strip().lower()
        if "boolean" in kinds and lowered in ("true", "false"):
            return lowered == "true"
        return None if "null" in kinds and lowered == "none" else text


# SGLang's parsers.  Each function returns None if SGLang cannot be imported, which is logged once.


def _warn(what: str, error: Exception) -> None:
    cause = f"{type(error).__name__}: {error}"
    logger.warning("SGLang's %s parsers cannot be imported (%s); the built-in ones read the output.", what, cause)


@functools.cache
def _tool_parts() -> tuple[Any, Any] | None:
    """Return ``(FunctionCallParser, Tool)``, or None without SGLang."""
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except Exception as error:  # the import may raise anything if GPU libraries are missing
        _warn("tool-call", error)
        return None
    return FunctionCallParser, Tool


@functools.cache
def _reasoning_part() -> Any:
    """Return ``ReasoningParser``, or None without SGLang."""
    try:
        from sglang.srt.parser.reasoning_parser import ReasoningParser
    except Exception as error:
        _warn("reasoning", error)
        return None
    return ReasoningParser


def _sglang_reasoning(text: str, name: str) -> tuple[str, str] | None:
    """Split into ``(reasoning, rest)`` with SGLang's reasoning parser ``name``."""
    parser_class = _reasoning_part()
    if parser_class is None:
        return None
    if name.lower() not in parser_class.DetectorMap:
        raise ConfigError(f"There is no reasoning parser {name!r}; SGLang has {', '.join(parser_class.DetectorMap)}.")
    reasoning, rest = parser_class(model_type=name, stream_reasoning=False).parse_non_stream(text)
    return (reasoning or "").strip(), rest or ""


def _sglang_tool_uses(text: str, tools_schema: Sequence[Mapping[str, Any]], name: str) -> ParsedTools | None:
    """Parse the calls in ``text`` with SGLang's tool-call parser ``name``."""
    parts = _tool_parts()
    if parts is None:
        return None
    parser_class, tool_class = parts
    if name not in parser_class.ToolCallParserEnum:
        known = ", ".join(parser_class.ToolCallParserEnum)
        raise ConfigError(f"There is no tool-call parser {name!r}; SGLang has {known}.")
    tools = [tool_class(type="function", function=_function_of(tool)) for tool in tools_schema]
    parser = parser_class(tools, name)
    mark = parser.detector.bot_token
    if mark and text.count(mark) > MAX_CALLS:
        return ParsedTools(text, [], True)
    try:
        rest, calls = parser.parse_non_stream(text)
        # Encoding also rejects lone surrogates.
        found = [(call.name, parse_object((call.parameters or "{}").encode())) for call in calls]
    except Exception as error:  # model output may break a parser in any way; the turn counts as ill-formed
        logger.info("Tool-call parser %s: %s: %s", name, type(error).__name__, error)
        return ParsedTools(text, [], True)
    uses = [{"name": call_name, "input": arguments} for call_name, arguments in found]
    offered = {tool.function.name for tool in tools}
    taken = [use for use in uses if use["name"] in offered]
    unread = parser.has_tool_call(rest) if uses else parser.has_tool_call(text)
    return ParsedTools(rest.strip() if taken else text, taken, len(taken) < len(uses) or unread)


def _function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    return {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters") or function.get("input_schema") or {},
    }
