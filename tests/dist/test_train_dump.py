"""``--save-debug-train-data``: the same file in every layout, with the trained data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.utils.safe_pickle import read_torch_file
from tests.dist.critic_case import PPO, my_share, start_critic
from tests.dist.trainer_case import LENGTHS, cut, make_args, make_train_data, run_workers, start_worker, write_model

pytestmark = pytest.mark.dist

LAYOUTS = {
    "DP2": (),
    "CP2": ("--context-parallel-size", "2"),
    "TP2": ("--tensor-model-parallel-size", "2"),
    "PP2": ("--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1"),
    "reused": ("--advantage-estimator", "grpo"),
}
INDICES = [40 + 3 * position for position in range(len(LENGTHS))]
"""``Sample.index`` of each sample, which does not start at 0 in every rollout."""


def train_and_dump(rank: int, world_size: int, port: int, hf: str, folder: str) -> None:
    for name, layout in LAYOUTS.items():
        flags = ("--actor-num-gpus-per-node", world_size, *layout)
        flags += ("--save-debug-train-data", f"{folder}/{name}/{{rollout_id}}.pt")
        if name != "reused":
            flags += ("--kl-coef", 0.2, "--advantage-estimator", "reinforce_plus_plus_baseline")
            flags += ("--normalize-advantages",)
        args = make_args(Path(hf), *flags)
        worker = start_worker(args, rank, world_size, port, with_ref=name != "reused")
        parallel = worker.get_parallel_config()
        top = {"teacher_top": [[[[1.0, -0.5]]] * response for _, response in LENGTHS], "sample_indices": INDICES}
        worker.train(3, cut(args, make_train_data() | top, parallel)[parallel["dp_rank"]])


def test_all_layouts_write_the_same_samples(tmp_path):
    write_model(tmp_path / "hf")
    run_workers(train_and_dump, 2, str(tmp_path / "hf"), str(tmp_path), timeout_s=250)
    dumps = {name: read_torch_file(tmp_path / name / "3.pt") for name in LAYOUTS}
    given = make_train_data()
    for name, dump in dumps.items():
        assert (dump["format_version"], dump["rollout_id"], dump["rank"]) == (2, 3, 0)
        # Rollouts that do not fill a step are dropped; all 8 of 8 fit.
        assert [sample["position"] for sample in dump["samples"]] == list(range(len(LENGTHS)))
        assert [shard["dp_rank"] for shard in dump["dp_shards"]] == ([0, 1] if name in ("DP2", "reused") else [0])
        assert sorted(p for shard in dump["dp_shards"] for p in shard["partition"]) == list(range(len(LENGTHS)))
        assert dump["raw_reward"] == given["raw_reward"]
        assert [sample["rollout_position"] for sample in dump["samples"]] == list(range(len(LENGTHS)))
        assert [sample["sample_index"] for sample in dump["samples"]] == INDICES
        for shard in dump["dp_shards"]:
            assert shard["sample_indices"] == [INDICES[position] for position in shard["partition"]]
        writers = {"DP2": [0, 1], "reused": [0, 1], "PP2": [1]}
        assert [shard["rank"] for shard in dump["dp_shards"]] == writers.get(name, [0])
        for position, (sample, (prompt, response)) in enumerate(zip(dump["samples"], LENGTHS, strict=True)):
            assert sample["tokens"].tolist() == given["tokens"][position]
            assert sample["loss_masks"].tolist() == given["loss_masks"][position]
            assert (sample["total_lengths"], sample["response_lengths"]) == (prompt + response, response)
            for column in ("log_probs", "rollout_log_probs", "advantages", "returns", "teacher_top"):
                assert sample[column].shape[0] == response, (name, column)
            torch.testing.assert_close(sample["rollout_log_probs"], torch.tensor(given["rollout_log_probs"][position]))
            columns = ["log_probs"] if name == "reused" else ["log_probs", "ref_log_probs", "advantages", "kl"]
            for column in columns:
                wanted = dumps["DP2"]["samples"][position][column]
                torch.testing.assert_close(sample[column], wanted, atol=2e-5, rtol=2e-5, msg=f"{name} {column}")


def train_critic(rank: int, world_size: int, port: int, hf: str, folder: str) -> None:
    flags = ("--actor-num-gpus-per-node", world_size, "--context-parallel-size", world_size, *PPO)
    flags += ("--num-critic-only-steps", 1, "--save-debug-train-data", f"{folder}/{{rollout_id}}.pt")
    args = make_args(Path(hf), *flags)
    critic = start_critic(args, rank, world_size, port)
    for rollout_id in (0, 1):
        critic.train(rollout_id, my_share(args, critic))


def test_the_critic_writes_the_rollouts_that_train_it_alone_and_leaves_the_others_to_the_actor(tmp_path):
    write_model(tmp_path / "hf")
    run_workers(train_critic, 2, str(tmp_path / "hf"), str(tmp_path), timeout_s=250)
    assert not (tmp_path / "1.pt").exists()
    samples = read_torch_file(tmp_path / "0.pt")["samples"]
    assert [sample["tokens"].tolist() for sample in samples] == make_train_data()["tokens"]
    for sample, (_, response) in zip(samples, LENGTHS, strict=True):
        assert sample["values"].shape == (response,)
        end = sample["loss_masks"].nonzero()[-1:]  # nothing follows the last trained token but the reward
        returns = torch.full((len(end), 1), sample["rewards"])
        torch.testing.assert_close(sample["returns"][end], returns, atol=1e-5, rtol=1e-5)
