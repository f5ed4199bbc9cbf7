"""What the flags of a mixture of experts may not say together."""

from __future__ import annotations

from argparse import Namespace

from slime.utils.errors import ConfigError


def check_expert_arguments(args: Namespace) -> None:
    """Refuse flags of experts that cannot work; ``args`` are complete.

    Raises:
        ConfigError: with the flags, their values and what is allowed.
    """
    _check_replay(args)
    if not args.num_experts:
        return
    if args.add_bias_linear:
        raise ConfigError("--num-experts is given with biases; experts have none here; add --disable-bias-linear.")
    _check_layers(args)
    _check_choice(args)
    _check_sizes(args)
    kinds = args.moe_router_load_balancing_type
    coefficients = args.moe_aux_loss_coeff
    if "global_aux_loss" in kinds and any(coefficients if isinstance(coefficients, list) else [coefficients]):
        raise ConfigError(
            "--moe-router-load-balancing-type global_aux_loss takes all ranks to have equally many tokens; packed "
            "micro-batches have not; use seq_aux_loss or aux_loss, or --moe-aux-loss-coeff 0."
        )


def _check_replay(args: Namespace) -> None:
    given = vars(args)
    if not given.get("use_routing_replay"):
        return
    flag = "--use-rollout-routing-replay" if given.get("use_rollout_routing_replay") else "--use-routing-replay"
    if not args.num_experts:
        raise ConfigError(f"{flag} replays the choice of experts, and the model has none (--num-experts); drop it.")
    if "sinkhorn" in args.moe_router_load_balancing_type:
        raise ConfigError(
            f"{flag} chooses the experts of single tokens; --moe-router-load-balancing-type sinkhorn assigns them to "
            "a batch as a whole; choose another one, or drop the replay."
        )
    if args.moe_router_fusion:
        raise ConfigError(
            f"{flag}: the kernel of --moe-router-fusion cannot be told what to choose; drop one of them."
        )


def _check_layers(args: Namespace) -> None:
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        if frequency < 1:
            raise ConfigError(
                f"--moe-layer-freq is {frequency}; it must be at least 1, or a list with 0 or 1 per layer."
            )
        return
    if len(frequency) != args.num_layers:
        raise ConfigError(
            f"--moe-layer-freq has {len(frequency)} entries; --num-layers is {args.num_layers}; give one per layer."
        )
    if set(frequency) - {0, 1}:
        raise ConfigError(f"--moe-layer-freq has entries {sorted(set(frequency))}; 1 is experts, 0 a dense layer.")


def _check_choice(args: Namespace) -> None:
    topk, num_experts = args.moe_router_topk, args.num_experts
    if not 1 <= topk <= num_experts:
        raise ConfigError(f"--moe-router-topk is {topk}; it must be from 1 to --num-experts {num_experts}.")
    groups, chosen = args.moe_router_num_groups, args.moe_router_group_topk
    if not chosen:
        return
    if not groups or num_experts % groups or not 1 <= chosen <= groups:
        raise ConfigError(
            f"--moe-router-group-topk is {chosen} of --moe-router-num-groups {groups}; the groups must divide "
            f"--num-experts {num_experts}, and no more can be chosen than there are."
        )
    if chosen > topk or chosen * (num_experts // groups) < topk:
        raise ConfigError(
            f"--moe-router-topk is {topk}; the --moe-router-group-topk {chosen} chosen groups have "
            f"{num_experts // groups} experts each; they must have as many together, and not be more."
        )


def _check_sizes(args: Namespace) -> None:
    parts = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    ffn = args.moe_ffn_hidden_size or args.ffn_hidden_size
    if ffn % parts:
        raise ConfigError(f"--moe-ffn-hidden-size is {ffn}; --expert-tensor-parallel-size {parts} must divide it.")
    shared = args.moe_shared_expert_intermediate_size
    if shared and shared % args.tensor_model_parallel_size:
        raise ConfigError(
            f"--moe-shared-expert-intermediate-size is {shared}; --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} must divide it."
        )
