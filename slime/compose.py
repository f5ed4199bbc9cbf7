"""The composition root: the only file that names extensions.  Each is imported when a command asks for it."""

from __future__ import annotations

import importlib
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
    "has_own_tower": "slime.ext.vision.transform:VisionTower",  # before those that change the whole model
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
    "record_max_gib": "slime.ext.record.alarms:AlarmSink",  # set wherever the extension is: alarms need no flag
    "prometheus_port": "slime.ext.record.prometheus_page:PrometheusSink",
    "hub_repository": "slime.ext.hub.push:HubSink",
    "use_wandb": "slime.ext.trackers.sinks:WandbSink",
    "use_tensorboard": "slime.ext.trackers.sinks:TensorboardSink",
    "use_trackio": "slime.ext.trackers.sinks:TrackioSink",
    "use_mlflow": "slime.ext.trackers.sinks:MlflowSink",
    "use_pytorch_profiler": "slime.ext.profiler.sink:TrainProfiler",
    "record_memory_history": "slime.ext.profiler.sink:TrainProfiler",
}
"""Flag -> class that a job gets where it is set; the extension declares the flag, or derives it from another one."""
OUTPUTS = {"lora_save": str, "update_weight_disk_dir": Path, "update_weight_local_checkpoint_dir": str}
"""Flag -> type of what it names; see ``slime.ray.save_lock.lock_outputs``."""


def run(train: Callable[[Namespace], None], check: Callable[[Namespace], None] | None = None) -> None:
    """Do what the command line asks for: print a plan, watch over a driver, or run ``train(args)`` as a job.

    Ends the process; see :func:`slime.ray.job.run` for ``check`` and the exit codes of a job.
    """
    from slime.ray import job

    configure_logger()
    words = sys.argv[1:]
    flags = {word.partition("=")[0] for word in words}
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
    """Return the implementations that the flags ask for."""
    given = {flag: kind(vars(args)[flag]) for flag, kind in OUTPUTS.items() if vars(args).get(flag) is not None}
    outputs: dict[str, str | Path] = {flag_of(flag): place for flag, place in given.items()}
    observers: tuple[Part, ...] = ()
    trains = args.save and not (args.debug_train_only or args.debug_rollout_only)
    if trains and not vars(args).get("no_rollout_ledger", True):
        from slime.ext.ledger.flags import ledger_folder

        observers = (Part("slime.ext.ledger.ledger:Ledger"),)
        outputs["--rollout-ledger-dir"] = ledger_folder(args)
    critic = vars(args).get("critic_args")
    beside = args.eval_in_background and not args.debug_train_only
    return Parts(
        sinks=sinks(args),
        transforms=_chosen(args, TRANSFORMS),
        critic_transforms=_chosen(critic, TRANSFORMS_OF_BOTH) if critic is not None else (),
        guides=guides(args),
        evaluation=Part("slime.ext.eval_background.evaluation:BackgroundEvaluation") if beside else None,
        observers=observers,
        outputs=outputs,
        train_group=_train_group(args),
        servers=_servers(args),
        transport=_transport(args),
    )


def guides(args: Namespace) -> tuple[Part, ...]:
    """Return what the flags ask a policy to be trained towards."""
    return _chosen(args, GUIDES)


def sinks(args: Namespace) -> tuple[Part, ...]:
    """Return the sinks that ``args``, complete or not, ask for."""
    return _chosen(args, SINKS)


def _chosen(args: Namespace, table: Mapping[str, str]) -> tuple[Part, ...]:
    """Return the classes of the flags that are set; those of a missing extension are not."""
    paths = (path for flag, path in table.items() if vars(args).get(flag) not in (None, False))
    return tuple(Part(path) for path in dict.fromkeys(paths))


def _train_group(args: Namespace) -> Part | None:
    if vars(args).get("release_train"):
        return Part("slime.ext.fast_push.disk.released_trainer:ReleasedTrainGroup")
    is_copied = vars(args).get("state_copy_interval") is not None
    return Part("slime.ext.recovery.copied_trainer:CopiedTrainGroup") if is_copied else None


def _servers(args: Namespace) -> Part | None:
    """Return what adopts the engines of others; None where the core starts its own, and for tools, which have none."""
    is_external = vars(args).get("rollout_external")
    return Part("slime.ext.external_engines.adopt:adopt_external_engines") if is_external else None


def _transport(args: Namespace) -> Part | None:
    """Return the way of weights to the engines; None for the plain push."""
    if vars(args).get("lora_rank") is not None and args.lora_push == "adapter":
        return Part("slime.ext.lora.adapter_push:AdapterPush")
    is_verified = vars(args).get("weight_push") == "verified"
    return Part("slime.ext.fast_push.verified_push:VerifiedPush.of") if is_verified else None


def start_job(args: Namespace) -> TrainJob:
    """Start the parts of a job, under the driver that ``args`` ask for; the weights have been pushed once."""
    recovers = args.restarts_trainer or vars(args).get("preemption_grace_s")
    driver = "slime.ext.recovery.job.RecoveringJob" if recovers else "slime.ray.train_loop.TrainJob"
    job: TrainJob = load_function(driver)(args, parts(args))
    return job


def flag_groups() -> tuple[FlagGroup, ...]:
    """Return the groups of flags of the core, and ``GROUP`` of ``flags.py`` in every extension that has one."""
    folders = sorted(file.parent.name for file in Path(ext.__file__).parent.glob("*/flags.py"))
    return GROUPS + tuple(importlib.import_module(f"slime.ext.{name}.flags").GROUP for name in folders)


def parse_args(add_custom_arguments: AddArguments | None = None, argv: Sequence[str] | None = None) -> Namespace:
    """Return the command line as a complete, checked Namespace, with the flags of extensions."""
    return parse.parse_args(add_custom_arguments, argv, groups=flag_groups())


def parse_flags(argv: Sequence[str]) -> Namespace:
    """Return the flags as they were given, nothing derived or checked yet."""
    return parse.parse_flags(argv, groups=flag_groups())


def _is_here(extension: str) -> bool:
    return find_spec(f"slime.ext.{extension}") is not None
