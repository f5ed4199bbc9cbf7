"""Prompts that keep generated ids, with templates that close, do not close, or rewrite turns."""

from __future__ import annotations

import pytest

from slime.agent.adapters.engine import build_prompt_ids
from slime.agent.trajectory import KnownPrefix
from tests.unit.talking_engine import drawn

USER = {"role": "user", "content": "use the tool"}
ANSWER = {"role": "assistant", "content": "the tool"}
RESULT = {"role": "tool", "content": "3"}


def known(tokenizer, text, finish="stop", end=True, answer=ANSWER):
    prompt = build_prompt_ids(tokenizer, [USER], None)
    ids = prompt + drawn(tokenizer, text) + ([tokenizer.eos_token_id] if end else [])
    return KnownPrefix(messages=[USER, answer], ids=ids, finish_reason=finish)


def test_without_a_known_beginning_the_template_is_encoded(tokenizer):
    ids = build_prompt_ids(tokenizer, [USER], None)
    assert tokenizer.decode(ids) == "<|im_start|>user\nuse the tool<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("finish", "end"), [("stop", True), ("length", False)])
def test_drawn_ids_stay_and_the_turn_is_closed_once(tokenizer, finish, end):
    before = known(tokenizer, "the tool", finish, end)
    ids = build_prompt_ids(tokenizer, [USER, ANSWER, RESULT], None, before)
    assert ids[: len(before.ids)] == before.ids
    again = build_prompt_ids(tokenizer, [USER, ANSWER, RESULT], None)
    assert tokenizer.decode(ids) == tokenizer.decode(again)
    assert ids != again  # the encoder merges the bytes that were generated one by one


def test_what_the_model_wrote_stays_where_the_template_would_write_it_otherwise(tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    raw = '<tool_call>\n{"name":"f","arguments":{"a":1}}\n</tool_call>'
    before = known(tokenizer, raw, answer=call)
    ids = build_prompt_ids(tokenizer, [USER, call, RESULT], None, before)
    assert ids[: len(before.ids)] == before.ids


def test_a_template_that_drops_old_reasoning_is_believed(tokenizer):
    answer = {**ANSWER, "reasoning_content": "why"}
    before = known(tokenizer, "<think>\nwhy\n</think>\n\nthe tool", answer=answer)
    kept = build_prompt_ids(tokenizer, [USER, answer, RESULT], None, before)
    assert "why" in tokenizer.decode(kept)
    dropped = build_prompt_ids(tokenizer, [USER, answer, USER], None, before)
    assert dropped == build_prompt_ids(tokenizer, [USER, ANSWER, USER], None)
    assert "why" not in tokenizer.decode(dropped)
