"""Are the files that the flags name there, and are they what they should be?

Read only; large checkpoints are judged by their index, data files row by row.
"""

from __future__ import annotations

import glob
import string
from argparse import Namespace
from pathlib import Path

from slime.arguments.checkpoint_paths import check_huggingface_folder, inspect_checkpoint
from slime.utils.errors import ConfigError

OWN_DATA_SOURCES = (
    "slime.rollout.data_source.RolloutDataSource",
    "slime.rollout.data_source.RolloutDataSourceWithBuffer",
)
"""Those that read --prompt-data; another data source may not."""


def check_files(args: Namespace) -> None:
    """Check model, checkpoints and data.

    Raises:
        ConfigError: a model or checkpoint is missing or malformed, or a file is not given at all.
        DataError: a data file is missing or malformed, with the line.
    """
    _check_model(args)
    if not args.debug_rollout_only:
        _check_starting_point(args)
    _check_reference(args)
    _check_teacher(args)
    _check_replay(args)
    _check_prompts(args)
    _check_eval_data(args)


def _check_model(args: Namespace) -> None:
    if args.hf_checkpoint is None:
        raise ConfigError("--hf-checkpoint is not given: name the model's Hugging Face folder (config and tokenizer).")
    # The engines read the weights; without engines, the trainer may have them from elsewhere.
    check_huggingface_folder(args.hf_checkpoint, "--hf-checkpoint", weights=not args.debug_train_only)
    folder = Path(args.hf_checkpoint)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise ConfigError(f"--hf-checkpoint: {folder} has no tokenizer (tokenizer.json); download the model again.")


def _check_starting_point(args: Namespace) -> None:
    if args.load is None:
        raise ConfigError(
            "Nothing to start from: neither --load nor --ref-load names a checkpoint. Give a Megatron checkpoint "
            "(tools/convert_hf_to_torch_dist.py makes one) or a Hugging Face folder."
        )
    flag = "--ref-load" if args.load == args.ref_load else "--load"
    inspect_checkpoint(args.load, flag, step=args.ckpt_step)


def _check_reference(args: Namespace) -> None:
    if args.debug_rollout_only or not (args.use_kl_loss or args.kl_coef != 0):
        return
    if args.ref_load is None:
        asking = "--use-kl-loss" if args.use_kl_loss else f"--kl-coef {args.kl_coef}"
        raise ConfigError(f"{asking} compares with a reference model; name its checkpoint: --ref-load.")
    inspect_checkpoint(args.ref_load, "--ref-load", step=args.ref_ckpt_step)


def _check_teacher(args: Namespace) -> None:
    if args.opd_teacher_load is not None and not args.debug_rollout_only:
        inspect_checkpoint(args.opd_teacher_load, "--opd-teacher-load", step=args.opd_teacher_ckpt_step)


def _check_replay(args: Namespace) -> None:
    for flag in ("load_debug_rollout_data", "load_forge_rollout_data"):
        if (template := getattr(args, flag)) is not None:
            _check_dumps(template, f"--{flag.replace('_', '-')}")


def _check_dumps(template: str, flag: str) -> None:
    pattern = "".join(
        glob.escape(text) + ("" if field is None else "*") for text, field, _, _ in string.Formatter().parse(template)
    )
    if not glob.glob(pattern):
        raise ConfigError(
            f"{flag}: no file fits {template}. Record some with --save-debug-rollout-data, and "
            "write {rollout_id} where the number stands."
        )


def _check_prompts(args: Namespace) -> None:
    from slime.rollout.prompt_dataset import check_prompt_file

    if args.prompt_data is None:
        wanted = args.rollout_global_dataset and args.data_source_path in OWN_DATA_SOURCES
        if wanted and args.load_debug_rollout_data is None:
            raise ConfigError(
                "--prompt-data is not given: name a .jsonl or .parquet file of prompts, or use "
                "--disable-rollout-global-dataset with a rollout function that has its own."
            )
        return
    check_prompt_file(args.prompt_data, args.input_key, label_key=args.label_key, multimodal_keys=args.multimodal_keys)


def _check_eval_data(args: Namespace) -> None:
    from slime.rollout.prompt_dataset import check_prompt_file

    if args.debug_train_only:
        return  # nothing is evaluated
    for dataset in args.eval_datasets:
        check_prompt_file(
            dataset.path,
            dataset.input_key,
            label_key=dataset.label_key,
            multimodal_keys=dataset.multimodal_keys,
            flag="--eval-config" if args.eval_config else "--eval-prompt-data",
            input_flag="--eval-input-key",
            label_flag="--eval-label-key",
        )
