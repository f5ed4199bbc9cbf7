"""Repeat any past step of a run, from its recorded samples and the nearest checkpoint before it.

    slime replay RUN --step 12                    the same samples, micro-batches, loss, gradient and weights
    slime replay RUN --step 12 --set eps_clip=0.1 the same step with a changed flag
    slime replay RUN --step 12 --pdb              in a debugger, from the first line of the step
    slime replay RUN --step 12 --micro-batch 3    the gradient of this micro-batch alone
    slime replay RUN --step 12 --rollout          generate the answers again, where the engine is deterministic
    slime replay RUN --step 12 --sample 5         the log-probs of sample 5 under every kept checkpoint

Steps are counted from 1, as in the step line.  A trainer of one rank runs in this process; one of several ranks is
started through Ray, as by ``train.py``.  The replay is itself a run, in ``RUN/replays``, whose record is compared with
that of the original: exits with 0 if the step is equal to the bit (or flags were changed), with 1 if it is not.  On
another layout (one process for a trainer of several ranks, or ``--set tensor_model_parallel_size=2``), sums are taken
in another order; loss, gradient norm and log-probs are then compared within ``BOUNDS``.
"""

from __future__ import annotations

import argparse
import json
import os
import pdb
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.record.run_reader import Run, read_run
from slime.flags.kinds import non_negative_int, positive_int
from slime.observability.dumps import load_rollout_dump, save_rollout_dump
from slime.utils.errors import ConfigError, DataError
from tools.cli import clean_exit
from tools.diff import first_differences, setting_differences
from tools.replay_plan import (
    FROM_START,
    LAYOUT,
    LEFT_OUT,
    SCRIPT,
    Replay,
    flags_of,
    places_to_begin,
    plan,
    recorded_samples,
)
from tools.replay_rollout import replay_rollout
from tools.terminal import say

