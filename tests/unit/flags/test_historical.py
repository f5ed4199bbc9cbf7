"""Retired flags and old spellings: all are accepted, and a message says what they do."""

from __future__ import annotations

import logging
import shlex

import pytest

from slime.backends.sglang_utils.arguments import derived_sglang_arguments
from slime.flags.historical import HISTORICAL
from slime.flags.parse import parse_flags, slime_validate_args

VALUES = {"qkv_format": "thd", "megatron_to_hf_mode": "bridge", "data_path": "a b"}
SWITCHES = {
    name for name in HISTORICAL if name.startswith(("log_", "use_", "manual_gc", "reset_", "ckpt_", "disable_"))
} - {"log_interval", "log_probs_max_tokens_per_gpu", "manual_gc_interval"} | {
    *("mock_data", "eod_mask_loss", "profile", "no_one_logger", "create_attention_mask_in_dataloader"),
    *("auto_detect_ckpt_format", "exit_on_missing_checkpoint", "fp16_lm_cross_entropy"),
}


def words_of(name: str) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if name in SWITCHES else [flag, *VALUES.get(name, "1").split()]


@pytest.mark.parametrize("name", HISTORICAL)
def test_a_retired_flag_is_accepted_with_a_line_that_says_what_became_of_it(name, make_args, caplog):
    caplog.set_level(logging.INFO)
    estimator = ["--advantage-estimator", "ppo"] if name == "use_critic" else []
    slime_validate_args(make_args(*words_of(name), *estimator))
    lines = [record.message for record in caplog.records if record.message.startswith("Flags without effect")]
    assert lines == [f"Flags without effect: --{name.replace('_', '-')}: {HISTORICAL[name]}"]


def test_the_opposite_of_a_retired_switch_is_accepted_too(make_args):
    slime_validate_args(make_args("--no-ckpt-fully-parallel-save"))


OLD_AND_NEW = [
    # old spelling, current spelling, the attribute that both set
    ("--eval-prompt-data /root/aime-2024.jsonl", "--eval-prompt-data aime /root/aime-2024.jsonl", None),
    ("--moe-enable-deepep", "--moe-enable-deepep", "moe_enable_deepep"),
    ("--sglang-data-parallel-size 4", "--sglang-dp-size 4", "sglang_dp_size"),
    ("--sglang-expert-parallel-size 4", "--sglang-ep-size 4", "sglang_ep_size"),
    ("--sglang-pipeline-parallel-size 2", "--sglang-pp-size 2", "sglang_pp_size"),
    (
        "--sglang-nsa-decode-backend flashmla_kv",
        "--sglang-dsa-decode-backend flashmla_kv",
        "sglang_dsa_decode_backend",
    ),
    (
        "--sglang-nsa-prefill-backend flashmla_sparse",
        "--sglang-dsa-prefill-backend flashmla_sparse",
        "sglang_dsa_prefill_backend",
    ),
    ("--no-check-for-nan-in-loss-and-grad", "--no-check-for-nan-in-loss-and-grad", "check_for_nan_in_loss_and_grad"),
]


@pytest.mark.parametrize(("old", "new", "attribute"), OLD_AND_NEW, ids=[row[0].split()[0] for row in OLD_AND_NEW])
def test_an_older_spelling_sets_what_todays_sets(old, new, attribute):
    before, after = (vars(parse_flags(shlex.split(line))) for line in (old, new))
    if attribute is not None:
        assert before[attribute] == after[attribute] != vars(parse_flags([]))[attribute]


def test_older_flags_of_expert_parallel_engines_mean_the_whole_engine():
    words = "--rollout-num-gpus-per-engine 64 --sglang-enable-ep-moe --sglang-enable-deepep-moe"
    derived = derived_sglang_arguments(parse_flags(words.split()))
    assert (derived["sglang_ep_size"], derived["sglang_moe_a2a_backend"]) == (64, "deepep")
