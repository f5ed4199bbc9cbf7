"""One drawn text, taken apart: first the reasoning, then the tool calls in what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.agent.parsing import plain, sglang_parsers
from slime.agent.parsing.plain import ParsedTools

__all__ = ["ParsedModelOutput", "ParsedTools", "parse_model_output", "parse_tool_uses"]


@dataclass(kw_only=True)
class ParsedModelOutput:
    """What the model said."""

    reasoning: str = ""
    text: str = ""
    tool_uses: list[dict[str, Any]] = field(default_factory=list)
    """``{"name": str, "input": dict}`` each."""
    ill_formed: bool = False
    """Whether reasoning was left open, or a tool call was broken or names no offered tool."""


def check_parsers(tool_parser_name: str | None, reasoning_parser_name: str | None) -> None:
    """Import the named parsers, which may take seconds, and refuse names that do not exist (ConfigError)."""
    if tool_parser_name:
        sglang_parsers.parse_tool_uses("", [], tool_parser_name)
    if reasoning_parser_name:
        sglang_parsers.split_reasoning("", reasoning_parser_name)


def parse_tool_uses(
    text: str, *, tools_schema: Sequence[Mapping[str, Any]] | None, tool_parser_name: str | None = None
) -> ParsedTools:
    """The calls in ``text``; a conversation without tools has none."""
    if not tools_schema:
        return ParsedTools(text, [], False)
    parsed = sglang_parsers.parse_tool_uses(text, tools_schema, tool_parser_name) if tool_parser_name else None
    return plain.parse_xml_tool_uses(text, tools_schema) if parsed is None else parsed


def parse_model_output(
    raw: str,
    *,
    tools_schema: Sequence[Mapping[str, Any]] | None = None,
    tool_parser_name: str | None = None,
    reasoning_parser_name: str | None = None,
) -> ParsedModelOutput:
    """Take apart what the model drew.

    Args:
        raw: the drawn text without its stop token.
        tools_schema: the tools that the model was offered, in OpenAI's or Anthropic's form.
        tool_parser_name: SGLang's name of the model's tool-call format; None: the built-in formats.
        reasoning_parser_name: SGLang's name of the model's reasoning format; None: ``<think>`` blocks.

    Raises:
        ConfigError: SGLang has no parser of that name.
    """
    reasoning, rest, unfinished = plain.split_reasoning(raw)
    if reasoning_parser_name:
        split = sglang_parsers.split_reasoning(raw, reasoning_parser_name)
        if split is not None:
            reasoning, rest = split
            unfinished = bool(reasoning) and not rest.strip() and plain.THINK_END not in raw
    tools = parse_tool_uses(rest, tools_schema=tools_schema, tool_parser_name=tool_parser_name)
    return ParsedModelOutput(
        reasoning=reasoning, text=tools.text, tool_uses=tools.tool_uses, ill_formed=unfinished or tools.ill_formed
    )
