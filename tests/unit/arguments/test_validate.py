"""Each refusal names the flag, its value and what to do."""

from __future__ import annotations

import json
import shutil
import sys
from types import ModuleType

import pytest

from slime.arguments import slime_validate_args
from slime.arguments.cross_group import check_in_step_arguments
from slime.arguments.groups import GROUPS
from slime.flags.checkpoint import TRACKER
from slime.flags.group import derive_all, problems_of
from slime.utils.errors import ConfigError, DataError, HookError

DISTILLATION = "slime.rollout.on_policy_distillation"
FORGE = "slime.rollout.forge_load.generate_rollout"
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


@pytest.fixture
def complaint(make_args):
    def run(*words, error=ConfigError, **kwargs):
        with pytest.raises(error) as caught:
            slime_validate_args(make_args(*words, **kwargs))
        return str(caught.value)

    return run


def test_the_smallest_command_is_accepted(make_args):
    slime_validate_args(make_args())


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "ppo"])
@pytest.mark.parametrize(
    "others",
    [
        "",
        "--disable-rewards-normalization",
        "--num-rollout 0",
        "--debug-rollout-only",
        "--use-kl-loss --kl-loss-coef 0.1",
        "--custom-advantage-function-path tests.oracle.plugins.leave_one_out",
    ],
)
def test_one_answer_to_a_prompt_is_refused_where_nothing_else_teaches(make_args, estimator, others):
    words = f"--n-samples-per-prompt 1 --advantage-estimator {estimator} --normalize-advantages {others}"
    args = make_args(*words.split())
    if others or estimator == "ppo":
        slime_validate_args(args)
        return
    with pytest.raises(ConfigError, match=f"--n-samples-per-prompt 1 with --advantage-estimator {estimator}: "):
        slime_validate_args(args)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rollout-temperature", "0"], "--rollout-temperature is 0.0; it must be above 0"),
        (["--eps-clip-c", "1.0"], "--eps-clip-c is 1.0; it must be above 1"),
        (["--advantage-estimator", "reinforce_plus_plus"], "needs --normalize-advantages"),
        (["--use-rollout-logprobs", "--use-tis"], "choose one of them"),
        (["--get-mismatch-metrics"], "give that path"),
        (["--tis-clip-low", "3"], "--tis-clip-low 3.0 is above --tis-clip 2.0"),
        (["--kl-coef", "0.1", "--use-kl-loss", "--kl-loss-coef", "0.2"], "one of them must be 0"),
        (["--kl-loss-coef", "0.2"], "no effect without --use-kl-loss"),
        (["--use-dynamic-batch-size"], "needs --max-tokens-per-gpu"),
        (["--balance-by-flops"], "needs --use-dynamic-batch-size"),
        (["--over-sampling-batch-size", "3"], "--over-sampling-batch-size 3 is below --rollout-batch-size 4"),
        (["--global-batch-size", "5"], "--rollout-batch-size 4 x --n-samples-per-prompt 2 = 8 samples"),
        (["--num-steps-per-rollout", "9"], "more than the 8 samples of a rollout"),
        (["--num-steps-per-rollout", "3"], "do not make 3 equal steps; with 2 in each there would be 4"),
        (["--debug-rollout-only", "--debug-train-only"], "leave nothing to run"),
        (["--debug-rollout-only", "--load-debug-rollout-data", "x"], "--load-debug-rollout-data leave nothing to run"),
        (["--loss-type", "custom_loss"], "needs both --loss-type custom_loss and the path"),
        (["--save-interval", "2"], "--save-interval needs --save"),
        (["--eval-interval", "2"], "--eval-interval needs data"),
        (["--rm-type", "boxed_mth"], "--rm-type boxed_mth is no grader. Did you mean math?"),
        (["--rm-type", "dapo"], "--reward-key score"),
        (["--rm-type", "remote_rm"], "needs --rm-url"),
        (["--fp32"], None),
        (["--only-train-params-name-list", "a", "--freeze-params-name-list", "b"], "contradict each other"),
        (["--freeze-params-name-list", "(a"], "'(a' is no regular expression"),
        (["--use-stateless-adam", "--save", "x"], "add --no-save-optim"),
        (["--use-stateless-adam", "--reset-optimizer-states"], "--reset-optimizer-states is about moments"),
        (["--use-stateless-adam", "--no-save-optim"], None),
        (["--use-routing-replay", "--disable-compute-advantages-and-returns"], "drop one of them"),
        (["--save-debug-rollout-data", "x_{rank}.pt"], "it may only have {rollout_id}"),
        (["--rollout-max-context-len", "9", "--rollout-max-prompt-len", "9"], "at most 8"),
        (["--mask-offpolicy-in-partial-rollout"], "add --partial-rollout"),
        (["--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"], "is not a multiple of"),
        (["--rollout-num-gpus", "12", "--rollout-num-gpus-per-engine", "12"], "no whole number of nodes"),
        (["--actor-num-nodes", "0"], "leaves no GPU to train on"),
        (["--num-rollout", "1", "--qkv-format", "bshd"], "--qkv-format is bshd"),
        (["--use-critic"], "grpo, which has no critic"),
        (["--use-opd"], "--use-opd needs --opd-type"),
        (["--opd-type", "sglang"], "no effect without --use-opd"),
        (["--opd-teacher-load", "x"], "no effect without --use-opd"),
        (["--opd-teachers", "a=x"], "no effect without --use-opd"),
        (["--use-opd", "--opd-type", "sglang", "--opd-teacher-key", "task"], "no effect without --opd-teachers"),
        (["--use-opd", "--opd-type", "sglang", "--opd-teachers", "http"], "each must be NAME=WHERE"),
        (["--use-opd", "--opd-type", "sglang", "--opd-teachers", "a=x", "a=y"], "each may occur once"),
        (["--use-opd", "--opd-type", "megatron", "--opd-teachers", "a=x", "--opd-teacher-load", "x"], "drop one"),
        (["--use-opd", "--opd-type", "megatron", "--opd-teachers", "a=/none"], "--opd-teachers"),
        (["--use-opd", "--opd-type", "sglang", "--opd-teachers", "a=http://a/generate", "b=http://b/generate"], None),
        (["--opd-top-k", "4"], "no effect without --use-opd"),
        (["--use-opd", "--opd-type", "sglang", "--opd-top-k", "4", "--rollout-top-p", "0.9"], "make it 1"),
        (["--use-opd", "--opd-type", "sglang", "--opd-top-k", "4", "--loss-type", "sft_loss"], "of the policy loss"),
        (["--use-opd", "--opd-type", "megatron"], "name its checkpoint: --opd-teacher-load"),
        (["--use-opd", "--opd-type", "sglang", "--opd-teacher-load", "x"], "use --opd-type megatron"),
        (["--use-opd", "--opd-type", "megatron", "--opd-teacher-load", "/none"], "--opd-teacher-load"),
        (["--use-opd", "--opd-type", "sglang", "--disable-compute-advantages-and-returns"], "there are none"),
        (["--use-opd", "--opd-type", "sglang", "--loss-type", "sft_loss"], "which --loss-type sft_loss does not use"),
        (
            ["--use-opd", "--opd-type", "sglang", "--custom-rm-path", f"{DISTILLATION}.reward_func"],
            "the teacher at --rm-url",
        ),
        (["--use-opd", "--opd-type", "sglang"], None),
        (["--stale-group-policy", "mask"], "needs --max-staleness"),
        (["--load-forge-rollout-data", "x.pt"], "takes both the file and --rollout-function-path"),
        (["--rollout-function-path", FORGE], "--load-forge-rollout-data is None"),
        (["--rollout-function-path", FORGE, "--load-forge-rollout-data", "/none/{rollout_id}.pt"], "no file fits"),
        (["--dump-details", "details"], None),
        (["--save-debug-train-data", "x_{step}.pt"], "it may only have {rank} and {rollout_id}"),
        (["--rollout-function-path", FULLY_ASYNC, "--offload-rollout"], "use train_async.py"),
        (["--eval-function-path", FULLY_ASYNC, "--eval-prompt-data", "x", "y"], "which cannot evaluate"),
        (["--rollout-function-path", FULLY_ASYNC, "--max-staleness", "2"], None),
    ],
)
def test_impossible_combinations_are_refused(complaint, make_args, words, says):
    if says is None:
        slime_validate_args(make_args(*words))
    else:
        assert says in complaint(*words)


