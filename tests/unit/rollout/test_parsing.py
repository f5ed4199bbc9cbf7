"""Model output -> reasoning, text, tool calls; the built-in parsers agree with SGLang's."""

from __future__ import annotations

import pytest

from slime.backends.sglang_utils import cpu_shim
from slime.rollout import parsing
from slime.rollout.parsing import opens_reasoning, parse_model_output, parse_tool_uses, parse_xml_tool_uses
from tests.unit.talking_engine import make_tokenizer


@pytest.fixture(scope="module")
def sglang():
    """Make SGLang importable, also on machines without its GPU parts."""
    cpu_shim.install()
    parsing._tool_parts.cache_clear()
    parsing._reasoning_part.cache_clear()
    assert parsing._tool_parts() is not None


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "note": {"type": "string"}, "deep": {"type": "boolean"}},
            },
        },
    }
]
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "7"}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n7\n</parameter>\n</function>\n"
    "</tool_call>"
)
GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>note</arg_key>\n"
    "<arg_value>7</arg_value>\n</tool_call>"
)
USE = {"name": "add", "input": {"a": 1, "note": "7"}}


@pytest.mark.parametrize(
    "text", [HERMES, CODER, GLM, CODER.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")]
)
def test_calls_are_read_in_every_common_format(text):
    assert parse_xml_tool_uses(f"Let me see.\n{text}", TOOLS) == ("Let me see.", [USE])
    assert parse_tool_uses(f"Let me see.\n{text}", TOOLS) == ("Let me see.", [USE], False)


@pytest.mark.parametrize(("name", "text"), [("qwen25", HERMES), ("qwen3_coder", CODER), ("glm45", GLM)])
def test_sglangs_parsers_give_the_same_as_the_built_in_ones(sglang, name, text):
    theirs = parse_tool_uses(f"Hm.\n{text}", TOOLS, name)
    assert (theirs.text, theirs.tool_uses, theirs.ill_formed) == ("Hm.", [USE], False)


def test_sglangs_parsers_take_no_tool_that_was_not_offered(sglang):
    parsed = parse_tool_uses(HERMES.replace('"add"', '"subtract"'), TOOLS, "qwen25")
    assert (parsed.tool_uses, parsed.ill_formed) == ([], True)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>',
        '<tool_call>{"name": "add"',
        '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>',
        "<function=add><parameter=a>1</function>",
    ],
)
def test_broken_calls_and_unknown_tools_are_ill_formed(text):
    assert parse_xml_tool_uses(text, TOOLS) == (text, [])
    assert parse_tool_uses(text, TOOLS) == (text, [], True)


@pytest.mark.parametrize(
    ("raw", "reasoning", "text", "ill_formed"),
    [
        ("plain", "", "plain", False),
        ("<think>a</think>b", "a", "b", False),
        ("a</think>\n\nb", "a", "b", False),
        ("<think>never closed", "never closed", "", True),
    ],
)
def test_reasoning_is_split_off(raw, reasoning, text, ill_formed):
    parsed = parse_model_output(raw)
    assert (parsed.reasoning, parsed.text, parsed.ill_formed) == (reasoning, text, ill_formed)


@pytest.mark.parametrize("begin", ["", "<think>", "\n"])
def test_an_answer_that_ends_within_the_reasoning_the_template_opened_calls_no_tool(begin):
    raw = f"{begin}Should I? {HERMES} No, that would"
    parsed = parse_model_output(raw, tools_schema=TOOLS, in_reasoning=True)
    assert (parsed.reasoning, parsed.text) == (f"Should I? {HERMES} No, that would", "")
    assert (parsed.tool_uses, parsed.ill_formed) == ([], True)
    done = parse_model_output(f"{raw}</think>{HERMES}", tools_schema=TOOLS, in_reasoning=True)
    assert (done.reasoning, done.tool_uses, done.ill_formed) == (parsed.reasoning, [USE], False)


def test_a_prompt_opens_reasoning_when_an_open_mark_ends_it():
    tokenizer = make_tokenizer()
    for end, is_open in (("<think>\n", True), ("<think>", True), ("<think>\n\n</think>\n\n", False), ("", False)):
        prompt = tokenizer.encode(f"<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n{end}")
        assert opens_reasoning(tokenizer, prompt) is is_open, end
    assert not opens_reasoning(tokenizer, [])


def test_values_take_the_type_of_the_schema_and_stay_text_where_they_do_not_fit():
    text = "<function=add><parameter=a>many</parameter><parameter=deep>True</parameter></function>"
    _, (use,) = parse_xml_tool_uses(text, TOOLS)
    assert use["input"] == {"a": "many", "deep": True}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"oneOf": [{"type": "boolean"}, {"type": "number"}]}, "True", True),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {}]}, "5", "5"),
        ({"allOf": [{"$ref": "#/$defs/Point"}, {"description": "where"}]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Name"}, "7", "7"),
        ({"$ref": "#/$defs/a~1b"}, "7", 7),
        ({"$ref": "#/$defs/Loop"}, "[7]", [7]),
        ({"$ref": "#/$defs/Self"}, "7", "7"),
        ({"$ref": "#/$defs/Nobody"}, "7", "7"),
        ({"$ref": "elsewhere.json#/Point"}, "7", "7"),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": [["integer"], 3], "anyOf": 3}, "7", "7"),
        ({"type": "integer", "anyOf": [{"minimum": 3}, {"maximum": 1}]}, "7", 7),
    ],
)
def test_a_value_has_the_types_of_a_schema_s_members_and_references(schema, written, value):
    defs = {
        "Point": {"type": "object"},
        "Name": {"type": "string"},
        "a/b": {"type": "integer"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "array"}]},
        "Self": {"$ref": "#/$defs/Self"},
    }
    tools = [{"name": "f", "input_schema": {"properties": {"x": schema}, "$defs": defs}}]
    for text in (
        f"<function=f><parameter=x>{written}</parameter></function>",
        f"<tool_call>f<arg_key>x</arg_key><arg_value>{written}</arg_value></tool_call>",
    ):
        assert parse_xml_tool_uses(text, tools) == ("", [{"name": "f", "input": {"x": value}}])
