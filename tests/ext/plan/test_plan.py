"""From a command line to a printed plan: legality in one go, layout, phases, exit codes; arithmetic by hand."""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from typing import Any

import pytest
import tokenizers
import transformers

from slime.ext.plan.command import EXIT_ILLEGAL, EXIT_OK, EXIT_TOO_LARGE, complete_run, run_plan
from slime.ext.plan.engines import (
    EngineShape,
    engine_memory,
    engine_places,
    engine_problems,
    kv_bytes_per_token,
    placement_problems,
    quantized_bytes,
)
from slime.ext.plan.layout import ParallelSizes, PipelineSplit, expand_layout, rank_places, stage_chunks
from slime.ext.plan.plan import PlanOptions, find_card
from slime.ext.plan.prompts import sample_lengths
from slime.ext.plan.traffic import reference_lengths, step_work
from slime.train_data.model_dims import ModelDims
from slime.train_data.schedule import ScheduleConfig
from slime.utils.errors import ConfigError
from tests.ext.plan.test_parameters import model_args
from tools import plan as plan_tool

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


def test_a_misspelt_flag_is_named_and_nothing_is_planned(capsys):
    code, document = document_of(capsys, f"{COLOCATED} --rollout-batchsize 4")
    assert (code, document["plan"]) == (EXIT_ILLEGAL, None)
    assert "Did you mean --rollout-batch-size" in document["problems"][0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--sglang-dp-size 4 --sglang-enable-dp-attention", "tp_size 2, dp_size 4 and ep_size 1 leave parts"),
        ("--sglang-pp-size 4", "tp_size 0, dp_size 1 and ep_size 1 leave parts"),
        ("--actor-num-gpus-per-node 0", "leaves no GPU to train on"),
    ],
)
def test_parts_without_a_gpu_are_told_and_do_not_end_the_plan(capsys, flags, says):
    code, document = document_of(capsys, f"{COLOCATED} {flags}")
    assert code == EXIT_ILLEGAL and any(says in problem for problem in document["problems"])


def test_experts_in_more_parts_than_gpus_are_told():
    engine = EngineShape(tp_size=2, ep_size=8)
    [problem] = engine_problems(latent(num_experts=64), engine, {}, {}, "Engines")
    assert problem.startswith("Engines: tp_size 2, dp_size 1 and ep_size 8 leave parts without a GPU")


def test_what_does_not_fit_is_told_with_a_remedy(capsys):
    flags = COLOCATED.replace("9216", "32768").replace("--tensor-model-parallel-size 2 --sequence-parallel", "")
    code, document = document_of(capsys, flags)
    assert code == EXIT_TOO_LARGE
    assert "--recompute-granularity full" in document["plan"]["too_large"][0]
    recompute = f"{flags} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert document_of(capsys, recompute)[0] == EXIT_OK


def test_separate_gpus_have_a_trainer_and_engines_that_share_nothing(capsys):
    flags = RUN.replace("--actor-num-gpus-per-node 8", "--actor-num-gpus-per-node 4") + " --rollout-num-gpus 4"
    _, document = document_of(capsys, f"{flags} --tensor-model-parallel-size 2 --sequence-parallel")
    plan = document["plan"]
    assert (plan["num_gpus"], len(plan["ranks"])) == (8, 4)
    assert [engine["first_gpu"] for engine in plan["engines"]] == [4, 5, 6, 7]
    assert not any(engine["shares_trainer_gpus"] for engine in plan["engines"])
    assert plan["phases"]["asleep"] is None
    assert plan["push"]["way"] == "distributed"


def test_engines_alone_are_planned_without_a_trainer(capsys):
    flags = f"{RUN} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 3 --debug-rollout-only"
    flags = flags.replace("--max-tokens-per-gpu 9216", "")
    code, document = document_of(capsys, f"{flags} --rollout-num-gpus 12 --rollout-num-gpus-per-engine 4")
    assert (code, document["problems"]) == (EXIT_OK, [])
    plan = document["plan"]
    assert (plan["num_gpus"], plan["ranks"], plan["work"], plan["push"]) == (12, [], None, None)
    assert [engine["first_gpu"] for engine in plan["engines"]] == [0, 4, 8]
    assert plan["phases"]["train"] is None and plan["phases"]["rollout"] > 0


def test_the_optimizer_on_the_host_leaves_the_card(capsys):
    here = document_of(capsys, COLOCATED)[1]["plan"]
    there = document_of(capsys, f"{COLOCATED} --optimizer-cpu-offload")[1]["plan"]
    owned = here["stages"][0]["memory"]["optimizer"]
    assert there["stages"][0]["memory"]["optimizer"] == 0
    assert there["host"]["optimizer"] == 8 * owned
    assert here["host"]["optimizer"] == 0


