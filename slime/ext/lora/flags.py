"""Flags of low-rank adapters in place of all weights (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime.flags.checkpoint import has_finished_save, is_huggingface_folder, is_release
from slime.flags.config import BackendFlags
from slime.flags.debug import template_problem
from slime.flags.group import FlagGroup, flag_of
from slime.flags.kinds import file_path, fraction_below_one, named_path, positive_float, positive_int

PLUGIN = "slime.ext.lora.sglang_plugin.register"
ALL_LINEAR = "all-linear"
"""Every linear layer of the decoder: attention, MLP, shared and routed experts."""


def add_lora_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the LoRA group to ``parser``."""
    group = parser.add_argument_group("LoRA", "Train low-rank adapters of the actor; its weights stay as they are.")
    group.add_argument(
        "--lora-rank", type=positive_int, metavar="R", help="Rank of the adapters. Default: no adapters."
    )
    group.add_argument(
        "--lora-alpha", type=positive_float, help="Adapters are scaled by this over the rank. Default: twice the rank."
    )
    group.add_argument(
        "--lora-target-modules",
        nargs="+",
        default=[ALL_LINEAR],
        metavar="NAME",
        help="Modules with an adapter, by the end of their Hugging Face or Megatron name (q_proj, mlp.gate_proj, "
        "linear_qkv); all-linear: every linear layer of the decoder.",
    )
    group.add_argument(
        "--lora-experts",
        choices=["each", "shared"],
        default="each",
        help="each: every matrix of a routed expert has its own adapter. shared: those of a layer's experts "
        "have one together.",
    )
    group.add_argument(
        "--lora-dropout", type=fraction_below_one, default=0.0, help="Dropout of what adapters read, in training."
    )
    group.add_argument(
        "--lora-push",
        choices=["merged", "adapter"],
        default="merged",
        help="merged: engines get whole weights with the adapters added. adapter: they hold --hf-checkpoint, and get "
        "adapters alone without a pause.",
    )
    group.add_argument(
        "--lora-engine-adapters",
        nargs="+",
        type=named_path,
        default=[],
        metavar="NAME=DIR",
        help="PEFT folders that engines serve beside the trained adapter, with --lora-push adapter. A request runs on "
        'one with "lora_path": NAME, which generate functions set.',
    )
    group.add_argument(
        "--lora-base-precision",
        choices=["fp8", "int4"],
        help="Hold the matrices under the adapters quantized (QLoRA): FP8 with a scale a block of 128 x 128, int4 "
        "with one a group. Default: the trainer's precision.",
    )
    group.add_argument("--lora-load", type=file_path, metavar="DIR", help="PEFT folder with the first adapters.")
    group.add_argument(
        "--lora-save",
        type=file_path,
        metavar="TEMPLATE",
        help="Folder for the adapters in PEFT's format with each save; {rollout_id} in it is replaced.",
    )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Size and place of the adapters."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    shares_experts: bool = False
    """All experts of a layer have the same A and B."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return self.alpha / self.rank

    def chooses(self, *names: str) -> bool:
        """Return True for a module that goes by one of these names."""
        return self.targets == (ALL_LINEAR,) or any(
            f".{name}".endswith(f".{target}") for name in names for target in self.targets
        )


def lora_alpha(rank: int, alpha: float | None) -> float:
    """Return the factor of the adapters before it is divided by their rank, if ``alpha`` is that of the flag."""
    return 2 * rank if alpha is None else alpha


def lora_config(args: Namespace) -> LoraConfig | None:
    """Return the adapters of a run; None where all weights are trained."""
    if vars(args).get("lora_rank") is None:
        return None
    return LoraConfig(
        rank=args.lora_rank,
        alpha=lora_alpha(args.lora_rank, args.lora_alpha),
        dropout=args.lora_dropout,
        targets=tuple(args.lora_target_modules),
        shares_experts=args.lora_experts == "shared",
    )


def engine_adapters(given: Sequence[str]) -> dict[str, str]:
    """Return the folders of ``--lora-engine-adapters`` by name."""
    return {name: folder for name, _, folder in (one.partition("=") for one in given)}


def lora_base(args: Namespace) -> str:
    """Return the checkpoint of the weights under the adapters: what the run began with, or begins with now."""
    if args.ref_load is not None:
        return args.ref_load
    return args.hf_checkpoint if has_finished_save(args.load) and not is_release(args.load) else args.load


def derive_lora(args: Namespace) -> None:
    """Say what is special about the weights of the actor and of the engines."""
    args.reference_in_actor = True
    args.push_sends_model = args.lora_push != "adapter"
    if args.lora_push == "adapter":
        args.engine_plugins.append([PLUGIN])


def complete_lora(args: Namespace) -> None:
    """Compare the adapters with the model, and give the engines room for those that they get alone.

    Raises:
        SlimeError: as ``check_targets`` and ``engine_settings`` of ``slime.ext.lora.targets`` say.
    """
    from slime.ext.lora.targets import check_targets, engine_settings

    check_targets(args)
    args.engine_settings |= engine_settings(args)


def check_lora(args: Namespace) -> Iterator[str]:
    """Yield one message for each value of an adapter's flag that cannot work, or does not go with the others."""
    if args.lora_push == "adapter":
        dp_size = BackendFlags.of(args).sglang_dp_size or 1
        yield from _adapter_push_problems(args.hf_checkpoint, lora_base(args), dp_size)
    if ALL_LINEAR in args.lora_target_modules and len(args.lora_target_modules) > 1:
        yield f"--lora-target-modules is {' '.join(args.lora_target_modules)}; all-linear excludes names."
    given: list[str] = args.lora_engine_adapters
    for one in given:
        name, _, folder = one.partition("=")
        if not name or not folder or name.startswith("slime-"):
            yield f"--lora-engine-adapters {one}: write NAME=DIR; names that begin with slime- are those of pushes."
    if len(engine_adapters(given)) < len(given):
        yield f"--lora-engine-adapters {' '.join(given)}: two have one name; give each its own."
    if args.lora_save is not None:
        if problem := template_problem("--lora-save", args.lora_save, {"rollout_id"}):
            yield problem
    for policy in args.frozen_policies:
        yield (
            f"{flag_of(policy.load_arg)} puts {policy.folder} in the place of the actor's weights, which --lora-rank "
            "keeps frozen and in one copy; let an engine serve that model (a teacher: --opd-type sglang)."
        )
    yield from _starting_point_problems(args.load, args.ref_load, finetunes=args.finetune)


