"""The whole parser: one command with Megatron's and SGLang's flags gives a complete Namespace."""

from __future__ import annotations

from slime.flags.parse import parse_args

MODEL = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 16 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 10000
--use-rotary-position-embeddings --disable-bias-linear --qk-layernorm --vocab-size 128
--untie-embeddings-and-output-weights""".split()


def test_a_complete_command_is_parsed_resolved_and_checked(command):
    args = parse_args(argv=[*command, *MODEL, "--sglang-mem-fraction-static", "0.3", "--router-policy", "random"])
    assert (args.num_layers, args.world_size, args.global_batch_size) == (2, 1, 8)
    assert (args.sglang_mem_fraction_static, args.sglang_tp_size, args.router_policy) == (0.3, 1, "random")


def test_without_engines_their_flags_are_named_in_one_line_and_left_alone(command, caplog):
    caplog.set_level("INFO")
    words = [
        "--debug-train-only",
        "--sglang-nonsense",
        "1",
        "2",
        "--router-policy",
        "random",
        "--sglang-nonsense",
        "3",
    ]
    args = parse_args(argv=[*command, *MODEL, *words])
    assert not hasattr(args, "sglang_nonsense")
    lines = [r.message for r in caplog.records if "no engine runs" in r.message]
    assert lines == ["Ignored, because no engine runs: --sglang-nonsense --router-policy"]


def test_without_a_trainer_the_models_shape_is_not_needed(command):
    args = parse_args(argv=[*command, "--debug-rollout-only"])
    assert (args.actor_num_nodes, args.actor_num_gpus_per_node) == (1, 1)


def test_a_drivers_own_flags_are_added(command):
    args = parse_args(lambda parser: parser.add_argument("--colour"), argv=[*command, *MODEL, "--colour", "red"])
    assert args.colour == "red"


def test_every_value_that_is_no_default_says_where_it_comes_from(command, tmp_path):
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("entropy_coef: 0.25\n")
    args = parse_args(argv=[*command, *MODEL, "--lr=2e-6", "--custom-config-path", str(overlay)])
    names = ("lr", "custom_config_path", "entropy_coef", "padded_vocab_size", "eps_clip")
    assert [args.value_origins.get(name) for name in names] == ["flag", "flag", "yaml", "derived", None]
