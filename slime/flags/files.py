"""Checks that the files named by flags exist and are valid.

Read only: large checkpoints are checked by their index, data files row by row.
"""

from __future__ import annotations

import glob
import importlib.util
import logging
import math
import os
import string
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.flags.algorithm import uses_reference
from slime.flags.checkpoint import CheckpointFolder, check_huggingface_folder, inspect_checkpoint
from slime.flags.config import BackendFlags
from slime.flags.evaluation import derive_evaluation
from slime.flags.group import flag_of
from slime.flags.overlay import ROLES_FLAG
from slime.flags.reward import BOXED_PREFIX, GRADERS_WITH_LABEL, RM_TYPES
from slime.flags.rollout import OWN_ROLLOUTS, SFT_ROLLOUT
from slime.flags.security import Trust
from slime.flags.words import NO_MODEL
from slime.utils.errors import ConfigError, DataError
from slime.utils.files import language_config, read_model_config, read_object

if TYPE_CHECKING:
    from slime.rollout.prompts import PromptLimit
    from slime.rollout.tokenizer_trial import TokenizerTrial

logger = logging.getLogger(__name__)


def check_files(args: Namespace) -> None:
    """Check model, checkpoints and data.

    Raises:
        ConfigError: a model or checkpoint is missing or malformed, or a required file is not given.
        DataError: a data file is missing or malformed; names the line.
    """
    from slime.rollout.tokenizer_trial import TokenizerTrial

    _check_model(args)
    _check_packages(BackendFlags.of(args))
    if args.save is not None:
        _check_save_folder(args.save, {"--hf-checkpoint": args.hf_checkpoint, "--ref-load": args.ref_load})
    if not args.debug_rollout_only:
        start, *_ = _checkpoints(args)
        _check_starting_point(*start, args.load, num_rollout=None if args.finetune else args.num_rollout)
    _check_replay("--load-debug-rollout-data", args.load_debug_rollout_data)
    _check_replay("--load-forge-rollout-data", args.load_forge_rollout_data)
    _render_messages(args)
    if args.apply_chat_template and not _may_have_chat_template(Path(args.hf_checkpoint)):
        raise ConfigError(
            f"--apply-chat-template: the tokenizer of --hf-checkpoint {args.hf_checkpoint} has no chat template; a "
            "base model has none. Drop the flag, name a column of text, use the instruct model's tokenizer, or put a "
            "chat_template.jinja into the folder."
        )
    # The chat template renders the rows of --prompt-data unchanged.
    renders_rows = bool(args.apply_chat_template or args.rollout_function_path == SFT_ROLLOUT)
    has_template = renders_rows or any(one.apply_chat_template for one in args.eval_datasets)
    trial = TokenizerTrial(args.hf_checkpoint, has_template=has_template, trusts_code=Trust.of(args).trust_remote_code)
    with trial:  # runs while the rows are read
        _check_prompts(args, trial, renders_rows=renders_rows)
        _check_eval_data(args, trial)
        trial.finish()
    _check_mask(args)


def _check_model(args: Namespace) -> None:
    if args.hf_checkpoint is None:
        raise ConfigError(NO_MODEL)
    # The engines read the weights; without engines, the trainer may load them from another folder.
    config = check_huggingface_folder(args.hf_checkpoint, "--hf-checkpoint", weights=not args.debug_train_only)
    folder = Path(args.hf_checkpoint)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise ConfigError(f"--hf-checkpoint: {folder} has no tokenizer (tokenizer.json); download the model again.")
    if not args.debug_train_only and BackendFlags.of(args).sglang_context_length is None:  # else it is the limit
        evaluated = args.eval_max_response_len if args.eval_datasets else None
        _check_positions(config, args.rollout_max_response_len, evaluated)
    if not args.debug_rollout_only and (args.save_hf is not None or not args.debug_train_only):
        if (quantized := config.get("quantization_config")) is not None:  # the format of pushes and exports
            from slime.weights.quantize import read_format

            read_format(quantized)


