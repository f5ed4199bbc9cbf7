"""From a command line to a printed plan: all problems at once, layout, phases, exit codes; arithmetic by hand."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import pytest
import tokenizers
import transformers

from slime.backends.megatron_utils.flags.parallel import ParallelSizes, PipelineSplit
from slime.ext.plan.command import EXIT_ILLEGAL, EXIT_OK, EXIT_TOO_LARGE, complete_run, run_plan
from slime.ext.plan.engines import (
    EngineShape,
    engine_problems,
    engine_weights,
    kv_bytes_per_token,
    quantized_bytes,
    quantized_expert_bytes,
)
from slime.ext.plan.layout import expand_layout, rank_places, stage_chunks
from slime.ext.plan.plan import PlanOptions, find_card
from slime.ext.plan.prompts import mixed
from slime.ext.plan.traffic import step_work
from slime.train_data.model_dims import ModelDims
from slime.train_data.schedule import ScheduleConfig
from tests.ext.plan.test_parameters import model_args

H100 = PlanOptions(card=find_card("H100"))
RUN = (
    "--hf-checkpoint /base/Qwen3-4B --ref-load /base/Qwen3-4B_torch_dist --num-rollout 10 --rollout-batch-size 32 "
    "--n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 8192 --prompt-data /base/data.jsonl "
    "--rm-type math --use-dynamic-batch-size --max-tokens-per-gpu 9216 --actor-num-nodes 1 "
    "--actor-num-gpus-per-node 8 --sglang-mem-fraction-static 0.7"
)
COLOCATED = f"{RUN} --colocate --rollout-num-gpus-per-engine 2 --tensor-model-parallel-size 2 --sequence-parallel"


def words(flags: str) -> list[str]:
    return [*model_args("qwen3-4B"), *flags.split()]


def document_of(capsys: pytest.CaptureFixture[str], flags: str, options: PlanOptions = H100) -> tuple[int, Any]:
    code = run_plan(words(flags), options, as_json=True)
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_plan_is_a_document_with_every_part(capsys):
    code, document = document_of(capsys, COLOCATED)
    assert (code, document["problems"]) == (EXIT_OK, [])
    plan = document["plan"]
    assert (plan["num_gpus"], plan["num_nodes"], plan["sizes"]["data"]) == (8, 1, 4)
    assert plan["ranks"][3] == {
        "rank": 3, "node": 0, "gpu": 3, "tensor": 1, "context": 0, "data": 1, "pipeline": 0, "expert": 0,
        "expert_tensor": 1, "expert_data": 1,
    }  # fmt: skip
    assert [engine["first_gpu"] for engine in plan["engines"]] == [0, 2, 4, 6]
    memory = plan["stages"][0]["memory"]
    assert memory["gradients"] == 2 * memory["weights"]  # fp32 sums of bf16 weights
    assert memory["peak"] == memory["static"] + memory["activations"] + max(memory["head"], memory["work"])
    assert plan["phases"]["asleep"] < plan["phases"]["rollout"]
    assert plan["model"] == "/base/Qwen3-4B"
    assert "no config.json" in document["notes"][0]


def test_the_tables_name_stages_nodes_and_phases(capsys):
    assert run_plan(words(COLOCATED), H100, all_ranks=True) == EXIT_OK
    text = capsys.readouterr().out
    for part in ("TP 2, PP 1, CP 1, DP 4", "embedding, 1-36, head", "default/regular 3: GPUs 6-7", "weight push"):
        assert part in text
    assert "rank  node  GPU" in text


def test_all_that_is_wrong_is_told_at_once(capsys):
    flags = COLOCATED.replace("--max-tokens-per-gpu 9216", "") + " --sglang-dp-size 2 --kl-coef 0.1 --kl-loss-coef 0.1"
    code, document = document_of(capsys, flags)
    assert code == EXIT_ILLEGAL
    text = "\n".join(document["problems"])
    assert "--max-tokens-per-gpu" in text  # slime's own
    assert "--sglang-dp-size" in text  # the engines'
    assert len(document["problems"]) >= 3


def test_what_does_not_fit_is_told_with_a_remedy(capsys):
    flags = COLOCATED.replace("9216", "32768").replace("--tensor-model-parallel-size 2 --sequence-parallel", "")
    code, document = document_of(capsys, flags)
    assert code == EXIT_TOO_LARGE
    assert "--recompute-granularity full" in document["plan"]["too_large"][0]
    recompute = f"{flags} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert document_of(capsys, recompute)[0] == EXIT_OK


def test_a_critic_is_checked_as_a_run_would_check_it(tmp_path):
    roles = tmp_path / "roles.yaml"
    flags = f"{COLOCATED} --advantage-estimator ppo --megatron-config-path {roles}"
    for override, told in (
        ("lr: 1e-5", []),
        ("tensor_model_parallel_size: 4", ["data_parallel_size of the critic is 2 and of the actor 4"]),
    ):
        roles.write_text(f"megatron: [{{name: value, role: critic, overrides: {{{override}}}}}]")
        run = complete_run(words(flags), tmp_path)
        assert len(run.problems) == len(told) and all(text in run.problems[0] for text in told)
        assert run.args is not None and run.args.critic_args.critic_args is None


@pytest.mark.parametrize("flags", (["--plan", "json"], ["--plan=json"]))
def test_train_py_plans_without_a_cluster(monkeypatch, capsys, flags):
    from slime.compose import run

    def train(args: Any) -> None:
        raise AssertionError("a plan trains nothing")

    monkeypatch.setattr(sys, "argv", ["train.py", *words(COLOCATED), *flags])
    with pytest.raises(SystemExit) as end:
        run(train)
    assert end.value.code == EXIT_OK
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["plan"]["num_gpus"] == 8


# Arithmetic


def test_ranks_are_numbered_tensor_context_data_pipeline_and_for_experts_apart():
    sizes = ParallelSizes(world=16, tensor=2, context=2, pipeline=2, expert=4, expert_tensor=1)
    places = rank_places(sizes, gpus_per_node=8)
    assert sizes.data == 2 and sizes.expert_data == 2
    last_of_first_stage = places[7]
    assert (last_of_first_stage.tensor, last_of_first_stage.context, last_of_first_stage.data) == (1, 1, 1)
    assert (last_of_first_stage.expert, last_of_first_stage.expert_data, last_of_first_stage.pipeline) == (3, 1, 0)
    assert (places[8].pipeline, places[8].node, places[8].gpu) == (1, 1, 0)


def test_layouts_are_expanded_as_megatron_writes_them():
    assert expand_layout("Et*3|(tt|)*2t*2L") == "Ettt|tt|tt|ttL"
    assert expand_layout("E,t|t,L") == "Et|tL"
    split = PipelineSplit(num_layers=9, stages=2, virtual=2, layout="Et*3|(tt|)*2t*2L")
    chunks = stage_chunks(split)
    assert [[list(chunk.layers) for chunk in stage] for stage in chunks] == [[[0, 1, 2], [5, 6]], [[3, 4], [7, 8]]]
    assert chunks[0][0].has_embedding and chunks[1][1].has_head


def latent(**changes: Any) -> ModelDims:
    return dataclasses.replace(
        ModelDims(
            num_layers=61, hidden_size=7168, ffn_hidden_size=18432, vocab_size=129280, attention="latent",
            num_attention_heads=128,
            num_query_groups=128, head_dim=128, q_lora=1536, kv_lora=512, qk_dim=128, rope_dim=64, v_dim=128,
            is_moe=(False,) * 3 + (True,) * 58, num_experts=256, topk=8, expert_ffn=2048, shared_ffn=2048,
        ),
        **changes,
    )  # fmt: skip


def test_a_token_of_latent_attention_costs_its_latent_on_every_card_of_the_replica():
    assert kv_bytes_per_token(latent(), EngineShape(tp_size=8)) == 61 * (512 + 64) * 2
    fp8 = EngineShape(tp_size=8, kv_element_bytes=1)
    sparse = latent(
        attention="sparse", computes_index=(True,) * 61, index_heads=32, index_head_dim=128, index_topk=2048
    )
    assert kv_bytes_per_token(sparse, fp8) == 61 * (512 + 64 + 132)


@pytest.mark.parametrize(
    ("engine", "flags", "told"),
    [
        (EngineShape(tp_size=24, ep_size=24, dp_size=3, enable_dp_attention=True), {}, "redundant-experts 8"),
        (
            EngineShape(tp_size=256, ep_size=256, dp_size=256, enable_dp_attention=True),
            {"moe_a2a_backend": "deepep"},
            "at most 160 ranks",
        ),
        (EngineShape(tp_size=12, ep_size=4), {}, "do not divide over 12"),
        (
            EngineShape(tp_size=8, ep_size=8, dp_size=8, enable_dp_attention=True),
            {"moe_a2a_backend": "deepep", "cuda_graph_max_bs_decode": 64, "speculative_algorithm": "EAGLE",
             "speculative_num_draft_tokens": 3},
            "64 requests (--sglang-cuda-graph-max-bs-decode) x 3 draft tokens = 192 tokens; set the variable to 256",
        ),
        (
            EngineShape(tp_size=8, ep_size=8, dp_size=2, enable_dp_attention=True),
            {"moe_a2a_backend": "deepep", "cuda_graph_max_bs_decode": 513},
            "= 513 tokens, 129 on each of the 4 ranks of a replica; set the variable to 256",
        ),
    ],
)  # fmt: skip
def test_rules_that_an_engine_would_meet_at_its_start_are_told_before(engine, flags, told):
    problems = list(engine_problems(latent(), engine, flags, {}, "Engines"))
    assert any(told in problem for problem in problems), problems


def data_of(folder, lengths):
    """A checkpoint folder with a tokenizer of one token per word, and a file with prompts of these lengths."""
    words_ = {"[UNK]": 0, **{f"w{index}": index + 1 for index in range(8)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words_, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    rows = [json.dumps({"text": " ".join(["w1"] * length)}) for length in lengths]
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n")
    return f"--hf-checkpoint {folder} --prompt-data {folder}/data.jsonl --input-key text"


def test_prompts_are_counted_where_data_and_tokenizer_are_at_hand(capsys, tmp_path):
    more = data_of(tmp_path, [700] * 31 + [3000])
    code, document = document_of(capsys, f"{COLOCATED} --rollout-max-response-len 64 {more}")
    work = document["plan"]["work"]
    assert code == EXIT_OK
    # 32 prompts of 8 samples each; the reference responses are cut to 64 tokens, and nearly all are longer.
    assert work["longest"] == 3000 + 64
    prompts = 8 * (31 * 700 + 3000)
    assert prompts < work["num_tokens"] <= prompts + 256 * 64
    assert not any("No prompt is counted" in note for note in document["notes"])


def test_prompts_of_several_data_sets_come_in_the_shares_of_their_weights():
    assert mixed([[1, 2], [9], [5]], [3, 1, 0])[:8] == (1, 2, 1, 9, 2, 1, 2, 9)


def test_a_step_is_counted_with_the_trainers_scheduler():
    flops = ModelDims(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=4, head_dim=16, ffn_hidden_size=128,
        vocab_size=512,
    )  # fmt: skip
    schedule = ScheduleConfig(dp_size=2, use_dynamic_batch_size=True, max_tokens_per_gpu=100)
    work = step_work(
        [100] * 8, schedule=schedule, flops=flops, global_batch_size=4, pipeline=4, forward_passes=1,
        recomputes_everything=True,
    )  # fmt: skip
    assert work.num_microbatches == (2, 2)
    assert work.model_flops == 3 * 8 * flops.forward_flops(100)
    assert work.hardware_flops * 3 == work.model_flops * 5
    assert work.bubble == pytest.approx(3 / 5)
    assert work.imbalance == 1.0


@pytest.mark.parametrize(
    ("quantization", "num_bytes"),
    [
        (None, 2.0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 128**2),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, 1 + 4 / 128),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, 0.5 + 2 / 32),
    ],
)
def test_engines_hold_a_byte_for_fp8_and_half_of_one_for_int4(quantization, num_bytes):
    assert quantized_bytes({"quantization_config": quantization}) == num_bytes


def test_fp4_experts_of_an_fp8_checkpoint_take_half_a_byte_and_their_scales():
    published = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    fp8, fp4 = quantized_expert_bytes(published), quantized_expert_bytes(published | {"expert_dtype": "fp4"})
    assert (fp8, fp4) == (quantized_bytes(published), 17 / 32)
    engine = EngineShape(tp_size=8, ep_size=8, weight_bytes=fp8)
    less = engine_weights(latent(), engine) - engine_weights(latent(), dataclasses.replace(engine, expert_bytes=fp4))
    assert less == pytest.approx(58 * 32 * 3 * 2048 * 7168 * (fp8 - fp4), rel=1e-9)
