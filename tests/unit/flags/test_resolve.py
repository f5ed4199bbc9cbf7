"""Values derived from flags, by hand."""

from __future__ import annotations

import copy
from argparse import Namespace

import pytest

from slime.flags.checkpoint import TRACKER
from slime.flags.config import BackendFlags
from slime.flags.fault_tolerance import check_on_nan
from slime.flags.group import derive_all
from slime.flags.parse import GROUPS, args_to_resume, slime_validate_args
from tests.unit.talking_engine import make_tokenizer


@pytest.fixture
def resolved(make_args):
    def run(*words, **kwargs):
        args = make_args(*words, **kwargs)
        derive_all(args, GROUPS)
        return args

    return run


def test_steps_per_rollout_give_the_global_batch_size(resolved):
    args = resolved("--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--num-steps-per-rollout", "2")
    assert args.global_batch_size == 128
    assert args.over_sampling_batch_size == 32


def test_without_a_batch_size_a_step_takes_all_of_a_rollout(make_args):
    args = make_args(without=("--num-steps-per-rollout",))
    slime_validate_args(args)
    assert args.global_batch_size == 8


@pytest.mark.parametrize("load", ["", "--load empty"])
def test_the_reference_is_the_checkpoint_where_none_is_named(make_args, model_folder, load):
    args = make_args("--use-kl-loss", *load.split(), without=("--ref-load",))
    slime_validate_args(args)
    assert (args.ref_load, args.load) == (str(model_folder), str(model_folder))


def test_rows_of_messages_are_rendered(make_args, model_folder, prompt_file):
    make_tokenizer().save_pretrained(model_folder)
    prompt_file.write_text('{"input": [{"role": "user", "content": "1+1="}], "label": "2"}\n' * 4)
    args = make_args("--eval-interval", "1", "--eval-prompt-data", "held_out", str(prompt_file))
    args.runs_here = False  # nothing is read
    slime_validate_args(args)
    assert args.apply_chat_template is False
    args = make_args("--eval-interval", "1", "--eval-prompt-data", "held_out", str(prompt_file))
    slime_validate_args(args)
    assert (args.apply_chat_template, args.eval_datasets[0].apply_chat_template) == (True, True)


def test_an_eval_data_set_may_say_that_its_rows_are_not_rendered(make_args, model_folder, prompt_file, tmp_path):
    make_tokenizer().save_pretrained(model_folder)
    (tmp_path / "text.jsonl").write_text(prompt_file.read_text())
    prompt_file.write_text('{"input": [{"role": "user", "content": "1+1="}], "label": "2"}\n' * 4)
    config = tmp_path / "eval.yaml"
    config.write_text(
        f"datasets:\n  - {{name: raw, path: {tmp_path / 'text.jsonl'}, apply_chat_template: false}}\n"
        f"  - {{name: chat, path: {prompt_file}}}\n"
    )
    args = make_args("--eval-interval", "1", "--eval-config", str(config))
    slime_validate_args(args)
    assert [dataset.apply_chat_template for dataset in args.eval_datasets] == [False, True]


def test_eps_clip_high_is_eps_clip_unless_given(resolved):
    assert resolved("--eps-clip", "0.3").eps_clip_high == 0.3
    assert resolved("--eps-clip", "0.3", "--eps-clip-high", "0.4").eps_clip_high == 0.4


def test_one_sample_a_prompt_turns_std_normalisation_off(resolved):
    assert resolved("--n-samples-per-prompt", "1").grpo_std_normalization is False
    assert resolved("--n-samples-per-prompt", "2").grpo_std_normalization is True


def test_colocation_shares_the_gpus_and_offloads_both_sides(resolved):
    args = resolved("--colocate", "--actor-num-gpus-per-node", "4", without=("--rollout-num-gpus",))
    assert (args.rollout_num_gpus, args.offload_train, args.offload_rollout) == (4, True, True)
    assert args.disable_grad_buffers_cpu_backup and args.disable_param_buffers_cpu_backup


def test_colocation_without_offload_when_asked(resolved):
    args = resolved("--colocate", "--no-offload-train", "--no-offload-rollout")
    assert (args.offload_train, args.offload_rollout) == (False, False)


