"""The model's text -> reasoning, text and tool calls.

With a parser's name SGLang's own parser of that name does the work, so that training sees what serving sees; it is
imported when it is first needed.  Without a name, or without SGLang, ``plain`` reads the common formats.
"""

from slime.agent.parsing.model_output import (
    ParsedModelOutput,
    ParsedTools,
    check_parsers,
    parse_model_output,
    parse_tool_uses,
)
from slime.agent.parsing.plain import parse_xml_tool_uses

__all__ = [
    "ParsedModelOutput",
    "ParsedTools",
    "check_parsers",
    "parse_model_output",
    "parse_tool_uses",
    "parse_xml_tool_uses",
]
