"""Checks of the complete args, before any GPU or engine is taken; nothing is changed here.

Each function of ``CHECKS`` yields one message for each thing that cannot work: the flag with its value, why, and what
to do.  All of them are shown together.  Files and plug-ins come after: validate_files.py, hook_checks.py.
"""

from __future__ import annotations

import difflib
import logging
import string
from argparse import Namespace
from collections.abc import Iterator

from slime.algorithms.advantages import get_estimator
from slime.algorithms.loss_types import LOSS_TYPES
from slime.algorithms.policy_losses import CISPO
from slime.arguments.critic import check_critic_files, check_critic_flags
from slime.arguments.hook_checks import check_hooks_on_driver
from slime.arguments.validate_files import check_files
from slime.arguments.validate_run import OWN_ROLLOUTS, advise, check_run
from slime.arguments.validate_training import check_training_flags
from slime.arguments.validate_weights import check_weight_flags
from slime.rollout.rm_hub import BOXED_PREFIX, RM_TYPES, math_verify
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

DICT_REWARDS = ("dapo",)
"""Built-in graders whose reward is a dict, so that a key must say which entry is trained on."""
NUMBER_REWARDS = tuple(name for name in RM_TYPES if name not in (*DICT_REWARDS, "remote_rm"))
"""Those whose reward is a number."""


def validate(args: Namespace) -> None:
    """Check ``args``, the files it names and the plug-ins it names.

    Raises:
        ConfigError: every combination that cannot work, or the first file that is wrong.
        DataError: a data file is malformed.
        HookError: a plug-in cannot be imported or does not fit its call.
    """
    problems = [message for check in CHECKS for message in check(args)]
    if problems:
        raise ConfigError("\n".join(problems))
    _advise(args)
    if args.plan is None:  # a plan is made where the files need not be
        check_files(args)
        check_critic_files(args)
    check_hooks_on_driver(args)


def _modes(args: Namespace) -> Iterator[str]:
    if args.debug_rollout_only and args.debug_train_only:
        asked = "--load-debug-rollout-data" if args.load_debug_rollout_data else "--debug-train-only"
        yield f"--debug-rollout-only and {asked} leave nothing to run; choose one of them."
    if args.load_debug_rollout_data_subsample is not None and args.load_debug_rollout_data is None:
        yield "--load-debug-rollout-data-subsample needs --load-debug-rollout-data, which says what is subsampled."
    precisions = [flag for flag in ("fp32", "bf16", "fp16") if getattr(args, flag)]
    if len(precisions) > 1:
        yield f"{' and '.join('--' + p for p in precisions)} contradict each other; give one of them."


def _gpus(args: Namespace) -> Iterator[str]:
    actor_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    if actor_gpus == 0 and not args.debug_rollout_only:
        yield (
            f"--actor-num-nodes {args.actor_num_nodes} times --actor-num-gpus-per-node {args.actor_num_gpus_per_node} "
            "leaves no GPU to train on; both must be at least 1, except with --debug-rollout-only."
        )
    if args.debug_train_only:
        return
    if args.rollout_num_gpus is None:
        yield "--rollout-num-gpus is not given: say how many GPUs the engines get, or share them with --colocate."
        return
    if args.rollout_external:
        if args.colocate:
            yield (
                "--rollout-external-engine-addrs and --colocate exclude each other: the GPUs of external engines are "
                "not this job's. Drop --colocate."
            )
        return
    if args.rollout_num_gpus == 0 and args.rollout_function_path in OWN_ROLLOUTS:
        yield (
            "--rollout-num-gpus 0 leaves no GPU for the engines, which --rollout-function-path asks; give at least "
            "--rollout-num-gpus-per-engine, or share the trainer's GPUs with --colocate."
        )
    per_engine = args.rollout_num_gpus_per_engine
    if getattr(args, "sglang_config", None) is None and args.rollout_num_gpus % per_engine:
        yield (
            f"--rollout-num-gpus {args.rollout_num_gpus} is not a multiple of --rollout-num-gpus-per-engine "
            f"{per_engine}: GPUs would be left over."
        )
    if per_engine > args.num_gpus_per_node and per_engine % args.num_gpus_per_node:
        yield (
            f"--rollout-num-gpus-per-engine {per_engine} is no whole number of nodes of --num-gpus-per-node "
            f"{args.num_gpus_per_node} GPUs; an engine over several nodes takes all of their GPUs."
        )


def _length_of_the_run(args: Namespace) -> Iterator[str]:
    if args.num_rollout is None and args.num_epoch is None:
        yield "Neither --num-rollout nor --num-epoch is given: say how long to train."
    if args.num_rollout is None and args.num_epoch is not None and not args.rollout_global_dataset:
        yield (
            "--num-epoch counts passes over the data set, but --disable-rollout-global-dataset leaves none; "
            "give --num-rollout."
        )


