"""What ``tools/replay.py`` needs to know about a run: where to begin, the samples, and the flags."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.ext.record.run_reader import Run
from slime.ext.record.sample_record import rollout_of, sample_of
from slime.observability.dumps import load_rollout_dump
from slime.utils.errors import ConfigError, DataError
from slime.utils.types import Sample
from tools.cli import parse_bool

SCRIPT = str(Path(__file__).resolve().parents[1] / "train.py")
"""The script that a replay runs; Ray's workers import from its folder, whatever the current one is."""
FROM_START = -1
"""Stands for the weights that the run began with, in place of a checkpoint."""
LEFT_OUT = frozenset(
    "--load --save --save-interval --save-hf --async-save --keep-last --no-save-optim --lora-save --ckpt-step "
    "--finetune --no-load-optim --no-load-rng --start-rollout-id --num-rollout --num-epoch --prompt-data "
    "--eval-interval --eval-prompt-data --eval-config --eval-in-background --colocate --offload --offload-train "
    "--offload-rollout --release-train --use-fault-tolerance --use-wandb --wandb-key --wandb-key-file "
    "--use-tensorboard --prometheus-port --save-debug-rollout-data --save-debug-train-data --dump-details "
    "--load-debug-rollout-data --load-debug-rollout-data-subsample --record-samples --trust-debug-data --fit "
    "--ci-test --ci-save-grad-norm --ci-load-grad-norm --ci-disable-kl-checker --check-weight-update-equal "
    "--trainer-recovery --memory-checkpoint-interval --spare-nodes --supervise --preemption-grace-s "
    "--weight-push-failure".split()
)
"""Flags of the run about where it began, what it stored, and how it shared GPUs with engines."""
OF_ENGINES = frozenset(
    "--colocate --offload --offload-train --offload-rollout --use-fault-tolerance --check-weight-update-equal "
    "--weight-push-failure".split()
)
"""The flags above that a replayed rollout keeps."""
NOT_IN_A_ROLLOUT = frozenset(
    "--over-sampling-batch-size --dynamic-sampling-filter-path --partial-rollout --data-source-path "
    "--buffer-filter-path --rollout-sample-filter-path --rollout-sample-hook-path --rollout-ledger-dir".split()
)
"""Flags by which a rollout chooses among groups; a replay generates only groups that were kept."""
LAYOUT = frozenset(
    "--actor-num-nodes --actor-num-gpus-per-node --tensor-model-parallel-size --pipeline-model-parallel-size "
    "--context-parallel-size --expert-model-parallel-size --expert-tensor-parallel-size --sequence-parallel "
    "--num-layers-per-virtual-pipeline-stage --virtual-pipeline-model-parallel-size "
    "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --allgather-cp".split()
)
"""Flags about how the trainer's ranks divide the model and the batch; dropped for a single process."""


@dataclass
class Replay:
    """What to replay."""

    run: Run
    rollout_id: int
    """Rollout of the step."""
    begin: int
    """Begin with the checkpoint after this rollout, or with ``FROM_START``."""
    folder: Path
    """Holds the replay's own files."""
    load: Path | None = None
    """Folder of the checkpoint; None: the run's own."""
    changes: list[str] = field(default_factory=list)
    """Changed flags as ``NAME=VALUE``."""
    in_one_process: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the replay's trainer, unless it is forced into one process."""
        changed_to = dict(_name_and_value(one) for one in self.changes)
        names = ("actor_num_nodes", "actor_num_gpus_per_node")
        return math.prod(int(changed_to.get(name) or self.run.value(name, 1)) for name in names)

    @property
    def on_another_layout(self) -> bool:
        """True if the ranks divide the model or the batch in another way than those of the run."""
        ranks = 1 if self.in_one_process else self.num_ranks
        of_run = self.run.value("actor_num_nodes", 1) * self.run.value("actor_num_gpus_per_node", 1)
        return ranks != of_run or any(self.is_of_layout(change) for change in self.changes)

    @staticmethod
    def is_of_layout(change: str) -> bool:
        """Return whether a ``NAME=VALUE`` sets a flag of ``LAYOUT``."""
        return "--" + _name_and_value(change)[0].replace("_", "-") in LAYOUT

    @property
    def rollouts(self) -> range:
        """The rollouts that are trained on, including those before the step."""
        return range(self.begin + 1, self.rollout_id + 1)


