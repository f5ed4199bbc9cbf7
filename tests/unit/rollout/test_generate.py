"""What one sample sends to an engine, and what it refuses; test_sglang_rollout tests the loop around it."""

from __future__ import annotations

import asyncio
import itertools
from argparse import Namespace
from typing import Any

import pytest
import torch

from slime.rollout import engine_client, sglang_rollout
from slime.rollout.config import RolloutConfig
from slime.rollout.engine_request import (
    _payload,
    _prepare_prompt_ids,
    append_checked,
    append_output,
    decoder_of,
)
from slime.rollout.sglang_rollout import generate_and_rm, get_model_url
from slime.rollout.sglang_streaming_rollout import _cut_off
from slime.utils.errors import DataError, HookError
from slime.utils.processing_utils import check_image_tokens
from slime.utils.types import Sample
from tests.unit.rollout.fake_cluster import FakeTokenizer
from tests.unit.talking_engine import drawn, make_tokenizer


class FakeProcessor:
    """Two image tokens, then the text."""

    def __call__(self, text: str, **kwargs: Any) -> dict[str, Any]:
        assert kwargs["images"] == ["img"]
        return {"input_ids": [[7, 7, *map(ord, text)]], "attention_mask": [[1]], "pixel_values": "pixels"}


class FakeState:
    """The part of GenerateState that plug-in tests provide."""

    def __init__(self, args: Namespace) -> None:
        self.semaphore = asyncio.Semaphore(1)
        self.aborted = getattr(args, "is_aborted", False)

    def dp_rank_context(self) -> Any:
        import contextlib

        return contextlib.nullcontext(0)


# The only attributes that plug-in tests promise on the way through generate_and_rm.
MINIMAL = {
    "partial_rollout": False,
    "mask_offpolicy_in_partial_rollout": False,
    "group_rm": False,
    "custom_generate_function_path": "plugin.generate",
    "sglang_enable_deterministic_inference": False,
    "rollout_seed": 1,
    "n_samples_per_prompt": 1,
}


def call(monkeypatch: pytest.MonkeyPatch, function: Any, sample: Sample, **flags: Any) -> Any:
    monkeypatch.setattr(sglang_rollout, "GenerateState", FakeState)
    monkeypatch.setattr(sglang_rollout, "load_function", lambda path: function)
    return asyncio.run(generate_and_rm(Namespace(**(MINIMAL | flags)), sample, {}, evaluation=True))


def test_a_custom_function_gets_the_evaluation_flag_only_if_it_asks(monkeypatch):
    async def without(args, sample, sampling_params):
        sample.status, sample.reward = Sample.Status.COMPLETED, 1.0
        return sample

    async def with_flag(args, sample, sampling_params, evaluation):
        sample.reward = 2.0 if evaluation else 3.0
        sample.status = Sample.Status.COMPLETED
        return sample

    assert call(monkeypatch, without, Sample()).reward == 1.0
    assert call(monkeypatch, with_flag, Sample()).reward == 2.0


