"""The composition root: the only file that names extensions.  An extension is imported only when a flag selects it."""

from __future__ import annotations

import importlib
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from slime import ext
from slime.flags import parse
from slime.flags.group import FlagGroup, flag_of
from slime.flags.parse import GROUPS, AddArguments
from slime.observability.text_log import configure_logger
from slime.ray.parts import Part, Parts
from slime.utils.misc import load_function

if TYPE_CHECKING:
    from slime.ray.train_loop import TrainJob

TRANSFORMS_OF_BOTH = {
    "joins_inputs": "slime.ext.vision.transform:JoinedInputs",
    "has_own_tower": "slime.ext.vision.transform:VisionTower",  # before transforms that change the whole model
    "trains_in_fp8": "slime.ext.low_precision.fp8_linear:Fp8",
    "use_stateless_adam": "slime.ext.small_adam.adam:Stateless",
    "narrow_moments": "slime.ext.small_adam.adam:NarrowMoments",
}
TRANSFORMS = {
    **TRANSFORMS_OF_BOTH,
    "int4_qat": "slime.ext.low_precision.fake_quantize:FakeInt4",
    "lora_rank": "slime.ext.lora.transform:Lora",
}
GUIDES = {"use_opd": "slime.ext.distill.guide:Distillation"}
SINKS = {
    "record": "slime.ext.record.run_record:RecordSink",
    "record_max_gib": "slime.ext.record.alarms:AlarmSink",  # has a default: alarms are always on
    "prometheus_port": "slime.ext.record.prometheus_page:PrometheusSink",
    "hub_repository": "slime.ext.hub.push:HubSink",
    "use_wandb": "slime.ext.trackers.sinks:WandbSink",
    "use_tensorboard": "slime.ext.trackers.sinks:TensorboardSink",
    "use_trackio": "slime.ext.trackers.sinks:TrackioSink",
    "use_mlflow": "slime.ext.trackers.sinks:MlflowSink",
    "use_pytorch_profiler": "slime.ext.profiler.sink:TrainProfiler",
    "record_memory_history": "slime.ext.profiler.sink:TrainProfiler",
}
TRAIN_GROUPS = {
    "release_train": "slime.ext.fast_push.disk.released_trainer:ReleasedTrainGroup",
    "state_copy_interval": "slime.ext.recovery.copied_trainer:CopiedTrainGroup",
}
SERVERS = {"rollout_external": "slime.ext.external_engines.adopt:adopt_external_engines"}
TRANSPORTS = {
    "lora_push=adapter": "slime.ext.lora.adapter_push:AdapterPush",
    "weight_push=verified": "slime.ext.fast_push.verified_push:VerifiedPush.of",
}
"""Flag, or flag with a value -> class that a job uses when the flag is set; of these three tables the first such one,
in place of the core's.  The extension declares the flag or derives it from another.
"""
OUTPUTS = {"lora_save": str, "update_weight_disk_dir": Path, "update_weight_local_checkpoint_dir": str}
"""Flag -> type of its value; see ``slime.ray.save_lock.lock_outputs`` for what str and Path mean."""


def run(train: Callable[[Namespace], None], check: Callable[[Namespace], None] | None = None) -> None:
    """Do what the command line asks for: print a plan, supervise a driver, or run ``train(args)`` as a job.

    Does not return: the process exits.  See :func:`slime.ray.job.run` for ``check`` and a job's exit codes.
    """
    from slime.ray import job

    words = sys.argv[1:]
    flags = {word.partition("=")[0] for word in words}
    configure_logger(level=logging.DEBUG if "--verbose" in flags else logging.INFO)
    if "--plan" in flags and _is_here("plan"):
        from slime.ext.plan.command import plan_of_train

        sys.exit(plan_of_train(words, flag_groups()))
    if "--supervise" in flags and _is_here("recovery"):
        from slime.ext.recovery.supervisor import supervise

        sys.exit(supervise(sys.argv[0], words))
    read: Callable[[], Namespace] = parse_args
    if "--fit" in flags and _is_here("plan"):
        from slime.ext.plan.fit import fitted_here

        read = lambda: parse_args(argv=fitted_here(words, flag_groups()))  # noqa: E731
    job.run(train, check, parse=read)


def parts(args: Namespace) -> Parts:
    """Return the implementations that the flags select."""
    given = {flag: kind(vars(args)[flag]) for flag, kind in OUTPUTS.items() if vars(args).get(flag) is not None}
    outputs: dict[str, str | Path] = {flag_of(flag): place for flag, place in given.items()}
    observers: tuple[Part, ...] = ()
    trains = args.save and not (args.debug_train_only or args.debug_rollout_only)
    if trains and not vars(args).get("no_rollout_ledger", True):
        from slime.ext.ledger.flags import ledger_folder

        observers = (Part("slime.ext.ledger.ledger:Ledger"),)
        outputs["--rollout-ledger-dir"] = ledger_folder(args.rollout_ledger_dir, args.save)
    critic = vars(args).get("critic_args")
    beside = args.eval_in_background and not args.debug_train_only
    return Parts(
        sinks=chosen(args, SINKS),
        transforms=chosen(args, TRANSFORMS),
        critic_transforms=chosen(critic, TRANSFORMS_OF_BOTH) if critic is not None else (),
        guides=chosen(args, GUIDES),
        evaluation=Part("slime.ext.eval_background.evaluation:BackgroundEvaluation") if beside else None,
        observers=observers,
        outputs=outputs,
        train_group=next(iter(chosen(args, TRAIN_GROUPS)), None),
        servers=next(iter(chosen(args, SERVERS)), None),
        transport=next(iter(chosen(args, TRANSPORTS)), None),
    )


def chosen(args: Namespace, table: Mapping[str, str]) -> tuple[Part, ...]:
    """Return the parts in a table above whose flags are set.  If an extension is missing, so are its flags."""

    def is_set(rule: str) -> bool:
        flag, _, wanted = rule.partition("=")
        value = vars(args).get(flag)
        return value == wanted if wanted else value not in (None, False)

    return tuple(Part(path) for path in dict.fromkeys(path for rule, path in table.items() if is_set(rule)))


def start_job(args: Namespace) -> TrainJob:
    """Start all parts of a job and return the driver that ``args`` selects, after the first weight push."""
    recovers = args.restarts_trainer or vars(args).get("preemption_grace_s")
    driver = "slime.ext.recovery.job.RecoveringJob" if recovers else "slime.ray.train_loop.TrainJob"
    job: TrainJob = load_function(driver)(args, parts(args))
    return job


def flag_groups() -> tuple[FlagGroup, ...]:
    """Return the core's flag groups, followed by ``GROUP`` from each extension that has a ``flags.py``."""
    folders = sorted(file.parent.name for file in Path(ext.__file__).parent.glob("*/flags.py"))
    return GROUPS + tuple(importlib.import_module(f"slime.ext.{name}.flags").GROUP for name in folders)


def parse_args(add_custom_arguments: AddArguments | None = None, argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line, extension flags included, into a complete and checked Namespace."""
    return parse.parse_args(add_custom_arguments, argv, groups=flag_groups())


def parse_flags(argv: Sequence[str]) -> Namespace:
    """Parse the flags as given, without deriving or checking anything."""
    return parse.parse_flags(argv, groups=flag_groups())


def _is_here(extension: str) -> bool:
    return find_spec(f"slime.ext.{extension}") is not None
