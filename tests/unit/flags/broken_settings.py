"""Mistakes in settings: losses, rewards, saves, evals, weight pushes, engines and plug-ins."""

from __future__ import annotations

from slime.utils.errors import HookError
from tests.unit.flags.broken_configurations import EXPERTS, Broken

ALGORITHM = (
    Broken(
        mistake="the KL counted twice",
        flags="--kl-coef 0.01 --use-kl-loss --kl-loss-coef 0.001",
        says=("--kl-coef 0.01", "--kl-loss-coef 0.001", "Drop one of them"),
    ),
    Broken(
        mistake="a KL weight without the KL loss",
        flags="--kl-loss-coef 0.001",
        says=("--kl-loss-coef 0.001", "no effect without --use-kl-loss"),
    ),
    Broken(
        mistake="importance weights of what was not recomputed",
        flags="--use-tis --use-rollout-logprobs",
        says=("--use-rollout-logprobs", "--use-tis", "Drop one of them"),
    ),
    Broken(
        mistake="swapped bounds of importance weights",
        flags="--use-tis --tis-clip 0.5 --tis-clip-low 2.0",
        says=("--tis-clip-low 2.0 is above --tis-clip 0.5",),
    ),
    Broken(
        mistake="mismatch metrics without a function",
        flags="--get-mismatch-metrics",
        says=("--get-mismatch-metrics", "--custom-tis-function-path"),
    ),
    Broken(
        mistake="a dual clip that clips everything",
        flags="--eps-clip-c 0.5",
        says=("--eps-clip-c is 0.5", "above 1"),
    ),
    Broken(
        mistake="REINFORCE++ without whitening",
        flags="--advantage-estimator reinforce_plus_plus",
        says=("--advantage-estimator reinforce_plus_plus needs --normalize-advantages",),
    ),
    Broken(
        mistake="a loss of one's own without its path",
        flags="--loss-type custom_loss",
        says=("--loss-type is custom_loss", "--custom-loss-function-path"),
    ),
    Broken(
        mistake="trained and frozen lists together",
        flags="--only-train-params-name-list lora --freeze-params-name-list embedding",
        says=("--only-train-params-name-list", "--freeze-params-name-list"),
    ),
    Broken(
        mistake="a list that is no regular expression",
        flags="--freeze-params-name-list '*.bias'",
        says=("--freeze-params-name-list", "'*.bias' is no regular expression"),
    ),
    Broken(
        mistake="two precisions",
        flags="--bf16 --fp16",
        says=("--bf16 and --fp16 are given", "one precision"),
    ),
    Broken(
        mistake="an optimizer that is not sharded",
        flags="--optimizer sgd",
        says=("--optimizer", "sgd", "adam"),
    ),
    Broken(
        mistake="a reference that is refreshed and not used",
        flags="--ref-update-interval 10",
        says=("--ref-update-interval", "--use-kl-loss"),
    ),
    Broken(
        mistake="masking of what is never carried over",
        flags="--mask-offpolicy-in-partial-rollout",
        says=("--mask-offpolicy-in-partial-rollout", "--partial-rollout"),
    ),
    Broken(
        mistake="the critic asked for by hand",
        flags="--use-critic",
        says=("--use-critic", "--advantage-estimator grpo", "ppo"),
    ),
)

REWARDS = (
    Broken(
        mistake="a misspelt grader",
        flags="--rm-type deepscalar",
        says=("--rm-type deepscalar is no grader", "Did you mean deepscaler?", "--custom-rm-path"),
    ),
    Broken(
        mistake="no grader at all",
        without=("--rm-type",),
        says=("--rm-type", "--custom-rm-path", "rm_type"),
    ),
    Broken(
        mistake="a grader that gives a dict",
        flags="--rm-type dapo",
        says=("--rm-type dapo gives a dict", "--reward-key score"),
    ),
    Broken(
        mistake="an entry of a reward that is a number",
        flags="--reward-key score",
        says=("--reward-key score", "--rm-type math gives a number", "Drop --reward-key"),
    ),
    Broken(
        mistake="a remote grader without an address",
        flags="--rm-type remote_rm",
        says=("--rm-type remote_rm needs --rm-url",),
    ),
    Broken(
        mistake="several answers in supervised training",
        flags="--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss "
        "--disable-compute-advantages-and-returns --debug-train-only",
        says=("--n-samples-per-prompt is 8", "sft_rollout needs 1"),
    ),
    Broken(
        mistake="supervised training with the loss of a policy",
        flags="--rollout-function-path slime.rollout.sft_rollout.generate_rollout --n-samples-per-prompt 1 "
        "--global-batch-size 32 --debug-train-only",
        says=("--loss-type is policy_loss", "give --loss-type sft_loss"),
    ),
    Broken(
        mistake="supervised training with engines",
        without=("--rollout-num-gpus",),
        flags="--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss "
        "--n-samples-per-prompt 1 --global-batch-size 32",
        says=("--rollout-num-gpus is not given", "sft_rollout needs no engines", "--debug-train-only"),
    ),
    Broken(
        mistake="training alone without answers",
        program="train_async.py",
        flags="--debug-train-only",
        says=("--debug-train-only starts no engines", "--load-debug-rollout-data", "sft_rollout.generate_rollout"),
    ),
)