def _batches(args: Namespace) -> Iterator[str]:
    if args.rollout_batch_size is None:
        yield "--rollout-batch-size is not given: say how many prompts one rollout has."
        return
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    product = f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt}"
    steps, batch = args.num_steps_per_rollout, args.global_batch_size
    if args.over_sampling_batch_size < args.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} is below --rollout-batch-size "
            f"{args.rollout_batch_size}; it must be at least as large."
        )
    if args.debug_rollout_only:
        return
    if batch is None:
        yield "Neither --global-batch-size nor --num-steps-per-rollout is given: say how many samples a step takes."
        return
    if steps is not None and batch != samples // steps:
        yield (
            f"--global-batch-size {batch} disagrees with --num-steps-per-rollout {steps}: {product} = {samples} "
            f"samples in {steps} steps make {samples // steps} a step. Drop one of the two flags."
        )
    elif batch == 0:
        yield f"--num-steps-per-rollout {steps} is more than the {samples} samples of a rollout ({product})."
    elif batch > samples and args.load_debug_rollout_data is None:
        yield f"--global-batch-size {batch} is more than the {samples} samples of a rollout ({product})."
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu: say how many tokens a micro-batch may have."
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        yield "--balance-by-flops balances packed micro-batches, so it needs --use-dynamic-batch-size."


def _sampling(args: Namespace) -> Iterator[str]:
    if args.rollout_temperature <= 0:
        yield (
            f"--rollout-temperature is {args.rollout_temperature}; it must be above 0, because the trainer divides "
            "its logits by it. For greedy evals use --eval-temperature 0."
        )
    context, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    if context is not None and prompt > context - 1:
        yield (
            f"--rollout-max-prompt-len {prompt} leaves no room for a response in --rollout-max-context-len {context}; "
            f"it must be at most {context - 1}."
        )
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        yield "--mask-offpolicy-in-partial-rollout masks what partial rollouts carry over; add --partial-rollout."


def _rewards(args: Namespace) -> Iterator[str]:
    if args.rm_type is not None:
        yield from _grader(args.rm_type, "--rm-type")
    for dataset in args.eval_datasets:
        if dataset.rm_type is not None:
            yield from _grader(dataset.rm_type, f"rm_type of eval data set {dataset.name}:")
    if args.rm_type is None or args.custom_rm_path is not None:
        return
    name = args.rm_type.removeprefix(BOXED_PREFIX)
    if name in DICT_REWARDS and args.reward_key is None:
        yield f"--rm-type {args.rm_type} gives a dict; say which entry is the reward: --reward-key score."
    if name in NUMBER_REWARDS and args.reward_key is not None and args.custom_generate_function_path is None:
        yield (
            f"--reward-key {args.reward_key} chooses an entry of a dict, but --rm-type {args.rm_type} gives a number. "
            "Drop --reward-key, or use a grader that gives a dict (dapo, remote_rm, --custom-rm-path)."
        )
    if name == "remote_rm" and args.rm_url is None:
        yield "--rm-type remote_rm needs --rm-url, the address of the grader."


def _grader(rm_type: str, where: str) -> Iterator[str]:
    name = rm_type.removeprefix(BOXED_PREFIX)
    if name not in RM_TYPES:
        similar = difflib.get_close_matches(name, RM_TYPES, n=1)
        hint = f"Did you mean {similar[0]}? " if similar else ""
        yield (
            f"{where} {rm_type} is no grader. {hint}There are {', '.join(RM_TYPES)}, each also with the prefix "
            f"{BOXED_PREFIX}; your own goes into --custom-rm-path."
        )
    if name == "math_verify" and not math_verify.is_installed():
        yield f"{where} {rm_type}: {math_verify.HOW_TO_INSTALL}"


def _loss(args: Namespace) -> Iterator[str]:
    if (args.loss_type == "custom_loss") != (args.custom_loss_function_path is not None):
        yield (
            f"--loss-type is {args.loss_type} and --custom-loss-function-path is {args.custom_loss_function_path}; "
            "a loss of your own takes both --loss-type custom_loss and the path."
        )
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        yield f"--eps-clip-c is {args.eps_clip_c}; it must be above 1, or it would clip on-policy tokens."
    if get_estimator(args.advantage_estimator).needs_whitening and not args.normalize_advantages:
        yield f"--advantage-estimator {args.advantage_estimator} needs --normalize-advantages."
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        yield (
            f"--kl-coef {args.kl_coef} and --kl-loss-coef {args.kl_loss_coef} would count the KL twice; "
            "one of them must be 0."
        )
    if not args.use_kl_loss and args.kl_loss_coef != 0:
        yield f"--kl-loss-coef {args.kl_loss_coef} has no effect without --use-kl-loss; add it or drop this one."
    if not args.use_kl_loss and args.use_unbiased_kl:
        yield "--use-unbiased-kl weights the KL loss; add --use-kl-loss."
    makes_advantages = args.custom_convert_samples_to_train_data_path or args.rollout_data_postprocess_path
    if LOSS_TYPES[args.loss_type].needs_advantages and not (args.compute_advantages_and_returns or makes_advantages):
        yield (
            f"--loss-type {args.loss_type} needs advantages, and --disable-compute-advantages-and-returns leaves "
            "none; drop that flag, or choose --loss-type sft_loss."
        )
    if args.enable_mtp_training and not args.mtp_num_layers:
        yield "--enable-mtp-training needs --mtp-num-layers: say how many layers the model has."