def test_separate_gpus_offload_nothing(resolved):
    args = resolved()
    assert (args.offload_train, args.offload_rollout) == (False, False)


def test_offload_stands_for_both_and_is_gone(resolved):
    args = resolved("--offload")
    assert (args.offload_train, args.offload_rollout) == (True, True)
    assert not hasattr(args, "offload")


@pytest.mark.parametrize(
    ("words", "offloads"),
    [
        ("--colocate --no-offload", (False, False)),
        ("--colocate --no-offload --offload-train", (True, False)),
        ("--offload --no-offload-rollout", (True, False)),
        ("--no-offload", (False, False)),
        ("--advantage-estimator ppo", (True, False)),
        ("--advantage-estimator ppo --debug-train-only", (True, False)),
    ],
)
def test_what_one_side_is_asked_counts_before_what_both_are(words, offloads, resolved):
    args = resolved(*words.split())
    assert (args.offload_train, args.offload_rollout) == offloads


def test_what_follows_from_another_flag_can_be_turned_off(resolved):
    args = resolved("--balance-by-flops", "--use-rollout-routing-replay")
    assert (args.balance_data, args.use_routing_replay, args.debug_train_only) == (True, True, False)
    assert resolved("--balance-by-flops", "--no-balance-data").balance_data is False
    args = resolved()
    assert (args.balance_data, args.use_routing_replay) == (False, False)


def test_rollout_only_gives_the_trainers_gpus_to_the_engines(resolved):
    args = resolved(
        *("--debug-rollout-only", "--colocate", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "8"),
        without=("--rollout-num-gpus",),
    )
    assert (args.rollout_num_gpus, args.actor_num_nodes, args.actor_num_gpus_per_node) == (16, 2, 8)
    assert (args.colocate, args.offload_train, args.offload_rollout) == (False, False, False)


def test_rollout_only_without_gpus_has_no_trainer(resolved):
    args = resolved("--debug-rollout-only", "--rollout-num-gpus", "0")
    assert (args.actor_num_nodes, args.actor_num_gpus_per_node) == (0, 0)


def test_replayed_data_needs_no_engine(resolved):
    args = resolved("--load-debug-rollout-data", "x_{rollout_id}.pt", "--colocate")
    assert args.debug_train_only
    assert (args.offload_train, args.offload_rollout) == (False, False)


def test_dump_details_names_both_dumps(resolved):
    args = resolved("--dump-details", "d")
    assert args.save_debug_rollout_data == "d/rollout_data/{rollout_id}.pt"
    assert args.save_debug_train_data == "d/train_data/{rollout_id}.pt"


def test_a_context_limit_bounds_the_prompt(resolved):
    args = resolved("--rollout-max-context-len", "100")
    assert (args.rollout_max_prompt_len, args.eval_max_context_len) == (99, 100)
    assert resolved("--rollout-max-context-len", "100", "--rollout-max-prompt-len", "5").rollout_max_prompt_len == 5


@pytest.mark.parametrize(("cuda", "precision", "backend"), [(False, "fp32", "gloo"), (True, "bf16", "nccl")])
def test_platform_chooses_precision_and_backend(resolved, monkeypatch, cuda, precision, backend):
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    args = resolved()
    assert {name for name in ("fp32", "bf16", "fp16") if getattr(args, name)} == {precision}
    assert args.distributed_backend == backend