def _adapter_push_problems(hf_checkpoint: str, base: str, dp_size: int) -> Iterator[str]:
    if dp_size > 1:
        yield f"--sglang-dp-size {dp_size} does not go with --lora-push adapter; drop it or use --lora-push merged."
    if base != hf_checkpoint:
        yield (
            f"--lora-push adapter leaves the engines at --hf-checkpoint {hf_checkpoint}, and the trainer's base "
            f"is {base}; give one Hugging Face folder (tools/convert_to_hf.py) as both, or use --lora-push merged."
        )


def _starting_point_problems(load: str | None, ref_load: str | None, *, finetunes: bool) -> Iterator[str]:
    if load is not None and load == ref_load and not finetunes:
        yield f"--load {load} is --ref-load too; drop --load, which with --lora-rank names saves of adapters."
    if ref_load is not None and load != ref_load:
        if is_huggingface_folder(load) or is_release(load):
            yield (
                f"--load {load} and --ref-load {ref_load} differ; with --lora-rank the reference is the "
                "actor without its adapters: give the model as --ref-load alone."
            )


_OF_ADAPTERS = ("lora_alpha", "lora_load", "lora_save", "lora_base_precision", "lora_engine_adapters")
_OF_PARAMETERS = (
    *("only_train_params_name_list", "freeze_params_name_list", "custom_model_provider_path"),
    *("train_vision_tower", "enable_mtp_training"),
)
_NOT_WITH_ADAPTER_PUSH = (
    *("check_weight_update_equal", "rollout_external_engine_addrs", "lora_base_precision", "sglang_config"),
    *("prefill_num_servers", "sglang_load_format=dummy"),
)
GROUP = FlagGroup(
    add_lora_arguments,
    derive=(derive_lora,),
    check=(check_lora,),
    complete=(complete_lora,),
    chosen_by="lora_rank",
    needs=(
        *((name, "lora_rank", "it is about adapters") for name in (*_OF_ADAPTERS, "lora_push=adapter")),
        ("lora_save", "save_interval", "adapters are written beside each save"),
        ("lora_engine_adapters", "lora_push=adapter", "other engines do not keep the base model of these adapters"),
    ),
    excludes=(
        *((name, "lora_rank", "adapters alone are trained") for name in _OF_PARAMETERS),
        *((name, "lora_push=adapter", "engines get adapters alone") for name in _NOT_WITH_ADAPTER_PUSH),
    ),
)