def _name_and_value(change: str) -> tuple[str, str]:
    name, _, value = change.partition("=")
    return name.removeprefix("--").replace("-", "_"), value


# What can be replayed


def plan(run: Run, step: int, folder: Path | None = None, load: Path | None = None) -> Replay:
    """Return the replay of a step, counted from 1.

    Raises:
        DataError: its checkpoints or samples are gone; the message names the nearest step that can be replayed.
    """
    rollout_id = step - 1
    begins = [rollout_id - 1] if load is not None else places_to_begin(run)
    begin = _begin_of(run, begins, rollout_id)
    if begin is None:
        known = {rollout_of(path) for path in run.sample_files()}
        others = [other for other in known if _begin_of(run, begins, other) is not None]
        nearest = min(others, key=lambda other: (abs(other - rollout_id), other), default=None)
        has = ", ".join("the start" if one == FROM_START else f"step {one + 1}" for one in begins) or "none"
        raise DataError(
            f"step {step} cannot be replayed: it needs a checkpoint before it and the samples since (checkpoints "
            f"after: {has}; recorded samples of {len(known)} steps). "
            + ("Nothing of this run can." if nearest is None else f"The nearest step is {nearest + 1}.")
        )
    if folder is None:
        names = (f"step_{step}" + (f"_{count}" if count > 1 else "") for count in itertools.count(1))
        folder = next(path for name in names if not (path := run.folder / "replays" / name).exists())
    return Replay(run, rollout_id, begin, folder.absolute(), load.absolute() if load is not None else None)


def places_to_begin(run: Run) -> list[int]:
    """Return the rollouts after which the run has a checkpoint, and ``FROM_START``."""
    saved = [int(path.parent.name[5:]) for path in run.folder.glob("iter_???????/metadata.json")]
    starts = [one["rollout"] for one in run.events if one["event"] == "start" and one.get("rollout") is not None]
    return sorted({*saved, *([starts[0] - 1] if starts else [])})


def _begin_of(run: Run, begins: Sequence[int], rollout_id: int) -> int | None:
    """Return the last place before a rollout from which all samples are recorded."""
    known = {rollout_of(path) for path in run.sample_files()}
    before = max((one for one in begins if one < rollout_id), default=None)
    if before is None or not known.issuperset(range(before + 1, rollout_id + 1)):
        return None
    return before


def recorded_samples(run: Run, rollout_id: int) -> list[Sample]:
    """Return the samples that a rollout was trained on, in order.

    Raises:
        DataError: the record lacks some of them, or parts of some.
    """
    rows = sorted(
        (row for row in run.samples(rollout_id) if row["position"] is not None), key=lambda row: row["position"]
    )
    limit = run.value("record_samples")
    if not rows or (limit is not None and len(rows) >= limit):
        raise DataError(
            f"the record of {run.folder} has {len(rows)} samples of rollout {rollout_id}, not all (--record-samples "
            f"{limit}); a replay needs every sample of the steps since the checkpoint."
        )
    dumps = run.value("save_debug_rollout_data")
    if any(row.get("lacks") for row in rows) and dumps and Path(dumps.format(rollout_id=rollout_id)).is_file():
        return load_rollout_dump(dumps, rollout_id, flag="--save-debug-rollout-data")
    return [sample_of(row) for row in rows]


# The command line of the replay


