"""``slime replay``: a recorded step is repeated bit for bit; with a changed flag it differs."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.ext.record.run_reader import read_run
from slime.utils.errors import DataError
from slime.utils.types import Sample
from tests.dist.trainer_case import LENGTHS, make_train_data, run_workers, write_model
from tools import replay, replay_plan

pytestmark = pytest.mark.dist

NUM_STEPS = 3
TP2 = "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel".split()
NO_DROPOUT = ["--hidden-dropout", "0"]  # another layout draws other random numbers
FLAGS = (
    "--lr 1e-3 --fp32 --num-rollout 7 --rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 4 "
    "--lr-decay-style cosine --weight-decay 0.1 --use-dynamic-batch-size --max-tokens-per-gpu 40 --use-kl-loss "
    "--kl-loss-coef 0.1 --data-pad-size-multiplier 4 --attention-dropout 0 --hidden-dropout 0.1 --save-interval 1 "
    "--rollout-num-gpus 1 --prompt-data gone.jsonl --wandb-key hidden"
).split()


def samples_of(rollout_id: int) -> list[Sample]:
    """Eight samples of four prompts."""
    data = make_train_data(seed=rollout_id)
    samples = []
    for index, (_, response) in enumerate(LENGTHS[:8]):
        samples.append(
            Sample(
                index=index, group_index=index // 2, tokens=data["tokens"][index], response_length=response,
                loss_mask=data["loss_masks"][index] if index % 3 else None, reward=data["rewards"][index],
                rollout_log_probs=data["rollout_log_probs"][index], status=Sample.Status.COMPLETED,
                prompt=[{"role": "user", "content": "hi"}], remove_sample=index == 4, metadata={"raw_reward": 0.25},
            )
        )  # fmt: skip
    return samples


def train_on_two_ranks(rank: int, world_size: int, port: int, folder: str) -> None:
    """A run of three steps on two tensor ranks."""
    from tests.unit.backends.megatron_utils.megatron_case import hf_flags

    os.chdir(folder)
    record_a_run(Path(folder, "tp2"), [*hf_flags(Path(folder, "hf")), *TP2, *NO_DROPOUT], rank, world_size, port)


def clear_between_trainers() -> Callable[[], None]:
    """Let trainers of this process share one default group; return a function that makes room for the next trainer."""
    import torch.distributed as dist
    from megatron.core import mpu

    from slime.backends.train_worker import TrainWorker
    from slime.observability.timer import Timer

    join = TrainWorker.join_process_group
    TrainWorker.join_process_group = lambda *given: None if dist.is_initialized() else join(*given)

    def clear() -> None:
        if mpu.is_initialized():
            mpu.destroy_model_parallel()
        if Timer().is_running("train_wait"):
            Timer().end("train_wait")

    return clear


def train_and_replay(rank: int, world_size: int, port: int, folder: str) -> dict[str, object]:
    """A run of three steps by the replay's own trainer, then replays of it, all in this process."""
    from tests.unit.backends.megatron_utils.megatron_case import hf_flags

    clear = clear_between_trainers()
    root = Path(folder)
    run = root / "run"
    os.chdir(root)

    def replayed(step: int, *words: str) -> int | str | None:
        clear()
        sys.argv = ["replay"]
        try:
            replay.main([str(run), "--step", str(step), "--out", str(root / f"out{len(results)}"), *words])
        except SystemExit as left:
            return left.code
        return None

    results: dict[str, object] = {}
    record_a_run(run, [*hf_flags(root / "hf"), "--actor-num-gpus-per-node", "1"])
    for path in run.glob("iter_*"):
        assert (path / "metadata.json").is_file()
    results["same"] = replayed(3)
    results["one sample"] = replayed(2, "--sample", "7")
    shutil.rmtree(run / "iter_0000001")
    results["from an earlier checkpoint"] = replayed(3)
    shutil.rmtree(run / "iter_0000000")
    results["from the start"] = replayed(2)
    results["with a flag changed"] = replayed(1, "--set", "eps_clip=0.01", "--set", "lr=2e-3")
    results["one micro-batch"] = replayed(1, "--micro-batch", "1")
    return results