def _off_policy(args: Namespace) -> Iterator[str]:
    if args.use_rollout_logprobs and args.use_tis:
        yield (
            "--use-rollout-logprobs takes the engine's log-probs as the old ones, so there is nothing left for "
            "--use-tis to correct; choose one of them."
        )
    if args.get_mismatch_metrics and args.custom_tis_function_path is None:
        yield "--get-mismatch-metrics logs what --custom-tis-function-path computes; give that path."
    rejects = getattr(args, "use_rs", False)  # a key of --custom-config-path; see MIS in docs/algorithms.md
    if args.custom_tis_function_path is not None and not (args.use_tis or args.get_mismatch_metrics or rejects):
        yield "--custom-tis-function-path is called only with --use-tis or --get-mismatch-metrics; add one of them."
    if args.custom_tis_function_path is None and rejects:
        yield "use_rs of --custom-config-path rejects by what --custom-tis-function-path says; give that path."
    if args.tis_clip_low > args.tis_clip:
        yield f"--tis-clip-low {args.tis_clip_low} is above --tis-clip {args.tis_clip}; the bounds are swapped."


def _distillation(args: Namespace) -> Iterator[str]:
    if not args.use_opd:
        for flag in ("opd_type", "opd_teacher_load", "opd_teacher_ckpt_step"):
            if getattr(args, flag) is not None:
                yield f"--{flag.replace('_', '-')} is {getattr(args, flag)}, which has no effect without --use-opd."
        return
    if not args.compute_advantages_and_returns or args.loss_type == "sft_loss":
        yield "--use-opd changes the advantages, and there are none: drop --disable-compute-advantages-and-returns."
    if args.opd_type is None:
        yield "--use-opd needs --opd-type: sglang for a teacher behind --rm-url, megatron for one in the trainer."
    elif args.opd_type == "megatron":
        if args.opd_teacher_load is None:
            yield "--opd-type megatron loads the teacher in the trainer; name its checkpoint: --opd-teacher-load."
    else:
        for flag in ("opd_teacher_load", "opd_teacher_ckpt_step"):
            if getattr(args, flag) is not None:
                yield (
                    f"--{flag.replace('_', '-')} is {getattr(args, flag)}, but with --opd-type sglang the teacher's "
                    "server loads it; drop the flag, or use --opd-type megatron."
                )
        own = "slime.rollout.on_policy_distillation.reward_func"
        if args.custom_rm_path == own and args.rm_url is None:
            yield f"--custom-rm-path {own} asks the teacher at --rm-url, which is not given."


def _rollout_functions(args: Namespace) -> Iterator[str]:
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    if args.eval_function_path == path and args.eval_datasets and not args.debug_train_only:
        yield (
            f"--eval-function-path is {path}, which cannot evaluate; give --eval-function-path "
            "slime.rollout.sglang_rollout.generate_rollout."
        )
    if args.rollout_function_path == path and args.offload_rollout:
        yield (
            f"--rollout-function-path {path} keeps requests in flight while the trainer works, so the engines' memory "
            "cannot be taken away: drop --colocate and --offload-rollout, and use train_async.py."
        )
    forge = "slime.rollout.forge_load.generate_rollout"
    if (args.load_forge_rollout_data is not None) != (forge in (args.rollout_function_path, args.eval_function_path)):
        yield (
            f"--load-forge-rollout-data is {args.load_forge_rollout_data} and --rollout-function-path is "
            f"{args.rollout_function_path}; a replay beside engines takes both the file and --rollout-function-path "
            f"{forge}."
        )
    if args.stale_group_policy != "regenerate" and args.max_staleness is None:
        yield f"--stale-group-policy {args.stale_group_policy} needs --max-staleness, which says what is stale."


