"""Inputs of chat templates of every family, and the text that they add around generated turns."""

from __future__ import annotations

import json

import pytest

from slime.agent.adapters.engine import build_prompt_ids
from slime.agent.trajectory import KnownPrefix
from slime.rollout.multi_turn import observation_text
from slime.rollout.prompts import render
from slime.utils.chat_template import apply_chat_template
from slime.utils.errors import DataError
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from tests.unit.utils.family_templates import FAMILIES, WITHOUT_TOOLS, tokenizer_of

USER = {"role": "user", "content": "2+3?"}
WITH_CALLS = [name for name in FAMILIES if name not in WITHOUT_TOOLS]


def calls(arguments):
    call = {"id": "a12345678", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def answer(text="5"):
    return {"role": "tool", "name": "add", "tool_call_id": "a12345678", "content": text}


# Arguments of calls


@pytest.mark.parametrize("name", WITH_CALLS)
def test_arguments_are_an_object_also_where_a_row_has_them_as_json_text(name):
    tokenizer = tokenizer_of(name)
    as_text, as_object = (
        [USER, calls(arguments), answer()] for arguments in ('{"a": 2, "b": "x"}', {"a": 2, "b": "x"})
    )
    text = apply_chat_template(tokenizer, as_text)
    assert (
        text
        == apply_chat_template(tokenizer, as_object)
        == render(tokenizer, as_text, None, "", add_generation_prompt=False)
    )
    assert "\\" not in text and '"{' not in text
    assert build_prompt_ids(tokenizer, as_text, None) == build_prompt_ids(tokenizer, as_object, None)
    of_rows = (MultiTurnLossMaskGenerator(tokenizer, "any").get_loss_mask(one) for one in (as_text, as_object))
    assert next(of_rows) == next(of_rows)


# The text after a generated turn


def between(name, messages, end, **kwargs):
    return observation_text(tokenizer_of(name), messages, end, **kwargs)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_the_answer_of_a_tool_follows_a_drawn_call_as_the_template_renders_it(name):
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    head = apply_chat_template(tokenizer, [USER, calls({"a": 2})])
    whole = apply_chat_template(tokenizer, [USER, calls({"a": 2}), answer()], add_generation_prompt=True)
    turn = head.rstrip("\n") + (family.call_end if not head.rstrip("\n").endswith(family.call_end) else "")
    rest = between(name, [{"role": "tool", "name": "add", "content": "5"}], family.call_end)
    if name in ("qwen3", "qwen3.5"):  # reasoning of an earlier turn is not rendered
        assert whole.endswith(rest)
    else:
        assert turn + rest == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_a_question_follows_a_drawn_answer_as_the_template_renders_it(name):
    end = FAMILIES[name].end
    rest = between(name, [{"role": "user", "content": "Sure?"}], end)
    whole = apply_chat_template(
        tokenizer_of(name),
        [USER, {"role": "assistant", "content": "5"}, {"role": "user", "content": "Sure?"}],
        add_generation_prompt=True,
    )
    assert whole.endswith(rest) and "Sure?" in rest
    assert (
        not rest.startswith(tuple(FAMILIES[name].special)) or name not in ("gpt-oss",) or rest.startswith("<|start|>")
    )


def test_a_turn_that_another_token_ended_is_not_ended_once_more():
    rest = (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"5"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    )
    assert between("llama3", [{"role": "tool", "content": "5"}], "<|eom_id|>") == rest
    assert between("llama3", [{"role": "tool", "content": "5"}], "<|eot_id|>") == rest
    assert between("llama3", [{"role": "tool", "content": "5"}], "") == "<|eot_id|>" + rest
    # In a family without an end token, the generated token stays, and the next role begins.
    assert between("glm4", [{"role": "tool", "content": "5"}], "<|user|>").startswith("<|observation|>\n5")


def test_an_agents_prompt_keeps_the_token_that_ended_its_turn():
    tokenizer = tokenizer_of("llama3")
    said = calls({"a": 2})
    prompt = build_prompt_ids(tokenizer, [USER], None)
    drawn = tokenizer.encode('{"name": "add", "parameters": {"a":2}}<|eom_id|>', add_special_tokens=False)
    known = KnownPrefix(messages=[USER, said], ids=prompt + drawn, finish_reason="stop")
    ids = build_prompt_ids(tokenizer, [USER, said, answer()], None, known)
    assert ids[: len(known.ids)] == known.ids
    rest = tokenizer.decode(ids[len(known.ids) :])
    assert rest.startswith("<|start_header_id|>ipython") and "<|eot_id|><|start_header_id|>assistant" in rest


@pytest.mark.parametrize(
    "show",
    [
        lambda tokenizer, messages: build_prompt_ids(tokenizer, messages, None),
        lambda tokenizer, messages: observation_text(tokenizer, messages, "<|im_end|>"),
        lambda tokenizer, messages: MultiTurnLossMaskGenerator(tokenizer, "any").get_loss_mask(messages),
    ],
    ids=["agent", "environment", "mask"],
)
def test_a_role_that_no_template_names_is_refused_wherever_messages_are_rendered(show):
    with pytest.raises(DataError, match="has the role 'bot', which the chat template does not know"):
        show(tokenizer_of("kimi"), [USER, {"role": "bot", "content": "x"}])


def test_the_child_of_the_trial_renders_what_a_job_will():
    from slime.rollout import trial_child

    for name in WITH_CALLS:
        rows = [["row 1", [USER, calls('{"a": 2}'), answer()], {"tools": None}]]
        *_, said = trial_child.answers(tokenizer_of(name), json.loads(json.dumps(rows)), 10_000)
        assert said["text"] == apply_chat_template(tokenizer_of(name), rows[0][1])