def test_what_sleeps_is_the_optimizer_and_the_weights_of_a_critic(capsys):
    """Gradients are kept nowhere, the actor's weights are parked; two trainers of one shape on each GPU."""
    plain = document_of(capsys, COLOCATED)[1]["plan"]
    memory = plain["stages"][0]["memory"]
    assert plain["host"]["asleep"] == 8 * memory["optimizer"]
    both = document_of(capsys, f"{COLOCATED} --advantage-estimator ppo")[1]["plan"]
    assert both["host"]["asleep"] == 8 * (2 * memory["optimizer"] + memory["weights"])
    apart = document_of(capsys, f"{COLOCATED} --no-offload-train")[1]["plan"]
    assert apart["host"]["asleep"] == 0


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


def test_copies_of_the_state_in_memory_are_counted_on_each_node(capsys):
    """Three of 12 bytes for each parameter that a rank owns; with a second node, two more of another node's rank."""
    saves = "--trainer-recovery memory --save /c --save-interval 9"
    for nodes, num_copies in ((1, 3), (2, 5)):
        flags = f"{COLOCATED} --actor-num-nodes {nodes}"
        plain, copying = (document_of(capsys, words)[1]["plan"] for words in (flags, f"{flags} {saves}"))
        owned = plain["stages"][0]["memory"]["optimizer"]
        assert plain["host"]["copies"] == 0
        assert copying["host"]["copies"] == 8 * num_copies * owned
        assert copying["host"]["total"] - plain["host"]["total"] == copying["host"]["copies"]


def test_the_reference_costs_a_parked_copy_and_a_pass(capsys):
    plain = document_of(capsys, COLOCATED)[1]["plan"]
    with_reference = document_of(capsys, f"{COLOCATED} --use-kl-loss")[1]["plan"]
    assert with_reference["host"]["parked_weights"] == pytest.approx(2 * plain["host"]["parked_weights"])
    assert with_reference["work"]["forward_passes"] == plain["work"]["forward_passes"] + 1


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


def test_layers_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="leaves 50 layers for 4 pipeline stages"):
        stage_chunks(PipelineSplit(num_layers=61, stages=5, last=11))


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


def test_the_engines_cache_is_no_larger_than_its_limit_of_tokens():
    card = 80 * 2**30
    whole = engine_memory(latent(), EngineShape(tp_size=256, dp_size=1), card_bytes=card, other_bytes=0)
    limit = whole.kv_tokens // 3
    limited = EngineShape(tp_size=256, dp_size=1, max_total_tokens=limit)
    cut = engine_memory(latent(), limited, card_bytes=card, other_bytes=0)
    assert (cut.kv_tokens, cut.kv_cache) == (limit, limit * kv_bytes_per_token(latent(), limited))
    assert cut.weights + cut.kv_cache + cut.reserve == whole.weights + whole.kv_cache + whole.reserve
    beyond = EngineShape(tp_size=256, dp_size=1, max_total_tokens=10 * whole.kv_tokens)
    assert engine_memory(latent(), beyond, card_bytes=card, other_bytes=0) == whole


def test_engines_over_several_nodes_are_numbered_within():
    groups = [("default", "prefill", 16, 16), ("default", "placeholder", 8, 8), ("other", "regular", 8, 4)]
    places = engine_places(groups, rollout_offset=8, gpus_per_node=8, trainer_gpus=16)
    assert [(p.model, p.first_gpu, p.nodes, p.shares_trainer_gpus) for p in places] == [
        ("default", 8, (1, 2), True), ("other", 32, (4,), False), ("other", 36, (4,), False),
    ]  # fmt: skip
    assert list(placement_problems(places, 8)) == []
    crooked = engine_places([("m", "regular", 4, 4), ("m", "regular", 8, 8)], rollout_offset=0, gpus_per_node=8,
                            trainer_gpus=0)  # fmt: skip
    assert ["cuts a node of 8 in two" in problem for problem in placement_problems(crooked, 8)] == [True]


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


def test_ranks_of_one_attention_replica_share_the_tokens_that_they_dispatch():
    engine = EngineShape(tp_size=8, ep_size=8)  # 256 requests over 8 ranks are 32 tokens
    flags = {"moe_a2a_backend": "deepep", "cuda_graph_max_bs_decode": 256}
    environment = {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "32"}
    assert list(engine_problems(latent(), engine, flags, environment, "Engines")) == []
    told = list(engine_problems(latent(), engine, {**flags, "cuda_graph_max_bs_decode": 257}, environment, "Engines"))
    assert ["257 requests" in problem and "33 on each of the 8 ranks" in problem for problem in told] == [True]