def replay_on_one_rank(rank: int, world_size: int, port: int, folder: str) -> list[int | str | None]:
    """Replays of the run on two ranks in this process: its last step unchanged, and with another clip range."""
    leave = clear_between_trainers()
    codes: list[int | str | None] = []
    for number, changes in enumerate(([], ["--set", "eps_clip=0.01"])):
        leave()
        sys.stdin = io.StringIO("continue\n")  # for the debugger
        out = str(Path(folder, f"one{number}"))
        try:
            replay.main([str(Path(folder, "tp2")), "--step", "3", "--pdb", "--out", out, *changes])
        except SystemExit as left:
            codes.append(left.code)
    return codes


def record_a_run(run: Path, model_flags: list[str], rank: int = 0, world_size: int = 1, port: int = 0) -> None:
    """Three steps with a checkpoint after each, recorded as by a job; rank 0 records."""
    from slime.compose import parse_args
    from slime.ext.record.run_record import RecordSink
    from slime.observability import telemetry
    from slime.ray.rollout_data import split_for_ranks, train_data_from_samples
    from tests.dist.trainer_case import start_worker

    hf = run.parent / "hf"
    words = [*FLAGS, *map(str, model_flags), "--ref-load", str(hf), "--load", str(run), "--save", str(run)]
    drop = frozenset({"--prompt-data", "--wandb-key"})
    args = parse_args(
        argv=[*replay_plan.without(words, drop), "--debug-train-only", "--disable-rollout-global-dataset"]
    )
    sys.argv = ["train.py", *words]
    telemetry.start(args, "driver" if rank == 0 else "actor 1", (RecordSink,), primary=rank == 0)
    if rank == 0:
        telemetry.event("start", rollout=0, num_rollout=args.num_rollout)
    worker = start_worker(args, rank, world_size, port, with_ref=True)
    for rollout_id in range(NUM_STEPS):
        samples = samples_of(rollout_id)
        data = train_data_from_samples(args, samples)
        if rank == 0:
            telemetry.samples("rollout", rollout_id=rollout_id, samples=samples, rewards=data.rewards)
        worker.train(rollout_id, split_for_ranks(args, data, worker.get_parallel_config())[0])
        worker.save_model(rollout_id, force_sync=True)
        worker.publish_checkpoint(rollout_id)
    telemetry.stop()


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    write_model(folder / "hf")
    (codes,) = run_workers(train_and_replay, 1, str(folder), timeout_s=300)
    return folder, codes


def test_a_step_is_the_same_to_the_bit_from_its_checkpoint_an_earlier_one_and_the_start(replayed):
    folder, codes = replayed
    run = read_run(folder / "run")
    assert list(run.digests) == [0, 1, 2] and len(set(run.digests.values())) == 3
    for number, (name, rollouts) in enumerate(
        {"same": [2], "one sample": [], "from an earlier checkpoint": [1, 2], "from the start": [0, 1]}.items()
    ):
        if not rollouts:
            continue
        again = read_run(folder / f"out{number}")
        assert codes[name] == 0
        assert again.digests == {rollout: run.digests[rollout] for rollout in rollouts}
        steps = [2 * rollout + step for rollout in rollouts for step in (0, 1)]
        assert sorted(again.steps) == steps
        for step in steps:
            for metric in ("train/loss", "train/grad_norm", "train/kl_loss", "train/lr-pg_0"):
                assert again.steps[step][metric] == run.steps[step][metric], (name, step, metric)
        for rollout in rollouts:
            ours, theirs = (sorted(one.samples(rollout), key=lambda row: row["position"]) for one in (run, again))
            assert ours == theirs and len(ours) == 8 and ours[0]["trainer_log_probs"]


def test_a_changed_flag_gives_another_step_and_a_micro_batch_another_gradient(replayed):
    folder, codes = replayed
    run, other, part = (read_run(folder / name) for name in ("run", "out4", "out5"))
    assert codes["with a flag changed"] == codes["one micro-batch"] == 0
    assert other.digests[0] != run.digests[0] != part.digests[0]
    assert other.steps[0]["train/lr-pg_0"] == pytest.approx(2 * run.steps[0]["train/lr-pg_0"])
    assert other.steps[0]["train/grad_norm"] != run.steps[0]["train/grad_norm"]
    assert part.steps[0]["train/grad_norm"] != run.steps[0]["train/grad_norm"]


