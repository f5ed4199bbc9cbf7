"""Each refusal names the flag, its value, and what to do."""

from __future__ import annotations

import json
import shutil
import sys
from types import ModuleType

import pytest

from slime.flags.cluster import check_loop
from slime.flags.parse import slime_validate_args
from slime.utils.errors import ConfigError, DataError

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
    ("words", "size"),
    [
        ("--advantage-estimator grpo", 8),
        ("--advantage-estimator gspo --num-steps-per-rollout 2", 8),
        ("--advantage-estimator ppo", 1),
        ("--advantage-estimator grpo --disable-rewards-normalization", 1),
        ("--advantage-estimator grpo --debug-rollout-only", 1),
        ("--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.1", 1),
    ],
)
def test_the_answers_to_a_prompt_are_eight_where_one_would_teach_nothing(make_args, words, size):
    args = make_args(*words.split())
    args.n_samples_per_prompt = args.global_batch_size = None
    slime_validate_args(args)
    assert args.n_samples_per_prompt == size
    steps = args.num_steps_per_rollout or 1
    assert args.debug_rollout_only or args.global_batch_size * steps == args.rollout_batch_size * size


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--global-batch-size", "5"], "--rollout-batch-size 4 x --n-samples-per-prompt 2 = 8 samples"),
        (["--num-steps-per-rollout", "3"], "do not make 3 equal steps; with 2 in each there would be 4"),
        (
            ["--rollout-batch-size", "25", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "3"],
            "--num-steps-per-rollout 3 does not divide the 100 samples",
        ),
        (["--debug-rollout-only", "--debug-train-only"], "leave nothing to run"),
        (["--debug-rollout-only", "--load-debug-rollout-data", "x"], "--load-debug-rollout-data leave nothing to run"),
        (["--use-routing-replay", "--disable-compute-advantages-and-returns"], "drop one of them"),
        (["--num-rollout", "1", "--qkv-format", "bshd"], "--qkv-format is bshd"),
        (["--stale-group-policy", "mask"], "has no effect without --max-staleness"),
        (["--save-debug-rollout-data", "x.pt", "--save-debug-train-data", "x.pt"], "would overwrite each other"),
        (["--rollout-function-path", FORGE], "--load-forge-rollout-data is None"),
        (["--rollout-function-path", FORGE, "--load-forge-rollout-data", "/none/{rollout_id}.pt"], "no file fits"),
        (["--save-debug-train-data", "x_{step}.pt"], "it may only have {rank} and {rollout_id}"),
        (["--rollout-function-path", FULLY_ASYNC, "--offload-rollout"], "use train_async.py"),
        (["--eval-function-path", FULLY_ASYNC, "--eval-prompt-data", "x", "y"], "which cannot evaluate"),
        (["--group-rm", "--eval-prompt-data", "x", "y"], "an evaluation each by itself"),
        (["--rollout-function-path", FULLY_ASYNC, "--max-staleness", "2"], None),
        (["--ci-disable-kl-checker"], None),  # the check warns without --ci-test
    ],
)
def test_impossible_combinations_are_refused(complaint, make_args, words, says):
    if says is None:
        slime_validate_args(make_args(*words))
    else:
        assert says in complaint(*words)


def test_a_batch_that_does_not_divide_the_rollout_is_refused_unless_a_plug_in_may_give_other_counts(
    complaint, make_args
):
    words = ["--global-batch-size", "3"]
    without = ("--num-steps-per-rollout",)
    assert "2 of them would not be trained on. Give a divisor of 8" in complaint(*words, without=without)
    for plug_in in (
        ["--custom-generate-function-path", "slime.rollout.sglang_rollout.generate"],
        ["--rollout-function-path", "slime.rollout.sleep_rollout.sleep"],
    ):
        slime_validate_args(make_args(*words, *plug_in, without=without))


def test_epochs_need_a_data_set(complaint):
    text = complaint("--num-epoch", "1", "--disable-rollout-global-dataset", without=("--num-rollout",))
    assert "give --num-rollout" in text


def test_all_impossible_combinations_are_shown_together(complaint):
    assert len(complaint("--eps-clip-c", "1", "--eval-interval", "2", "--save-hf", "x").splitlines()) == 4


def test_evaluation_in_the_background_needs_engines_of_its_own(complaint, make_args):
    assert "has no effect without --eval-interval: that says when" in complaint("--eval-in-background")
    args = make_args("--eval-in-background")
    args.keep_old_actor = False
    with pytest.raises(ConfigError, match="--eval-in-background does not work with train.py.* use train_async.py"):
        check_loop(args, "train.py")


def test_nixl_is_refused_with_the_reason_where_its_package_is_not(complaint, make_args, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert "--rollout-data-transport nixl needs the package nixl" in complaint("--rollout-data-transport", "nixl")
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    slime_validate_args(make_args("--rollout-data-transport", "nixl"))


def test_a_broken_config_is_named(complaint, model_folder):
    (model_folder / "config.json").write_text("{")
    assert "config.json is not JSON" in complaint()


def test_the_trainer_starts_from_a_folder_in_mxfp4(make_args, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "mxfp4")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    slime_validate_args(make_args("--ref-load", str(folder)))


def test_the_record_of_a_run_that_ended_before_its_first_save_is_no_model(make_args, tmp_path):
    for name in ("config.json", "events.jsonl"):
        (tmp_path / name).write_text("{}")
    args = make_args("--load", str(tmp_path))
    slime_validate_args(args)
    assert args.load == args.ref_load


def test_eval_data_is_checked_too(complaint, tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"question": "2", "label": "1"}\n')
    text = complaint("--eval-prompt-data", "mine", str(tmp_path / "eval.jsonl"), error=DataError)
    assert "eval.jsonl" in text and "--eval-input-key" in text


def test_the_grader_of_an_eval_data_set_is_checked(complaint, tmp_path, prompt_file):
    config = tmp_path / "eval.yaml"
    config.write_text(f"datasets: [{{name: mine, path: {prompt_file}, rm_type: gqpa}}]\n")
    assert "rm_type of eval data set mine: gqpa is no grader. Did you mean gpqa?" in complaint(
        "--eval-config", str(config)
    )
    config.write_text(f"datasets: [{{name: mine, path: {prompt_file}, rm_type: remote_rm}}]\n")
    assert "rm_type of eval data set mine: remote_rm needs --rm-url" in complaint("--eval-config", str(config))