def _saves(args: Namespace) -> Iterator[str]:
    if args.save is None:
        for flag in ("save_interval", "save_hf", "async_save", "no_save_optim"):
            if getattr(args, flag) and not (flag == "no_save_optim" and args.use_stateless_adam):
                yield f"--{flag.replace('_', '-')} needs --save, the folder of the checkpoints."
    elif args.save_hf is not None and args.save_interval is None:
        yield "--save-hf writes beside each save; give --save-interval too."


def _evals(args: Namespace) -> Iterator[str]:
    if args.eval_interval is not None and not args.eval_datasets:
        yield "--eval-interval needs data: give --eval-prompt-data NAME PATH or --eval-config."
    if args.eval_prompt_data is not None and args.eval_config is not None:
        yield "--eval-prompt-data and --eval-config both name data sets; give one of them."
    if args.ref_update_interval is not None and not (args.use_kl_loss or args.kl_coef != 0):
        yield "--ref-update-interval refreshes a reference model that is not there; add --use-kl-loss or --kl-coef."


def _ci(args: Namespace) -> Iterator[str]:
    for flag in ("ci_disable_kl_checker", "ci_save_grad_norm", "ci_load_grad_norm"):
        if getattr(args, flag) and not args.ci_test:
            yield f"--{flag.replace('_', '-')} belongs to the checks of --ci-test; add that flag or drop this one."


def _dump_templates(args: Namespace) -> Iterator[str]:
    for name, fields in _TEMPLATE_FIELDS.items():
        template = getattr(args, name)
        if template is None:
            continue
        try:
            strangers = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None} - fields
        except ValueError as error:
            strangers = {str(error)}
        if strangers:
            allowed = " and ".join("{" + field + "}" for field in sorted(fields))
            yield f"--{name.replace('_', '-')} is {template!r}; in braces it may only have {allowed}."
    if args.save_debug_rollout_data and args.save_debug_rollout_data == args.save_debug_train_data:
        yield (
            f"--save-debug-rollout-data and --save-debug-train-data are both {args.save_debug_rollout_data}; they "
            "would overwrite each other."
        )


_TEMPLATE_FIELDS = {
    "save_debug_rollout_data": {"rollout_id"},
    "load_debug_rollout_data": {"rollout_id"},
    "load_forge_rollout_data": {"rollout_id"},
    "save_debug_train_data": {"rollout_id", "rank"},
    "save_hf": {"rollout_id"},
    "ci_save_grad_norm": {"role", "rollout_id", "step_id"},
    "ci_load_grad_norm": {"role", "rollout_id", "step_id"},
}

CHECKS = (
    _modes,
    _gpus,
    _length_of_the_run,
    _batches,
    _sampling,
    _rewards,
    _loss,
    _off_policy,
    _distillation,
    _rollout_functions,
    _saves,
    _evals,
    _ci,
    _dump_templates,
    check_training_flags,
    check_weight_flags,
    check_run,
    check_critic_flags,
)


def _advise(args: Namespace) -> None:
    """Log what works, but may not be what was meant."""
    if args.num_rollout is not None and args.num_epoch is not None:
        logger.warning("--num-rollout %d wins over --num-epoch %d.", args.num_rollout, args.num_epoch)
    if args.save_debug_rollout_data and "{rollout_id" not in args.save_debug_rollout_data:
        logger.warning(
            "--save-debug-rollout-data %s has no {rollout_id}: every rollout is written over the one before.",
            args.save_debug_rollout_data,
        )
    if args.save is not None and args.save_interval is None and not args.debug_rollout_only:
        logger.warning("--save is given without --save-interval: no checkpoint will be written.")
    if args.use_critic and args.num_rollout is not None and 0 < args.num_rollout <= args.num_critic_only_steps:
        logger.warning(
            "--num-critic-only-steps %d of %d rollouts: the actor never trains.",
            args.num_critic_only_steps,
            args.num_rollout,
        )
    if args.max_tokens_per_gpu is not None and not args.use_dynamic_batch_size:
        logger.warning("--max-tokens-per-gpu has no effect without --use-dynamic-batch-size.")
    estimator = get_estimator(args.advantage_estimator)
    if args.kl_coef != 0 and not estimator.uses_kl and args.custom_advantage_function_path is None:
        logger.warning(
            "--kl-coef %g is logged, but takes no part in the advantages of --advantage-estimator %s. Hold the policy "
            "near the reference with --use-kl-loss and --kl-loss-coef.",
            args.kl_coef,
            args.advantage_estimator,
        )
    if estimator.policy_loss is CISPO and args.eps_clip_c is not None:
        logger.warning("--eps-clip-c has no effect on CISPO, whose weights are bounded from both sides already.")
    if estimator.policy_loss is CISPO and args.eps_clip < 1:
        logger.warning("CISPO bounds its weights from below at 1 - --eps-clip = %g; usual is 0.", 1 - args.eps_clip)
    advise(args)
