"""What other trainers call our flags and their values: an unknown word is answered with ours."""

from __future__ import annotations

FLAGS = {
    **dict.fromkeys(("--learning-rate", "--actor-learning-rate"), "--lr"),
    **dict.fromkeys(("--num-gpus", "--n-gpus", "--gpus"), "--actor-num-gpus-per-node"),
    **dict.fromkeys(("--num-nodes", "--nnodes"), "--actor-num-nodes"),
    **dict.fromkeys(("--algorithm", "--algo", "--adv-estimator"), "--advantage-estimator"),
    **dict.fromkeys(("--model", "--model-path", "--model-name-or-path"), "--hf-checkpoint"),
    **dict.fromkeys(("--pretrain", "--actor-model-path"), "--hf-checkpoint"),
    **dict.fromkeys(("--ref-model", "--reference-model"), "--ref-load"),
    **dict.fromkeys(("--dataset", "--dataset-name", "--train-data", "--train-files"), "--prompt-data"),
    **dict.fromkeys(("--eval-dataset", "--val-files", "--eval-data"), "--eval-prompt-data"),
    **dict.fromkeys(("--num-generations", "--group-size", "--rollout-n"), "--n-samples-per-prompt"),
    **dict.fromkeys(("--max-completion-length", "--max-new-tokens"), "--rollout-max-response-len"),
    **dict.fromkeys(("--max-response-length", "--generate-max-len"), "--rollout-max-response-len"),
    **dict.fromkeys(("--max-prompt-length", "--prompt-max-len"), "--rollout-max-prompt-len"),
    **dict.fromkeys(("--train-batch-size", "--ppo-mini-batch-size"), "--global-batch-size"),
    **dict.fromkeys(("--temperature", "--sampling-temperature"), "--rollout-temperature"),
    **dict.fromkeys(("--max-steps", "--num-steps", "--total-steps"), "--num-rollout"),
    **dict.fromkeys(("--epochs", "--num-epochs", "--num-train-epochs", "--total-epochs"), "--num-epoch"),
    **dict.fromkeys(("--output-dir", "--save-path", "--ckpt-path"), "--save"),
    **dict.fromkeys(("--save-steps", "--save-freq"), "--save-interval"),
    **dict.fromkeys(("--eval-steps", "--test-freq"), "--eval-interval"),
    **dict.fromkeys(("--reward-fn", "--reward-function", "--reward-funcs"), "--custom-rm-path"),
    **dict.fromkeys(("--beta", "--kl-beta", "--init-kl-coef"), "--kl-loss-coef"),
    **dict.fromkeys(("--clip-ratio", "--cliprange"), "--eps-clip"),
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size"), "--tensor-model-parallel-size"),
    **dict.fromkeys(("--gradient-checkpointing", "--activation-checkpointing"), "--recompute-granularity"),
    **dict.fromkeys(("--lora-r", "--lora-dim"), "--lora-rank"),
    "--report-to": "--use-wandb",
}
"""Their flag -> ours."""
VALUES = {
    "dapo": "DAPO is grpo with other flags: docs/howto/dapo.md",
    "dr_grpo": "Dr. GRPO is grpo with --disable-grpo-std-normalization and examples/DrGRPO/custom_reducer.py",
    "rloo": "RLOO is an estimator by its import path: examples.custom_estimator.rloo.rloo",
    "reinforce": "it is called reinforce_plus_plus",
}
"""Their value of --advantage-estimator -> what to give."""
