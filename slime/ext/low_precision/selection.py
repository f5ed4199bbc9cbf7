"""The weights that int4 quantization-aware training rounds, and in which groups.

Where ``--hf-checkpoint`` holds packed four-bit integers, it decides: what it has quantized is what engines serve so.
Otherwise routed experts are rounded, and with ``--int4-qat-dense`` all that ``tools/convert_hf_to_int4_direct.py``
would quantize.
"""

from __future__ import annotations

import logging
from argparse import Namespace

from slime.backends.megatron_utils.flags.model_dims import moe_layers
from slime.backends.megatron_utils.models import plain_weights
from slime.ext.low_precision.folders.to_quantized import to_int4
from slime.utils import env
from slime.utils.errors import ConfigError
from slime.utils.files import read_model_config
from slime.weights.quantize import quantized_names, read_format
from slime.weights.quantize.formats import GroupInt
from slime.weights.stored_tensors import stored_codes

logger = logging.getLogger(__name__)

DEFAULT_GROUP_SIZE = 128
NUM_BITS = 4
EXPERTS, MLP, ATTENTION = ".experts.", ".mlp.down_proj.", ".self_attn.o_proj."
"""Parts of HF names: of routed experts, and of the dense matrices that tensor parallelism cuts along their input."""


def group_size(asked: int | None, hf_checkpoint: str, *, is_served: bool) -> int:
    """Return the columns that share a scale, by the flag (``asked``), the environment and the checkpoint.

    Args:
        is_served: engines serve ``hf_checkpoint``.

    Raises:
        ConfigError: they disagree, or the checkpoint is quantized in another way.
    """
    asked = asked or env.int4_group_size()
    packed = packed_format(hf_checkpoint)
    if packed is None:
        if is_served:
            logger.warning(
                "--int4-qat rounds weights to int4, and --hf-checkpoint %s, which engines serve, is not in int4: the "
                "trainer computes another policy than they do. Give the folder of tools/convert_hf_to_int4_direct.py.",
                hf_checkpoint,
            )
        size = asked or DEFAULT_GROUP_SIZE
        if size % 8:
            raise ConfigError(
                f"--int4-qat-group-size (or OPEN_TRAINING_INT4_GROUP_SIZE) is {size}; it must be a multiple of 8; "
                "engines take 32 or 128."
            )
        return size
    if asked is not None and asked != packed.group_size:
        raise ConfigError(
            f"--int4-qat-group-size (or OPEN_TRAINING_INT4_GROUP_SIZE) is {asked}; the groups of --hf-checkpoint "
            f"{hf_checkpoint} have {packed.group_size} columns; leave it out."
        )
    assert packed.group_size is not None
    return packed.group_size


def packed_format(hf_checkpoint: str | None) -> GroupInt | None:
    """Return the format of ``--hf-checkpoint`` when its weights are packed integers.

    Raises:
        ConfigError: they are, and not as ``--int4-qat`` rounds; or they are FP8.
    """
    if not hf_checkpoint:
        return None
    config = read_model_config(hf_checkpoint).get("quantization_config")
    if not config:
        return None
    found = read_format(config)
    if isinstance(found, GroupInt) and found.is_symmetric and found.num_bits == NUM_BITS and found.group_size:
        return found
    raise ConfigError(
        f"--int4-qat rounds to symmetric four-bit integers in groups; --hf-checkpoint {hf_checkpoint} is "
        f"quantized as {found}; drop the flag, or give a folder of tools/convert_hf_to_int4_direct.py."
    )


def check_layout(args: Namespace) -> None:
    """Refuse groups that would lie on two tensor-parallel ranks, and FP8 products of weights in int4.

    Raises:
        ConfigError: with the columns, the ranks and the group size.
    """
    if args.fp8:
        raise ConfigError(
            f"--int4-qat and --fp8-format {args.fp8} are given; engines hold weights in one of the two; drop one."
        )
    columns = args.int4_qat_group_size
    selection = Int4Selection(args.hf_checkpoint, columns, rounds_dense=args.int4_qat_dense)
    tensor_flag, tensor_ranks = "--tensor-model-parallel-size", args.tensor_model_parallel_size
    head_flag, head_size = "--kv-channels", args.kv_channels
    if args.multi_latent_attention:
        head_flag, head_size = "--v-head-dim", args.v_head_dim
    cuts = [(ATTENTION, f"--num-attention-heads x {head_flag}", args.num_attention_heads * head_size, tensor_ranks)]
    if not (args.num_experts and all(moe_layers(args.moe_layer_freq, args.num_layers))):
        cuts.append((MLP, "--ffn-hidden-size", args.ffn_hidden_size, tensor_ranks))
    if args.num_experts:
        ranks = args.expert_tensor_parallel_size or tensor_ranks
        ffn = args.moe_ffn_hidden_size or args.ffn_hidden_size
        cuts.append((EXPERTS, "--moe-ffn-hidden-size", ffn, ranks))
    for part, flag, size, ranks in cuts:
        if size % (ranks * columns) and selection.has(part):
            ranks_flag = "--expert-tensor-parallel-size" if part == EXPERTS else tensor_flag
            raise ConfigError(
                f"{flag} is {size}; over {ranks_flag} {ranks} a rank has {size / ranks:g} columns of a matrix that is "
                f"cut along its input, which are no whole number of groups of {columns} (--int4-qat); use fewer "
                "ranks, or smaller groups."
            )


class Int4Selection:
    """The HF tensors that are rounded.

    Args:
        hf_checkpoint: the folder that engines serve; it decides if its weights are in int4.
        group_size: columns that share a scale.
        rounds_dense: round dense matrices too (``--int4-qat-dense``), unless the checkpoint decides.
    """

    def __init__(self, hf_checkpoint: str, group_size: int, *, rounds_dense: bool) -> None:
        self._rounds_dense = rounds_dense
        plain = plain_weights(read_model_config(hf_checkpoint)) if hf_checkpoint else None
        self._rule = to_int4(group_size, plain=plain).is_quantized
        self._names: frozenset[str] | None = None
        if (packed := packed_format(hf_checkpoint)) is not None:
            self._names = quantized_names(stored_codes(hf_checkpoint), packed)

    def has(self, part: str) -> bool:
        """True when a tensor with this part in its name may be rounded: one of the names above this class."""
        if self._names is not None:
            return any(part in name for name in self._names)
        return self._rounds_dense or part == EXPERTS

    def is_quantized(self, name: str) -> bool:
        """True for a tensor that an engine holds in int4, by its HF name; it is a matrix."""
        if self._names is not None:
            return name in self._names
        return (self._rounds_dense or EXPERTS in name) and self._rule(name, (1, 1))
