"""The public path of ``slime.rollout.parsing``."""

from slime.rollout.parsing import ParsedModelOutput, parse_model_output, parse_tool_uses, parse_xml_tool_uses

__all__ = ["ParsedModelOutput", "parse_model_output", "parse_tool_uses", "parse_xml_tool_uses"]
