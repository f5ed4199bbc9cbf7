"""A plug-in package that uses only the public surface runs through the rollout side unmodified."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slime.ext.record.run_record import RecordSink
from slime.observability import telemetry
from slime.rollout.base_types import leaf_samples
from slime.utils.types import Sample
from tests.plugin_package.product import PLUGIN_FOLDER, Product
from tests.scripted_engine.script import FIRST_RESPONSE_TOKEN

GENERATE = ("--custom-generate-function-path", "calculator_plugin.generate.generate")
REWARD = ("--custom-rm-path", "calculator_plugin.rewards.custom_rm", "--reward-key", "score")

Start = Callable[..., Product]


@pytest.fixture
def start(tmp_path, monkeypatch) -> Iterator[Start]:
    monkeypatch.syspath_prepend(PLUGIN_FOLDER)
    products: list[Product] = []

    def make(*flags: str, script: Any = None) -> Product:
        products.append(Product(tmp_path, *flags, script=script))
        return products[-1]

    yield make
    for product in products:
        product.close()


def plugin(name: str) -> Any:
    return importlib.import_module(f"calculator_plugin.{name}")


def check_sample(sample: Sample) -> None:
    """Invariants of every sample that trains."""
    assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs)
    response = sample.tokens[-sample.response_length :]
    trained = [token >= FIRST_RESPONSE_TOKEN for token in response]
    assert [bool(mask) for mask in sample.loss_mask] == trained, "the model's tokens train, the tool's do not"
    assert all(value == 0.0 for value, mask in zip(sample.rollout_log_probs, sample.loss_mask) if not mask)
    assert sample.status is Sample.Status.COMPLETED


def test_turns_of_model_and_tool_become_one_sample_with_masks_and_a_dict_reward(start):
    product = start(*GENERATE, *REWARD)
    groups = product.rollout()
    assert [len(group) for group in groups] == [4, 4]
    for sample in leaf_samples(groups):
        check_sample(sample)
        assert sample.tool_iters == sample.metadata["calls"] == 2
        assert sample.reward["score"] == sample.reward["acc"] + 0.5
        assert len(sample.weight_versions) == 3
        assert sample.response.count("<result>5</result>") == 2
    names = [event["name"] for event in groups[0][0].trace["events"]]
    assert names.count("calculator_turn") == 6 and names.count("calculator_result") == 2
    data = product.train_data(product.samples)
    assert data["rewards"] and len(data["tokens"]) == 8
    assert len(product.engine.payloads) == 8 * 3
    assert all(payload["sampling_params"]["no_stop_trim"] for payload in product.engine.payloads)


def test_the_older_style_sets_its_own_reward_and_knows_of_evaluation(start):
    product = start("--custom-generate-function-path", "calculator_plugin.generate.generate_by_hand")
    for sample in leaf_samples(product.rollout()):
        check_sample(sample)
        assert sample.reward == float("5" in sample.response) + 1.0
        assert sample.metadata["evaluation"] is False
    assert product.train_data(product.samples)["metadata"] == [{"calls": 2}] * 8


def test_two_agents_fan_out_and_what_they_hang_on_args_stays_and_can_be_copied(start):
    product = start(
        *("--custom-generate-function-path", "calculator_plugin.generate.generate_two_agents"),
        *REWARD,
        *("--dynamic-sampling-filter-path", "calculator_plugin.filters.dynamic_filter"),
        *("--rollout-sample-filter-path", "calculator_plugin.filters.drop_long_calls"),
    )
    groups = product.rollout()
    assert [[entry[0].source + "/" + entry[1].source for entry in group] for group in groups] == [
        ["solver/critic"] * 4
    ] * 2
    assert all(sample.reward is not None for sample in leaf_samples(groups))
    assert product.args.calc_agents == ["solver", "critic"] and product.args.tokenizer is not None
    copy.deepcopy(product.args)
    data = product.train_data(product.samples)
    assert len(data["tokens"]) == 16
    pairs = list(zip(data["rollout_ids"], data["rollout_mask_sums"], [sum(m) for m in data["loss_masks"]]))
    totals: dict[int, int] = {}
    for rollout_id, _, own in pairs:
        totals[rollout_id] = totals.get(rollout_id, 0) + int(own)
    assert len(totals) == 8 and all(int(total) == totals[rollout_id] for rollout_id, total, _ in pairs)
    assert data["source_names"] == ["solver", "critic"] * 8
    product.rollout(1)


def test_filters_of_groups_buffer_and_samples(start):
    product = start(
        *GENERATE,
        *REWARD,
        *("--dynamic-sampling-filter-path", "calculator_plugin.filters.keep_odd_groups"),
        *("--buffer-filter-path", "calculator_plugin.filters.buffer_newest_first"),
        *("--rollout-sample-filter-path", "calculator_plugin.filters.drop_long_calls"),
        *("--rollout-all-samples-process-path", "calculator_plugin.filters.remember_all"),
        *("--over-sampling-batch-size", "4", "--partial-rollout"),
    )
    product.args.calc_max_turns = 3
    plugin("filters").SEEN.clear()
    source = product.manager.work.data_source
    extra = source.get_samples(2)
    source.add_samples(extra)
    groups = product.rollout()
    assert [group[0].group_index for group in groups] == [1, 3]
    assert product.metrics["rollout/groups/dropped"] >= 1
    assert plugin("filters").SEEN and plugin("filters").SEEN[0] % 4 == 0
    assert not any(sample.remove_sample for sample in leaf_samples(groups))
    product.args.calc_max_turns = 2
    product.rollout(1)
    assert not any(sample.remove_sample for sample in product.samples)  # one call per sample, two allowed


def test_sample_hooks_run_in_order_between_generation_and_reward(start):
    product = start(
        *GENERATE,
        *REWARD,
        *("--rollout-sample-hook-path", "calculator_plugin.hooks.strip_end"),
        *("--rollout-sample-hook-path", "calculator_plugin.hooks.note_length"),
        *("--custom-rollout-log-function-path", "calculator_plugin.hooks.log_rollout"),
    )
    hooks = plugin("hooks")
    hooks.CALLS.update(sync=0, **{"async": 0})
    hooks.LOGGED.clear()
    for sample in leaf_samples(product.rollout(3)):
        assert sample.metadata["hook_rollout_id"] == 3 and sample.metadata["hook_evaluation"] is False
        assert sample.metadata["reward_was_unset"] and sample.metadata["length_at_hook"] == sample.response_length
    assert hooks.CALLS == {"sync": 8, "async": 8}
    assert hooks.LOGGED[0][0] == 3 and hooks.LOGGED[0][1]["calculator/calls_mean"] == 2
    assert hooks.LOGGED[0][2]["rollout/groups/kept"] == 2


@pytest.mark.parametrize("name", ["TaggingSource", "SumsSource"])
def test_a_data_source_of_ones_own(start, name):
    product = start(*GENERATE, *REWARD, "--data-source-path", f"calculator_plugin.sources.{name}")
    groups = product.rollout()
    assert [group[0].group_index for group in groups] == [0, 1]
    product.manager.save(0)
    product.args.load = product.args.save
    source = product.manager.work.data_source
    if name == "TaggingSource":
        assert product.train_data(product.samples)["source_names"] == ["calculator"] * 8
        assert source.get_metadata() == {"handed_out": 2} and source.handed_out == 2
    product.rollout(1)
    product.manager.load(0)
    assert [group[0].group_index for group in source.get_samples(2)] == [2, 3]
    assert len(source) == (6 if name == "TaggingSource" else 1000)


@pytest.mark.parametrize("name", ["generate_rollout", "generate_rollout_legacy"])
def test_a_rollout_function_of_ones_own_with_evaluation(start, name):
    product = start(
        *GENERATE,
        *REWARD,
        *("--rollout-function-path", f"calculator_plugin.rollouts.{name}"),
        *("--custom-eval-rollout-log-function-path", "calculator_plugin.hooks.log_eval"),
        *("--eval-function-path", "calculator_plugin.rollouts.eval_function"),
    )
    assert [len(group) for group in product.rollout()] == [4, 4]
    if name == "generate_rollout":
        assert product.metrics["calculator/groups"] == 2
    logged = plugin("hooks").LOGGED
    logged.clear()
    record = product.manager.eval(0)
    assert logged and logged[0][:2] == (0, "sums")
    assert 0.5 <= record["eval/sums"] <= 1.5 and record["calculator/evaluated"] == 4


def test_the_legacy_evaluation_dict_is_taken_and_recorded_before_and_after_the_first_rollout(start, tmp_path):
    product = start(
        *GENERATE, *REWARD, "--rollout-function-path", "calculator_plugin.rollouts.generate_rollout_legacy"
    )
    telemetry.start(product.args, "rollout manager", (RecordSink,), primary=True)
    assert product.manager.eval(0)["eval/sums"] == 1.0
    product.rollout(0)
    product.manager.eval(0)
    telemetry.stop()
    files = {path.name for path in (tmp_path / "save/samples").iterdir()}
    assert files == {"eval_start.parquet", "eval_000000.parquet"}


def test_rewards_and_train_data_made_by_the_plug_in(start):
    product = start(*GENERATE, *REWARD, "--custom-reward-post-process-path", "calculator_plugin.rewards.post_process")
    product.rollout()
    data = product.train_data(product.samples)
    assert abs(sum(data["rewards"][:4])) < 1e-6
    product.args.custom_convert_samples_to_train_data_path = "calculator_plugin.training.convert"
    made = product.train_data(product.samples)
    assert [list(mask) for mask in made["loss_masks"]] == [list(mask) for mask in data["loss_masks"]]
    assert made["rewards"] == [sample.reward["score"] for sample in product.samples]


READ_BY_PLUGINS = """
sglang_router_ip sglang_router_port sglang_model_routers sglang_server_concurrency sglang_dp_size
sglang_speculative_algorithm sglang_tool_call_parser sglang_reasoning_parser sglang_enable_deterministic_inference
router_policy hf_checkpoint rollout_batch_size n_samples_per_prompt n_samples_per_eval_prompt over_sampling_batch_size
rollout_max_response_len rollout_max_context_len eval_max_context_len rollout_max_prompt_len eval_max_prompt_len
rollout_temperature rollout_top_p rollout_top_k rollout_stop rollout_stop_token_ids rollout_skip_special_tokens
rollout_seed rollout_shuffle rollout_global_dataset partial_rollout mask_offpolicy_in_partial_rollout group_rm rm_type
rm_url reward_key eval_reward_key custom_rm_path apply_chat_template apply_chat_template_kwargs input_key label_key
metadata_key tool_key multimodal_keys prompt_data eval_datasets loss_mask_type rollout_num_gpus
rollout_num_gpus_per_engine num_gpus_per_node context_parallel_size max_tokens_per_gpu global_batch_size use_wandb
use_tensorboard wandb_always_use_train_step num_epoch save load ci_test use_rollout_routing_replay num_layers
moe_router_topk rollout_buffer_url fetch_trajectory_retry_times advantage_estimator grpo_std_normalization
rewards_normalization log_passrate
""".split()


def test_args_are_plain_and_have_what_plugins_read(start):
    args = start(*GENERATE, *REWARD).args
    assert [name for name in READ_BY_PLUGINS if not hasattr(args, name)] == []
    assert (args.calc_max_turns, args.calc_tool_reward) == (3, 0.25)
    args.anything = object
    assert copy.deepcopy(args).anything is object and vars(args)["anything"] is object
