"""The real job on two CPU cores: Ray, Megatron, SGLang and its router, started by the real entry points.

A random model and random rewards: what is tested is that every part works with the others, not that it learns.  Each
test starts a job or goes on with the one before; they run in this order.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.job import JOBS, REPO, Job, records

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; scripts/run-tiny-gpu.sh is the GPU's"),
]

START_S = 240
"""Deadline for a job to print its first step; about 45 s on two idle cores."""
GONE_S = 90


@pytest.fixture(autouse=True)
def no_job_survives():
    yield
    while JOBS:
        JOBS.pop().kill_everything()


def model_flags() -> list[str]:
    """MODEL_ARGS of the tiny model, as a recipe sources them."""
    script = 'source scripts/models/tiny-arithmetic.sh; printf "%s\\n" "${MODEL_ARGS[@]}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=REPO).stdout.split()


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """The tiny task, its random model, and the converted checkpoint."""
    folder = tmp_path_factory.mktemp("task")
    environment = dict(os.environ) | {"PYTHONPATH": str(REPO)}
    for command in (
        [REPO / "examples/tiny_arithmetic/make_task.py", "--output", folder / "task"],
        [
            REPO / "tools/convert_hf_to_torch_dist.py",
            *model_flags(),
            *("--hf-checkpoint", folder / "task/hf", "--save", folder / "torch_dist"),
        ],
    ):
        subprocess.run([sys.executable, *map(str, command)], check=True, env=environment, timeout=200)
    return folder


def grpo_flags(task: Path, save: Path, *more: str) -> list[str]:
    """A small GRPO run with the features of a large one."""
    text = f"""
        --actor-num-nodes 1 --hf-checkpoint {task}/task/hf --ref-load {task}/torch_dist --load {save} --save {save}
        --save-interval 1 --prompt-data {task}/task/data/grpo.jsonl --input-key prompt --label-key label
        --apply-chat-template --rollout-shuffle --rm-type random --num-rollout 2 --rollout-batch-size 4
        --n-samples-per-prompt 4 --rollout-max-response-len 24 --global-batch-size 8 --use-dynamic-batch-size
        --max-tokens-per-gpu 512 --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01
        --kl-loss-type low_var_kl --eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --lr 1e-4
        --lr-decay-style constant --weight-decay 0.1 --over-sampling-batch-size 6 --partial-rollout
        --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
        --rollout-num-gpus-per-engine 1 --save-debug-rollout-data {save}/dump/{{rollout_id}}.pt
    """
    return [*model_flags(), *shlex.split(text), *more]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


def test_a_colocated_run_trains_saves_exports_and_checks_every_push(task, run_folder):
    eval_file = task / "eval32.jsonl"
    eval_file.write_text("".join((task / "task/data/eval.jsonl").read_text().splitlines(keepends=True)[:32]))
    flags = grpo_flags(
        task, run_folder, *"--actor-num-gpus-per-node 1 --colocate --check-weight-update-equal".split(),
        *f"--eval-interval 1 --eval-prompt-data held_out {eval_file} --eval-temperature 0.7".split(),
        *f"--save-hf {run_folder}/hf/{{rollout_id}} --use-tensorboard --use-wandb --wandb-mode offline".split(),
        *f"--wandb-dir {run_folder} --wandb-project tiny --wandb-group tiny".split(),
    )  # fmt: skip
    job = Job("train.py", flags, run_folder / "log.txt", TENSORBOARD_DIR=str(run_folder / "tensorboard"))
    assert job.finish(START_S + 120) == 0, job.text()[-4000:]
    assert "step 2/2" in job.text()
    job.seconds_until_gone(GONE_S)
    assert (run_folder / "latest_checkpointed_iteration.txt").read_text() == "1"
    steps = records(run_folder, "train/step")
    assert len(steps) == 4  # two optimizer steps a rollout
    assert all(0 < step["train/grad_norm"] < 100 for step in steps)
    differences = [record["train/train_rollout_logprob_abs_diff"] for record in steps]
    assert differences[0] < 1e-4  # fp32 on both sides; later rollouts hold groups that older weights finished
    assert len(records(run_folder, "eval/held_out")) == 3  # before training and after each rollout
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(run_folder / "hf/1")
    started = AutoModelForCausalLM.from_pretrained(task / "task/hf")
    assert not torch.equal(exported.lm_head.weight, started.lm_head.weight)
    assert list((run_folder / "tensorboard").rglob("events.*")) and list(run_folder.rglob("run-*.wandb"))


def test_the_same_command_with_more_rollouts_goes_on_where_it_stopped(task, run_folder):
    flags = grpo_flags(task, run_folder, *"--actor-num-gpus-per-node 1 --colocate --num-rollout 3".split())
    job = Job("train.py", flags, run_folder / "log2.txt")
    assert job.finish(START_S + 60) == 0, job.text()[-4000:]
    shown = re.findall(r"^step (\d)/3", job.text(), flags=re.MULTILINE)
    assert shown == ["3"]
    assert [record["train/step"] for record in records(run_folder, "train/step")] == [0, 1, 2, 3, 4, 5]
    trained: list[int] = []
    for rollout_id in range(3):
        samples = torch.load(run_folder / f"dump/{rollout_id}.pt", weights_only=False)["samples"]
        trained += sorted({sample["group_index"] for sample in samples})
    assert len(trained) == len(set(trained)) == 12  # no group twice over the resume


def test_a_replayed_rollout_gives_the_same_losses_without_engines(task, run_folder, tmp_path):
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 1 --num-rollout 3".split(),
        *("--load-debug-rollout-data", f"{run_folder}/dump/{{rollout_id}}.pt"),
    )  # fmt: skip
    # The dumps are read, not written over.
    cut = flags.index("--save-debug-rollout-data")
    job = Job("train.py", flags[:cut] + flags[cut + 2 :], tmp_path / "log.txt")
    assert job.finish(START_S + 60) == 0, job.text()[-4000:]
    original = {row["train/step"]: row for row in records(run_folder, "train/step")}
    for row in records(tmp_path, "train/step"):
        for name in ("train/loss", "train/grad_norm", "train/kl_loss"):
            assert row[name] == original[row["train/step"]][name], (row["train/step"], name)


def test_ppo_trains_its_critic_first_on_the_same_gpu_and_saves_both(task, run_folder, tmp_path):
    roles = tmp_path / "roles.yaml"
    roles.write_text("megatron:\n  - {name: values, role: critic, overrides: {lr: 1e-3}}\n")
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 1 --advantage-estimator ppo --num-critic-only-steps 1".split(),
        *("--megatron-config-path", str(roles)),
        *("--load-debug-rollout-data", f"{run_folder}/dump/{{rollout_id}}.pt"),  # the engines' part is tested above
    )  # fmt: skip
    cut = flags.index("--save-debug-rollout-data")
    job = Job("train.py", flags[:cut] + flags[cut + 2 :], tmp_path / "log.txt")
    assert job.finish(START_S + 60) == 0, job.text()[-4000:]
    critic_steps = records(tmp_path, "train/critic-value_loss")
    assert [step["train/step"] for step in critic_steps] == [0, 1, 2, 3]
    assert {step["train/critic-lr-pg_0"] for step in critic_steps} == {1e-3}
    assert [step["train/step"] for step in records(tmp_path, "train/pg_loss")] == [2, 3]
    assert all("rollout/values" in record for record in records(tmp_path, "rollout/returns"))
    assert [row["rollout/step"] for row in records(tmp_path, "rollout/explained_variance")] == [0, 1]
    for folder in (tmp_path, tmp_path / "critic"):
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "1"
    job.seconds_until_gone(GONE_S)


def test_engines_apart_are_reached_over_gloo_by_two_trainer_ranks_one_rollout_ahead(task, tmp_path):
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 2 --rollout-num-gpus 1 --tensor-model-parallel-size 2".split(),
        *"--sequence-parallel --num-rollout 3 --check-weight-update-equal".split(),
    )  # fmt: skip
    job = Job("train_async.py", flags, tmp_path / "log.txt")
    assert job.finish(START_S + 180) == 0, job.text()[-4000:]
    assert "step 3/3" in job.text()
    first = records(tmp_path, "train/step")[0]
    assert first["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_changes_of_weights_travel_over_disk(task, tmp_path):
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --num-rollout 2 --lr 1e-3".split(),
        *"--update-weight-mode delta --update-weight-transport disk --check-weight-update-equal".split(),
        *("--update-weight-disk-dir", str(tmp_path / "shared"), "--update-weight-disk-keep-files"),
        *("--update-weight-local-checkpoint-dir", str(tmp_path / "local")),
    )  # fmt: skip
    job = Job("train.py", flags, tmp_path / "log.txt")
    assert job.finish(START_S + 120) == 0, job.text()[-4000:]
    assert "step 2/2" in job.text()
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == [f"weight_v00000{n}" for n in (1, 2, 3)]
    state = json.loads((tmp_path / "local/.weight_sync/state.json").read_text())
    assert (state["version"], state["dirty"]) == ("000003", "")
    assert records(tmp_path, "train/step")[0]["train/train_rollout_logprob_abs_diff"] < 1e-4
    pushes = records(tmp_path, "perf/update_weights_wire_bytes")
    assert [0 < push["perf/update_weights_density"] <= 1 for push in pushes] == [True, True]


def test_a_trainer_that_ends_with_every_push_goes_on_from_its_checkpoint(task, tmp_path):
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 1 --colocate --release-train --num-rollout 2 --lr 1e-3".split(),
        *"--update-weight-transport disk --check-weight-update-equal".split(),
        *("--update-weight-disk-dir", str(tmp_path / "shared")),
    )  # fmt: skip
    job = Job("train.py", flags, tmp_path / "log.txt")
    assert job.finish(START_S + 120) == 0, job.text()[-4000:]
    assert "step 2/2" in job.text()
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["weight_v000003"]
    steps = records(tmp_path, "train/step")
    assert [step["train/step"] for step in steps] == [0, 1, 2, 3]
    assert steps[0]["train/train_rollout_logprob_abs_diff"] < 1e-4
    job.seconds_until_gone(GONE_S)


def test_engines_alone_generate_without_a_trainer(task, tmp_path):
    flags = grpo_flags(
        task,
        tmp_path,
        *"--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --debug-rollout-only --num-rollout 1".split(),
    )
    job = Job("train.py", flags, tmp_path / "log.txt")
    assert job.finish(START_S + 60) == 0, job.text()[-4000:]
    assert "MegatronTrainRayActor" not in job.text()
    samples = torch.load(tmp_path / "dump/0.pt", weights_only=False)["samples"]
    assert len(samples) == 16 and all(sample["response_length"] > 0 for sample in samples)


def test_a_driver_of_the_users_own_trains_actor_and_critic(task, tmp_path):
    """Written against upstream's names alone, and run without this project's entry point."""
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 1 --colocate --check-weight-update-equal".split(),
        *"--advantage-estimator ppo --num-critic-only-steps 1 --rollout-max-response-len 16".split(),
    )  # fmt: skip
    job = Job("tests/e2e/drivers/synchronous.py", flags, tmp_path / "log.txt")
    assert job.finish(START_S + 120) == 0, job.text()[-4000:]
    steps = records(tmp_path, "train/pg_loss")
    assert [step["train/step"] for step in steps] == [2, 3]  # rollout 0 trains the critic alone
    assert steps[0]["train/train_rollout_logprob_abs_diff"] < 1e-4  # the engines have the trainer's weights
    assert [step["train/step"] for step in records(tmp_path, "train/critic-value_loss")] == [0, 1, 2, 3]
    for folder in (tmp_path, tmp_path / "critic"):
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert (tmp_path / "rollout/global_dataset_state_dict_1.pt").exists()
    versions = {
        version
        for rollout_id in range(2)
        for sample in torch.load(tmp_path / f"dump/{rollout_id}.pt", weights_only=False)["samples"]
        for version in sample["weight_versions"]
    }
    assert versions == {"1", "2"}
    job.seconds_until_gone(GONE_S)


def test_a_driver_of_the_users_own_trains_one_rollout_ahead(task, tmp_path):
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --num-rollout 3".split(),
        *"--rollout-max-response-len 16 --check-weight-update-equal".split(),
    )  # fmt: skip
    job = Job("tests/e2e/drivers/one_rollout_ahead.py", flags, tmp_path / "log.txt")
    assert job.finish(START_S + 120) == 0, job.text()[-4000:]
    assert [step["train/step"] for step in records(tmp_path, "train/pg_loss")] == [0, 1, 2, 3, 4, 5]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    job.seconds_until_gone(GONE_S)


def test_an_evaluation_in_the_background_stops_no_step_and_has_one_weight_version(task, tmp_path):
    engines = tmp_path / "engines.yaml"
    group = "[{worker_type: regular, num_gpus: 1}]"
    engines.write_text("sglang:\n" + "".join(f"  - {{name: {n}, server_groups: {group}}}\n" for n in ("p", "eval")))
    data = tmp_path / "eval8.jsonl"
    data.write_text("".join((task / "task/data/eval.jsonl").read_text().splitlines(keepends=True)[:8]))
    sets = tmp_path / "sets.yaml"
    grader = "tests.e2e.slow_grader.reward"
    sets.write_text(f"eval:\n  datasets:\n    - {{name: held_out, path: {data}, custom_rm_path: {grader}}}\n")
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 1 --rollout-num-gpus 2 --num-rollout 3".split(),
        *("--sglang-config", str(engines), "--eval-in-background", "--eval-interval", "1"),
        *("--eval-config", str(sets)),
        *"--rollout-max-response-len 16 --check-weight-update-equal".split(),
    )  # fmt: skip
    job = Job("train_async.py", flags, tmp_path / "log.txt")
    assert job.finish(START_S + 180) == 0, job.text()[-4000:]
    text = job.text()
    # Rollout 1 was trained and its weights were pushed while the first evaluation ran.
    assert "The evaluation after rollout 1 is left out: that of rollout 0 still runs" in text
    assert [step["train/step"] for step in records(tmp_path, "train/step")] == [0, 1, 2, 3, 4, 5]
    evaluations = records(tmp_path, "eval/held_out")
    assert (evaluations[0]["eval/held_out"], evaluations[0]["eval/step"]) == (1.0, 0)
    assert evaluations[0]["eval/held_out/weight_version"] == 2  # pushed after rollout 0, with later ones after it
    dump = torch.load(tmp_path / "dump/eval_0.pt", weights_only=False)
    assert (dump["rollout_id"], dump["weight_versions"]) == (0, {"held_out": 2})
    assert {tuple(sample["weight_versions"]) for sample in dump["samples"]} == {("2",)}
    differences = [row["train/train_rollout_logprob_abs_diff"] for row in records(tmp_path, "train/step")]
    assert differences[0] < 1e-4
    job.seconds_until_gone(GONE_S)


@pytest.fixture
def busy_job(task, tmp_path):
    """A job in the middle of its work, with responses long enough to be caught generating."""
    flags = grpo_flags(
        task, tmp_path, *"--actor-num-gpus-per-node 1 --colocate --num-rollout 1000".split(),
        *"--rollout-batch-size 16 --global-batch-size 64 --over-sampling-batch-size 16".split(),
        *"--rollout-max-response-len 400 --save-interval 1000".split(),
    )  # fmt: skip
    job = Job("train.py", flags, tmp_path / "log.txt")
    job.wait_until(lambda: "step 1/" in job.text(), "first step", START_S)
    return job


@pytest.mark.parametrize(
    ("victim", "message"),
    [
        ("slime.backends.sglang_utils.server_main", r"EngineDiedError: engine 0 .*killed by signal 9"),
        ("slime.backends.sglang_utils.router_main", r"EngineDiedError: the router http.* has ended"),
        ("ray::MegatronTrainRayActor", r"EngineDiedError: (actor rank 0 died|an actor died during training)"),
    ],
    ids=["engine", "router", "trainer"],
)
def test_a_death_ends_the_job_with_the_cause_and_leaves_nothing(busy_job, victim, message):
    for pid in busy_job.pids(victim):
        os.kill(pid, signal.SIGKILL)
    assert busy_job.finish(GONE_S) == 1
    assert re.search("slime job failed: " + message, busy_job.text(), re.DOTALL), busy_job.text()[-3000:]
    busy_job.seconds_until_gone(GONE_S)


def test_ctrl_c_ends_the_job_and_leaves_nothing(busy_job):
    busy_job.process.send_signal(signal.SIGINT)
    assert busy_job.finish(GONE_S) == 130
    busy_job.seconds_until_gone(GONE_S)


def test_a_cluster_that_is_too_small_is_an_error_not_a_wait(task, tmp_path):
    import ray

    ray.init(address="local", num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        address = ray.get_runtime_context().gcs_address
        flags = grpo_flags(
            task, tmp_path, *"--actor-num-gpus-per-node 4 --colocate --cluster-wait-timeout-s 2".split()
        )
        job = Job("train.py", flags, tmp_path / "log.txt", RAY_ADDRESS=address)
        assert job.finish(120) == 2
        assert "the job needs 4 GPUs and 5 CPUs; the Ray cluster has 1 GPUs and 4 CPUs" in job.text()
    finally:
        ray.shutdown()
