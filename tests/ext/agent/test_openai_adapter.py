"""The OpenAI adapter, driven by the real ``openai`` client, with an engine that speaks SGLang's protocol."""

from __future__ import annotations

import asyncio
import threading
import time

import openai
import pytest

from slime.agent.adapters import OpenAIAdapter, common, engine
from slime.utils.aiohttp_threaded import run_app_in_thread
from slime.utils.types import Sample
from tests.eventually import wait_until
from tests.scripted_engine.script import Fault
from tests.unit.talking_engine import EOS, TalkingEngine

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "a + b",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
CALL = '<think>\nI need the tool.\n</think>\n\n<tool_call>\n{"name":"add","arguments":{"a":1,"b":2}}\n</tool_call>'
ANSWER = "<think>\nEasy.\n</think>\n\nThe tool says 3."


def calculator(prompt):
    """Calls the tool first and answers when it has the result."""
    return ANSWER if "<tool_response>" in prompt.rpartition("<|im_start|>user")[2] else CALL


class Setup:
    """Engine, adapter and a client."""

    def __init__(self, tokenizer, say=calculator, *, script=None, session=None, **kwargs):
        self.engine = TalkingEngine(tokenizer, say, **(script or {}))
        self.engine.start()
        self.adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url=f"{self.engine.url}/generate", **kwargs)
        self.adapter.open_session("s1", **(session or {}))
        self.server = run_app_in_thread(self.adapter.app, host="127.0.0.1")
        self.clients = []

    def client(self, sid="s1", **kwargs):
        url = f"http://127.0.0.1:{self.server.port}/v1"
        made = openai.OpenAI(base_url=url, api_key=sid, timeout=20, **{"max_retries": 0, **kwargs})
        self.clients.append(made)
        return made

    def finish(self, sid="s1", **kwargs):
        base = Sample(index=7, group_index=3, prompt="p", label="l")
        return asyncio.run(self.adapter.finish_session(sid, base_sample=base, **kwargs))

    def close(self):
        for client in self.clients:
            client.close()
        self.server.stop()
        self.engine.stop()


@pytest.fixture
def setup(tokenizer):
    made = []

    def make(*args, **kwargs):
        made.append(Setup(tokenizer, *args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ask(client, messages, **kwargs):
    return client.chat.completions.create(model="policy", messages=messages, **kwargs)


def play(client, stream=False):
    """Two turns: the tool call, and the answer."""
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    first = ask(client, messages, tools=TOOLS).choices[0]
    messages.append(first.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "3"})
    return first, ask(client, messages, tools=TOOLS).choices[0]


def test_a_call_of_a_tool_reaches_the_client_in_openais_form(setup):
    first, second = play(setup().client())
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    assert first.message.tool_calls[0].function.name == "add"
    assert first.message.tool_calls[0].function.arguments == '{"a": 1, "b": 2}'
    assert first.message.reasoning_content == "I need the tool."
    assert (second.finish_reason, second.message.content) == ("stop", "The tool says 3.")


def test_two_turns_become_one_sample_of_exactly_the_tokens_that_were_drawn(setup, tokenizer):
    world = setup()
    play(world.client())
    (sample,) = world.finish(reward=0.5, extra_metadata={"task": "add"})
    first, second = [payload["input_ids"] for payload in world.engine.payloads]
    replies = world.engine.script.replies
    reply_1, reply_2 = replies[tuple(first)], replies[tuple(second)]
    assert sample.tokens == second + reply_2  # what the engine saw, and what it generated
    assert second[: len(first) + len(reply_1)] == first + reply_1  # not encoded again
    observation = len(second) - len(first) - len(reply_1)
    assert sample.loss_mask == [1] * len(reply_1) + [0] * observation + [1] * len(reply_2)
    assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs)
    drawn = world.engine.script.log_probs_of(reply_1, 0)
    assert sample.rollout_log_probs[: len(reply_1)] == pytest.approx(drawn)
    assert set(sample.rollout_log_probs[len(reply_1) : len(reply_1) + observation]) == {0.0}
    assert tokenizer.decode(second[len(first) + len(reply_1) :]) == (
        "\n<|im_start|>user\n<tool_response>3</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert sample.response.startswith(CALL + EOS)
    assert (sample.index, sample.group_index, sample.rollout_id, sample.label) == (7, 3, 7, "l")
    assert (sample.reward, sample.status, sample.weight_versions) == (0.5, Sample.Status.COMPLETED, ["default"] * 2)
    facts = {key: sample.metadata[key] for key in ("task", "use_tool", "ill_formed", "truncated")}
    assert facts == {"task": "add", "use_tool": True, "ill_formed": False, "truncated": False}


def test_a_session_ends_once_and_then_refuses(setup):
    world = setup()
    with pytest.raises(ValueError, match="is open already"):
        world.adapter.open_session("s1")
    play(world.client())
    assert len(world.finish()) == 1
    assert world.finish() == []
    # The official client would retry a 503; the answer's headers forbid it.
    began = time.monotonic()
    with pytest.raises(openai.InternalServerError) as refused:
        ask(world.client(max_retries=5), [{"role": "user", "content": "more"}])
    assert refused.value.status_code == 503
    assert time.monotonic() - began < 10


def test_a_stream_says_the_same_as_an_answer_in_one_piece(setup):
    client = setup().client()
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, messages, tools=TOOLS, **options))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert calls[0].function.name == "add"
    assert "".join(call.function.arguments for call in calls) == '{"a": 1, "b": 2}'
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "I need the tool."
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.completion_tokens > 20