def test_precision_and_backend_that_were_asked_for_stay(resolved, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    args = resolved("--fp32", "--distributed-backend", "gloo")
    assert (args.fp32, args.bf16, args.distributed_backend) == (True, False, "gloo")


def test_an_empty_load_folder_starts_from_the_reference(resolved, tmp_path, model_folder):
    (tmp_path / "saves").mkdir()
    args = resolved("--load", str(tmp_path / "saves"), "--ref-ckpt-step", "7")
    assert (args.load, args.ckpt_step, args.start_rollout_id) == (str(model_folder), 7, 0)
    assert args.no_load_optim and args.no_load_rng and args.finetune


def test_a_finished_save_is_resumed(resolved, tmp_path):
    (tmp_path / TRACKER).write_text("3")
    args = resolved("--load", str(tmp_path))
    assert (args.load, args.start_rollout_id) == (str(tmp_path), None)
    assert not (args.no_load_optim or args.no_load_rng or args.finetune)


def test_a_hugging_face_folder_is_loaded_as_it_is(resolved, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    args = resolved("--load", str(tmp_path))
    assert (args.load, args.start_rollout_id, args.finetune) == (str(tmp_path), 0, True)


def test_eval_takes_the_rollouts_function_and_reward_key(resolved):
    args = resolved("--reward-key", "score", "--rollout-function-path", "a.b")
    assert (args.eval_function_path, args.eval_reward_key) == ("a.b", "score")


def test_a_single_eval_value_is_the_file_of_aime(resolved, prompt_file):
    datasets = resolved("--eval-prompt-data", str(prompt_file)).eval_datasets
    assert [(d.name, d.path) for d in datasets] == [("aime", str(prompt_file))]


def test_the_result_is_a_plain_namespace_that_can_be_copied(resolved):
    args = resolved()
    other = copy.deepcopy(args)
    other.anything = 1
    assert not hasattr(args, "anything")
    assert args.rollout_sample_hook_path == []


def test_the_trainer_of_a_run_goes_on_from_its_own_checkpoint_once_there_is_one(resolved):
    args = resolved("--save", "/ckpt")
    before = copy.deepcopy(vars(args))
    first = args_to_resume(args, weight_version=1, checkpoint=None)
    assert vars(first) == before | {"update_weight_start_version": 1}
    later = args_to_resume(args, weight_version=2, checkpoint=7)
    assert (later.load, later.finetune, later.no_load_optim, later.no_load_rng) == ("/ckpt", False, False, False)
    assert (later.ckpt_step, later.start_rollout_id, later.update_weight_start_version) == (7, None, 2)
    assert later.earlier_load is None, "the folder of another run"
    going_on = Namespace(**{**before, "load": "/begin", "finetune": False})
    assert args_to_resume(going_on, weight_version=2, checkpoint=7).earlier_load == "/begin"
    assert vars(args) == before


def test_a_trainer_that_has_its_state_reads_no_checkpoint(resolved):
    args = resolved("--load", "/begin", "--save", "/ckpt")
    resumed = args_to_resume(args, weight_version=2, checkpoint=1, copied=5)
    assert (resumed.load, resumed.start_rollout_id) == (args.load, 6)


@pytest.mark.parametrize(
    ("flags", "on_nan", "checks"),
    [
        ((), ["stop"], True),
        (("--on-nan", "skip"), ["skip"], False),
        (("--on-nan", "rollback", "2"), ["rollback", "2"], True),
    ],
)
def test_what_a_number_that_is_not_finite_does(resolved, flags, on_nan, checks):
    args = resolved(*flags)
    assert (args.on_nan, BackendFlags.of(args).check_for_nan_in_loss_and_grad) == (on_nan, checks)


@pytest.mark.parametrize("word", [None, "stop"])
def test_where_megatron_does_not_check_a_step_is_skipped_and_nothing_else_can_be_asked_for(make_args, word):
    args = make_args(*([] if word is None else ["--on-nan", word]))
    args.check_for_nan_in_loss_and_grad = False
    derive_all(args, GROUPS)
    assert args.on_nan == [word or "skip"]
    refused = ["--no-check-for-nan-in-loss-and-grad finds nothing for --on-nan stop; drop one of them."]
    assert list(check_on_nan(args)) == (refused if word else [])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--on-nan", "rollback"), "--on-nan rollback is none of stop, skip and rollback N"),
        (("--on-nan", "skip", "2"), "--on-nan skip 2 is none of"),
        (("--on-nan", "rollback", "1"), "--on-nan rollback 1 goes back by --trainer-recovery checkpoint"),
        (
            ("--on-nan", "rollback", "3", "--save", "/c", "--save-interval", "1", "--keep-last", "2"),
            "--on-nan rollback 3 needs as many checkpoints, and --keep-last is 2",
        ),
    ],
)
def test_what_cannot_be_done_about_such_a_number_is_named(resolved, flags, message):
    args = resolved(*flags)
    args.restarts_trainer = args.save is not None
    assert any(line.startswith(message) for line in check_on_nan(args))