SAVES = (
    Broken(
        mistake="saves without a folder",
        flags="--save-interval 20",
        says=("--save-interval 20 has no effect without --save",),
    ),
    Broken(
        mistake="a folder without saves",
        flags="--save $folder/out",
        says=("--save is given without --save-interval", "no checkpoint"),
        error=None,
    ),
    Broken(
        mistake="exports without saves",
        flags="--save $folder/out --save-hf '$folder/hf/{rollout_id}'",
        says=("--save-hf", "--save-interval"),
    ),
    Broken(
        mistake="a template with a field that does not exist",
        flags="--save $folder/out --save-interval 5 --save-hf '$folder/hf/{iteration}'",
        says=("--save-hf", "{iteration}", "{rollout_id}"),
    ),
    Broken(
        mistake="saves into the reference",
        flags="--save $folder/model --save-interval 5",
        says=("--save", "--hf-checkpoint", "another folder"),
    ),
    Broken(
        mistake="saves below a file",
        flags="--save $folder/prompts.jsonl/run --save-interval 5",
        says=("--save", "prompts.jsonl is a file", "give a folder"),
    ),
    Broken(
        mistake="dumps that overwrite each other",
        flags="--save-debug-rollout-data $folder/dump.pt",
        says=("--save-debug-rollout-data is '", "overwrite the one before", "put {rollout_id} into it"),
    ),
    Broken(
        mistake="a file where the saves should go",
        flags="--save $folder/prompts.jsonl --save-interval 5",
        says=("--save", "prompts.jsonl is a file"),
    ),
    Broken(
        mistake="evals without data",
        flags="--eval-interval 5",
        says=("--eval-interval 5 has no effect without", "--eval-prompt-data"),
    ),
    Broken(
        mistake="a name of eval data without its path",
        flags="--eval-interval 5 --eval-prompt-data aime $folder/prompts.jsonl math",
        says=("--eval-prompt-data", "math"),
    ),
)

PUSHES = (
    Broken(
        mistake="engines started again that nobody starts",
        flags="--weight-push-failure refill",
        says=("--weight-push-failure refill", "--use-fault-tolerance"),
    ),
)

ENGINES = (
    Broken(
        mistake="DeepEP in the engines without the package",
        script=EXPERTS,
        flags="--rollout-num-gpus-per-engine 8 --sglang-moe-a2a-backend deepep --sglang-ep-size 8",
        says=("--sglang-moe-a2a-backend deepep", "deep_ep", "not installed"),
    ),
    Broken(
        mistake="DeepEP in the trainer without the package",
        script=EXPERTS,
        flags="--moe-enable-deepep --moe-token-dispatcher-type flex",
        says=("DeepEP is not installed", "--moe-token-dispatcher-type alltoall"),
        error=None,
    ),
    Broken(
        mistake="draft steps without an algorithm",
        flags="--sglang-speculative-num-steps 3 --sglang-speculative-num-draft-tokens 4",
        says=("--sglang-speculative-num-steps", "--sglang-speculative-algorithm"),
    ),
    Broken(
        mistake="drafts of a model that has no layer for it",
        flags="--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 "
        "--sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4",
        says=("--sglang-speculative-algorithm EAGLE", "--sglang-speculative-draft-model-path"),
    ),
    Broken(
        mistake="more drafted tokens than steps give",
        script="mimo-7B-rl",
        flags="--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 "
        "--sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 8",
        says=("--sglang-speculative-num-draft-tokens is 8", "--sglang-speculative-num-steps 3", "4"),
    ),
    Broken(
        mistake="two layouts of the engines",
        flags="--prefill-num-servers 2 --sglang-config $folder/engines.yaml",
        files={"engines.yaml": "sglang: []\n"},
        says=("and --prefill-num-servers 2 contradict each other", "lays out the engines alone"),
    ),
)

PLUGINS = (
    Broken(
        mistake="a plug-in whose module does not exist",
        flags="--custom-rm-path my_rewards.grade",
        says=("--custom-rm-path", "my_rewards", "PYTHONPATH"),
        error=HookError,
    ),
    Broken(
        mistake="a plug-in whose name does not exist",
        flags="--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_std",
        says=("--dynamic-sampling-filter-path", "has no check_reward_std"),
        error=HookError,
    ),
    Broken(
        mistake="a plug-in named as a file",
        flags="--custom-generate-function-path examples/search/generate.py:generate",
        says=("--custom-generate-function-path", "package.module.attribute"),
        error=HookError,
    ),
    Broken(
        mistake="a plug-in with another signature",
        flags="--custom-rm-path json.dumps",
        says=("--custom-rm-path", "json.dumps", "See"),
        error=HookError,
    ),
    Broken(
        mistake="a plug-in of the trainer that does not exist",
        flags="--loss-type custom_loss --custom-loss-function-path my_losses.loss",
        says=("--custom-loss-function-path", "there is no module my_losses", "PYTHONPATH"),
        error=HookError,
    ),
    Broken(
        mistake="a layer spec that does not exist",
        flags="--spec slime_plugins.models.qwen4 get_qwen4_spec",
        says=("--spec", "slime_plugins.models.qwen4"),
        error=HookError,
    ),
    Broken(
        mistake="a data source without its methods",
        flags="--data-source-path collections.OrderedDict",
        says=("--data-source-path", "collections.OrderedDict lacks get_samples"),
        error=HookError,
    ),
)

BROKEN = (*ALGORITHM, *REWARDS, *SAVES, *PUSHES, *ENGINES, *PLUGINS)
