"""Mistakes in single words: names of flags, and values that no run can use."""

from __future__ import annotations

from tests.unit.flags.broken_configurations import Broken

NAMES = (
    Broken(
        mistake="a misspelt flag",
        flags="--rollout-batchsize 64",
        says=("--rollout-batchsize is not a flag", "Did you mean --rollout-batch-size"),
    ),
    Broken(
        mistake="underscores in the place of hyphens",
        flags="--n_samples_per_prompt 4",
        says=("--n_samples_per_prompt is not a flag", "Did you mean --n-samples-per-prompt"),
    ),
    Broken(
        mistake="one hyphen too few",
        flags="-colocate",
        says=("-colocate is not a flag", "Did you mean --colocate"),
    ),
    Broken(
        mistake="a capital letter",
        flags="--Use-KL-loss",
        says=("--Use-KL-loss is not a flag", "Did you mean --use-kl-loss"),
    ),
    Broken(
        mistake="a flag of SGLang without the prefix",
        flags="--mem-fraction-static 0.7",
        says=("--mem-fraction-static is not a flag", "--sglang-mem-fraction-static"),
    ),
    Broken(
        mistake="tensor parallelism given to SGLang itself",
        flags="--sglang-tp-size 4",
        says=("--sglang-tp-size is not a flag", "--rollout-num-gpus-per-engine"),
    ),
    Broken(
        mistake="the number of an optimizer that there is not",
        flags="--muon-momentum 0.9",
        says=("--muon-momentum is not a flag", "the optimizer is Adam"),
    ),
    Broken(
        mistake="a flag of another framework",
        flags="--actor-learning-rate-scheduler cosine",
        says=("--actor-learning-rate-scheduler is not a flag", "docs/flags.md"),
    ),
    Broken(
        mistake="an abbreviated flag",
        flags="--rollout-batch 64",
        says=("--rollout-batch is not a flag", "Did you mean --rollout-batch-size"),
    ),
    Broken(
        mistake="a dash from a document in the place of two hyphens",
        flags="\u2013lr 1e-6",
        says=("'\u2013lr'", "dash", "--lr"),
    ),
    Broken(
        mistake="a flag given twice with different values",
        flags="--lr 1e-6 --lr 5e-6",
        says=("--lr is given 2 times", "1e-6", "5e-6", "the last"),
        error=None,
    ),
)

VALUES = (
    Broken(
        mistake="a value left out at the end",
        flags="--lr",
        says=("--lr", "expected one argument"),
    ),
    Broken(
        mistake="a value with a space and no quotes",
        flags="--wandb-run-id my first run --use-kl-loss",
        says=("'first' belongs to no flag", "--wandb-run-id takes no more values", "Quote values"),
    ),
    Broken(
        mistake="an unknown estimator",
        flags="--advantage-estimator gropo",
        says=("--advantage-estimator", "'gropo'", "grpo", "gspo"),
    ),
    Broken(
        mistake="a size with a unit",
        flags="--update-weight-buffer-size 512MB",
        says=("--update-weight-buffer-size", "'512MB' is not a whole number", "without a unit"),
    ),
    Broken(
        mistake="a negative batch",
        flags="--rollout-batch-size -32",
        says=("--rollout-batch-size", "-32 is not a whole number of 1 or more"),
    ),
    Broken(
        mistake="a negative learning rate",
        flags="--lr -1e-6",
        says=("--lr", "-1e-6", "0 or more"),
    ),
    Broken(
        mistake="a nucleus above one",
        flags="--rollout-top-p 95",
        says=("--rollout-top-p", "95 is not a finite number above 0 and at most 1"),
    ),
    Broken(
        mistake="a temperature of zero in training",
        flags="--rollout-temperature 0",
        says=("--rollout-temperature is 0.0", "above 0", "--eval-temperature 0"),
    ),
    Broken(
        mistake="text where JSON belongs",
        flags="--apply-chat-template --apply-chat-template-kwargs enable_thinking=false",
        says=("--apply-chat-template-kwargs", "'enable_thinking=false' is not JSON", "'{\"key\": value}'"),
    ),
    Broken(
        mistake="percent in the place of a fraction of memory",
        flags="--sglang-mem-fraction-static 70",
        says=("--sglang-mem-fraction-static is 70.0", "between 0 and 1"),
    ),
    Broken(
        mistake="no request at a time",
        flags="--sglang-server-concurrency 0",
        says=("--sglang-server-concurrency is 0", "1 or more"),
    ),
    Broken(
        mistake="an attention backend that SGLang does not have",
        flags="--sglang-attention-backend flash-attention-3",
        says=("--sglang-attention-backend", "'flash-attention-3'", "fa3"),
    ),
    Broken(
        mistake="an Adam beta of one",
        flags="--adam-beta2 1.0",
        says=("--adam-beta2", "1.0", "below 1"),
    ),
    Broken(
        mistake="full recompute without a method",
        flags="--recompute-granularity full",
        says=("--recompute-granularity", "--recompute-method"),
    ),
)

BROKEN = (*NAMES, *VALUES)