def test_earlier_tokens_of_an_answered_sample_are_masked_when_it_comes_back(monkeypatch):
    sample = Sample(status=Sample.Status.COMPLETED, reward=0.5, response_length=3, loss_mask=[1, 1, 1])
    call(monkeypatch, None, sample, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    assert sample.loss_mask == [0, 0, 0]


def test_an_aborted_sample_gets_no_reward(monkeypatch):
    async def aborted(args, sample, sampling_params):
        sample.status = Sample.Status.ABORTED
        return sample

    assert call(monkeypatch, aborted, Sample()).reward is None
    assert call(monkeypatch, None, Sample(), is_aborted=True).status is Sample.Status.ABORTED


def test_a_new_sample_of_a_custom_function_takes_its_place_in_the_group_and_its_answer_is_complete(monkeypatch):
    async def new(args, sample, sampling_params):
        return [
            Sample(tokens=[1, 2], response_length=length, rollout_id=3, reward=torch.tensor(0.5)) for length in (1, 0)
        ]

    answered, empty = call(monkeypatch, new, Sample(index=7, group_index=2))
    assert (answered.index, answered.group_index, answered.status) == (7, 2, Sample.Status.COMPLETED)
    assert type(answered.reward) is float and answered.reward == 0.5
    assert empty.status is Sample.Status.PENDING


def test_a_custom_function_that_returns_nothing_is_refused(monkeypatch):
    async def nothing(args, sample, sampling_params):
        return None

    with pytest.raises(HookError, match="returned NoneType"):
        call(monkeypatch, nothing, Sample())


def test_a_multimodal_prompt_goes_through_the_processor_and_keeps_its_pixels():
    sample = Sample(prompt="a", multimodal_inputs={"images": ["img"]})
    assert _prepare_prompt_ids(sample, FakeTokenizer(), FakeProcessor()) == [7, 7, 97]
    assert sample.multimodal_train_inputs == {"pixel_values": "pixels"}
    sample.tokens, sample.response_length, sample.multimodal_train_inputs = [7, 7, 97, 1000], 1, None
    assert _prepare_prompt_ids(sample, FakeTokenizer(), FakeProcessor()) == [7, 7, 97, 1000]


def test_ids_go_with_one_token_for_each_image_where_it_is_known(monkeypatch):
    monkeypatch.setattr("slime.rollout.engine_request.encode_image_for_rollout_engine", lambda image: image)
    sample = Sample(prompt="a", multimodal_inputs={"images": ["x", "y"]})
    payload = _payload(
        RolloutConfig.of(Namespace(use_rollout_routing_replay=False)),
        sample,
        [7, 9, 9, 9, 8, 7, 9, 8, 8, 5],
        {},
        image_token=9,
    )
    assert payload["input_ids"] == [7, 9, 8, 7, 9, 8, 8, 5]
    assert payload["image_data"] == ["x", "y"] and "text" not in payload


@pytest.mark.parametrize("kind", ["videos", "audio"])
def test_what_is_no_image_is_refused_before_it_is_left_out_of_the_request(kind):
    config = RolloutConfig.of(Namespace(use_rollout_routing_replay=False))
    sample = Sample(index=4, prompt="a", multimodal_inputs={"images": None, kind: ["x"]})
    with pytest.raises(DataError, match=f"Sample 4 has {kind}; .*--custom-generate-function-path"):
        _payload(config, sample, [7], {})


def test_an_engine_that_counts_other_tokens_for_images_is_refused():
    stop, abort = {"type": "stop"}, {"type": "abort"}
    check_image_tokens("Sample 1", {"image_data": ["x"]}, {"prompt_tokens": 4, "finish_reason": stop}, 4)
    check_image_tokens("Sample 1", {"image_data": ["x"]}, {"prompt_tokens": 3, "finish_reason": abort}, 4)
    check_image_tokens("Sample 1", {"input_ids": [1]}, {"prompt_tokens": 3, "finish_reason": stop}, 4)
    with pytest.raises(DataError, match="with 1 images has 4 tokens, but 3 in the engine.*SGLANG_IMAGE_MAX_PIXELS"):
        check_image_tokens("Sample 1", {"image_data": ["x"]}, {"prompt_tokens": 3, "finish_reason": stop}, 4)


def test_siblings_share_the_pixels_of_one_run_of_the_processor():
    calls = []

    class Counting(FakeProcessor):
        def __call__(self, text: str, **kwargs: Any) -> dict[str, Any]:
            calls.append(text)
            return super().__call__(text, **kwargs)

    images = ["img"]
    samples = [Sample(prompt=prompt, multimodal_inputs={"images": list(images)}) for prompt in ("one", "one", "other")]
    ids = [_prepare_prompt_ids(sample, FakeTokenizer(), Counting()) for sample in samples]
    assert calls == ["one", "other"] and ids[0] == ids[1] != ids[2]
    first, second, _ = (sample.multimodal_train_inputs for sample in samples)
    assert first["pixel_values"] is second["pixel_values"] and first is not second


def test_images_are_sent_with_the_text_instead_of_the_ids(monkeypatch):
    monkeypatch.setattr("slime.rollout.engine_request.encode_image_for_rollout_engine", lambda image: f"data:{image}")
    sample = Sample(prompt="a", response="b", multimodal_inputs={"images": ["img"]})
    payload = _payload(RolloutConfig.of(Namespace(use_rollout_routing_replay=True)), sample, [1], {"n": 1})
    assert payload == {
        "sampling_params": {"n": 1},
        "return_logprob": True,
        "return_routed_experts": True,
        "text": "ab",
        "image_data": ["data:img"],
    }


def test_a_model_is_served_at_its_router_or_the_default_one():
    args = Namespace(sglang_router_ip="h", sglang_router_port=1, sglang_model_routers={"ref": ("r", 2)})
    assert get_model_url(args, "ref") == "http://r:2/generate"
    assert get_model_url(args, "other", "/v1/models") == "http://h:1/v1/models"


@pytest.mark.parametrize(
    ("payload", "lost"),
    [
        ({"input_ids": [1], "sampling_params": {"top_p": 0.9, "spaces_between_special_tokens": False}}, []),
        ({"return_routed_experts": True, "sampling_params": {}}, ["return_routed_experts"]),
        ({"sampling_params": {"custom_params": {}, "stop_regex": None}}, ["sampling_params.custom_params"]),
        ({"sampling_params": {"sampling_seed": 3, "stop_token_ids": [1]}}, []),
    ],
)
def test_fields_that_the_router_loses_are_known(payload, lost):
    assert engine_client.lost_fields(payload) == lost


def test_consistent_hashing_moves_only_the_keys_of_a_lost_worker():
    engine_client.WorkerPicker.clear_instances()
    engines = Namespace(sglang_router_ip="h", sglang_router_port=1, router_policy="consistent_hashing")
    config = RolloutConfig.of(engines)
    picker = engine_client.WorkerPicker(config)
    keys = [str(i) for i in range(200)]
    before = {key: picker.choose(["a", "b", "c"], key) for key in keys}
    after = {key: picker.choose(["a", "b"], key) for key in keys}
    assert set(before.values()) == {"a", "b", "c"}
    assert all(after[key] == before[key] for key in keys if before[key] != "c")
    engine_client.WorkerPicker.clear_instances()


def answered(tokenizer, ids, kind):
    """An answer as SGLang returns it: an incomplete character's bytes are shown as a replacement character."""
    meta = {"finish_reason": {"type": kind}, "output_token_logprobs": [[-0.1, token, None] for token in ids]}
    return {"text": tokenizer.decode(ids, skip_special_tokens=False), "meta_info": meta}


@pytest.mark.parametrize("said", ["I say \u5317\u4eac and \U0001f642.", "\u5317\u4eac", "\U0001f642"])
@pytest.mark.parametrize("before", ["", "<|im_start|>assistant\n"])
def test_a_response_that_was_aborted_within_a_character_has_the_text_of_all_its_ids(said, before):
    tokenizer = make_tokenizer()
    ids = drawn(tokenizer, said)
    payload = {"sampling_params": {"skip_special_tokens": False}}
    decode = decoder_of(Namespace(tokenizer=tokenizer), payload)
    for cuts in itertools.combinations(range(1, len(ids)), 2):
        sample = Sample(prompt="a", tokens=[97])
        observation = tokenizer.encode(before, add_special_tokens=False)
        sample.append_response_tokens(Namespace(), tokens=observation, text=before, trainable=False)
        for begin, end in itertools.pairwise((0, *cuts, len(ids))):
            kind = "stop" if end == len(ids) else "abort"
            append_checked(Namespace(), sample, answered(tokenizer, ids[begin:end], kind), decode)
        assert sample.response == before + said and sample.tokens[1:] == observation + ids


def test_a_stream_that_breaks_within_a_character_keeps_the_words_that_the_engine_held_back():
    tokenizer = make_tokenizer()
    ids = drawn(tokenizer, "to \u5317\u4eac")
    decode = decoder_of(Namespace(tokenizer=tokenizer), {"sampling_params": {"skip_special_tokens": False}})
    event = answered(tokenizer, ids[:-1], None) | {"text": "to "}
    event["meta_info"]["finish_reason"] = None
    sample = Sample(prompt="a", tokens=[97])
    append_output(Namespace(), sample, _cut_off(event, decode), decode)
    assert sample.response.rstrip("\ufffd") == "to \u5317"
    append_checked(Namespace(), sample, answered(tokenizer, ids[-1:], "stop"), decode)
    assert sample.response == "to \u5317\u4eac"
