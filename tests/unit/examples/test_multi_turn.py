"""The conversation of a sample with an environment: which tokens, whose they are, where it ends."""

from __future__ import annotations

import asyncio

import pytest

from examples.multi_turn import observation_text, play
from examples.tiny_arithmetic.tokenizer import build_tokenizer
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample
from tests.unit.agent.talking_engine import make_tokenizer

PARAMS = {"temperature": 1.0, "max_new_tokens": 200}
DIALOGUE = [("ask 1", "one"), ("ask 2", "two"), ("done", None)]


def policy(prompt):
    return DIALOGUE[prompt.count("<|im_start|>assistant") - 1][0]


async def environment(turn):
    return dict(DIALOGUE)[turn]


def played(args, sample, params=PARAMS, **keywords):
    return asyncio.run(play(args, sample, params, environment, **({"max_turns": 5} | keywords)))


def test_tokens_are_the_conversation_as_the_template_renders_it(talk, ask):
    sample = played(talk(policy)[0], ask("?"))
    messages = [{"role": "user", "content": "?"}]
    for turn, observation in DIALOGUE:
        messages += [{"role": "assistant", "content": turn}]
        messages += [{"role": "tool", "content": observation}] if observation else []
    rendered = build_tokenizer().apply_chat_template(messages, tokenize=False)
    assert build_tokenizer().decode(sample.tokens) == rendered.removesuffix("\n")
    assert sample.prompt + sample.response == rendered.removesuffix("\n")
    assert sample.status is Sample.Status.COMPLETED and sample.metadata["round_number"] == 3


def test_the_policys_tokens_are_trained_with_the_engines_log_probs_and_no_others(talk, ask):
    args, engine = talk(policy)
    sample = played(args, ask("?"))
    tokenizer = build_tokenizer()
    response = sample.tokens[-sample.response_length :]
    trained = tokenizer.decode([token for token, mask in zip(response, sample.loss_mask, strict=True) if mask])
    assert trained == "ask 1<|im_end|>ask 2<|im_end|>done<|im_end|>"
    assert [log_prob != 0.0 for log_prob in sample.rollout_log_probs] == [mask == 1 for mask in sample.loss_mask]
    script = engine.script
    per_turn = [script.log_probs_of([*tokenizer.encode(turn), tokenizer.eos_token_id], 0) for turn, _ in DIALOGUE]
    drawn = [value for value in sample.rollout_log_probs if value]
    assert drawn == [value for values in per_turn for value in values]


def test_each_request_sends_the_tokens_so_far_and_what_is_left_of_the_limit(talk, ask):
    args, engine = talk(policy)
    sample = played(args, ask("?"))
    payloads = engine.payloads
    assert len(payloads) == len(sample.weight_versions) == 3
    num_prompt = len(sample.tokens) - sample.response_length
    for payload in payloads:
        length = len(payload["input_ids"])
        assert payload["input_ids"] == sample.tokens[:length]
        assert payload["sampling_params"]["max_new_tokens"] == 200 - (length - num_prompt)
    assert PARAMS["max_new_tokens"] == 200


def test_a_policy_that_never_ends_is_cut_after_its_last_turn(talk, ask):
    sample = played(talk(policy)[0], ask("?"), max_turns=2)
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.response.endswith("ask 2<|im_end|>") and sample.loss_mask[-1] == 1


def test_an_observation_without_room_behind_it_is_left_out(talk, ask):
    first = len(build_tokenizer().encode("ask 1")) + 1
    observation = build_tokenizer().encode(observation_text(build_tokenizer(), "one", "tool"))
    for limit, response in ((first + len(observation), first), (first + len(observation) + 1, None)):
        sample = played(talk(policy)[0], ask("?"), {"max_new_tokens": limit})
        assert sample.status is Sample.Status.TRUNCATED
        assert sample.response_length == (response or limit)
        GenerateState.clear_instances()


def test_the_context_limit_counts_the_prompt(talk, ask):
    num_prompt = len(build_tokenizer().encode(ask("?").prompt))
    sample = played(talk(policy, rollout_max_context_len=num_prompt + 4)[0], ask("?"))
    assert sample.status is Sample.Status.TRUNCATED
    assert (len(sample.tokens), sample.response) == (num_prompt + 4, "ask ")


@pytest.mark.parametrize("after", [2, 5])
def test_a_turn_that_was_aborted_is_continued_where_it_stopped(talk, ask, after):
    whole = played(talk(policy)[0], ask("?"))
    GenerateState.clear_instances()

    second_turn = lambda request: after if len(request.prompt) > 20 + after else None  # noqa: E731
    args, engine = talk(policy, script={"hold_after": second_turn, "holds": 2})
    sample = ask("?")

    async def abort_it():
        task = asyncio.create_task(play(args, sample, PARAMS, environment, max_turns=5))
        while engine.calls["/generate"] < 2 or not engine.in_flight:
            await asyncio.sleep(0.01)
        await post(f"{engine.url}/abort_request", {"abort_all": True})
        return await task

    assert asyncio.run(abort_it()).status is Sample.Status.ABORTED
    assert 0 < sample.response_length < whole.response_length
    engine.script.hold_after = None
    continued = played(args, sample)
    assert continued.tokens == whole.tokens and continued.loss_mask == whole.loss_mask
    assert continued.status is Sample.Status.COMPLETED and continued.metadata["round_number"] == 3


def test_an_observation_is_what_the_template_makes_of_it():
    assert observation_text(build_tokenizer(), "x", "tool") == (
        "\n<|im_start|>tool\nx<|im_end|>\n<|im_start|>assistant\n"
    )
    assert observation_text(make_tokenizer(), "x", "tool") == (
        "\n<|im_start|>user\n<tool_response>x</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_without_an_end_of_turn_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(ValueError, match="needs a template of that kind"):
        observation_text(tokenizer, "x", "tool")