FOLLOWS = {"changed", "on_nan", "debug_train_only", "rollout_global_dataset", "rollout_num_gpus", "trainer_recovery"}
"""Settings that differ in every replay."""
BOUNDS = {
    "fp32": {"train/loss": 1e-5, "train/grad_norm": 1e-4, "log-probs": 1e-5},
    "bf16": {"train/loss": 1e-3, "train/grad_norm": 2e-2, "log-probs": 2e-2},
}
"""Largest differences from the recorded step on another layout: loss and gradient norm relative (absolute below 1),
log-probs as the mean difference per token."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="The folder of a run.")
    parser.add_argument("--step", type=positive_int, required=True, metavar="K", help="Counted from 1.")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="Change a flag; repeatable.")
    parser.add_argument("--pdb", action="store_true", help="Stop in a debugger where the step begins; one process.")
    parser.add_argument(
        "--micro-batch", type=non_negative_int, metavar="M", help="Only this one, from 0; one process."
    )
    parser.add_argument("--sample", type=non_negative_int, metavar="I", help="Its position in the rollout, from 0.")
    parser.add_argument("--rollout", action="store_true", help="Generate its answers again, with real engines.")
    parser.add_argument("--out", type=Path, help="Folder of the replay. Default: a new one in RUN/replays.")
    parser.add_argument("--load", type=Path, help="Folder of the checkpoint before the step, if it is not in RUN.")
    parser.add_argument("--save-checkpoint", action="store_true", help="Keep the checkpoint after the step in --out.")
    options = parser.parse_args(argv)
    names = ("rollout", "sample", "pdb", "micro_batch", "save_checkpoint")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) != parser.get_default(name)]
    if len(given) > 1 and given[0] in ("--rollout", "--sample"):
        parser.error(f"{' and '.join(given)} cannot be given together: {given[0]} takes no optimizer step")
    with clean_exit():
        run = read_run(options.run.absolute())
        replay = plan(run, options.step, options.out, options.load)
        replay.changes = options.set
        if (folder := run.config.get("folder")) and Path(folder).is_dir():
            os.chdir(folder)  # paths in its flags may be relative
        needs_one = options.pdb or options.micro_batch is not None or options.sample is not None
        replay.in_one_process = needs_one or replay.num_ranks == 1 and not run.value("use_critic", False)
        has_steps_before = bool(options.set) and replay.begin != replay.rollout_id - 1
        if run.value("use_critic", False):
            _check_critic(run, needs_one=needs_one, is_saved=options.save_checkpoint or has_steps_before)
        if options.sample is not None:
            replay.begin = places_to_begin(run)[0]
            _print_sample(replay, options.sample)
            return
        if options.rollout:
            raise SystemExit(replay_rollout(replay))
        if has_steps_before:
            _take_steps_before(replay)
        _take_steps(replay, options)
        raise SystemExit(_compare(replay, is_whole=options.micro_batch is None))


def _check_critic(run: Run, *, needs_one: bool, is_saved: bool) -> None:
    """Check that a run with a critic can be replayed as asked.

    Args:
        run: a run with a critic.
        needs_one: the replay needs a single process.
        is_saved: the replay keeps a checkpoint.

    Raises:
        ConfigError: the critic cannot take part, or would overwrite the run's own checkpoints.
    """
    if needs_one:
        raise ConfigError(
            "This run has a critic, which takes its steps in separate processes; drop --pdb, --micro-batch and "
            "--sample, which need one process."
        )
    folder = (run.value("critic_args", {}).get("role_overrides") or {}).get("save")
    if is_saved and folder is not None:
        raise ConfigError(
            f"A replay that keeps a checkpoint would write over the critic's in {folder}, the save of its role in "
            f"--megatron-config-path {run.value('megatron_config_path')}. Drop --save-checkpoint; --set changes "
            "only a step with a checkpoint just before it."
        )


# The steps


def _take_steps_before(replay: Replay) -> None:
    """Take the steps before the one with changed flags, as they were, and continue from there."""
    folder = replay.folder / "before"
    say(f"Steps {replay.begin + 2} to {replay.rollout_id} come first, without --set.", flush=True)
    words = [str(replay.run.folder), "--step", str(replay.rollout_id), "--out", str(folder), "--save-checkpoint"]
    if subprocess.run([sys.executable, __file__, *words], check=False).returncode:
        raise DataError(f"the steps before are not the same as they were; see {folder}. --set changes step 1 of many.")
    replay.load, replay.begin = folder, replay.rollout_id - 1


def _take_steps(replay: Replay, options: Namespace) -> None:
    """Train again on the recorded samples, in this process or through Ray."""
    template = str(replay.folder / "rollouts" / "{rollout_id}.pt")
    for rollout_id in replay.rollouts:
        save_rollout_dump(template, rollout_id, recorded_samples(replay.run, rollout_id))
    sys.argv = [SCRIPT, *flags_of(replay)]
    came_from = "the start" if replay.begin == FROM_START else f"the checkpoint after step {replay.begin + 1}"
    say(f"Step {replay.rollout_id + 1} from {came_from}, {len(replay.rollouts)} steps; {replay.folder}", flush=True)
    if replay.in_one_process:
        _take_steps_here(replay, options)
    else:
        _take_steps_on_ray(replay, options)


def _take_steps_on_ray(replay: Replay, options: Namespace) -> None:
    """Run a job of these steps only; ends the process if the job fails."""
    from slime.compose import parse_args, start_job
    from slime.ray.job import run

    def train(args: Namespace) -> None:
        job = start_job(args)
        for rollout_id in replay.rollouts:
            data = job.generate(rollout_id)
            assert data is not None
            job.train(rollout_id, data)
            job.report(rollout_id)
        if options.save_checkpoint:
            for trainer in reversed(job.trainers.all):
                trainer.save_model(replay.rollout_id, force_sync=True)
        job.finish()

    try:
        run(train, parse=parse_args)
    except SystemExit as ended:
        if ended.code:
            raise


def _start_worker(replay: Replay, micro_batch: int | None = None) -> Any:
    """Return the run's trainer in this process, as its only rank."""
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.compose import parse_args, parts
    from slime.ext.record.run_record import RecordSink
    from slime.flags.algorithm import uses_reference
    from slime.flags.hook_checks import check_trainer_hooks
    from slime.observability import telemetry
    from slime.observability.text_log import configure_logger
    from slime.ray.parts import load_all
    from slime.ray.train_actor import kernel_environment
    from slime.utils import env
    from slime.utils.net import find_available_port

    configure_logger("replay")
    args = parse_args()
    env.export(kernel_environment() | {name: str(value) for name, value in args.train_env_vars.items()})
    threads = [one["threads"] for one in replay.run.events if one["event"] == "weights" and "threads" in one]
    if threads:
        import torch

        torch.set_num_threads(threads[-1])  # sums on a CPU depend on the number of threads
    telemetry.start(args, "replay", (RecordSink,), primary=True)
    telemetry.event("start", rollout=replay.begin + 1, num_rollout=args.num_rollout)
    check_trainer_hooks(args)
    worker = MegatronTrainRayActor()
    worker.set_rendezvous(1, 0, "127.0.0.1", find_available_port(21000))
    chosen = parts(args)
    made = {"transforms": load_all(chosen.transforms), "guides": load_all(chosen.guides)}
    worker.init(args, "actor", uses_reference(args.use_kl_loss, args.kl_coef), **made)
    take_steps = worker.training.take_steps

    def take_steps_of_one(rollout_id: int, data: Any, iterators: Any, loss_type: str) -> dict[str, float]:
        if rollout_id == replay.rollout_id:
            assert micro_batch is not None
            iterators = _cut_to(micro_batch, data, iterators)
        return take_steps(rollout_id, data, iterators, loss_type)

    if micro_batch is not None:
        worker.training.take_steps = take_steps_of_one  # type: ignore[method-assign]
    return worker