def test_a_hung_engine_is_a_timeout(setup):
    world = setup(script={"faults": [Fault(kind="hang")]}, generate_timeout_s=1.0)
    with pytest.raises(openai.InternalServerError) as late:
        ask(world.client(), [{"role": "user", "content": "hi"}])
    assert late.value.status_code == 504


def test_a_template_without_an_end_is_a_timeout(setup, monkeypatch):
    monkeypatch.setattr(common, "PROMPT_TIMEOUT_S", 0.2)
    world = setup()
    release = threading.Event()
    monkeypatch.setattr(common, "build_prompt_ids", lambda *_, **__: release.wait(30))
    with pytest.raises(
        openai.InternalServerError, match="chat template .* is still running.*chat_template.jinja"
    ) as late:
        ask(world.client(), [{"role": "user", "content": "hi"}])
    release.set()
    assert late.value.status_code == 504


def test_an_engine_that_answers_nonsense_is_a_bad_gateway(setup):
    world = setup(script={"faults": [Fault(kind="empty")]})
    with pytest.raises(openai.InternalServerError, match="meta_info") as broken:
        ask(world.client(), [{"role": "user", "content": "hi"}])
    assert broken.value.status_code == 502
    assert world.finish() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 2}, "one answer"),
        ({"max_tokens": 0}, "positive"),
        ({"messages": []}, "at least one"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_reason(setup, change, message):
    request = {"messages": [{"role": "user", "content": "hi"}], **change}
    with pytest.raises(openai.BadRequestError, match=message):
        ask(setup().client(), **request)


def test_a_prompt_beyond_the_context_is_refused_and_the_sample_is_marked(setup):
    world = setup(lambda prompt: "ok", session={"max_context_tokens": 60})
    client = world.client()
    ask(client, [{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="prompt is too long") as refused:
        ask(client, [{"role": "user", "content": "hi" * 100}])
    assert refused.value.code == "context_length_exceeded"
    (sample,) = world.finish()
    assert sample.metadata["truncated"]


def test_sampling_comes_from_the_session_then_the_request_then_what_the_session_insists_on(setup):
    defaults = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 50, "stop": ["END"]}
    session = {"sampling_defaults": defaults, "sampling_overrides": {"temperature": 1.0}}
    world = setup(lambda prompt: "ok", session=session)
    ask(world.client(), [{"role": "user", "content": "hi"}], temperature=0.1, top_p=0.5, max_tokens=90, stop="X")
    sent = world.engine.payloads[0]["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["max_new_tokens"]) == (1.0, 0.5, 50)
    assert sent["stop"] == ["X", "END"]
    assert world.engine.headers[0]["X-SMG-Routing-Key"] == "s1"


def test_an_aborted_turn_goes_on_and_says_which_weights_drew_what(setup, monkeypatch):
    monkeypatch.setattr(engine, "RESUME_WAIT_S", 0.05)
    world = setup(lambda prompt: "a long answer", script={"hold_after": 5, "holds": 1})

    def update():
        wait_until(lambda: world.engine.in_flight, "a request in flight")
        world.engine.loop.call_soon_threadsafe(world.engine._abort, {"abort_all": True})

    def new_weights(request):
        world.engine.weight_version = str(request.number + 1)

    world.engine.on_request = new_weights
    thread = threading.Thread(target=update)
    thread.start()
    answer = ask(world.client(), [{"role": "user", "content": "hi"}]).choices[0]
    thread.join()
    assert answer.message.content == "a long answer"
    assert len(world.engine.payloads) == 2
    (sample,) = world.finish(mask_off_policy=True)
    assert sample.weight_versions == ["1", "2"]
    assert sample.metadata["weight_spans"] == [("1", 0, 5), ("2", 5, 14)]
    assert sample.loss_mask == [0] * 5 + [1] * 9


def test_a_turn_in_flight_is_cancelled_when_its_session_ends(setup):
    world = setup(script={"faults": [Fault(kind="hang")]})
    statuses = []

    def request():
        try:
            ask(world.client(), [{"role": "user", "content": "hi"}])
        except openai.APIStatusError as error:
            statuses.append(error.status_code)

    thread = threading.Thread(target=request)
    thread.start()
    wait_until(lambda: world.engine.calls["/generate"], "a request")
    assert world.finish(wait_timeout=0.1) == []
    thread.join(10)
    assert statuses == [503]


def test_an_answer_that_dropped_its_reasoning_goes_on_from_the_tokens_of_the_template(setup):
    world = setup(lambda prompt: ANSWER)
    client = world.client()
    messages = [{"role": "user", "content": "one"}]
    messages.append({"role": "assistant", "content": ask(client, messages).choices[0].message.content})
    messages.append({"role": "user", "content": "two"})
    ask(client, messages)
    # The template drops reasoning before a new user message, so the first answer's tokens leave the sample.
    (sample,) = world.finish()
    first, second = [payload["input_ids"] for payload in world.engine.payloads]
    assert sample.tokens[: len(second)] == second
    assert sample.effective_response_length < 2 * len(world.engine.script.replies[tuple(first)])
    trained = [
        token for token, on in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if on
    ]
    assert trained[-len(world.engine.script.replies[tuple(second)]) :] == world.engine.script.replies[tuple(second)]