def test_two_precisions_are_refused(make_args):
    args = make_args("--fp32")
    args.bf16 = True
    with pytest.raises(ConfigError, match="--fp32 and --bf16 contradict each other"):
        slime_validate_args(args)


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        ("--rollout-batch-size", "--rollout-batch-size is not given"),
        ("--num-rollout", "Neither --num-rollout nor --num-epoch"),
        ("--num-steps-per-rollout", "Neither --global-batch-size nor --num-steps-per-rollout"),
        ("--rollout-num-gpus", "--rollout-num-gpus is not given"),
        ("--hf-checkpoint", "--hf-checkpoint is not given"),
        ("--prompt-data", "--prompt-data is not given"),
        ("--ref-load", "Nothing to start from"),
    ],
)
def test_what_is_needed_and_missing_is_named(complaint, left_out, says):
    assert says in complaint(without=(left_out,))


def test_epochs_need_a_data_set(complaint):
    text = complaint("--num-epoch", "1", "--disable-rollout-global-dataset", without=("--num-rollout",))
    assert "give --num-rollout" in text


def test_all_impossible_combinations_are_shown_together(complaint):
    assert len(complaint("--eps-clip-c", "1", "--eval-interval", "2", "--save-hf", "x").splitlines()) == 3


def test_evaluation_in_the_background_needs_engines_of_its_own_and_whole_pushes(complaint, make_args):
    text = complaint("--eval-in-background", "--update-weight-mode", "delta", "--update-weight-transport", "disk")
    for part in ("say when with --eval-interval", "use full"):
        assert part in text
    args = make_args("--eval-in-background")
    args.keep_old_actor = False
    with pytest.raises(ConfigError, match="--eval-in-background evaluates while .* use train_async.py"):
        check_in_step_arguments(args)


