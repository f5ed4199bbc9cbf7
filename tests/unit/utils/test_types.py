"""Sample: how a response grows, what it refuses, how it is serialized."""

import base64
import copy
import pickle
from argparse import Namespace

import numpy as np
import pytest
import torch

from slime.utils.types import Sample


def int32_text(values):
    return base64.b64encode(np.array(values, dtype="<i4").tobytes()).decode()


def started():
    """Prompt [5, 6], response [7, 8]."""
    sample = Sample(tokens=[5, 6])
    sample.append_response_tokens(tokens=[7, 8], log_probs=[-0.1, -0.2], text="ab")
    return sample


def test_tool_tokens_get_mask_zero_and_log_prob_zero():
    sample = started()
    sample.append_response_tokens(tokens=[9], trainable=False, text="c")
    sample.append_response_tokens(tokens=[10], log_probs=[-0.3])
    assert sample.tokens == [5, 6, 7, 8, 9, 10]
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-0.1, -0.2, 0.0, -0.3]
    assert sample.effective_response_length == 3


@pytest.mark.parametrize(
    ("sample", "call", "message"),
    [
        (Sample(), {"tokens": [1]}, "without log_probs"),
        (Sample(), {"tokens": [1], "log_probs": [-1.0], "trainable": False}, "trainable=False"),
        (
            Sample(tokens=[1, 2], response_length=1),
            {"tokens": [3], "log_probs": [-1.0]},
            "1 tokens without rollout_log_probs",
        ),
        (
            Sample(tokens=[1, 2], response_length=1, loss_mask=[1, 1], rollout_log_probs=[0.0]),
            {"tokens": [3], "log_probs": [-1.0]},
            "loss_mask would have 3 entries for a response of 2 tokens",
        ),
        (
            Sample(),
            {"tokens": [1], "log_probs": [-1.0], "meta_info": {"routed_experts": int32_text([])}},
            "pass args",
        ),
        (
            Sample(),
            {"tokens": [1], "log_probs": [-1.0], "meta_info": {"top_p_token_ids": [1]}},
            "ids without offsets",
        ),
        (
            Sample(),
            {"tokens": [1], "log_probs": [-1.0], "meta_info": {"top_p_token_ids": [1], "top_p_token_offsets": [0, 2]}},
            "must rise from 0 to the 1 ids",
        ),
    ],
)
def test_pieces_that_do_not_fit_are_refused_and_leave_the_sample_as_it_was(sample, call, message):
    before = pickle.dumps(sample.to_dict())
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(**call)
    assert pickle.dumps(sample.to_dict()) == before


def test_top_p_spans_of_two_calls_are_joined_with_an_empty_span_for_tool_tokens():
    sample = Sample(tokens=[0])
    first = {"top_p_token_ids": int32_text([7, 9, 8]), "top_p_token_offsets": int32_text([0, 2, 3])}
    sample.append_response_tokens(tokens=[7, 8], log_probs=[-0.1, -0.2], meta_info=first)
    sample.append_response_tokens(tokens=[50], trainable=False)
    second = {"top_p_kept_token_ids": [4, 5], "top_p_kept_token_offsets": [0, 2]}
    sample.append_response_tokens(tokens=[4], log_probs=[-0.3], meta_info=second)
    assert sample.rollout_top_p_token_ids.tolist() == [7, 9, 8, 4, 5]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3, 3, 5]
    assert sample.rollout_top_p_token_ids.dtype == torch.int32


def test_routed_experts_of_a_cached_prefix_are_taken_from_the_call_before():
    args = Namespace(num_layers=2, moe_router_topk=1)
    sample = Sample(tokens=[5, 6])
    meta = {"routed_experts": int32_text([1, 2, 3, 4])}  # 3 tokens: 2 positions x 2 layers x 1 expert
    sample.append_response_tokens(args, tokens=[7], log_probs=[-0.1], meta_info=meta)
    assert sample.rollout_routed_experts.tolist() == [[[1], [2]], [[3], [4]]]
    meta = {"routed_experts": int32_text([30, 40, 5, 6]), "routed_experts_start_len": 1}
    sample.append_response_tokens(args, tokens=[8], log_probs=[-0.1], meta_info=meta)
    assert sample.rollout_routed_experts.tolist() == [[[1], [2]], [[30], [40]], [[5], [6]]]
    with pytest.raises(ValueError, match="has 3 values"):
        bad = {"routed_experts": [1, 2, 3]}
        sample.append_response_tokens(args, tokens=[9], log_probs=[-0.1], meta_info=bad)
    with pytest.raises(ValueError, match="knows the routing of 0 positions"):
        late = {"routed_experts": [1, 2], "routed_experts_start_len": 1}
        Sample(tokens=[1, 2]).append_response_tokens(args, tokens=[3], log_probs=[-0.1], meta_info=late)


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", Sample.Status.COMPLETED), ("length", Sample.Status.TRUNCATED), ("abort", Sample.Status.ABORTED)],
)
def test_the_finish_reason_sets_status_version_and_cache_counts(reason, status):
    sample = Sample(tokens=[5])
    meta = {"finish_reason": {"type": reason}, "weight_version": "3", "cached_tokens": 2, "prompt_tokens": 8}
    sample.append_response_tokens(tokens=[7], log_probs=[-0.1], meta_info=meta)
    sample.append_response_tokens(tokens=[], log_probs=[], meta_info=meta)
    assert sample.status is status
    assert sample.weight_versions == ["3", "3"]
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.25
    assert sample.spec_info == Sample.SpecInfo()


