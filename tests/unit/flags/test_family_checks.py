"""Engine flags against the model family: draft models, and replayed experts."""

from __future__ import annotations

import pytest

from slime.flags.family_checks import draft_problems, replay_problems, yarn_problems


def test_experts_that_an_engine_does_not_give_back_are_not_replayed():
    (found,) = replay_problems({"model_type": "minimax_m2"})
    assert "--use-rollout-routing-replay" in found and "use --use-routing-replay" in found
    assert not list(replay_problems({"model_type": "qwen3_moe"}))


@pytest.mark.parametrize(
    ("config", "drafts"),
    [
        ({"model_type": "qwen3"}, False),
        ({"model_type": "qwen3", "num_nextn_predict_layers": 1}, True),
        ({"model_type": "mimo"}, True),
        ({"model_type": "deepseek_v3"}, True),
        ({"model_type": "of a plug-in"}, True),
    ],
)
def test_a_family_without_mtp_layers_drafts_with_a_named_model_only(config, drafts):
    assert bool(list(draft_problems("EAGLE", None, config))) is not drafts
    assert not list(draft_problems("EAGLE", "/draft", config))


DEEPSEEK_R1 = {
    "model_type": "deepseek_v3",
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
}


@pytest.mark.parametrize(
    ("changes", "context_length", "words"),
    [
        ({}, None, None),
        ({}, 163840, None),
        ({}, 163841, "--sglang-context-length is 163841, and YaRN of config.json stretches 163840 positions"),
        ({"max_position_embeddings": 200000}, None, "max_position_embeddings of config.json is 200000"),
        ({"max_position_embeddings": 200000}, 163840, None),
        ({"max_position_embeddings": 1 << 20, "rope_scaling": {"type": "linear", "factor": 2.0}}, None, None),
        ({"max_position_embeddings": 1 << 20, "rope_scaling": None}, None, None),
    ],
)
def test_engines_serve_no_positions_beyond_those_that_yarn_stretches(changes, context_length, words):
    found = list(yarn_problems(context_length, DEEPSEEK_R1 | changes))
    assert bool(found) is (words is not None)
    if words is not None:
        assert words in found[0] and "Give --sglang-context-length 163840" in found[0]