def _cut_to(micro_batch: int, data: Any, iterators: Sequence[Any]) -> list[Any]:
    """Leave one micro-batch in the data; return iterators over it with the callback and loss terms of the old ones."""
    from slime.backends.megatron_utils.data import get_data_iterator

    there = data.micro_batch_indices
    if micro_batch >= len(there):
        raise ConfigError(f"--micro-batch {micro_batch}: the step has {len(there)}, counted from 0.")
    step = next(i for i in range(len(there)) if sum(data.num_microbatches[: i + 1]) > micro_batch)
    data.micro_batch_indices, data.num_microbatches = [there[micro_batch]], [1]
    data.global_batch_sizes = [data.global_batch_sizes[step]]
    cut = get_data_iterator(data, len(iterators))
    for whole, one in zip(iterators, cut, strict=True):
        one.loss_terms = whole.loss_terms
        if (attach := whole.attach) is not None:
            # Its number within the step, which selects the experts to replay, is now 0.
            one.attach = lambda packed, _, lengths, attach=attach: attach(packed, micro_batch, lengths)
    return cut


def _take_steps_here(replay: Replay, options: Namespace) -> None:
    from slime.observability import telemetry
    from slime.ray.rollout_data import split_for_ranks, train_data_from_samples

    worker = _start_worker(replay, options.micro_batch)
    args = worker.args
    for rollout_id in replay.rollouts:
        samples = load_rollout_dump(args.load_debug_rollout_data, rollout_id)
        data = train_data_from_samples(args, samples)
        rewards = data.rewards if len(data.rewards) == len(samples) else None
        telemetry.samples("rollout", rollout_id=rollout_id, samples=samples, rewards=rewards)
        (batch,) = split_for_ranks(args, data, worker.get_parallel_config())
        if options.pdb and rollout_id == replay.rollout_id:
            pdb.runcall(worker.train, rollout_id, batch)
        else:
            worker.train(rollout_id, batch)
        if (rollout_id + 1) % args.update_weights_interval == 0:
            worker._policies.record_pushed()
    if options.save_checkpoint:
        worker.save_model(replay.rollout_id, force_sync=True)
        worker.publish_checkpoint(replay.rollout_id)
    telemetry.stop()


# Results


def _compare(replay: Replay, *, is_whole: bool) -> int:
    """Print the step's numbers as recorded and as replayed; return the exit code."""
    first, second = replay.run, read_run(replay.folder)
    own = {name.removeprefix("--").replace("-", "_") for name in LEFT_OUT | LAYOUT} | FOLLOWS
    last = max(second.steps, default=0)
    if not is_whole:
        say(*(f"{name:24}{value!r}" for name, value in second.steps[last].items() if "train/" in name))
        return 0
    say("", f"{'':32}{'recorded':>24}{'replayed':>24}")
    shown = {
        name: [run.steps.get(last, {}).get(name) for run in (first, second)]
        for name in ("train/critic-value_loss", "train/critic-grad_norm", "train/loss", "train/grad_norm")
    }
    digests = {"critic's weights": (first.critic_digests, second.critic_digests)}
    digests["weights"] = (first.digests, second.digests)
    shown |= {f"digest of the {what}": [one.get(replay.rollout_id) for one in pair] for what, pair in digests.items()}
    for name, pair in shown.items():
        if pair != [None, None]:  # the run has no critic, or trained only the critic
            say(f"{name:32}{pair[0]!s:>24}{pair[1]!s:>24}")
    differences = list(first_differences(first, second))
    for what, step, size in differences:
        say(f"differs: {what} at step {step}, by {size}")
    if not differences:
        say(f"Step {replay.rollout_id + 1} is the same to the bit: samples, packing, log-probs, gradient, weights.")
        return 0
    for name, a, b in setting_differences(first, second):
        if name.rpartition(".")[2] not in own and b != "None":
            say(f"setting: {name} was {a}, is {b}")
    is_within = replay.on_another_layout and _is_within_bounds(replay, first, second)
    return 0 if is_within or not all(map(replay.is_of_layout, replay.changes)) else 1


