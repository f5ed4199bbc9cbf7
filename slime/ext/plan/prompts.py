"""The lengths of a run's samples, of its own prompts where data and tokenizer are at hand, and their images."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils.flags.parallel import ParallelSizes
from slime.ext.plan.plan import PlanOptions
from slime.ext.plan.run_flags import RunFlags
from slime.ext.plan.traffic import StepWork, reference_lengths
from slime.flags.security import Trust
from slime.rollout.prompt_dataset import Dataset
from slime.rollout.prompt_files import readers_of, split_path
from slime.rollout.tools import TurnsConfig, toolbox
from slime.train_data.model_dims import ModelDims
from slime.utils.errors import ConfigError
from slime.utils.processing_utils import load_tokenizer

ROWS_READ = 4096
"""Of a file, and prompts taken from a mixture; those of a larger one are not all read for a plan."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def prompt_lengths(args: Namespace, checkpoint: str) -> tuple[int, ...]:
    """Return the tokens of each prompt, in the order in which rollouts take them.

    Args:
        checkpoint: the folder of ``--hf-checkpoint`` as the user gave it, with the tokenizer.

    Returns:
        Nothing when the file or the tokenizer is not here, or samples come from elsewhere.

    Raises:
        DataError: a row of the file is wrong.
        ConfigError: the tokenizer cannot be read.
    """
    if not args.rollout_global_dataset or args.prompt_data is None or args.debug_train_only:
        return ()
    if not all(_is_here(source["path"], args.prompt_readers) for source in args.prompt_sources):
        return ()
    if not any((Path(checkpoint) / file).is_file() for file in TOKENIZER_FILES):
        return ()
    tokenizer = load_tokenizer(checkpoint, trust_remote_code=Trust.of(args).trust_remote_code)

    def open_one(source: Mapping[str, Any]) -> Dataset:
        name, rows = split_path(source["path"])
        return Dataset(
            f"{name}@[0:{ROWS_READ}]" if rows == slice(None) else source["path"],
            tokenizer,
            None,
            args.rollout_max_prompt_len,
            prompt_key=source.get("input_key", args.input_key),
            label_key=source.get("label_key", args.label_key),
            tool_key=args.tool_key,
            metadata_key=args.metadata_key,
            seed=args.rollout_seed,
            apply_chat_template=args.apply_chat_template,
            apply_chat_template_kwargs=args.apply_chat_template_kwargs,
            tools=toolbox(TurnsConfig.of(args)).schemas,
            readers=readers_of(args),
        )

    lengths: list[list[int]] = []
    for source in args.prompt_sources:
        dataset = open_one(source)
        if args.rollout_shuffle:
            dataset.shuffle(0)
        texts = [_text(sample.prompt) for sample in dataset.samples]
        lengths.append([len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]])
    if len(lengths) == 1:
        return tuple(lengths[0])
    return mixed(lengths, [source["weight"][0][1] for source in args.prompt_sources])


def mixed(lengths: Sequence[Sequence[int]], weights: Sequence[float]) -> tuple[int, ...]:
    """Return the lengths of several data sets in turn, in the shares of their weights."""
    turns = (
        ((number + 1) / weight, values[number % len(values)])
        for values, weight in zip(lengths, weights, strict=True)
        if weight > 0
        for number in range(ROWS_READ)
    )
    return tuple(length for _, length in sorted(turns, key=itemgetter(0))[:ROWS_READ])


def _is_here(path: str, prefixes: Iterable[str]) -> bool:
    name, _ = split_path(path)
    return name.startswith(tuple(prefixes)) or Path(name).is_file()


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content", "")) for message in prompt)


def sample_lengths(run: RunFlags, prompts: Sequence[int]) -> list[int]:
    """Return the tokens of each sample: responses of the reference distribution, after known prompts."""
    longest = longest_sample(run, prompts)
    if not prompts:
        return reference_lengths(run.num_samples, longest)
    limit = run.rollout_max_response_len
    responses = reference_lengths(run.num_samples, limit) if limit else [0] * run.num_samples
    return [
        min(longest, prompts[index // run.n_samples_per_prompt % len(prompts)] + response)
        for index, response in enumerate(responses)
    ]


def longest_sample(run: RunFlags, prompts: Sequence[int] = ()) -> int:
    """Return the longest sample that flags and prompts allow, a prompt of unknown length left out."""
    if run.rollout_max_context_len is not None:
        return run.rollout_max_context_len
    prompt = max(prompts, default=run.rollout_max_prompt_len or 0)
    return (run.rollout_max_response_len or 0) + prompt or run.seq_length


def image_patches(dims: ModelDims, options: PlanOptions) -> list[int]:
    """Return the patches of each image of a sample."""
    if not options.images:
        return []
    if dims.tower is None:
        raise ConfigError("--image is given, but the trainer has no vision tower for this model; drop it.")
    return [dims.tower.patches_of(*size) for size in options.images]


def with_image_tokens(dims: ModelDims, options: PlanOptions, images: Sequence[int]) -> PlanOptions:
    """Return the options with the images' tokens in the prompts."""
    if dims.tower is None or not images:
        return options
    tokens = sum(images) // dims.tower.merge**2
    return replace(options, prompts=tuple(prompt + tokens for prompt in options.prompts or (0,)))


def patches_of_rank(tokens: int, per_sample: int, sizes: ParallelSizes, work: StepWork | None) -> int:
    """Return the patches in a micro-batch of so many tokens on a rank: samples of the mean length fill it."""
    if work is None:
        return 0
    patches = -(-tokens * per_sample * work.num_samples // work.num_tokens)
    return -(-patches // (sizes.tensor if sizes.sequence_parallel else 1))