def test_the_tokens_that_the_loss_clipped_are_recorded(replayed):
    other = read_run(replayed[0] / "out4")  # --eps-clip 0.01, steps of positions 0 to 3 and 4 to 7
    shares: list[list[float]] = [[], []]
    for row in other.samples(0):
        mask = row["loss_mask"] or [1] * row["response_length"]
        assert len(row["clipped"]) == len(mask)
        trained = [clipped for clipped, is_trained in zip(row["clipped"], mask, strict=True) if is_trained]
        shares[row["position"] // 4].append(0.0 if row["is_removed"] else sum(trained) / max(len(trained), 1))
    for step, of_samples in enumerate(shares):
        assert sum(of_samples) / 4 == pytest.approx(other.steps[step]["train/pg_clipfrac"], abs=1e-6), step
    assert sum(shares[1]) > 0


def test_a_sample_has_its_log_probs_under_every_kept_checkpoint(replayed):
    folder, _ = replayed
    found = json.loads((folder / "out1/sample_7.json").read_text())
    (row,) = (row for row in read_run(folder / "run").samples(1) if row["position"] == 7)
    columns = found["log_probs"]
    assert list(columns) == ["engine", "trainer", "start", "step 1", "step 2", "step 3"]
    assert found["tokens"] == row["tokens"][-row["response_length"] :]
    # The trainer's were computed by the weights after step 1, in a micro-batch with others.
    assert columns["step 1"] == pytest.approx(row["trainer_log_probs"], abs=1e-5)
    assert columns["step 1"] != columns["step 2"] != columns["step 3"]
    assert columns["start"] != pytest.approx(columns["step 1"], abs=1e-5)


def test_what_is_gone_is_told_with_the_nearest_step_that_is_not(replayed):
    folder, _ = replayed
    run = read_run(folder / "run")
    run.events = [one | {"rollout": 3} if one["event"] == "start" else one for one in run.events]
    assert [int(path.name[5:]) for path in run.folder.glob("iter_*")] == [2]
    with pytest.raises(DataError, match=r"step 2 cannot .*checkpoints after: step 3.* Nothing of this run can"):
        replay_plan.plan(run, 2)
    run.events[0]["rollout"] = 1
    with pytest.raises(DataError, match=r"checkpoints after: step 1, step 3.* The nearest step is 3\."):
        replay_plan.plan(run, 9)
    assert json.loads((run.folder / "config.json").read_text())["command"][-1].endswith("run")


def test_a_run_on_two_ranks_is_replayed_by_one_within_the_bounds_of_another_layout(tmp_path, capfd):
    write_model(tmp_path / "hf")
    run_workers(train_on_two_ranks, 2, str(tmp_path), timeout_s=300)
    (codes,) = run_workers(replay_on_one_rank, 1, str(tmp_path), timeout_s=300)
    said = capfd.readouterr().out
    assert codes == [0, 0], said
    run, again, other = (read_run(tmp_path / name) for name in ("tp2", "one0", "one1"))
    as_it_was = replay_plan.Replay(run, 2, 1, tmp_path, in_one_process=True)
    assert replay._is_within_bounds(as_it_was, run, again) and not replay._is_within_bounds(as_it_was, run, other)
    assert run.digests[2] != again.digests[2]  # sums in another order: equal digests would mean the same layout
    for step in (4, 5):
        for metric in replay.BOUNDS["fp32"].keys() - {"log-probs"}:
            assert again.steps[step][metric] == pytest.approx(run.steps[step][metric], rel=1e-4, abs=1e-5), metric
    assert other.steps[5]["train/loss"] != pytest.approx(run.steps[5]["train/loss"], abs=1e-5)


def test_one_micro_batch_keeps_the_terms_of_the_loss_and_its_number_among_the_experts_to_replay():
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.train_data.device_batch import DeviceBatch

    data = DeviceBatch(
        tokens=["a", "b", "c", "d"],
        micro_batch_indices=[[0], [1, 2], [3]],
        num_microbatches=[1, 2],
        global_batch_sizes=[5, 6],
    )
    whole, attached, terms = get_data_iterator(data, 1), [], (print,)
    whole[0].loss_terms, whole[0].attach = terms, lambda *given: attached.append(given)
    [one] = replay._cut_to(1, data, whole)
    assert one.get_next(["tokens"])["tokens"] == ["b", "c"] and one.loss_terms is terms
    one.attach("packed", one.offset - 1, [2, 3])
    assert attached == [("packed", 1, [2, 3])]
    assert (data.num_microbatches, data.global_batch_sizes) == ([1], [6])
