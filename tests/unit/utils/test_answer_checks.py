"""An engine's answer that would silently train on errors is refused, with the field and its value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slime.utils.sglang_meta import TokenLogProbs, decode_generate_answer, problem_with_answer

PAYLOAD = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
GOOD = [[-0.5, 7, None], [-1.25, 8, None], [0.0, 9, None]]


def answer(entries: Any = None, *, text: Any = "abc", output_ids: Any = None, **meta: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"text": text, "output_ids": [7, 8, 9] if output_ids is None else output_ids}
    body["meta_info"] = {
        "id": "r1",
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "output_token_logprobs": GOOD if entries is None else entries,
    } | meta
    return body


def on_the_wire(body: dict[str, Any]) -> Any:
    """Decoded as the client does."""
    return decode_generate_answer(json.dumps(body, separators=(",", ":")).encode())


def with_entry(log_prob: Any, token: Any = 8) -> list[Any]:
    return [GOOD[0], [log_prob, token, None], GOOD[2]]


def test_a_good_answer_passes_and_is_read_the_fast_way():
    decoded = on_the_wire(answer())
    assert isinstance(decoded["meta_info"]["output_token_logprobs"], TokenLogProbs)
    assert problem_with_answer(decoded, PAYLOAD) is None
    assert problem_with_answer(on_the_wire(answer([[1e-5, 7, None], *GOOD[1:]])), PAYLOAD) is None, "rounding"


@pytest.mark.parametrize(
    ("log_prob", "shown"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (0.5, "0.5"),
        (None, "None"),
        ("-0.5", "'-0.5'"),
        (False, "False"),
        ([1], r"\[1\]"),
    ],
)
def test_a_log_prob_that_is_none_is_named(log_prob, shown):
    problem = problem_with_answer(on_the_wire(answer(with_entry(log_prob))), PAYLOAD)
    assert problem is not None
    assert problem.startswith("meta_info['output_token_logprobs'][1] has the log-prob ")
    assert shown.replace("\\", "") in problem and "at most 0" in problem


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (answer("none"), "output_token_logprobs'] is 'none'; it must be a list"),
        (answer([[-0.5], *GOOD[1:]]), r"[0] is [-0.5]; it must be [log_prob, token_id, ...]"),
        (answer([*GOOD, *GOOD], completion_tokens=6, output_ids=[]), "6 tokens; max_new_tokens of the request is 4"),
        (answer(completion_tokens=5), "completion_tokens'] is 5, but output_token_logprobs has 3"),
        (answer([], output_ids=[]), "completion_tokens'] is 3, but output_token_logprobs has 0"),
        (answer(prompt_tokens=2), "prompt_tokens'] is 2; the request has 3 input_ids"),
        (answer(text="x" * 50_000_000), "its text has 50000000 characters for 3 tokens"),
        (answer([], completion_tokens=0, output_ids=[], text="x"), "its text has 1 characters for 0 tokens"),
        (answer(text=7), "its text is 7; it must be a string"),
        (answer(with_entry(-0.5, 8.0), output_ids=[7]), "has the token 8.0"),
    ],
)
def test_counts_and_lengths_must_agree(body, says):
    problem = problem_with_answer(on_the_wire(body), PAYLOAD)
    assert problem is not None and says in problem and len(problem) < 600


def test_an_aborted_answer_may_be_counted_ahead_and_one_without_counts_passes():
    aborted = answer(finish_reason={"type": "abort"}, completion_tokens=4)
    assert problem_with_answer(on_the_wire(aborted), PAYLOAD) is None
    bare = {"text": "abc", "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": GOOD}}
    assert problem_with_answer(bare, {}) is None
