"""Which grader grades a sample, and the reward server client against a real server."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

import pytest
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from slime.rollout import rm_hub
from slime.rollout.rm_hub import async_rm, batched_async_rm, remote
from slime.utils.errors import GraderError
from slime.utils.types import Sample
from tests.http_server import served

NAMES = Namespace(custom_rm_path=None, rm_type=None, rm_url=None, unsafe_local_sandbox=False)


def args(**flags: Any) -> Namespace:
    return Namespace(**(vars(NAMES) | flags))


async def whole_list(args: Namespace, sample: Any, **kwargs: Any) -> Any:
    """A custom reward function: each reward is the number of samples in the call."""
    return [len(sample)] * len(sample) if isinstance(sample, list) else -1


CUSTOM = f"{__name__}.whole_list"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setattr("slime.rollout.rm_hub.load_function", {CUSTOM: whole_list}.__getitem__)


@pytest.mark.parametrize(
    ("flags", "fields", "reward"),
    [
        ({"rm_type": "math"}, {}, 1),
        ({"rm_type": "deepscaler"}, {}, 0),
        ({"rm_type": "dapo"}, {}, {"score": -1.0, "acc": False, "pred": "[INVALID]"}),
        ({"rm_type": "f1"}, {}, 0.4),
        ({"rm_type": "boxed_f1"}, {}, 1.0),
        ({"rm_type": "boxed_f1"}, {"response": "no box"}, 0.0),
        ({"rm_type": "math"}, {"metadata": {"rm_type": "boxed_f1"}}, 1.0),
        ({"rm_type": "math", "custom_rm_path": CUSTOM}, {}, -1),
        ({"rm_type": "math"}, {"custom_rm_path": CUSTOM}, -1),
    ],
)
def test_the_most_special_setting_chooses_the_grader(flags, fields, reward):
    sample = Sample(**({"response": "so \\boxed{7 ducks}", "label": "7 ducks"} | fields))
    response = sample.response
    assert asyncio.run(async_rm(args(**flags), sample)) == reward
    assert sample.response == response


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The folder of a tokenizer whose end tokens are not Qwen's."""
    words = {word: number for number, word in enumerate(["a", "<|eot|>", "<end_of_turn>", "</s>", "</answer>"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="a"))
    backend.add_special_tokens([AddedToken(word, special=True) for word in words if word != "a"])
    folder = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("end", ["<|eot|>", "</s>", "<end_of_turn>\n</s> \n", "<|eot|>" * 3])
@pytest.mark.parametrize(
    ("rm_type", "response", "label", "reward"),
    [
        ("f1", "Paris", "Paris", 1.0),
        ("dapo", "Answer: 42", "42", 1.0),
        ("gpqa", "the answer is b", "B", 1.0),
        ("math", "\\boxed{42}", "42", 1),
    ],
)
def test_no_built_in_grader_reads_the_end_tokens_of_the_model(model, rm_type, response, label, reward, end):
    sample = Sample(response=response + end, label=label)
    graded = asyncio.run(async_rm(args(rm_type=rm_type, hf_checkpoint=model), sample))
    assert (graded["score"] if rm_type == "dapo" else graded) == reward
    assert sample.response == response + end


@pytest.mark.parametrize("rm_type", ["ifbench", "gym"])
def test_what_grades_elsewhere_gets_the_text_without_end_tokens(model, rm_type, monkeypatch):
    """A closing tag is part of the answer, even if it is a special token."""
    asked: list[str] = []
    monkeypatch.setitem(rm_hub._GRADERS, "ifbench", lambda sample: asked.append(sample.response))
    monkeypatch.setattr(rm_hub, "score_gym", lambda sample, is_unsafe: asked.append(sample.response))
    sample = Sample(response="</s> <answer>3 </answer><|eot|>\n")
    asyncio.run(async_rm(args(rm_type=rm_type, hf_checkpoint=model), sample))
    assert asked == ["</s> <answer>3 </answer>"]


def test_a_function_or_server_of_the_user_gets_the_sample_as_it_is(model, monkeypatch):
    async def same(args: Namespace, sample: Sample, **kwargs: Any) -> float:
        assert sample is given
        return 0.5

    monkeypatch.setattr("slime.rollout.rm_hub.load_function", lambda path: same)
    given = Sample(response="Paris<|eot|>")
    assert asyncio.run(async_rm(args(custom_rm_path="mine.same", hf_checkpoint=model), given)) == 0.5
    monkeypatch.setattr(rm_hub, "remote_rm", same)
    assert asyncio.run(async_rm(args(rm_type="remote_rm", hf_checkpoint=model), given)) == 0.5


@pytest.mark.parametrize("rm_type", [None, "maths", "boxed_maths"])
def test_an_unknown_grader_is_refused_with_the_known_names(rm_type):
    with pytest.raises(NotImplementedError, match="remote_rm, gym, deepscaler, dapo, math, f1, gpqa, ifbench, random"):
        asyncio.run(async_rm(args(rm_type=rm_type), Sample()))


def test_a_batch_is_one_call_of_a_custom_function_and_else_one_each():
    samples = [Sample(response="\\boxed{1}", label="1"), Sample(response="\\boxed{2}", label="1")]
    assert asyncio.run(batched_async_rm(args(custom_rm_path=CUSTOM), samples)) == [2, 2]
    assert asyncio.run(batched_async_rm(args(rm_type="math"), samples)) == [1, 0]


def serve(
    answers: list[web.Response], flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[Any]]:
    """Grade one sample by a server that gives ``answers`` in turn; return the reward and the server's requests."""
    asked: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return answers[len(asked) - 1]

    async def no_wait(seconds: float) -> None:
        asked.append(seconds)
        answers.insert(len(asked) - 1, web.Response())

    async def main() -> Any:
        sample = Sample(prompt="p", response="r", label="l")
        async with served(handle) as port:
            with monkeypatch.context() as quick:
                quick.setattr(remote.asyncio, "sleep", no_wait)
                return await rm_hub.remote_rm(args(rm_url=f"http://127.0.0.1:{port}/"), sample, **flags)

    return asyncio.run(main()), asked


def test_the_reward_server_gets_prompt_response_and_label(monkeypatch):
    reward, asked = serve([web.json_response({"score": 2})], {}, monkeypatch)
    assert reward == {"score": 2} and asked == [{"prompt": "p", "response": "r", "label": "l"}]


def test_a_failing_reward_server_is_asked_again_after_a_growing_wait(monkeypatch):
    reward, asked = serve(
        [web.Response(status=500), web.Response(status=500), web.json_response(1.5)], {}, monkeypatch
    )
    waits = [entry for entry in asked if isinstance(entry, float)]
    assert reward == 1.5 and 1 <= waits[0] <= 2 <= waits[1] <= 3


def test_a_reward_server_that_always_fails_is_an_error(monkeypatch):
    with pytest.raises(GraderError, match="failed 2 times"):
        serve([web.Response(status=500), web.Response(status=500)], {"max_retries": 2}, monkeypatch)