def test_nixl_is_refused_with_the_reason_where_its_package_is_not(complaint, make_args, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert "--rollout-data-transport nixl needs the package nixl" in complaint("--rollout-data-transport", "nixl")
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    slime_validate_args(make_args("--rollout-data-transport", "nixl"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--memory-recorder", "memray"], "memory is recorded by torch only"),
    ],
)
def test_features_that_do_not_exist_are_refused_and_not_ignored(complaint, words, says):
    assert says in complaint(*words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--save-debug-rollout-data", "x.pt", "--save-debug-train-data", "x.pt"], "would overwrite each other"),
        (["--enable-mtp-training"], "needs --mtp-num-layers"),
    ],
)
def test_rules_of_features_to_come_are_ready(make_args, words, says):
    args = make_args(*words)
    args.critic_args = None
    derive_all(args, GROUPS)
    assert any(says in problem for problem in problems_of(args, GROUPS))


def test_historical_flags_are_named_in_one_line(make_args, caplog):
    caplog.set_level("INFO")
    slime_validate_args(make_args("--megatron-to-hf-mode", "bridge", "--http-proxy", "h"))
    lines = [record.message for record in caplog.records if "without effect" in record.message]
    assert len(lines) == 1
    assert "--megatron-to-hf-mode" in lines[0] and "--http-proxy" in lines[0]


# Model and checkpoints


def test_a_missing_model_folder_is_named(complaint, tmp_path):
    assert f"--hf-checkpoint: {tmp_path / 'none'} is not a folder" in complaint(
        "--hf-checkpoint", str(tmp_path / "none")
    )


def test_a_broken_config_is_named(complaint, model_folder):
    (model_folder / "config.json").write_text("{")
    assert "config.json is not JSON" in complaint()