def test_more_experts_and_stages_than_gpus_is_an_error_with_the_numbers(capsys):
    flags = f"{COLOCATED} --num-experts 16 --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 "
    code, document = document_of(capsys, flags + "--moe-ffn-hidden-size 768 --pipeline-model-parallel-size 2")
    assert code == EXIT_ILLEGAL
    assert any("has 8 GPUs" in problem and "= 32 must divide that" in problem for problem in document["problems"])


def test_a_model_without_experts_has_no_groups_of_them(capsys):
    code, document = document_of(capsys, f"{COLOCATED} --expert-model-parallel-size 16")
    assert code == EXIT_ILLEGAL
    assert any("no --num-experts" in problem for problem in document["problems"])


@pytest.mark.parametrize("flag", ["--qkv-format bshd", "--use-critic"])
def test_a_refused_flag_is_told_and_nothing_else_breaks(capsys, flag):
    code, document = document_of(capsys, f"{COLOCATED} {flag}")
    assert (code, document["plan"]) == (EXIT_ILLEGAL, None)
    assert len(document["problems"]) == 1 and flag.split()[0] in document["problems"][0]


def data_of(folder, lengths):
    """A checkpoint's folder with a tokenizer of one token a word, and a file with prompts of these lengths."""
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
    # 32 prompts of 8 samples each; the reference responses are cut to 64 tokens, nearly all of them are longer.
    assert work["longest"] == 3000 + 64
    prompts = 8 * (31 * 700 + 3000)
    assert prompts < work["num_tokens"] <= prompts + 256 * 64
    assert not any("No prompt is counted" in note for note in document["notes"])


def test_the_prompts_of_a_mixture_are_those_of_all_its_data_sets_by_weight(capsys, tmp_path):
    more = data_of(tmp_path, [100] * 4)
    rows = [json.dumps({"question": " ".join(["w1"] * length)}) for length in (900, 1500)]
    (tmp_path / "long.jsonl").write_text("\n".join(rows) + "\n")
    sets = f"[{{path: {tmp_path}/data.jsonl, weight: 3}}, {{path: {tmp_path}/long.jsonl, input_key: question}}]"
    (tmp_path / "mix.yaml").write_text(f"datasets: {sets}\n")
    flags = f"{COLOCATED} --rollout-max-response-len 64 {more}".replace("data.jsonl", "mix.yaml")
    code, document = document_of(capsys, flags)
    work = document["plan"]["work"]
    assert code == EXIT_OK
    assert work["longest"] == 1500 + 64
    # Of 32 prompts three quarters have 100 tokens, and those of the other set take turns.
    prompts = 8 * (24 * 100 + 4 * 900 + 4 * 1500)
    assert prompts < work["num_tokens"] <= prompts + 256 * 64
    (tmp_path / "long.jsonl").unlink()
    _, document = document_of(capsys, flags)
    assert any("No prompt is counted" in note for note in document["notes"])


def test_rows_that_hold_their_responses_are_the_samples():
    args = Namespace(n_samples_per_prompt=1)
    args.rollout_max_context_len = args.rollout_max_response_len = args.rollout_max_prompt_len = None
    assert sample_lengths(args, 5, (70, 30, 500)) == [70, 30, 500, 70, 30]
    args.rollout_max_context_len = 100
    assert sample_lengths(args, 3, (70, 30, 500)) == [70, 30, 100]


def test_prompts_that_cannot_be_counted_are_said(capsys):
    _, document = document_of(capsys, COLOCATED)
    assert any("No prompt is counted: /base/data.jsonl" in note for note in document["notes"])
    _, document = document_of(capsys, f"{COLOCATED} --rollout-max-prompt-len 1024")
    assert not any("No prompt is counted" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--mfu", "0"], "--mfu: 0 is not a finite number above 0"),
        (["--mfu", "1.5"], "--mfu: 1.5 is not a finite number above 0 and at most 1"),
        (["--gpu-memory", "-5"], "-5 is not a finite number above 0"),
        (["--host-memory", "0"], "0 is not a finite number above 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan.py", *options, *words(COLOCATED)])
    with pytest.raises(SystemExit) as ended:
        plan_tool.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_24_gpus_want_8_redundant_experts_beside_64():
    flash = latent(num_attention_heads=24, num_experts=64)
    engine = EngineShape(tp_size=24, ep_size=24, dp_size=3, enable_dp_attention=True, redundant_experts=16)
    assert list(engine_problems(flash, engine, {}, {}, "Engines")) == [
        "Engines: 64 experts and 16 redundant ones do not divide over 24 expert-parallel ranks; use "
        "--sglang-ep-num-redundant-experts 32."
    ]
    assert list(engine_problems(flash, dataclasses.replace(engine, redundant_experts=8), {}, {}, "Engines")) == []


