"""Derived values: what the flags imply, filled in once, in order.

``resolve`` runs the functions of ``STEPS`` one after the other; each may rely on those before it.  Nothing is checked
here (see validate.py): a step that cannot derive its value leaves it for the check to name.
"""

from __future__ import annotations

import logging
import warnings
from argparse import Namespace
from pathlib import Path

from slime.algorithms.advantages import get_estimator
from slime.arguments.checkpoint_paths import has_finished_save, is_huggingface_folder, is_release

logger = logging.getLogger(__name__)

NODE_GPUS = 8
"""GPUs of a node that --debug-rollout-only fills before it takes another."""


def has_cuda() -> bool:
    """True when this process can see a CUDA GPU."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def _is_for_cuda(args: Namespace) -> bool:
    """True where the run has GPUs; a plan is always one of a run that has."""
    return has_cuda() or args.plan is not None


def resolve(args: Namespace, *, of_the_run: bool = True) -> None:
    """Fill in every derived attribute of ``args``.

    Args:
        args: changed in place.
        of_the_run: False leaves out what belongs to the run as a whole, for a second role in it.
    """
    for step in STEPS:
        if of_the_run or step not in OF_THE_RUN:
            step(args)


def _debug_modes(args: Namespace) -> None:
    """Replayed data needs no engine; --dump-details names both dumps."""
    if args.load_debug_rollout_data is not None:
        args.debug_train_only = True
    if args.dump_details is not None:
        args.save_debug_rollout_data = f"{args.dump_details}/rollout_data/{{rollout_id}}.pt"
        args.save_debug_train_data = f"{args.dump_details}/train_data/{{rollout_id}}.pt"


def _precision(args: Namespace) -> None:
    """bf16 with CUDA and fp32 without, unless one was asked for."""
    if not (args.fp32 or args.bf16 or args.fp16):
        cuda = _is_for_cuda(args)
        args.bf16 = cuda
        args.fp32 = not cuda
        logger.info("Precision: %s (say --fp32, --bf16 or --fp16 for another)", "bf16" if cuda else "fp32: no CUDA")


def _distributed_backend(args: Namespace) -> None:
    """NCCL with CUDA, gloo without."""
    if args.distributed_backend is None:
        args.distributed_backend = "nccl" if _is_for_cuda(args) else "gloo"


def _critic(args: Namespace) -> None:
    """An estimator that needs values (PPO) has a critic, of the actor's size."""
    args.use_critic = get_estimator(args.advantage_estimator).needs_values
    args.critic_num_nodes = args.actor_num_nodes
    args.critic_num_gpus_per_node = args.actor_num_gpus_per_node


def _external_engines(args: Namespace) -> None:
    """Engines that somebody else runs are asked what they are; their GPUs are not ours to place anything on."""
    args.rollout_external = args.rollout_external_engine_addrs is not None
    if args.rollout_external and not args.debug_train_only:
        from slime.backends.sglang_utils.external_engines import record_external_engines

        for name, value in record_external_engines(args).items():
            setattr(args, name, value)


def _weight_push_failure(args: Namespace) -> None:
    """An engine that does not take a push is started again where that is done to engines at all."""
    if args.weight_push_failure is None:
        refills = args.use_fault_tolerance and not args.rollout_external
        args.weight_push_failure = "refill" if refills else "stop"


def _released_trainer(args: Namespace) -> None:
    """A trainer that ends after every rollout saves every rollout, and pushes what it has before it goes."""
    args.update_weight_start_version = 0
    if args.release_train:
        args.update_weights_interval = 1
        if args.save_interval is None:
            args.save_interval = 1


def _offload_shorthand(args: Namespace) -> None:
    """--offload stands for both sides, and is gone afterwards."""
    if args.offload:
        args.offload_train = True
        args.offload_rollout = True
    del args.offload


def _rollout_only_cluster(args: Namespace) -> None:
    """Without a trainer its GPUs are the engines'; nothing is shared, nothing takes turns."""
    if not args.debug_rollout_only:
        return
    if args.colocate and args.rollout_num_gpus is None and not args.rollout_external:
        args.rollout_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.rollout_num_gpus is not None:
        args.actor_num_gpus_per_node = min(NODE_GPUS, args.rollout_num_gpus)
        args.actor_num_nodes = (
            args.rollout_num_gpus // args.actor_num_gpus_per_node if args.actor_num_gpus_per_node else 0
        )
    args.colocate = False
    args.offload_train = False
    args.offload_rollout = False