def test_a_weight_file_that_the_index_names_must_exist(complaint, model_folder):
    (model_folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks 2 weight files that its index names, model-1.safetensors first" in complaint()


def test_a_model_without_tokenizer_is_refused(complaint, model_folder):
    (model_folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in complaint()


def test_the_trainer_starts_from_a_folder_in_mxfp4(make_args, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "mxfp4")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    slime_validate_args(make_args("--ref-load", str(folder)))


def test_a_folder_that_is_no_checkpoint_is_refused(complaint, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds neither a Megatron checkpoint" in complaint("--ref-load", str(tmp_path / "empty"))


def test_the_record_of_a_run_that_ended_before_its_first_save_is_no_model(make_args, tmp_path):
    for name in ("config.json", "events.jsonl"):
        (tmp_path / name).write_text("{}")
    args = make_args("--load", str(tmp_path))
    slime_validate_args(args)
    assert args.load == args.ref_load


def test_a_tracker_must_name_a_save_that_exists(complaint, tmp_path):
    folder = tmp_path / "saves"
    (folder / "iter_0000003").mkdir(parents=True)
    (folder / TRACKER).write_text("5")
    text = complaint("--load", str(folder))
    assert f"--load: {folder} has no checkpoint iter_0000005, or it is empty; saves there: iter_0000003" in text


def test_a_tracker_holds_a_number_or_release(complaint, tmp_path):
    (tmp_path / TRACKER).write_text("latest")
    assert "says 'latest'; an iteration or the word release is needed" in complaint("--load", str(tmp_path))


@pytest.mark.parametrize(
    "content", ["\u00b2", "\u0663", "-1", "1e3", "3.0", "0x3", "", "9" * 40, "3\n4", "release2", b"\xff\xfe3"]
)
def test_a_tracker_with_strange_digits_is_an_error_with_the_file(content, complaint, tmp_path):
    (tmp_path / TRACKER).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert f"{tmp_path / TRACKER} says" in complaint("--load", str(tmp_path))


def test_the_kl_loss_needs_a_reference(complaint, tmp_path):
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001/x").touch()
    (tmp_path / TRACKER).write_text("1")
    text = complaint("--use-kl-loss", "--load", str(tmp_path), without=("--ref-load",))
    assert "--use-kl-loss needs a reference model" in text


# Data


def test_a_missing_prompt_file_is_named(complaint, tmp_path):
    assert "nothing.jsonl" in complaint("--prompt-data", str(tmp_path / "nothing.jsonl"), error=DataError)


def test_a_malformed_row_is_named_with_its_line(complaint, prompt_file):
    prompt_file.write_text('{"input": "1"}\n{"input": \n')
    text = complaint(error=DataError, without=("--label-key",))
    assert str(prompt_file) in text and "2" in text


def test_a_row_without_the_input_key_is_named_with_its_line(complaint, prompt_file):
    prompt_file.write_text('{"input": "1", "label": "1"}\n{"question": "2", "label": "1"}\n')
    text = complaint(error=DataError)
    assert "2" in text and "--input-key" in text


def test_eval_data_is_checked_too(complaint, tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"question": "2", "label": "1"}\n')
    text = complaint("--eval-prompt-data", "mine", str(tmp_path / "eval.jsonl"), error=DataError)
    assert "eval.jsonl" in text and "--eval-input-key" in text


def test_replayed_data_must_exist(complaint, tmp_path):
    text = complaint("--load-debug-rollout-data", str(tmp_path / "{rollout_id}.pt"))
    assert "no file fits" in text


# Plug-ins


def test_a_plug_in_that_does_not_exist_stops_the_run(complaint):
    text = complaint("--custom-rm-path", "nowhere.to.be.found", error=HookError)
    assert text.startswith("--custom-rm-path: nowhere.to.be.found: importing nowhere.to.be raised ModuleNotFoundError")


def test_the_grader_of_an_eval_data_set_is_checked(complaint, tmp_path, prompt_file):
    config = tmp_path / "eval.yaml"
    config.write_text(f"datasets: [{{name: mine, path: {prompt_file}, rm_type: gqpa}}]\n")
    assert "rm_type of eval data set mine: gqpa is no grader. Did you mean gpqa?" in complaint(
        "--eval-config", str(config)
    )
    config.write_text(f"datasets: [{{name: mine, path: {prompt_file}, rm_type: remote_rm}}]\n")
    assert "rm_type of eval data set mine: remote_rm needs --rm-url" in complaint("--eval-config", str(config))