def test_the_reference_distribution_is_the_decided_one():
    lengths = reference_lengths(2048, 32768)
    assert len(lengths) == 2048 and max(lengths) <= 32768
    assert lengths[:3] == reference_lengths(3, 32768)
    assert max(reference_lengths(2048, 100)) == 100


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


def test_a_card_that_nobody_knows_is_named():
    with pytest.raises(ConfigError, match="'H9000'; known cards are H100"):
        find_card("H9000")


def test_an_incomplete_run_still_tells_what_is_missing(tmp_path):
    run = complete_run(["--hf-checkpoint", "/base/x", "--rollout-batch-size", "4"], tmp_path)
    assert run.args is None
    assert any("--num-layers" in problem for problem in run.problems)


VISION = {
    **{"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3},
    **{"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304},
    **{"out_hidden_size": 2560, "deepstack_visual_indexes": [5, 11, 17]},
}
"""The tower of Qwen3-VL-4B."""


@pytest.fixture
def seeing(tmp_path) -> str:
    """The flags of a run of Qwen3-VL-4B, whose config.json is there."""
    text = {
        **{"model_type": "qwen3_vl_text", "num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
        **{
            "rope_theta": 5000000,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
        },
    }
    config = {
        **{"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655},
        **{"tie_word_embeddings": True, "text_config": text, "vision_config": VISION, "torch_dtype": "bfloat16"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return f"{COLOCATED} --hf-checkpoint {tmp_path} --ref-load {tmp_path} --pipeline-model-parallel-size 2"


def planned(capsys: pytest.CaptureFixture[str], flags: str, *images: tuple[int, int]) -> Any:
    code = run_plan(flags.split(), dataclasses.replace(H100, images=images), as_json=True)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, document["problems"]) == (EXIT_OK, [])
    return document["plan"]


def test_images_cost_work_time_and_memory_of_the_first_stage(seeing, capsys):
    blind, one, trained = (
        planned(capsys, seeing),
        planned(capsys, seeing, (1024, 1024)),
        planned(capsys, f"{seeing} --train-vision-tower", (1024, 1024)),
    )
    samples, patches, hidden = 256, 4096, 1152
    block = 2 * patches * hidden * (4 * hidden + 2 * 4304) + 4 * patches**2 * hidden
    mergers = 4 * 2 * (patches // 4) * 4 * hidden * (4 * hidden + 2560)
    forward = samples * (2 * patches * 3 * 2 * 16**2 * hidden + 27 * block + mergers)
    passes = one["work"]["forward_passes"]
    assert one["work"]["tower_flops"] == forward * (passes + 1)
    assert trained["work"]["tower_flops"] == forward * (passes + 3)
    assert blind["work"]["tower_flops"] == 0
    assert one["work"]["num_tokens"] == blind["work"]["num_tokens"] + samples * patches // 4
    assert one["train_seconds"] < trained["train_seconds"]
    first, last = (
        [plan["stages"][stage]["memory"]["activations"] for plan in (blind, one, trained)] for stage in (0, 1)
    )
    assert first[0] < first[1] < first[2] and last[1] == last[2]


def test_more_images_are_the_sum_of_each(seeing, capsys):
    two = planned(capsys, seeing, (1024, 1024), (512, 256))["work"]["tower_flops"]
    each = [planned(capsys, seeing, size)["work"]["tower_flops"] for size in ((1024, 1024), (512, 256))]
    assert two == sum(each)


def test_images_for_a_model_without_eyes_and_sizes_that_are_none_are_refused(capsys, monkeypatch):
    code, document = document_of(capsys, COLOCATED, dataclasses.replace(H100, images=((64, 64),)))
    assert code == EXIT_ILLEGAL and "the trainer has no vision tower for this model" in document["problems"][0]
    monkeypatch.setattr(sys, "argv", ["plan.py", "--image", "64", *words(COLOCATED)])
    with pytest.raises(SystemExit):
        plan_tool.main()
    assert "'64': give height and width in pixels, as 1024x768" in capsys.readouterr().err


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