def _render_messages(args: Namespace) -> None:
    """Turn on --apply-chat-template if rows hold chat messages, which nothing else would render."""
    is_refused = args.apply_chat_template is False
    args.apply_chat_template = bool(args.apply_chat_template)
    if args.prompt_data is None or args.apply_chat_template or not _is_plain(args):
        return
    for source in args.prompt_sources:
        _, row = _first_row(source["path"], args.prompt_readers)
        key = source.get("input_key", args.input_key)
        if isinstance(row.get(key), list):
            if is_refused:
                raise ConfigError(
                    f"--apply-chat-template is false, and {key} (--input-key) of {source['path']} is a list of chat "
                    "messages, which nothing else would render. Drop it, or name a column of text."
                )
            logger.info("%s (--input-key) is a list of chat messages: --apply-chat-template is on.", key)
            args.apply_chat_template = True
            derive_evaluation(args)  # a data set's own setting takes precedence
            return


def _first_row(path: str, readers: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the place of the first row of a data set, and the row; an empty row if there is none."""
    from slime.rollout.prompt_files import read_rows

    return next(iter(read_rows(path, readers=readers)), ("", {}))


def _may_have_chat_template(folder: Path) -> bool:
    """Return False if the tokenizer's settings exist and have no template."""
    if any(folder.glob("chat_template*")) or any(folder.glob("additional_chat_templates/*")):
        return True
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() or (folder / "tokenizer.model").is_file():
        return True  # the tokenizer's class may have one
    content = read_object(settings, flag="--hf-checkpoint", error=ConfigError)
    return bool(content.get("chat_template") or content.get("auto_map"))


def _check_positions(config: dict[str, Any], rollout_length: int | None, eval_length: int | None) -> None:
    """Reject responses longer than the model's positions."""
    positions = _positions(config)
    if positions is None:
        return
    for flag, length in (
        ("--rollout-max-response-len", rollout_length),
        ("--eval-max-response-len", eval_length),
    ):
        if length is not None and length >= positions:
            raise ConfigError(
                f"{flag} {length}: the model of --hf-checkpoint has max_position_embeddings {positions}, which must "
                f"hold prompt and response; give at most {positions - 1}, less the longest prompt."
            )


def _positions(config: dict[str, Any]) -> int | None:
    """Return the model's positions; None if they are unknown or its rotary embedding is stretched."""
    text = language_config(config)
    positions = text.get("max_position_embeddings")
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    is_stretched = any(isinstance(rope, dict) and rope.get(key) is not None for key in ("factor", "long_factor"))
    return positions if isinstance(positions, int) and not is_stretched else None


def _prompt_limit(
    engines: BackendFlags, model: str, response: int | None, flag: str, kept: int | None
) -> PromptLimit | None:
    """Return the longest prompt that the engines take; None if their context is unknown.

    Args:
        engines: Flags of the engines.
        model: Folder of --hf-checkpoint.
        response: Maximum tokens of a response.
        flag: Flag that leaves out longer prompts.
        kept: Its value.
    """
    from slime.rollout.prompts import PromptLimit

    if engines.sglang_config or engines.sglang_allow_auto_truncate:
        return None
    context, why = engines.sglang_context_length, "--sglang-context-length"
    if context is None:
        context = _positions(read_model_config(model, flag="--hf-checkpoint"))
        why = "max_position_embeddings of --hf-checkpoint"
    room = 1 if response is None else response
    if context is None or context <= room:
        return None
    return PromptLimit(context - room, f"{why} {context}, less {room} for the response", flag, kept)


def _check_packages(engines: BackendFlags) -> None:
    """Reject flags whose package is not installed."""
    deepep = engines.sglang_enable_deepep_moe or engines.sglang_moe_a2a_backend == "deepep"
    if deepep and importlib.util.find_spec("deep_ep") is None:
        raise ConfigError(
            "--sglang-moe-a2a-backend deepep (or --sglang-enable-deepep-moe) needs the package deep_ep, which is not "
            "installed here; install DeepEP on every node, or drop the flag."
        )


def _check_save_folder(folder: str, models: Mapping[str, str | None]) -> None:
    for flag, other in models.items():
        if other is not None and Path(other).resolve() == Path(folder).resolve():
            raise ConfigError(
                f"--save and {flag} are both {other}: the first save would overwrite the model. Give the "
                "checkpoints another folder."
            )
    save = Path(folder).absolute()
    there = next(path for path in (save, *save.parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"--save {folder}: {there} is a file; give a folder for the checkpoints.")
    if not os.access(there, os.W_OK):
        raise ConfigError(f"--save {folder}: {there} is not writable; give another folder, or change its permissions.")


def _checkpoints(args: Namespace) -> Iterator[tuple[str, CheckpointFolder]]:
    """Yield flag and folder of each checkpoint that the actor loads, starting with its own weights."""
    flag = "--load"
    if args.load == args.ref_load:  # where --load falls back to
        flag = "--hf-checkpoint" if args.ref_load == args.hf_checkpoint else "--ref-load"
    yield flag, inspect_checkpoint(args.load, flag, step=args.ckpt_step)
    has_kl = uses_reference(args.use_kl_loss, args.kl_coef)
    if args.ref_load is None and has_kl and not args.reference_in_actor:
        asking = "--use-kl-loss" if args.use_kl_loss else f"--kl-coef {args.kl_coef}"
        raise ConfigError(f"{asking} needs a reference model; name its checkpoint: --ref-load.")
    if args.ref_load is not None and (has_kl or args.reference_in_actor):
        yield "--ref-load", inspect_checkpoint(args.ref_load, "--ref-load", step=args.ref_ckpt_step)
    for policy in args.frozen_policies:
        flag = flag_of(policy.load_arg)
        yield flag, inspect_checkpoint(policy.folder, flag, step=policy.step)


def check_contents(args: Namespace) -> None:
    """Check the files of model and checkpoints against their metadata: names, lengths, headers, digests of headers.
    No weights are read.

    Raises:
        DataError: a file is missing, truncated or damaged.
    """
    from slime.weights.file_digests import check_headers

    model = Path(args.hf_checkpoint)
    loaded = [] if args.debug_train_only else [("--hf-checkpoint", CheckpointFolder("huggingface", None, model))]
    loaded += [] if args.debug_rollout_only else _checkpoints(args)
    critic = args.critic_args
    if critic is not None and critic.load is not None:
        flag = f"{ROLES_FLAG}: load of the critic"
        loaded.append((flag, inspect_checkpoint(critic.load, flag, step=critic.ckpt_step)))
    for flag, found in {found.folder: (flag, found) for flag, found in loaded}.values():
        try:
            if found.kind == "huggingface":
                check_headers(found.folder, verify=args.verify_checkpoint)
            else:
                from slime.backends.megatron_utils.checkpoints.checkpoint_reader import CheckpointReader

                CheckpointReader(found.folder, verify=args.verify_checkpoint).check_files()
        except DataError as error:
            raise DataError(f"{flag}: {error}") from error


def _check_starting_point(flag: str, found: CheckpointFolder, load: str, *, num_rollout: int | None) -> None:
    if found.kind == "huggingface":
        _check_format(load, flag)
    done = found.iteration
    if isinstance(done, int) and num_rollout and done + 1 >= num_rollout:
        logger.warning(
            "%s %s has been trained up to rollout %d, and --num-rollout %d counts from the first: nothing is left to "
            "do. Raise --num-rollout to continue.",
            flag,
            load,
            done,
            num_rollout,
        )


def _check_format(folder: str, flag: str) -> None:
    """Reject quantized weights in a format that the trainer cannot dequantize."""
    config = read_model_config(folder, flag=flag).get("quantization_config")
    if config is None:
        return
    from slime.weights.quantize import read_format
    from slime.weights.quantize.mxfp4 import METHOD as MXFP4

    if config.get("quant_method") == MXFP4:
        return  # supported for reading only
    try:
        read_format(config)
    except ConfigError as error:
        raise ConfigError(
            f"{flag}: the trainer cannot read the quantized weights of {folder}: {error} Give the bf16 model."
        ) from error


def _check_replay(flag: str, template: str | None) -> None:
    parts = string.Formatter().parse(template or "")
    pattern = "".join(glob.escape(text) + ("" if field is None else "*") for text, field, _, _ in parts)
    if template is not None and not glob.glob(pattern):
        raise ConfigError(
            f"{flag}: no file fits {template}. Record some with --save-debug-rollout-data, and write {{rollout_id}} "
            "where the number stands."
        )


def _check_prompts(args: Namespace, trial: TokenizerTrial, *, renders_rows: bool) -> None:
    from slime.rollout.prompt_files import readers_of
    from slime.rollout.prompts import check_prompt_file

    if args.prompt_data is None:
        wanted = args.rollout_global_dataset and _is_of_slime(args.data_source_path)
        if wanted and args.load_debug_rollout_data is None:
            raise ConfigError(
                "--prompt-data is not given: name a .jsonl or .parquet file of prompts, or use "
                "--disable-rollout-global-dataset with a rollout function that has its own."
            )
        return
    asked = {"--metadata-key": (args.metadata_key, "metadata"), "--tool-key": (args.tool_key, "tools")}
    has_built_in = _is_plain(args) and not args.custom_rm_path
    num_rows = 0
    template_kwargs = {"add_generation_prompt": args.apply_chat_template, **(args.apply_chat_template_kwargs or {})}
    limit = None
    if _is_plain(args) and not (args.rollout_external or args.multimodal_keys or args.load_debug_rollout_data):
        room, flag = args.rollout_max_response_len, "--rollout-max-prompt-len"
        limit = _prompt_limit(BackendFlags.of(args), args.hf_checkpoint, room, flag, args.rollout_max_prompt_len)
    for source in args.prompt_sources:
        num_rows += check_prompt_file(
            source["path"],
            source.get("input_key", args.input_key),
            label_key=source.get("label_key", args.label_key),
            tool_key=args.tool_key,
            metadata_key=args.metadata_key,
            multimodal_keys=args.multimodal_keys,
            grader=args.rm_type if has_built_in else None,
            rm_types=RM_TYPES if has_built_in else None,
            template=trial.template(template_kwargs) if renders_rows else None,
            lengths=trial.lengths(limit, template_kwargs if renders_rows else None),
            readers=readers_of(args),
            some_keys={key: flag for flag, (key, default) in asked.items() if key and key != default},
        )
        if has_built_in:
            _check_first_row(args, source)
    if args.num_rollout is None and _is_of_slime(args.data_source_path):
        _check_epochs(args, num_rows)


def _is_of_slime(data_source_path: str) -> bool:
    """Return True for slime's own data sources; a user's may get its data from elsewhere."""
    return data_source_path.startswith("slime.")


def _check_epochs(args: Namespace, num_rows: int) -> None:
    """Check that ``--num-epoch`` gives at least one rollout, and more steps than the learning rate's warm-up."""
    rollouts = num_rows // args.rollout_batch_size * args.num_epoch
    if rollouts == 0:
        raise ConfigError(
            f"--num-epoch {args.num_epoch} gives no rollout: --prompt-data has {num_rows} prompts, fewer than "
            f"--rollout-batch-size {args.rollout_batch_size}. Use a smaller batch, more data or --num-rollout."
        )
    wanted, taken = num_rows * args.num_epoch, rollouts * args.rollout_batch_size
    if taken < wanted:
        logger.warning(
            "--num-epoch %d takes %d of %d prompts: an epoch of %d prompts counts as %d whole rollouts of "
            "--rollout-batch-size %d. --num-rollout %d takes them all.",
            args.num_epoch, taken, wanted, num_rows, rollouts // args.num_epoch, args.rollout_batch_size,
            math.ceil(wanted / args.rollout_batch_size),
        )  # fmt: skip
    schedule = BackendFlags.of(args)
    warmup = schedule.lr_warmup_iters
    if not args.global_batch_size or schedule.lr_decay_iters or args.debug_rollout_only:
        return
    steps = rollouts * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    if warmup and warmup >= steps:
        raise ConfigError(
            f"The learning rate warms up for {warmup} of {steps} optimizer steps (--num-epoch {args.num_epoch} over "
            f"{num_rows} prompts); lower --lr-warmup-iters, or raise --num-epoch."
        )


def _is_plain(args: Namespace) -> bool:
    """Return True if no user code runs between reading a row and grading it."""
    if args.custom_generate_function_path or args.debug_train_only or args.rollout_sample_hook_path:
        return False
    return args.rollout_function_path in OWN_ROLLOUTS and _is_of_slime(args.data_source_path)


def _check_mask(args: Namespace) -> None:
    """Check on the first row of SFT data that --loss-mask-type fits the chat template."""
    is_read_here = args.prompt_data and _is_of_slime(args.data_source_path) and not args.multimodal_keys
    if args.rollout_function_path != SFT_ROLLOUT or not is_read_here:
        return
    from slime.rollout.prompt_files import parse_tools
    from slime.rollout.prompts import map_with_deadline
    from slime.rollout.sft_rollout import mask_generator

    source = args.prompt_sources[0]
    where, row = _first_row(source["path"], args.prompt_readers)
    key = source.get("input_key", args.input_key)
    if not isinstance(row[key], list):
        raise DataError(f"{where}: {key} (--input-key) is text; sft_rollout needs messages, answers included.")

    def mask(where: str, tools: list[Any] | None) -> None:
        try:
            mask_generator(args).get_loss_mask(row[key], tools)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    map_with_deadline(mask, [(where, parse_tools(row.get(args.tool_key), where))])


def _check_first_row(args: Namespace, source: Mapping[str, Any]) -> None:
    """Check that a built-in grader can grade the first row."""
    from slime.rollout.prompt_files import parse_metadata

    where, row = _first_row(source["path"], args.prompt_readers)
    own = parse_metadata(row.get(args.metadata_key), where).get("rm_type")
    if not own and args.rm_type and args.rm_type.removeprefix(BOXED_PREFIX) in GRADERS_WITH_LABEL:
        if source.get("label_key", args.label_key) is None:
            raise ConfigError(
                f"--rm-type {args.rm_type} compares answers with a label, and --label-key is not given, so that every "
                f"reward would be 0; name the column: {where} has {', '.join(row)}."
            )
    if not own and not args.rm_type:
        raise ConfigError(
            f"No grader: --rm-type and --custom-rm-path are not given, and {where} has no rm_type in its "
            f"{args.metadata_key} (--metadata-key). Give one of the three."
        )


def _check_eval_data(args: Namespace, trial: TokenizerTrial) -> None:
    from slime.rollout.prompt_files import readers_of
    from slime.rollout.prompts import check_prompt_file

    if args.debug_train_only:
        return  # nothing is evaluated
    is_ours = args.eval_function_path in OWN_ROLLOUTS
    has_code = args.custom_generate_function_path or args.rollout_sample_hook_path
    is_asked = is_ours and not (has_code or args.rollout_external or args.load_debug_rollout_data)
    for dataset in args.eval_datasets:
        # User code may run between reading a row and grading it.
        is_plain = is_ours and not (has_code or dataset.custom_rm_path or dataset.custom_generate_function_path)
        kwargs = dataset.apply_chat_template_kwargs or {} if dataset.apply_chat_template else None
        limit = None
        if is_asked and not (dataset.custom_generate_function_path or dataset.multimodal_keys):
            room, flag = dataset.max_response_len, "--eval-max-prompt-len"
            limit = _prompt_limit(BackendFlags.of(args), args.hf_checkpoint, room, flag, args.eval_max_prompt_len)
        check_prompt_file(
            dataset.path,
            dataset.input_key,
            label_key=dataset.label_key,
            tool_key=dataset.tool_key,
            metadata_key=dataset.metadata_key,
            multimodal_keys=dataset.multimodal_keys,
            grader=dataset.rm_type or args.rm_type if is_plain else None,
            template=None if kwargs is None else trial.template(kwargs),
            lengths=trial.lengths(limit, kwargs),
            flag="--eval-config" if args.eval_config else "--eval-prompt-data",
            input_flag="--eval-input-key",
            label_flag="--eval-label-key",
            readers=readers_of(args),
        )