def _is_within_bounds(replay: Replay, first: Run, second: Run) -> bool:
    """Print how far a step on another layout is from the recorded one, beside the allowed bounds."""
    bounds = BOUNDS["fp32" if first.value("fp32") else "bf16"]
    errors = {}
    for name in bounds.keys() - {"log-probs"}:
        pairs = [(run[name], second.steps[step][name]) for step, run in first.steps.items() if step in second.steps]
        errors[name] = max(abs(now - was) / max(1.0, abs(was)) for was, now in pairs)
    was, now = (_trainer_log_probs(run, replay.rollout_id) for run in (first, second))
    if was and now:
        errors["log-probs"] = sum(abs(a - b) for a, b in zip(was, now, strict=True)) / len(was)
    for name, error in errors.items():
        say(f"{name:16} {error:.2g} from the recorded one, at most {bounds[name]:g}")
    is_within = all(error <= bounds[name] for name, error in errors.items())  # False for NaN
    say(f"Step {replay.rollout_id + 1} on another layout is {'' if is_within else 'not '}within its bounds.")
    return is_within


def _trainer_log_probs(run: Run, rollout_id: int) -> list[float]:
    rows = (row for row in run.samples(rollout_id) if row.get("trainer_log_probs"))
    return [value for row in sorted(rows, key=itemgetter("position")) for value in row["trainer_log_probs"]]


def _print_sample(replay: Replay, position: int) -> None:
    """Print the log-probs of one sample under every available checkpoint, and the recorded ones."""
    from slime.backends.megatron_utils import checkpoint
    from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
    from slime.backends.megatron_utils.flags.model_dims import schedule_config
    from slime.backends.megatron_utils.forward import forward_only
    from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy
    from slime.train_data.convert import samples_to_train_data
    from slime.train_data.schedule import build_dp_schedule
    from slime.train_data.split import split_by_rank

    samples = recorded_samples(replay.run, replay.rollout_id)
    if position >= len(samples):
        raise ConfigError(f"--sample {position}: the rollout has {len(samples)}, counted from 0.")
    rows = {row["position"]: row for row in replay.run.samples(replay.rollout_id)}
    columns = {name: rows[position].get(f"{name}_log_probs") for name in ("engine", "trainer")}
    save_rollout_dump(str(replay.folder / "rollouts" / "{rollout_id}.pt"), replay.rollout_id, samples)
    sys.argv = [SCRIPT, *flags_of(replay)]
    worker = _start_worker(replay)
    args = worker.args
    batch = samples_to_train_data([samples[position]], [0.0], [0.0], rollout_top_p=args.rollout_top_p)
    config = schedule_config(args, worker.get_parallel_config())
    schedule = build_dp_schedule(config, [len(batch.tokens[0])], global_batch_size=1, rollout_indices=[0])
    data = prepare_rollout_data(split_by_rank(batch, schedule)[0], args.padded_vocab_size)
    iterators = get_data_iterator(data, len(worker.model))
    for begin in places_to_begin(replay.run):
        if (replay.run.folder / f"iter_{begin:07d}").is_dir():
            weights = {"load": str(replay.run.folder), "ckpt_step": begin, "finetune": True}
            checkpoint.load_checkpoint(Namespace(**vars(args) | weights), worker.model)
        elif begin != replay.begin:
            continue  # the run's start, where the worker did not begin
        read = forward_only(get_log_probs_and_entropy, args, worker.model, iterators, data.num_microbatches)
        columns["start" if begin == FROM_START else f"step {begin + 1}"] = read["log_probs"][0].tolist()
    columns = {name: values for name, values in columns.items() if values}
    path = replay.folder / f"sample_{position}.json"
    tokens = samples[position].tokens[-samples[position].response_length :]
    path.write_text(json.dumps({"tokens": tokens, "log_probs": columns}), encoding="utf-8")
    say("", f"{'token':>9}" + "".join(f"{name:>12}" for name in columns))
    for token, *values in zip(tokens, *columns.values(), strict=True):
        say(f"{token:>9}" + "".join(f"{value:>12.5f}" for value in values))
    say(f"{'sum':>9}" + "".join(f"{sum(values):>12.4f}" for values in columns.values()), path)


if __name__ == "__main__":
    main()