def _train_only_cluster(args: Namespace) -> None:
    """Without engines there is nothing to take turns with."""
    if args.debug_train_only:
        args.rollout_num_gpus = 0 if args.rollout_num_gpus is None else args.rollout_num_gpus
        args.offload_train = bool(args.offload_train)
        args.offload_rollout = False


def _colocation(args: Namespace) -> None:
    """Shared GPUs are handed over by offloading; separate GPUs need none of it."""
    if args.colocate:
        if args.release_train:
            args.offload_train = False
            args.offload_rollout = True
        if args.rollout_num_gpus is None:
            args.rollout_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    args.offload_train = args.colocate if args.offload_train is None else args.offload_train
    args.offload_rollout = args.colocate if args.offload_rollout is None else args.offload_rollout
    if args.use_critic:
        args.offload_train = True
    if args.offload_train:
        args.disable_grad_buffers_cpu_backup = True
        args.disable_param_buffers_cpu_backup = True


def _batch_sizes(args: Namespace) -> None:
    """Samples of one optimizer step, prompts submitted at a time."""
    if args.rollout_batch_size is None:
        return
    if args.num_steps_per_rollout is not None and args.global_batch_size is None:
        args.global_batch_size = args.rollout_batch_size * args.n_samples_per_prompt // args.num_steps_per_rollout
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size


def _balance(args: Namespace) -> None:
    """Balancing micro-batches by FLOPs balances ranks too."""
    if args.balance_by_flops:
        args.balance_data = True


def _algorithm(args: Namespace) -> None:
    """Defaults that follow from other flags of the loss."""
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.n_samples_per_prompt == 1 and args.grpo_std_normalization:
        # One sample has no deviation to divide by.
        args.grpo_std_normalization = False
    if args.use_rollout_routing_replay:
        args.use_routing_replay = True


def _lengths(args: Namespace) -> None:
    """A context limit leaves room for at least one token of response."""
    if args.rollout_max_context_len is not None:
        if args.rollout_max_prompt_len is None:
            args.rollout_max_prompt_len = args.rollout_max_context_len - 1
        if args.eval_max_context_len is None:
            args.eval_max_context_len = args.rollout_max_context_len


def _eval(args: Namespace) -> None:
    """What eval takes from the rollout when it has no flag of its own."""
    from slime.rollout.eval_config import eval_datasets_from_args

    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key
    args.eval_datasets = eval_datasets_from_args(args)


def _starting_point(args: Namespace) -> None:
    """--load when a run saved there; else a fresh start, from a converted model there or from the reference."""
    if has_finished_save(args.load) and not is_release(args.load):
        return
    args.no_load_optim = True
    args.no_load_rng = True
    args.finetune = True
    is_file = args.load is not None and Path(args.load).is_file()  # left for the check to name
    if not is_huggingface_folder(args.load) and not is_release(args.load) and not is_file:
        args.load = args.ref_load
        if args.ref_ckpt_step is not None:
            args.ckpt_step = args.ref_ckpt_step
    if args.start_rollout_id is None:
        args.start_rollout_id = 0


def _hook_lists(args: Namespace) -> None:
    """Repeatable plug-ins are a list, empty when none was named."""
    args.rollout_sample_hook_path = args.rollout_sample_hook_path or []


STEPS = (
    _debug_modes,
    _precision,
    _distributed_backend,
    _critic,
    _external_engines,
    _weight_push_failure,
    _released_trainer,
    _offload_shorthand,
    _rollout_only_cluster,
    _train_only_cluster,
    _colocation,
    _batch_sizes,
    _balance,
    _algorithm,
    _lengths,
    _hook_lists,
    _eval,
    _starting_point,
)
"""In order; each may rely on those before it."""

OF_THE_RUN = (_external_engines, _eval, _starting_point)
"""Steps that ask engines, read the evaluation's data sets, and say where the actor starts."""
