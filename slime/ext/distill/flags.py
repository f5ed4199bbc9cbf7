"""On-policy distillation: its flags, which teachers a run has, and the server of one (``tools/serve_teacher.py``)."""

from __future__ import annotations

import argparse
import logging
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.flags.algorithm import FrozenPolicy
from slime.flags.config import BackendFlags, FlagConfig
from slime.flags.group import FlagGroup, flag_of
from slime.flags.kinds import file_path, http_url, non_negative_int, port_number, positive_float, positive_int

logger = logging.getLogger(__name__)

ASKS_TEACHER = "slime.rollout.on_policy_distillation.reward_func"
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
class TeacherConfig(FlagConfig):
    """The flags of distillation that the reward and post-processing functions read; plug-ins may call these alone."""

    rm_url: str | None = None
    use_opd: bool = False
    opd_type: str | None = None
    opd_teacher_load: str | None = None
    opd_teachers: list[str] | None = None
    opd_teacher_key: str | None = None
    opd_top_k: int | None = None

    @property
    def teachers(self) -> dict[str, str | None]:
        """Name -> ``/generate`` address or checkpoint of each teacher; one teacher is called ``ONLY_TEACHER``."""
        if self.opd_teachers is None:
            return {ONLY_TEACHER: self.rm_url if self.opd_type == "sglang" else self.opd_teacher_load}
        return {name: where for name, _, where in (entry.partition("=") for entry in self.opd_teachers)}

    @property
    def in_trainer(self) -> dict[str, str]:
        """Name -> checkpoint of the teachers inside the trainer; empty without any."""
        if not self.use_opd or self.opd_type != "megatron":
            return {}
        return {name: folder for name, folder in self.teachers.items() if folder is not None}


def teacher_tag(name: str) -> str:
    """Return the tag of a teacher's weights in the trainer."""
    return f"teacher {name}".rstrip()


def derive_distillation(args: Namespace) -> None:
    """Say which policies and columns the trainer needs, and that the advantages read its old log-probs."""
    config = TeacherConfig.of(args)
    args.advantage_terms += ("--use-opd: the teacher's pull is in the advantages",)
    flag = "opd_teacher_load" if args.opd_teachers is None else "opd_teachers"
    args.frozen_policies += tuple(
        FrozenPolicy(
            teacher_tag(name), flag, folder, "opd_teacher_ckpt_step", args.opd_teacher_ckpt_step, "teacher_log_probs"
        )
        for name, folder in config.in_trainer.items()
    )
    if args.opd_teachers is not None:
        entry = args.opd_teacher_key, tuple(config.teachers), "--opd-teachers"
        args.named_columns = {**args.named_columns, "teacher_names": entry}


def check_distillation(args: Namespace) -> Iterator[str]:
    """Yield one message for each distillation flag that is missing or without effect."""
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
        if BackendFlags.of(args).allgather_cp:
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
        if args.custom_rm_path == ASKS_TEACHER and args.rm_url is None and args.opd_teachers is None:
            yield f"--custom-rm-path {ASKS_TEACHER} asks the teacher at --rm-url, which is not given."


def advise_distillation(args: Namespace) -> None:
    """Log that student and teacher are compared under different distributions."""
    is_asked = args.opd_type == "sglang" and args.custom_rm_path == ASKS_TEACHER
    if is_asked and (args.rollout_temperature, args.rollout_top_p) != (1.0, 1.0):
        logger.warning(
            "--opd-type sglang: a server scores tokens at temperature 1 and top-p 1, the student's log-probs are "
            "those of --rollout-temperature %g and --rollout-top-p %g, so that a teacher pulls where both agree. "
            "Make both 1, or use --opd-type megatron.",
            args.rollout_temperature,
            args.rollout_top_p,
        )


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


def add_teacher_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the group of the teacher server to ``parser``; train.py accepts the flags and does not read them."""
    group = parser.add_argument_group(
        "teacher server", "A server of a teacher's log-probs, tools/serve_teacher.py; training does not read these."
    )
    group.add_argument("--teacher-port", type=port_number, default=7999, help="Port of the server.")
    group.add_argument(
        "--teacher-warmup-port",
        type=port_number,
        help="Port at which /healthz answers 503 until the server is ready. Default: nothing listens before that.",
    )
    group.add_argument(
        "--teacher-warmup-timeout-s",
        type=positive_float,
        default=3000.0,
        help="The server ends when its warm-up takes longer.",
    )
    group.add_argument(
        "--teacher-sample-reduction-chunk-size",
        type=positive_int,
        default=4096,
        metavar="ROWS",
        help="Rows of logits searched at a time for the likeliest tokens.",
    )
    group.add_argument(
        "--teacher-label-reduction-chunk-size",
        type=positive_int,
        default=4096,
        metavar="ROWS",
        help="Rows of logits reduced at a time to log-probs of the given tokens.",
    )
    group.add_argument(
        "--megatron-server-max-length",
        type=non_negative_int,
        default=0,
        metavar="TOKENS",
        help="Longest sequence that is scored; 0: max_position_embeddings of config.json.",
    )
    group.add_argument(
        "--megatron-server-update-timeout-s",
        type=positive_float,
        default=3600.0,
        help="Longest wait of a request for new weights.",
    )
    group.add_argument(
        "--megatron-server-warmup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Score one sequence of full length before the port opens.",
    )


@dataclass(frozen=True, kw_only=True)
class TeacherServerConfig(FlagConfig):
    """The flags of the teacher server."""

    teacher_port: int
    teacher_warmup_port: int | None
    teacher_warmup_timeout_s: float
    teacher_sample_reduction_chunk_size: int
    teacher_label_reduction_chunk_size: int
    megatron_server_max_length: int
    megatron_server_update_timeout_s: float
    megatron_server_warmup: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add both groups to ``parser``."""
    add_distillation_arguments(parser)
    add_teacher_server_arguments(parser)


_OF_TEACHERS = ("opd_type", "opd_teacher_load", "opd_teachers", "opd_teacher_ckpt_step", "opd_top_k")
GROUP = FlagGroup(
    add_arguments,
    derive=(derive_distillation,),
    once=(derive_distillation,),
    check=(check_distillation,),
    advise=(advise_distillation,),
    chosen_by="use_opd",
    needs=(
        *((name, "use_opd", "it is about the teacher") for name in _OF_TEACHERS),
        ("opd_teacher_key", "opd_teachers", "it chooses among several"),
    ),
    excludes=(("opd_teacher_load", "opd_teachers", "the first is one teacher, the second several"),),
)
