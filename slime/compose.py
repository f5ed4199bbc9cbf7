"""The composition root: the only file that names extensions.  Each is imported when a command asks for it."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from slime import ext
from slime.flags import parse
from slime.flags.group import FlagGroup
from slime.flags.parse import GROUPS, AddArguments
from slime.observability.logging_utils import configure_logger
from slime.observability.telemetry import Sink
from slime.ray.parts import Evaluation, MakeObserver, Parts

if TYPE_CHECKING:
    from slime.backends.megatron_utils.model_transform import ModelTransform
    from slime.backends.megatron_utils.update_weight.transport import MakeTransport
    from slime.ray.actor_group import RayTrainGroup
    from slime.ray.train_loop import TrainJob


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
    job.run(train, check, parse=_fit_and_parse if "--fit" in flags and _is_here("plan") else parse_args)


def parts(args: Namespace) -> Parts:
    """Return the implementations that the flags ask for."""
    transforms: list[type[ModelTransform]] = []
    if vars(args).get("int4_qat"):
        from slime.ext.low_precision.fake_quantize import FakeInt4

        transforms.append(FakeInt4)
    has_adapters = vars(args).get("lora_rank") is not None
    if has_adapters:
        from slime.ext.lora.transform import Lora

        transforms.append(Lora)
    observers: list[MakeObserver] = []
    outputs: dict[str, str | Path] = {}
    if has_adapters and args.lora_save is not None:
        outputs["--lora-save"] = args.lora_save
    trains = args.save and not (args.debug_train_only or args.debug_rollout_only)
    if trains and _is_here("ledger") and not args.no_rollout_ledger:
        from slime.ext.ledger.ledger import Ledger, ledger_folder

        observers.append(Ledger)
        outputs["--rollout-ledger-dir"] = ledger_folder(args)
    return Parts(
        tuple(_sinks(args)),
        tuple(transforms),
        _evaluation(args),
        tuple(observers),
        outputs,
        _train_group(args),
        _transport(args),
    )


def _sinks(args: Namespace) -> Iterator[type[Sink]]:
    if _is_here("record"):
        if args.record:
            from slime.ext.record.run_record import RecordSink

            yield RecordSink
        from slime.ext.record.alarms import AlarmSink

        yield AlarmSink
        if args.prometheus_port is not None:
            from slime.ext.record.prometheus_page import PrometheusSink

            yield PrometheusSink
    if args.use_pytorch_profiler or args.record_memory_history:
        from slime.observability.profile_utils import TrainProfiler

        yield TrainProfiler


def _evaluation(args: Namespace) -> type[Evaluation] | None:
    if not args.eval_in_background or args.debug_train_only:
        return None
    from slime.ext.eval_background.evaluation import BackgroundEvaluation

    return BackgroundEvaluation


def _train_group(args: Namespace) -> Callable[..., RayTrainGroup] | None:
    if args.release_train:
        from slime.ext.disk_push.released_trainer import ReleasedTrainGroup
        from slime.ext.fast_push.push import push_weights

        return partial(ReleasedTrainGroup, push_weights=push_weights)
    if args.trainer_recovery != "memory":
        return None
    from slime.ext.recovery.copied_trainer import CopiedTrainGroup

    return CopiedTrainGroup


def _transport(args: Namespace) -> MakeTransport | None:
    """Return the way of weights to the engines; None for the plain push."""
    if vars(args).get("lora_rank") is not None and args.lora_push == "adapter":
        from slime.ext.lora.adapter_push import AdapterPush

        return AdapterPush.of
    if vars(args).get("weight_push") != "verified":
        return None
    from slime.ext.fast_push.verified_push import VerifiedPush

    if args.update_weight_transport == "disk":
        from slime.ext.disk_push.delta_carrier import make_carrier

        return partial(VerifiedPush.of, carrier=make_carrier)
    return VerifiedPush.of


def start_job(args: Namespace) -> TrainJob:
    """Start the parts of a job, under the driver that ``args`` ask for; the weights have been pushed once."""
    if _is_here("recovery") and (args.trainer_recovery != "off" or args.preemption_grace_s):
        from slime.ext.recovery.job import RecoveringJob

        return RecoveringJob(args, parts(args))
    from slime.ray.train_loop import TrainJob

    return TrainJob(args, parts(args))


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


def _fit_and_parse() -> Namespace:
    from slime.ext.plan.fit import fitted_here

    return parse_args(argv=fitted_here(sys.argv[1:], flag_groups()))