def test_lists_grow_in_place_for_whoever_holds_them():
    """Tool loops in plug-ins keep ``loss_mask = sample.loss_mask`` and write it back at the end."""
    sample = started()
    held = {name: getattr(sample, name) for name in ("tokens", "loss_mask", "rollout_log_probs", "weight_versions")}
    sample.append_response_tokens(tokens=[9], trainable=False)
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "3"}
    sample.append_response_tokens(tokens=[10], log_probs=[-0.3], meta_info=meta)
    assert held == {
        "tokens": [5, 6, 7, 8, 9, 10],
        "loss_mask": [1, 1, 0, 1],
        "rollout_log_probs": [-0.1, -0.2, 0.0, -0.3],
        "weight_versions": ["3"],
    }
    assert all(getattr(sample, name) is value for name, value in held.items())

    mask: list[int] = []
    empty = Sample(tokens=[5], loss_mask=mask)
    new = [7]
    empty.append_response_tokens(tokens=new, log_probs=[-0.1])
    assert mask == [1] and new == [7]


@pytest.mark.parametrize("status", Sample.Status)
def test_a_status_may_be_set_as_text(status):
    sample = Sample(status=status.value)
    assert sample.status is status
    sample.status = Sample.Status.PENDING
    sample.status = status.value
    assert sample.status is status
    for twin in (copy.copy(sample), copy.deepcopy(sample), pickle.loads(pickle.dumps(sample))):
        assert twin.status is status
    assert Sample.from_dict(sample.to_dict()).status is status


@pytest.mark.parametrize("status", ["complete", "COMPLETED", None, 3, ["completed"]])
def test_a_status_that_is_none_is_refused_with_its_value(status):
    sample = Sample()
    with pytest.raises(ValueError, match=r"status is .*must be one of pending, completed") as error:
        sample.status = status
    assert repr(status) in str(error.value)
    with pytest.raises(ValueError, match="must be one of"):
        Sample(status=status)
    assert sample.status is Sample.Status.PENDING


@pytest.mark.parametrize(
    ("accepted", "drafted"),
    [("spec_num_correct_drafts", "spec_num_proposed_drafts"), ("spec_accept_token_num", "spec_draft_token_num")],
    ids=["SGLang 0.5.15", "before"],
)
def test_speculation_is_counted_when_the_engine_speculates(accepted, drafted):
    sample = Sample()
    meta = {
        "finish_reason": {"type": "stop"},
        accepted: 3,
        drafted: 4,
        "spec_verify_ct": 2,
        "completion_tokens": 5,
    }
    args = Namespace(sglang_speculative_algorithm="EAGLE")
    sample.append_response_tokens(args, tokens=[7], log_probs=[-0.1], meta_info=meta)
    assert sample.spec_info.spec_accept_rate == 0.75
    assert sample.spec_info.spec_accept_length == 2.5
    assert Sample.SpecInfo().spec_accept_rate == Sample.SpecInfo().spec_accept_length == 0.0


def test_a_sample_and_its_extra_attributes_survive_a_dict():
    sample = started()
    sample.trace = {"version": 1}
    sample.prefix_cache_info.cached_tokens = 4
    data = sample.to_dict()
    assert data["status"] == "pending"
    assert data["prefix_cache_info"] == {"cached_tokens": 4, "total_prompt_tokens": 0}
    back = Sample.from_dict(data)
    assert back == sample
    assert back.trace == {"version": 1}
    assert data["status"] == "pending"


def test_a_deep_copy_of_a_sample_shares_nothing_with_it():
    sample = Sample(tokens=[1], metadata={"a": [1]}, multimodal_inputs={"images": [torch.zeros(1)]})
    sample.prefix_cache_info.cached_tokens = 3
    sample.note = {"k": [1]}
    sample.itself = sample
    twin = copy.deepcopy(sample)
    assert twin.itself is twin
    twin.tokens.append(2)
    twin.metadata["a"].append(2)
    twin.note["k"].append(2)
    twin.multimodal_inputs["images"][0] += 1
    twin.prefix_cache_info.cached_tokens += 1
    assert (sample.tokens, sample.metadata, sample.note) == ([1], {"a": [1]}, {"k": [1]})
    assert sample.multimodal_inputs["images"][0] == 0 and sample.prefix_cache_info.cached_tokens == 3
