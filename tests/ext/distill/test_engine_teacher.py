"""The teacher behind an SGLang server: its requests, and the use of its answers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from slime.ext.distill.engine_teacher import post_process_rewards, reward_func
from slime.rollout.rm_hub import async_rm, remote
from slime.utils.async_utils import run
from slime.utils.errors import DataError, GraderError
from slime.utils.http_utils import close_http_client
from slime.utils.types import Sample
from tests.scripted_engine.script import Fault, Script
from tests.scripted_engine.server import ScriptedEngine


@pytest.fixture
def teacher(monkeypatch) -> Iterator[ScriptedEngine]:
    monkeypatch.setattr(remote, "MAX_WAIT_S", -1.0)  # no wait between attempts
    monkeypatch.setattr(remote.random, "random", lambda: 1.01)
    engine = ScriptedEngine(Script(log_prob=lambda token, position: -token / 10 - position))
    engine.start()
    yield engine
    run(close_http_client())
    engine.stop()


def arguments(engine: ScriptedEngine, **overrides: Any) -> Namespace:
    return Namespace(**({"rm_url": f"{engine.url}/generate", "rollout_temperature": 0.7} | overrides))


def sample(response_length: int = 3) -> Sample:
    return Sample(index=4, tokens=[11, 12, 13, 14, 15], response_length=response_length)


def test_the_teacher_reads_the_whole_sample_and_draws_nothing(teacher):
    answer = run(reward_func(arguments(teacher), sample()))
    [payload] = teacher.payloads
    assert payload == {
        "input_ids": [11, 12, 13, 14, 15],
        "sampling_params": {"temperature": 0.7, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    assert [entry[1] for entry in answer["meta_info"]["input_token_logprobs"]] == [11, 12, 13, 14, 15]


@pytest.mark.parametrize("response_length", [0, 1, 3, 4])
def test_the_log_probs_of_the_response_become_the_teachers(teacher, response_length):
    samples = [sample(response_length)]
    samples[0].reward = run(reward_func(arguments(teacher), samples[0]))
    assert post_process_rewards(arguments(teacher), samples) == ([0.0], [0.0])
    expected = [-token / 10 - position for position, token in enumerate([11, 12, 13, 14, 15])]
    assert samples[0].teacher_log_probs == pytest.approx(expected[5 - response_length :])


def test_the_key_of_evaluations_is_not_looked_for_in_the_teachers_answer(teacher):
    module = reward_func.__module__
    hooks = {"custom_rm_path": f"{module}.reward_func", "custom_reward_post_process_path": f"{module}.post_process"}
    args = arguments(teacher, eval_reward_key="score", **hooks)
    answered, failed = sample(), sample()
    answered.reward = run(async_rm(args, answered))
    args.rm_url = "http://127.0.0.1:9/generate"
    failed.reward = run(async_rm(args, failed))
    post_process_rewards(args, [answered, failed])
    assert len(answered.teacher_log_probs) == 3 and not answered.remove_sample
    assert failed.remove_sample and "reward_error" in failed.metadata


def test_a_teacher_with_other_tokens_is_noticed():
    entries = [[None, 11, None], [-1.0, 12, None], [-1.0, 13, None], [-1.0, 14, None], [-1.0, 99, None]]
    wrong = sample()
    wrong.reward = {"meta_info": {"input_token_logprobs": entries}}
    with pytest.raises(DataError, match="read token 99.*where sample 4 has 15"):
        post_process_rewards(Namespace(), [wrong])


def test_a_sample_without_an_answer_is_not_trained(caplog):
    lost = sample()
    lost.reward = 0
    post_process_rewards(Namespace(), [lost])
    assert lost.remove_sample and lost.teacher_log_probs == [0.0, 0.0, 0.0]
    assert "Sample 4 has no response of the teacher" in caplog.text


@pytest.mark.parametrize("kind", ["status", "garbage", "empty"])
def test_a_teacher_that_fails_for_a_while_is_asked_again(teacher, kind):
    teacher.script.faults = [Fault(kind, requests=[0, 1], times=2)]
    assert run(reward_func(arguments(teacher), sample()))["meta_info"]
    assert len(teacher.payloads) == 3


def test_a_teacher_that_goes_on_failing_is_named(teacher):
    teacher.script.faults = [Fault("status", times=99)]
    with pytest.raises(GraderError, match=r"failed 10 times; last: status 503.*--rm-url"):
        run(reward_func(arguments(teacher), sample()))


@pytest.mark.parametrize("status", [503, 400])
def test_credentials_of_the_teacher_are_not_written_down(teacher, caplog, status):
    teacher.script.faults = [Fault("status", status=status, times=99)]
    url = teacher.url.replace("http://", "http://user:hidden@") + "/generate"
    with pytest.raises(GraderError, match=r"The teacher http://\(secret\)@") as caught:
        run(reward_func(arguments(teacher, rm_url=url), sample()))
    assert "hidden" not in f"{caught.value}{caplog.text}"


@pytest.mark.parametrize(("key", "names"), [(None, ["math", "code", "math"]), ("task", ["code", "math", "math"])])
def test_each_sample_asks_its_own_teacher(teacher, key, names):
    other = ScriptedEngine(Script(log_prob=lambda token, position: -5.0))
    other.start()
    teachers = [f"math={teacher.url}/generate", f"code={other.url}/generate?a=b"]
    args = arguments(teacher, rm_url=None, opd_teachers=teachers, opd_teacher_key=key)
    samples = [sample() for _ in names]
    for one, task, source in zip(samples, ["code", "math", "math"], ["math", "code", "math"], strict=True):
        one.metadata = {"task": task, "source_name": source}
    try:
        for one, answer in zip(samples, run(reward_func(args, samples)), strict=True):
            one.reward = answer
    finally:
        other.stop()
    post_process_rewards(args, samples)
    assert [one.teacher_log_probs == [-5.0] * 3 for one in samples] == [name == "code" for name in names]
    assert (len(teacher.payloads), len(other.payloads)) == (2, 1)


def test_the_teachers_likeliest_tokens_are_asked_for_and_kept(teacher):
    args = arguments(teacher, opd_top_k=2)
    one = sample()
    one.reward = run(reward_func(args, one))
    assert teacher.payloads[0]["top_logprobs_num"] == 2
    # The scripted engine returns none; SGLang returns, for each token, [log-prob, id, text] of the likeliest.
    top = [None, *([[-0.1 * n, 20 + n, None], [-0.5, 30 + n, None]] for n in range(4))]
    one.reward["meta_info"]["input_top_logprobs"] = top
    post_process_rewards(args, [one])
    assert one.metadata["teacher_top"] == [[[20 + n, 30 + n], [-0.1 * n, -0.5]] for n in (1, 2, 3)]
    one.reward["meta_info"]["input_top_logprobs"] = top[:-1]
    with pytest.raises(DataError, match="2 likeliest tokens of --opd-top-k"):
        post_process_rewards(args, [Sample(**{**vars(one), "tokens": one.tokens})])