def flags_of(replay: Replay) -> list[str]:
    """Return the run's flags, changed to train on the recorded samples from the checkpoint on."""
    words = _flags(replay, LEFT_OUT | (LAYOUT if replay.in_one_process else frozenset()))
    words += ["--load-debug-rollout-data", str(replay.folder / "rollouts" / "{rollout_id}.pt")]
    if replay.in_one_process:
        words += ["--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1"]
    return changed(words, replay.changes)


def rollout_flags_of(replay: Replay) -> list[str]:
    """Return the run's flags, changed to generate from the recorded prompts with the checkpoint's weights."""
    words = _flags(replay, (LEFT_OUT - OF_ENGINES) | NOT_IN_A_ROLLOUT)
    words += ["--data-source-path", "tools.replay_rollout.RecordedGroups"]
    return changed(words, replay.changes, with_engine_flags=True)


def _flags(replay: Replay, left_out: frozenset[str]) -> list[str]:
    run = replay.run
    script, *given = run.config.get("command") or [""]
    if not script:
        raise DataError(f"{run.folder} has no config.json with the command of the run, which a replay needs.")
    words = without(given, left_out)
    if _value_of(words, "--on-nan") == "rollback":
        words = without(words, frozenset({"--on-nan"}))
    if "--use-stateless-adam" in words:
        words.append("--no-save-optim")  # nothing could be saved, and a command with --save must say so
    starts = [one for one in run.events if one["event"] == "start" and one.get("num_rollout")]
    lengths = [one["num_rollout"] for one in starts if (one.get("rollout") or 0) <= replay.rollout_id]
    words += ["--num-rollout", str((lengths or [run.value("num_rollout")])[-1])]
    words += ["--save", str(replay.folder), "--disable-rollout-global-dataset"]
    if replay.load is not None or (run.folder / f"iter_{replay.begin:07d}").is_dir():
        words += ["--load", str(replay.load or run.folder), "--ckpt-step", str(replay.begin)]
    elif (first := _value_of(given, "--load")) not in (None, _value_of(given, "--save"), str(run.folder)):
        words += ["--load", str(first)]  # a checkpoint of another run; this run's own folder was empty at the start
    return words


def _groups(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with its values."""
    group: list[str] = []
    for word in words:
        if word.startswith("--"):
            if group:
                yield group
            group = []
        group.append(word)
    if group:
        yield group


def without(words: Sequence[str], flags: frozenset[str]) -> list[str]:
    """Return a command line without the given flags and their values."""
    return [word for group in _groups(words) if group[0].partition("=")[0] not in flags for word in group]


def _value_of(words: Sequence[str], flag: str) -> str | None:
    for name, *values in reversed(list(_groups(words))):
        given, equals, value = name.partition("=")
        if given == flag and (equals or values):
            return value if equals else values[0]
    return None


def changed(words: Sequence[str], changes: Sequence[str], *, with_engine_flags: bool = False) -> list[str]:
    """Return a command line with flags set to other values.

    Raises:
        ConfigError: a change is not ``NAME=VALUE``, or there is no such flag.
    """
    if not changes:
        return list(words)
    from slime.compose import flag_groups
    from slime.flags.parse import build_parser

    parser = build_parser(with_engine_flags=with_engine_flags, groups=flag_groups())
    for change in changes:
        dest, value = _name_and_value(change)
        action = parser.flag_with(dest)
        if action is None or "=" not in change:
            raise ConfigError(f"--set {change} must be NAME=VALUE with the name of a flag, as in eps_clip=0.1.")
        names = {flag for one in parser._actions if one.dest == dest for flag in one.option_strings}
        words = without(words, frozenset(names))
        if action.nargs != 0:
            words += [action.option_strings[0], *([value] if action.nargs is None else value.split())]
            continue
        try:
            is_on = parse_bool(value)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--set {change}: {error}.") from error
        if isinstance(action, argparse.BooleanOptionalAction):
            words.append(action.option_strings[0 if is_on else -1])
        words += [one.option_strings[0] for one in parser._actions if one.dest == dest and one.const is is_on]
    return list(words)
