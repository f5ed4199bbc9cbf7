"""Megatron flags that are not fields of a config dataclass."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from slime.backends.megatron_utils.flags.config_flags import add_unless_present
from slime.utils.errors import ConfigError

Add = Callable[..., None]


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    """Add these flags; skip option strings that ``parser`` already has."""
    group = parser.add_argument_group("megatron", "Megatron flags that are not fields of megatron-core's configs.")

    def add(*options: str, **settings: Any) -> None:
        add_unless_present(parser, group, list(options), **settings)

    _add_model(add)
    _add_layout(add)
    _add_schedule(add)
    _add_checkpoints(add)


def _add_model(add: Add) -> None:
    add(
        "--group-query-attention",
        help="Fewer key heads than query heads: as many as --num-query-groups.",
        action="store_true",
    )
    add(
        "--position-embedding-type",
        help="How positions enter the model.",
        default="learned_absolute",
        choices=["learned_absolute", "rope", "yarn", "mrope", "none"],
    )
    add("--use-rotary-position-embeddings", help="The same as --position-embedding-type rope.", action="store_true")
    add(
        "--no-position-embedding",
        help="No learned positions. With --position-embedding-type rope there are none anyway.",
        action="store_false",
        dest="add_position_embedding",
        default=True,
    )
    add("--rotary-seq-len-interpolation-factor", help="Divide positions by this factor.", type=float)
    add("--use-rope-scaling", help="Divide low rotary frequencies by --rope-scaling-factor.", action="store_true")
    add("--rope-scaling-factor", help="The factor of --use-rope-scaling.", type=float, default=8.0)
    add(
        "--yarn-truncate",
        help=(
            "Round the bounds of YaRN's ramp to whole dimensions, with --position-embedding-type yarn. "
            "Default: truncate of --hf-checkpoint's config.json, else on."
        ),
        action=argparse.BooleanOptionalAction,
        default=None,
    )
    add(
        "--quick-geglu",
        help="Gate MLP and experts with x * sigmoid(1.702 x); --glu-linear-offset is added to the other half.",
        action="store_true",
    )
    add(
        "--untie-embeddings-and-output-weights",
        help="The output projection does not share the embedding's weights.",
        action="store_true",
    )
    add("--vocab-size", help="Vocabulary size before padding; default: that of the HF config.", type=int)
    add(
        "--make-vocab-size-divisible-by",
        help="Pad the vocabulary to a multiple of this times the tensor-parallel size.",
        type=int,
        default=128,
    )
    add("--max-position-embeddings", help="Longest position; default: --seq-length.", type=int)
    add("--seq-length", help="Nominal sequence length; micro-batches are packed to varying lengths.", type=int)
    add("--spec", help="Module and function that return the layer spec.", nargs=2, metavar=("MODULE", "NAME"))
    add("--post-self-attn-layernorm", help="A norm after attention, before the residual add.", action="store_true")
    add("--post-mlp-layernorm", help="A norm after the MLP, before the residual add.", action="store_true")
    add("--use-gated-attention", help="The same as --attention-output-gate.", action="store_true")
    add("--enable-experimental", help="Enable megatron-core's experimental features.", action="store_true")
    add("--recompute-activations", help="The same as --recompute-granularity selective.", action="store_true")


def _add_layout(add: Add) -> None:
    add("--num-layers-per-virtual-pipeline-stage", help="Layers of one virtual pipeline stage.", type=int)
    add("--num-virtual-stages-per-pipeline-rank", help="Virtual stages of one pipeline rank.", type=int)
    add(
        "--disable-gloo-process-groups",
        help="Create no gloo groups besides the NCCL groups.",
        action="store_false",
        dest="enable_gloo_process_groups",
        default=True,
    )
    add(
        "--no-align-grad-reduce",
        help=(
            "With --overlap-grad-reduce and pipeline parallelism, each stage reduces its gradients when they are "
            "ready, instead of all stages at the same time."
        ),
        action="store_false",
        dest="align_grad_reduce",
        default=True,
    )
    add("--data-parallel-random-init", help="Data-parallel ranks start from different seeds.", action="store_true")


def _add_schedule(add: Add) -> None:
    add(
        "--lr-decay-style",
        help="Shape of the learning-rate decay.",
        default="linear",
        choices=["constant", "linear", "cosine", "inverse-square-root", "WSD"],
    )
    add("--lr-decay-iters", help="Optimizer steps over which the learning rate decays; default: all.", type=int)
    add("--lr-warmup-iters", help="Optimizer steps of linear warm-up.", type=int, default=0)
    add("--lr-warmup-fraction", help="Warm-up as a fraction of the decay steps.", type=float)
    add("--lr-warmup-init", help="Learning rate at the first warm-up step.", type=float, default=0.0)
    add("--lr-wsd-decay-iters", help="Optimizer steps of the final decay phase of WSD.", type=int)
    add(
        "--lr-wsd-decay-style",
        help="Shape of the final decay phase of WSD.",
        default="exponential",
        choices=["exponential", "linear", "cosine", "minus_sqrt"],
    )
    add("--start-weight-decay", help="Weight decay at the start; default: --weight-decay.", type=float)
    add("--end-weight-decay", help="Weight decay at the end; default: --weight-decay.", type=float)
    add(
        "--weight-decay-incr-style",
        help="Shape of the change of weight decay from start to end.",
        default="constant",
        choices=["constant", "linear", "cosine"],
    )
    add(
        "--use-checkpoint-opt-param-scheduler",
        "--use-checkpoint-opt_param-scheduler",
        help="Use the schedule of the checkpoint.",
        action="store_true",
        dest="use_checkpoint_opt_param_scheduler",
    )
    add(
        "--override-opt-param-scheduler",
        "--override-opt_param-scheduler",
        help="Use the schedule of the flags even if the checkpoint has another.",
        action="store_true",
        dest="override_opt_param_scheduler",
    )


def _add_checkpoints(add: Add) -> None:
    add("--ckpt-step", help="Load this iteration instead of the latest.", type=int)
    add("--ckpt-format", help="Format of checkpoints.", default="torch_dist", choices=["torch_dist"])
    add("--no-load-optim", help="Do not load the optimizer state of the checkpoint.", action="store_true")
    add("--no-load-rng", help="Do not load the random states of the checkpoint.", action="store_true")
    add("--no-save-rng", help="Do not save random states.", action="store_true")
    add("--finetune", help="Load only weights, and start at iteration 0.", action="store_true")
    add("--tokenizer-model", help="Default: --hf-checkpoint.")
    add("--tokenizer-type", help="Default: HuggingFaceTokenizer.")


def load_spec(path: list[str]) -> Any:
    """Import the function or the spec object that ``--spec MODULE NAME`` names.

    Raises:
        ConfigError: the module or the name does not exist.
    """
    try:
        module = importlib.import_module(path[0])
    except ImportError as error:
        if getattr(error, "name", None) == path[0] and path[0].startswith("slime_plugins."):
            raise ConfigError(
                f"--spec {path[0]} {path[1]}: the layers of this model are not built; docs/models.md lists the models "
                "that are."
            ) from error
        raise ConfigError(
            f"--spec {path[0]} {path[1]} cannot be imported: {error}; the module must be on PYTHONPATH of every node."
        ) from error
    if not hasattr(module, path[1]):
        raise ConfigError(f"--spec {path[0]} {path[1]}: the module {module.__file__} has no name {path[1]!r}.")
    return getattr(module, path[1])
