"""The conversation of a sample with an environment: its tokens, which are trained, where it ends."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from argparse import Namespace

import pytest

from examples.multi_turn import GuessNumber
from examples.tiny_arithmetic.tokenizer import build_tokenizer
from slime.ext.environments.flags import GROUP, MULTI_TURN, derive_turns
from slime.ext.environments.multi_turn import EnvironmentFailure, check_tools_and_environment, converse, generate
from slime.ext.environments.multi_turn import observation_text as text_between
from slime.flags.parse import GROUPS, build_parser
from slime.rollout import tools
from slime.rollout.prompt_dataset import Dataset
from slime.rollout.rm_hub.policy import FAILURES
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.errors import ConfigError
from slime.utils.http_utils import post
from slime.utils.types import Sample
from tests.eventually import until
from tests.unit.talking_engine import make_tokenizer

PARAMS = {"temperature": 1.0, "max_new_tokens": 200}
DIALOGUE = [("ask 1", "one"), ("ask 2", "two"), ("done", None)]


def observation_text(tokenizer, content, role):
    return text_between(tokenizer, [{"role": role, "content": content}], "<|im_end|>")


def policy(prompt):
    return DIALOGUE[prompt.count("<|im_start|>assistant") - 1][0]


async def environment(turn):
    return dict(DIALOGUE)[turn]


SERVER_STARTS = threading.Event()


def read_when_started(path):
    assert SERVER_STARTS.wait(20)
    yield {"type": "function", "function": {"name": path, "parameters": {}}}, print


def test_the_event_loop_runs_while_the_servers_of_tools_start(talk, ask):
    args, _ = talk(policy, rollout_tools=["slow"], tool_readers={"slow": f"{__name__}.read_when_started"})

    async def start_meanwhile():
        playing = asyncio.create_task(generate(args, ask("?"), PARAMS))
        await asyncio.sleep(0.05)
        SERVER_STARTS.set()
        return await playing

    assert asyncio.run(start_meanwhile()).status is Sample.Status.COMPLETED


def played(args, sample, params=PARAMS, **keywords):
    return asyncio.run(converse(args, sample, params, environment, **({"max_turns": 5} | keywords)))


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


def test_an_observation_without_room_behind_it_is_left_out(talk, ask):
    first = len(build_tokenizer().encode("ask 1")) + 1
    observation = build_tokenizer().encode(observation_text(build_tokenizer(), "one", "tool"))
    for limit, response in ((first + len(observation), first), (first + len(observation) + 1, None)):
        sample = played(talk(policy)[0], ask("?"), {"max_new_tokens": limit})
        assert sample.status is Sample.Status.TRUNCATED
        assert sample.response_length == (response or limit)
        GenerateState.clear_instances()


async def aborted_in_its_second_turn(engine, call):
    task = asyncio.create_task(call)
    await until(lambda: engine.calls["/generate"] >= 2 and engine.in_flight, "the second request")
    await post(f"{engine.url}/abort_request", {"abort_all": True})
    return await task


@pytest.mark.parametrize("after", [2, 5])
def test_a_turn_that_was_aborted_is_continued_where_it_stopped(talk, ask, after):
    whole = played(talk(policy)[0], ask("?"))
    GenerateState.clear_instances()

    second_turn = lambda request: after if len(request.prompt) > 20 + after else None  # noqa: E731
    args, engine = talk(policy, script={"hold_after": second_turn, "holds": 2})
    sample = ask("?")

    call = converse(args, sample, PARAMS, environment, max_turns=5)
    assert asyncio.run(aborted_in_its_second_turn(engine, call)).status is Sample.Status.ABORTED
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


def test_the_end_of_a_turn_is_rendered_where_a_stop_string_ended_it():
    assert text_between(build_tokenizer(), [{"role": "tool", "content": "x"}], "").startswith(
        "<|im_end|>\n<|im_start|>"
    )


def test_a_template_that_leaves_out_earlier_turns_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[-1].role }}: {{ messages[-1].content }}"
    with pytest.raises(ConfigError, match="leaves out a turn of the assistant"):
        observation_text(tokenizer, "x", "tool")


# Tools


def double(number: int) -> int:
    """Double a number.

    Args:
        number: any.
    """
    return 2 * number


async def slow(number: int) -> str:
    """Wait for the other call of the turn.

    Args:
        number: any.
    """
    BARRIER.append(number)
    while len(BARRIER) < 2:
        await asyncio.sleep(0.001)
    return f"slow {number}"


def search(number: int) -> str:
    """Ask a server that does not answer it.

    Args:
        number: any.
    """
    raise TimeoutError("the server is busy")


def leave(number: int) -> str:
    """End the process.

    Args:
        number: any.
    """
    sys.exit(number)


async def leave_slowly(number: int) -> str:
    """End the process.

    Args:
        number: any.
    """
    await asyncio.sleep(0)
    sys.exit(number)


def grid(number: int) -> dict:
    """Return what JSON has no text for.

    Args:
        number: any.
    """
    return {(0, number): "x"}


def tree(number: int) -> dict:
    """Return what holds itself.

    Args:
        number: any.
    """
    node: dict = {number: None}
    node[number] = node
    return node


BARRIER = []
HERE = __name__


def call_text(name, **arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def turns(*texts):
    """A policy that says these texts, one per turn."""
    return lambda prompt: texts[prompt.count("<|im_start|>assistant") - 1]


def generated(args, sample, params=PARAMS):
    return asyncio.run(generate(args, sample, params))


def test_the_calls_of_a_turn_are_answered_at_the_same_time_each_by_a_message(talk, ask):
    BARRIER.clear()
    say = turns(call_text("slow", number=1) + call_text("slow", number=2) + call_text("double", number=4), "done")
    sample = generated(
        talk(say, rollout_tools=[f"{HERE}.slow", f"{HERE}.double"])[0], ask("?"), {"max_new_tokens": 400}
    )
    observed = "".join(f"<|im_start|>tool\n{text}<|im_end|>\n" for text in ("slow 1", "slow 2", "8"))
    assert f"<|im_end|>\n{observed}<|im_start|>assistant\ndone" in sample.response
    tokenizer = build_tokenizer()
    masked = [
        token
        for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True)
        if not mask
    ]
    assert tokenizer.decode(masked) == f"\n{observed}<|im_start|>assistant\n"
    assert sample.status is Sample.Status.COMPLETED and sample.reward is None


def test_a_tool_that_takes_too_long_is_answered_with_that(talk, ask):
    BARRIER.clear()
    args = talk(turns(call_text("slow", number=1), "done"), rollout_tools=[f"{HERE}.slow"], turn_timeout_s=0.05)[0]
    assert "Error: TimeoutError: no answer within 0.05 s (--turn-timeout-s)" in generated(args, ask("?")).response


@pytest.mark.parametrize(
    ("tool", "answer"),
    [
        ("leave", "Error: RuntimeError: it called exit(3)"),
        ("leave_slowly", "Error: RuntimeError: it called exit(3)"),
        ("grid", "Error: TypeError: keys must be str"),
        ("tree", "Error: ValueError: Circular reference detected"),
    ],
)
def test_a_tool_that_exits_or_answers_what_json_cannot_say_is_answered_with_its_error(talk, ask, tool, answer):
    args = talk(turns(call_text(tool, number=3), "done"), rollout_tools=[f"{HERE}.{tool}"])[0]
    sample = generated(args, ask("?"))
    assert answer in sample.response and sample.response.endswith("done<|im_end|>")


def test_what_is_offered_comes_from_signature_and_docstring():
    args = build_parser(with_engine_flags=False, groups=(*GROUPS, GROUP)).parse_args(
        ["--rollout-tools", f"{HERE}.double"]
    )
    derive_turns(args)
    assert args.custom_generate_function_path == MULTI_TURN
    (schema,) = tools.toolbox(tools.TurnsConfig.of(args)).schemas
    assert schema["function"] == {
        "name": "double",
        "description": "Double a number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "any."}},
            "required": ["number"],
        },
        "return": {"type": "integer"},
    }


def test_the_prompt_offers_the_tools_whoever_renders_it(tmp_path, talk):
    tokenizer = make_tokenizer()
    (tmp_path / "rows.jsonl").write_text('{"text": "hi"}\n')
    offered = tools.toolbox(tools.TurnsConfig.of(Namespace(rollout_tools=[f"{HERE}.double"]))).schemas
    rendered = (
        Dataset(str(tmp_path / "rows.jsonl"), tokenizer, None, None, apply_chat_template=True, tools=offered)
        .samples[0]
        .prompt
    )
    assert rendered.startswith("<|im_start|>system\nTools: [{") and "Double a number." in rendered
    args = talk(lambda prompt: "done", rollout_tools=[f"{HERE}.double"])[0]
    GenerateState(args).tokenizer.chat_template = tokenizer.chat_template
    sample = generated(args, Sample(prompt=[{"role": "user", "content": "hi"}]))
    assert build_tokenizer().decode(sample.tokens[: -sample.response_length]) == rendered


@pytest.mark.parametrize("path", [f"{HERE}.missing", f"{HERE}.turns", f"{HERE}.HERE"])
def test_a_tool_that_cannot_be_described_is_refused(path):
    with pytest.raises(ConfigError, match=f"--rollout-tools {path} cannot be offered.*docstring"):
        check_tools_and_environment(Namespace(rollout_tools=[path]))


def test_a_template_that_leaves_tools_out_is_refused_unless_the_command_says_so(tmp_path):
    tokenizer = make_tokenizer()
    args = Namespace(
        rollout_tools=[f"{HERE}.double"], hf_checkpoint=str(tmp_path), apply_chat_template_kwargs=None,
    )  # fmt: skip
    tokenizer.save_pretrained(tmp_path)
    check_tools_and_environment(args)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ConfigError, match="leaves them out"):
        check_tools_and_environment(args)
    args.apply_chat_template_kwargs = {"tools": None}
    check_tools_and_environment(args)


# Environments

GUESS = f"{GuessNumber.__module__}.GuessNumber"


def guesser(prompt):
    """Halve the interval, as far as the prompt tells."""
    low, high = 1, 100
    for guess, said in re.findall(r"assistant\n(\d+)<\|im_end\|>\n<\|im_start\|>user\n(\w+)", prompt):
        low, high = (int(guess) + 1, high) if said == "higher" else (low, int(guess) - 1)
    return str((low + high) // 2)


def asking():
    return Sample(index=3, group_index=1, prompt=[{"role": "user", "content": "play"}])


def test_an_environment_is_played_to_its_end_and_gives_the_reward(talk):
    args, engine = talk(guesser, rollout_environment=GUESS)
    sample = generated(args, asking())
    prompt = build_tokenizer().decode(engine.payloads[0]["input_ids"])
    asked = "play\n\nGuess my number, from 1 to 100."
    assert prompt == f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    number = GuessNumber()
    number.reset(seed=1)
    assert sample.metadata["turns"][-1] == str(number.number) and len(sample.metadata["turns"]) > 1
    assert sample.reward == pytest.approx(1 / sample.metadata["round_number"])
    assert sample.status is Sample.Status.COMPLETED and not sample.remove_sample


def test_a_named_grader_finds_the_rewards_in_the_metadata(talk):
    sample = generated(talk(guesser, rollout_environment=GUESS, custom_rm_path="a.b")[0], asking())
    assert sample.reward is None and sample.metadata["environment_reward"] > 0


def test_an_interrupted_sample_goes_on_in_an_environment_that_is_where_it_was(talk):
    whole = generated(talk(guesser, rollout_environment=GUESS)[0], asking())
    GenerateState.clear_instances()
    second_turn = lambda request: 1 if build_tokenizer().decode(request.prompt).count("assistant") == 2 else None  # noqa: E731
    args, engine = talk(guesser, script={"hold_after": second_turn, "holds": 2}, rollout_environment=GUESS)
    sample = asyncio.run(aborted_in_its_second_turn(engine, generate(args, asking(), PARAMS)))
    assert sample.status is Sample.Status.ABORTED and sample.reward is None
    engine.script.hold_after = None
    sample = generated(args, Sample.from_dict(json.loads(json.dumps(sample.to_dict()))))
    assert (sample.tokens, sample.loss_mask, sample.reward) == (whole.tokens, whole.loss_mask, whole.reward)


class Breaks(GuessNumber):
    """Fails at the step or the reset named in ``options``."""

    closed = 0

    def reset(self, *, seed=None, options=None):
        self.at = options["at"]
        if self.at == "reset":
            raise RuntimeError("no table")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.at == "step":
            raise RuntimeError("no chair")
        if self.at == "exit":
            sys.exit("no room")
        if self.at == "shape":
            return "only text"
        if self.at == "hang":
            time.sleep(1.5)
        return super().step(action)

    def close(self):
        Breaks.closed += 1


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("reset", "Breaks.reset: RuntimeError: no table"),
        ("step", "Breaks.step: RuntimeError: no chair"),
        ("exit", "Breaks.step: RuntimeError: it called exit('no room')"),
        ("shape", "Breaks.step returned 'only text', not a tuple of 5 values"),
        ("hang", "no answer within 1 s"),
    ],
)
def test_an_environment_that_breaks_costs_its_sample_and_no_other(talk, at, message):
    args = talk(guesser, rollout_environment=f"{HERE}.Breaks", turn_timeout_s=1.0)[0]
    samples = [asking(), asking()]
    samples[0].metadata["at"], samples[1].metadata["at"] = at, None
    closed = Breaks.closed

    async def both():
        return await asyncio.gather(*(generate(args, sample, PARAMS) for sample in samples))

    broken, whole = asyncio.run(both())
    assert broken.status is Sample.Status.FAILED and broken.remove_sample and broken.reward == 0.0
    assert (
        message in broken.metadata["reward_error"] and EnvironmentFailure.__name__ in broken.metadata["reward_error"]
    )
    assert 0 < broken.response_length < len(broken.tokens) and len(broken.loss_mask) == broken.response_length
    assert whole.status is Sample.Status.COMPLETED and whole.reward > 0
    assert Breaks.closed == closed + 2
    FAILURES.succeeded()
