"""Megatron flags that are no field of a config dataclass, and who reads each.

:data:`OWN_FLAGS` is the whole list; ``reader`` is the module of ``slime`` (or the plug-in) that acts on the flag.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass, field
from typing import Any

from slime.backends.megatron_utils.flags.config_flags import add_unless_present
from slime.utils.errors import ConfigError

_RESOLVE = "slime.backends.megatron_utils.flags.resolve_arguments"
_BUILDERS = "slime.backends.megatron_utils.flags.config_builders"
_MODEL = "slime.backends.megatron_utils.model_provider"
_LAYERS = "slime.backends.megatron_utils.layers.layer_specs"
_INITIALIZE = "slime.backends.megatron_utils.initialize"
_SCHEDULER = "slime.backends.megatron_utils.model"
_CHECKPOINT = "slime.backends.megatron_utils.checkpoint"


@dataclass(frozen=True)
class OwnFlag:
    """One flag: its spellings, what argparse needs, and the module that reads it."""

    options: tuple[str, ...]
    reader: str
    help: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def attribute(self) -> str:
        """Name of the attribute in which argparse stores the value."""
        return self.settings.get("dest", self.options[0].lstrip("-").replace("-", "_"))


def _switch(option: str, reader: str, help: str, **settings: Any) -> OwnFlag:
    return OwnFlag((option,), reader, help, {"action": "store_true", **settings})


def _value(option: str, reader: str, help: str, *, type: Any = str, default: Any = None, **settings: Any) -> OwnFlag:
    return OwnFlag((option,), reader, help, {"type": type, "default": default, **settings})


OWN_FLAGS: tuple[OwnFlag, ...] = (
    # model
    _switch("--group-query-attention", _RESOLVE, "Fewer key heads than query heads: --num-query-groups counts."),
    _value(
        "--position-embedding-type",
        _MODEL,
        "How positions enter the model.",
        default="learned_absolute",
        choices=["learned_absolute", "rope", "yarn", "mrope", "none"],
    ),
    _switch("--use-rotary-position-embeddings", _RESOLVE, "The same as --position-embedding-type rope."),
    OwnFlag(
        ("--no-position-embedding",),
        _RESOLVE,
        "No learned positions; with --position-embedding-type rope there are none anyway.",
        {"action": "store_false", "dest": "add_position_embedding", "default": True},
    ),
    _value("--rotary-seq-len-interpolation-factor", _MODEL, "Positions are divided by this factor.", type=float),
    _switch("--use-rope-scaling", _MODEL, "--rope-scaling-factor divides low rotary frequencies."),
    _value("--rope-scaling-factor", _MODEL, "The factor of --use-rope-scaling.", type=float, default=8.0),
    OwnFlag(
        ("--yarn-truncate",),
        _BUILDERS,
        "YaRN rounds the range of dimensions between stretched and not to whole ones; of --position-embedding-type "
        "yarn. Default: truncate of --hf-checkpoint's config.json, else on.",
        {"action": argparse.BooleanOptionalAction, "default": None},
    ),
    _switch(
        "--quick-geglu",
        _BUILDERS,
        "MLP and experts are gated by x * sigmoid(1.702 x); --glu-linear-offset is added to the other half.",
    ),
    _switch("--untie-embeddings-and-output-weights", _MODEL, "The output projection has weights of its own."),
    _value("--vocab-size", _RESOLVE, "Vocabulary before padding; default: that of the HF config.", type=int),
    _value(
        "--make-vocab-size-divisible-by",
        _RESOLVE,
        "The vocabulary is padded to a multiple of this times the tensor-parallel size.",
        type=int,
        default=128,
    ),
    _value("--max-position-embeddings", _MODEL, "Longest position; default: --seq-length.", type=int),
    _value("--seq-length", _RESOLVE, "Nominal sequence length; micro-batches are packed to their own.", type=int),
    _value("--spec", _MODEL, "Module and function that give the layer spec.", nargs=2, metavar=("MODULE", "NAME")),
    _switch("--post-self-attn-layernorm", _LAYERS, "A norm after attention, before its output is added."),
    _switch("--post-mlp-layernorm", _LAYERS, "A norm after the MLP, before its output is added."),
    _switch("--use-gated-attention", _RESOLVE, "The same as --attention-output-gate."),
    _switch("--enable-experimental", _INITIALIZE, "Let megatron-core use what it calls experimental."),
    _switch("--recompute-activations", _RESOLVE, "The same as --recompute-granularity selective."),
    # layout
    _value("--num-layers-per-virtual-pipeline-stage", _RESOLVE, "Layers of one virtual pipeline stage.", type=int),
    _value("--num-virtual-stages-per-pipeline-rank", _RESOLVE, "Virtual stages of one pipeline rank.", type=int),
    OwnFlag(
        ("--disable-gloo-process-groups",),
        _INITIALIZE,
        "Make no gloo groups beside the NCCL ones.",
        {"action": "store_false", "dest": "enable_gloo_process_groups", "default": True},
    ),
    OwnFlag(
        ("--no-align-grad-reduce",),
        "slime.backends.megatron_utils.train_step",
        "With --overlap-grad-reduce and a pipeline, each stage reduces its gradients when they are ready instead of "
        "all stages at the same moment.",
        {"action": "store_false", "dest": "align_grad_reduce", "default": True},
    ),
    _switch("--data-parallel-random-init", _INITIALIZE, "Data-parallel ranks start from different seeds."),
    # schedule of the learning rate and the weight decay
    _value(
        "--lr-decay-style",
        _SCHEDULER,
        "Shape of the learning rate.",
        default="linear",
        choices=["constant", "linear", "cosine", "inverse-square-root", "WSD"],
    ),
    _value("--lr-decay-iters", _SCHEDULER, "Steps over which the rate decays; default: all.", type=int),
    _value("--lr-warmup-iters", _SCHEDULER, "Steps of linear warm-up.", type=int, default=0),
    _value("--lr-warmup-fraction", _SCHEDULER, "Warm-up as a fraction of the decay steps.", type=float),
    _value("--lr-warmup-init", _SCHEDULER, "Rate at the first warm-up step.", type=float, default=0.0),
    _value("--lr-wsd-decay-iters", _SCHEDULER, "Steps of the last phase of WSD.", type=int),
    _value(
        "--lr-wsd-decay-style",
        _SCHEDULER,
        "Shape of the last phase of WSD.",
        default="exponential",
        choices=["exponential", "linear", "cosine", "minus_sqrt"],
    ),
    _value("--start-weight-decay", _SCHEDULER, "Weight decay at the start; default: --weight-decay.", type=float),
    _value("--end-weight-decay", _SCHEDULER, "Weight decay at the end; default: --weight-decay.", type=float),
    _value(
        "--weight-decay-incr-style",
        _SCHEDULER,
        "How weight decay goes from start to end.",
        default="constant",
        choices=["constant", "linear", "cosine"],
    ),
    OwnFlag(
        ("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"),
        _SCHEDULER,
        "Take the schedule from the checkpoint.",
        {"action": "store_true", "dest": "use_checkpoint_opt_param_scheduler"},
    ),
    OwnFlag(
        ("--override-opt-param-scheduler", "--override-opt_param-scheduler"),
        _SCHEDULER,
        "Take the schedule from the flags although a checkpoint has another.",
        {"action": "store_true", "dest": "override_opt_param_scheduler"},
    ),
    # checkpoints
    _value("--ckpt-step", _CHECKPOINT, "Load this iteration instead of the latest.", type=int),
    _value("--ckpt-format", "the only choice", "Format of checkpoints.", default="torch_dist", choices=["torch_dist"]),
    _switch("--no-load-optim", _CHECKPOINT, "Leave the optimizer state of the checkpoint."),
    _switch("--no-load-rng", _CHECKPOINT, "Leave the random states of the checkpoint."),
    _switch("--no-save-rng", _CHECKPOINT, "Save no random states."),
    _switch("--finetune", _CHECKPOINT, "Load weights only, and start at iteration 0."),
    # tokenizer of the checkpoint's arguments
    _value("--tokenizer-model", _RESOLVE, "Default: --hf-checkpoint."),
    _value("--tokenizer-type", _RESOLVE, "Default: HuggingFaceTokenizer."),
)


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    """Add :data:`OWN_FLAGS`; option strings already on ``parser`` are left alone."""
    group = parser.add_argument_group("megatron", "Megatron flags that are no field of a config of megatron-core.")
    for flag in OWN_FLAGS:
        add_unless_present(parser, group, list(flag.options), help=flag.help, **flag.settings)


def load_spec(path: list[str]) -> Any:
    """Import the function or the ready spec that ``--spec MODULE FUNC`` names.

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
