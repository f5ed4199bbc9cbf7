"""On-policy distillation: its flags, and which teachers a run has."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime.flags.config import backend_flags, read_config
from slime.flags.group import FlagGroup, flag_of
from slime.flags.kinds import file_path, http_url, non_negative_int, positive_int

ONLY_TEACHER = ""
"""Name of the teacher of a run with one."""


def add_distillation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the distillation group to ``parser``."""
    group = parser.add_argument_group("distillation", "On-policy distillation from a teacher.")
    group.add_argument(
        "--use-opd",
        action="store_true",
        help="On-policy distillation: add the reverse KL to a teacher to the advantages.",
    )
    group.add_argument(
        "--opd-type", choices=["sglang", "megatron"], help="Where the teacher runs: in an engine or in the trainer."
    )
    group.add_argument("--opd-kl-coef", type=float, default=1.0, help="Weight of the teacher's reverse KL.")
    group.add_argument(
        "--opd-teacher-load",
        type=file_path,
        metavar="DIR",
        help="Checkpoint of the teacher (--opd-type megatron only).",
    )
    group.add_argument(
        "--opd-teachers",
        nargs="+",
        metavar="NAME=WHERE",
        help="Several teachers: the name and the /generate address (sglang) or the checkpoint (megatron) of each, in "
        "place of --rm-url or --opd-teacher-load.",
    )
    group.add_argument(
        "--opd-teacher-key",
        metavar="KEY",
        help="Entry of a sample's metadata that names its teacher, with --opd-teachers. Default: the data set's name, "
        "the attribute source of the sample or the entry source_name.",
    )
    group.add_argument(
        "--opd-top-k",
        type=positive_int,
        metavar="K",
        help="Train on the reverse KL over the teacher's K likeliest tokens at each position, as a term of the policy "
        "loss weighted by --opd-kl-coef, in place of the drawn token's log-prob in the advantages.",
    )
    group.add_argument(
        "--opd-teacher-ckpt-step",
        type=non_negative_int,
        help="Iteration of the teacher's checkpoint. Default: the latest.",
    )


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """The flags of distillation that the reward and post-processing functions read; plug-ins may call these alone."""

    rm_url: str | None = None
    opd_type: str | None = None
    opd_teacher_load: str | None = None
    opd_teachers: list[str] | None = None
    opd_teacher_key: str | None = None
    opd_top_k: int | None = None


def teacher_config(args: Any) -> TeacherConfig:
    """Return the flags of distillation, from a namespace that may lack them."""
    return read_config(TeacherConfig, args)


def teachers_of(args: Any) -> dict[str, str | None]:
    """Return name -> ``/generate`` address or checkpoint of each teacher; one teacher is called ``ONLY_TEACHER``."""
    config = teacher_config(args)
    if config.opd_teachers is None:
        return {ONLY_TEACHER: config.rm_url if config.opd_type == "sglang" else config.opd_teacher_load}
    return {name: where for name, _, where in (entry.partition("=") for entry in config.opd_teachers)}


def trainer_teachers(args: Any) -> dict[str, str]:
    """Return name -> checkpoint of the teachers inside the trainer; empty without any."""
    if not args.use_opd or args.opd_type != "megatron":
        return {}
    return {name: folder for name, folder in teachers_of(args).items() if folder is not None}


def check_distillation(args: Namespace) -> Iterator[str]:
    """Yield one message for each distillation flag that is missing or without effect."""
    if not args.use_opd:
        return
    if not args.compute_advantages_and_returns:
        yield "--use-opd changes the advantages, and there are none: drop --disable-compute-advantages-and-returns."
    if args.loss_type == "sft_loss":
        yield "--use-opd changes the advantages, which --loss-type sft_loss does not use; drop one of them."
    yield from _check_teachers(args.opd_teachers or [], args.opd_type)
    if (here := args.opd_top_k and f"--opd-top-k {args.opd_top_k}") is not None:
        if args.loss_type != "policy_loss":
            yield f"{here} is a term of the policy loss; --loss-type is {args.loss_type}."
        if args.rollout_top_p != 1.0:
            yield f"{here} compares distributions, and --rollout-top-p {args.rollout_top_p} cuts them; make it 1."
        if backend_flags(args).allgather_cp:
            yield f"{here} does not work with --allgather-cp; drop one of them."
    if args.opd_type is None:
        yield "--use-opd needs --opd-type: sglang for a teacher behind --rm-url, megatron for one in the trainer."
    elif args.opd_type == "megatron":
        if args.opd_teacher_load is None and args.opd_teachers is None:
            yield "--opd-type megatron loads the teacher in the trainer; name its checkpoint: --opd-teacher-load."
    else:
        for flag in ("opd_teacher_load", "opd_teacher_ckpt_step"):
            if getattr(args, flag) is not None:
                yield (
                    f"{flag_of(flag)} is {getattr(args, flag)}, but with --opd-type sglang the teacher's "
                    "server loads it; drop the flag, or use --opd-type megatron."
                )
        own = "slime.rollout.on_policy_distillation.reward_func"
        if args.custom_rm_path == own and args.rm_url is None and args.opd_teachers is None:
            yield f"--custom-rm-path {own} asks the teacher at --rm-url, which is not given."


def _check_teachers(entries: list[str], kind: str | None) -> Iterator[str]:
    names = [entry.partition("=")[0] for entry in entries]
    wrong = [entry for entry in entries if not all(entry.partition("="))]
    if wrong:
        yield f"--opd-teachers has {wrong[0]!r}; each must be NAME=WHERE."
    elif kind == "sglang":
        for name, _, where in (entry.partition("=") for entry in entries):
            try:
                http_url(where)
            except argparse.ArgumentTypeError as error:
                yield f"--opd-teachers: the teacher {name} with --opd-type sglang: {error}."
    if len(set(names)) < len(names):
        yield f"--opd-teachers has the names {', '.join(names)}; each may occur once."


_OF_TEACHERS = ("opd_type", "opd_teacher_load", "opd_teachers", "opd_teacher_ckpt_step", "opd_top_k")
GROUP = FlagGroup(
    add_distillation_arguments,
    check=(check_distillation,),
    needs=(
        *((name, "use_opd", "it is about the teacher") for name in _OF_TEACHERS),
        ("opd_teacher_key", "opd_teachers", "it chooses among several"),
    ),
    excludes=(("opd_teacher_load", "opd_teachers", "the first is one teacher, the second several"),),
)
