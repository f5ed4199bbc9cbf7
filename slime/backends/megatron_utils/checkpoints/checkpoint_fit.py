"""Checks that a checkpoint fits the model that the flags describe.

It runs before anything is loaded, so that the error can name all differences: flags, shapes, missing and unexpected
tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime.backends.megatron_utils.checkpoints.checkpoint_reader import CheckpointReader
from slime.flags.group import flag_of
from slime.utils.distributed_utils import gather_on_first, object_of_first
from slime.utils.errors import DataError

NOT_WEIGHTS = ("optimizer.", "rng_state")
"""Prefixes of names in a checkpoint that do not belong to the model."""

SAME_SHAPE = (
    *("num_attention_heads", "num_query_groups", "kv_channels", "qk_head_dim", "qk_pos_emb_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
)
"""Flags that determine the meaning of a matrix's rows: models that differ in them may have the same shapes."""

SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", *SAME_SHAPE, "v_head_dim", "q_lora_rank", "kv_lora_rank"),
    *("vocab_size", "num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq"),
    *(
        "lora_rank",
        "lora_alpha",
        "lora_experts",
        "mtp_num_layers",
        "multi_latent_attention",
        "qk_layernorm",
        "add_qkv_bias",
        "swiglu",
    ),
    "untie_embeddings_and_output_weights",
)
"""Flags that determine the tensors and their shapes, in the order in which errors name them."""

Shapes = dict[str, tuple[tuple[int, ...], bool]]
"""Name on disk -> shape of the whole tensor, and whether its vocabulary padding may differ."""


def check_fit(
    flags: Mapping[str, Any],
    folder: Path,
    saved: Mapping[str, tuple[int, ...]],
    model_state: Mapping[str, Any],
    saved_args: Any,
    flag: str,
    *,
    unread: Iterable[str] = (),
) -> None:
    """Raise an error if a checkpoint does not fit.  Collective; rank 0 compares.

    MTP layers in the checkpoint are ignored if the model has none.

    Args:
        flags: this run's flags, by attribute.
        saved: on rank 0, the :func:`saved_shapes` of the folder; ignored on other ranks.
        saved_args: the arguments in the checkpoint, or None.
        unread: names on disk that this rank deliberately does not read.

    Raises:
        DataError: on every rank; names the differing flags and up to three tensors of each kind of difference.
    """
    everyone = gather_on_first((_shapes_of(model_state), set(unread)))
    verdict = ""
    if everyone is not None:
        wanted: Shapes = {}
        left_out: set[str] = set()
        for shapes, names in everyone:
            wanted |= shapes
            left_out |= names
        both = flags, None if saved_args is None else vars(saved_args)
        lines = [*_flag_lines(*both, SAME_SHAPE)]
        read = {key: shape for key, shape in saved.items() if key not in left_out}
        differences = list(_tensor_lines(wanted, read, flags["vocab_size"]))
        if differences:
            lines = [*_flag_lines(*both, SHAPE), *differences]
        verdict = "\n  ".join(lines)
    if verdict := object_of_first(verdict):
        raise DataError(
            f"{flag}: the checkpoint {folder} does not fit the model that the flags describe:\n  {verdict}\n"
            "Compare the MODEL_ARGS of this run with those of the run that saved it."
        )


def _shapes_of(model_state: Mapping[str, Any]) -> Shapes:
    sharded, _, _ = load_preprocess(dict(model_state))
    return {
        entry.key: (tuple(entry.global_shape), bool(entry.allow_shape_mismatch))
        for entry in nested_values(sharded)
        if isinstance(entry, ShardedTensor)
    }


def saved_shapes(reader: CheckpointReader) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the model's tensors in a checkpoint."""
    metadata = reader.metadata.state_dict_metadata
    return {
        key: tuple(entry.size)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith(NOT_WEIGHTS)
    }


def _flag_lines(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None, names: Iterable[str]) -> Iterator[str]:
    """Yield one line for each flag whose value differs from the checkpoint's."""
    if theirs is None:
        return
    for name in names:
        is_default_groups = name == "num_query_groups" and not theirs.get("group_query_attention")
        saved = theirs.get("num_attention_heads" if is_default_groups else name)
        if saved is not None and name in theirs and ours.get(name) is not None and ours[name] != saved:
            yield f"{flag_of(name)} is {ours[name]}; the checkpoint has {saved}"


def _tensor_lines(wanted: Shapes, saved: Mapping[str, tuple[int, ...]], vocab_size: int) -> Iterator[str]:
    shapes = [
        f"{key} is {list(saved[key])} in the checkpoint and {list(shape)} by the flags"
        for key, (shape, is_vocabulary) in sorted(wanted.items())
        if key in saved and not _fits(shape, saved[key], vocab_size if is_vocabulary else None)
    ]
    yield from _some(shapes, "shapes differ")
    missing = [f"{key} is not in the checkpoint" for key in sorted(wanted) if key not in saved]
    yield from _some(missing, "tensors are missing")
    has_mtp = any(key.startswith("mtp.") for key in wanted)
    extra = [
        f"{key} of the checkpoint is not in the model"
        for key in sorted(saved)
        if key not in wanted and not key.endswith("_extra_state") and (has_mtp or not key.startswith("mtp."))
    ]
    yield from _some(extra, "tensors are not in the model")


def _fits(wanted: tuple[int, ...], saved: tuple[int, ...], vocab_size: int | None) -> bool:
    if wanted == saved or vocab_size is None:
        return wanted == saved
    # Rows are padded to a multiple that depends on the parallel layout.
    return wanted[1:] == saved[1:] and min(wanted[0], saved[0]) >= vocab_size


def _some(lines: list[str], what: str) -> Iterator[str]:
    yield from lines[:3]
    if len(lines) > 3:
        yield f"({len(lines)} {what} in all)"
