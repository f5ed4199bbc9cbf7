"""Mistakes in sizes: GPUs, parallel layouts, batches, lengths, and models that differ from the checkpoint."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, models, pre_tokenizers

from slime.utils.errors import DataError
from tests.unit.flags.broken_configurations import DENSE, EXPERTS, PROMPTS, SPARSE, Broken

LONG_ROW = {"input": "sum " * 60, "label": "2"}
_TOKENIZER = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
_TOKENIZER.pre_tokenizer = pre_tokenizers.Whitespace()
WORDS = _TOKENIZER.to_str()
"""A tokenizer.json whose tokens are words."""

GPUS = (
    Broken(
        mistake="no GPU for the engines",
        without=("--rollout-num-gpus",),
        says=("--rollout-num-gpus is not given", "--colocate"),
    ),
    Broken(
        mistake="no GPU at all for the engines",
        flags="--rollout-num-gpus 0",
        says=("--rollout-num-gpus 0", "--rollout-num-gpus-per-engine", "--colocate"),
    ),
    Broken(
        mistake="no GPU for the trainer",
        flags="--actor-num-nodes 0",
        says=("--actor-num-nodes 0", "at least 1"),
    ),
    Broken(
        mistake="engines that do not fill their GPUs",
        flags="--rollout-num-gpus 8 --rollout-num-gpus-per-engine 3",
        says=("--rollout-num-gpus 8", "--rollout-num-gpus-per-engine 3", "multiple"),
    ),
    Broken(
        mistake="an engine over one and a half nodes",
        flags="--rollout-num-gpus 12 --rollout-num-gpus-per-engine 12",
        says=("--rollout-num-gpus-per-engine 12", "--num-gpus-per-node 8", "whole number of nodes"),
    ),
    Broken(
        mistake="a colocated engine half on the trainer's GPUs",
        flags="--colocate --actor-num-gpus-per-node 4 --rollout-num-gpus 9 --rollout-num-gpus-per-engine 3",
        says=("--rollout-num-gpus-per-engine 3", "trainer's 4 GPUs", "--rollout-num-gpus 9"),
    ),
    Broken(
        mistake="more colocated engines than the trainer has GPUs for",
        flags="--colocate --rollout-num-gpus 16",
        says=("--rollout-num-gpus 16", "more than the trainer's 8", "--colocate"),
        error=None,
    ),
    Broken(
        mistake="a trainer with GPUs of its own that may stay awake",
        flags="--offload-train-if-needed --sglang-mem-fraction-static 0.5",
        says=("--offload-train-if-needed", "--offload-train;", "drop it"),
    ),
    Broken(
        mistake="colocated engines in train_async",
        flags="--colocate",
        program="train_async.py",
        says=("train_async.py", "--colocate", "--rollout-num-gpus", "train.py"),
    ),
    Broken(
        mistake="engines that give their memory away in train_async",
        flags="--offload-rollout",
        program="train_async.py",
        says=("train_async.py", "--offload-rollout", "train.py"),
    ),
    Broken(
        mistake="pipeline stages that do not divide an engine",
        flags="--rollout-num-gpus-per-engine 4 --sglang-pp-size 3",
        says=("--rollout-num-gpus-per-engine is 4", "--sglang-pp-size 3"),
    ),
    Broken(
        mistake="data parallelism inside an engine without data-parallel attention",
        flags="--rollout-num-gpus-per-engine 4 --sglang-dp-size 2",
        says=("--sglang-dp-size is 2", "--sglang-enable-dp-attention"),
    ),
    Broken(
        mistake="data-parallel attention that does not divide an engine",
        flags="--rollout-num-gpus-per-engine 8 --sglang-enable-dp-attention --sglang-dp-size 3",
        says=("--sglang-dp-size is 3", "--rollout-num-gpus-per-engine"),
    ),
    Broken(
        mistake="expert parallelism that does not divide an engine",
        script=EXPERTS,
        flags="--rollout-num-gpus-per-engine 8 --sglang-ep-size 3",
        says=("--sglang-ep-size is 3", "--rollout-num-gpus-per-engine"),
    ),
    Broken(
        mistake="all engines prefill and none decodes",
        flags="--rollout-num-gpus 8 --prefill-num-servers 8",
        says=("--prefill-num-servers is 8", "leaves 0 for decoding", "--rollout-num-gpus"),
    ),
    Broken(
        mistake="half of a router's address",
        flags="--sglang-router-ip 10.0.0.1",
        says=("--sglang-router-ip 10.0.0.1 has no effect without --sglang-router-port",),
    ),
)

TRAINER = (
    Broken(
        mistake="model parallelism that does not divide the GPUs",
        flags="--tensor-model-parallel-size 4 --pipeline-model-parallel-size 3",
        says=("has 8 GPUs", "--tensor-model-parallel-size 4", "--pipeline-model-parallel-size 3", "= 12 must divide"),
    ),
    Broken(
        mistake="attention heads that do not divide",
        script="qwen2.5-7B",
        flags="--tensor-model-parallel-size 8",
        says=("--num-attention-heads (28) must be a multiple of --tensor-model-parallel-size (8)",),
    ),
    Broken(
        mistake="layers that do not divide into stages",
        flags="--actor-num-nodes 5 --pipeline-model-parallel-size 5 --global-batch-size 256",
        says=("--num-layers is 36", "for 5 pipeline stages", "--decoder-last-pipeline-num-layers"),
    ),
    Broken(
        mistake="first and last stage that leave an uneven middle",
        flags="--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 8 "
        "--decoder-last-pipeline-num-layers 7",
        says=(
            "--num-layers is 36",
            "--decoder-first-pipeline-num-layers 8",
            "--decoder-last-pipeline-num-layers 7",
            "21 layers",
            "2 pipeline stages",
        ),
    ),
    Broken(
        mistake="first and last stage with more layers than the model",
        flags="--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 20 "
        "--decoder-last-pipeline-num-layers 20",
        says=("--num-layers is 36", "--decoder-first-pipeline-num-layers 20", "--decoder-last-pipeline-num-layers 20"),
    ),
    Broken(
        mistake="an uneven stage without a pipeline",
        flags="--decoder-last-pipeline-num-layers 6",
        says=("--decoder-last-pipeline-num-layers 6", "--pipeline-model-parallel-size 1"),
    ),
    Broken(
        mistake="a pipeline layout with too few layers",
        flags="--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*17|t*18L'",
        says=("decoder layers 35", "--num-layers 36"),
    ),
    Broken(
        mistake="virtual stages that do not divide a rank's layers",
        flags="--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4",
        says=("--num-layers-per-virtual-pipeline-stage is 4", "36 / 4"),
    ),
    Broken(
        mistake="stages of shared sparse attention that begin at a layer without its own index",
        script=SPARSE,
        flags="--actor-num-nodes 32 --rollout-num-gpus 256 --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 8 --context-parallel-size 8 --expert-model-parallel-size 32 "
        "--expert-tensor-parallel-size 1 --decoder-first-pipeline-num-layers 9 --decoder-last-pipeline-num-layers 9",
        says=("a stage starts at layer 10", "1, 2, 3, 7, 11", "--decoder-first-pipeline-num-layers"),
    ),
    Broken(
        mistake="experts that do not divide",
        script=EXPERTS,
        flags="--actor-num-gpus-per-node 6 --expert-model-parallel-size 6 --expert-tensor-parallel-size 1",
        says=("--num-experts is 128", "--expert-model-parallel-size 6 must divide it"),
    ),
    Broken(
        mistake="expert groups that do not divide the GPUs",
        script=EXPERTS,
        flags="--tensor-model-parallel-size 4 --expert-model-parallel-size 4",
        says=("has 8 GPUs", "--expert-tensor-parallel-size 4", "= 16 must divide"),
    ),
    Broken(
        mistake="expert parallelism of a dense model",
        flags="--expert-model-parallel-size 4",
        says=("--num-experts must be non None to use expert-parallel",),
    ),
    Broken(
        mistake="the layout of DeepSeek's attention for another model",
        flags="--context-parallel-size 2 --allgather-cp",
        says=("--allgather-cp with --context-parallel-size 2", "DeepseekV32ForCausalLM", "drop --allgather-cp"),
    ),
)

BATCHES = (
    Broken(
        mistake="a batch that leaves samples over",
        flags="--global-batch-size 96",
        says=("--global-batch-size 96 does not divide the 256 samples", "64 of them would not be trained on"),
    ),
    Broken(
        mistake="a batch larger than the rollout",
        flags="--global-batch-size 512",
        says=("--global-batch-size 512 is more than the 256 samples", "--rollout-batch-size 32"),
    ),
    Broken(
        mistake="a batch that disagrees with the steps",
        flags="--num-steps-per-rollout 4 --global-batch-size 128",
        says=("--global-batch-size 128", "--num-steps-per-rollout 4", "64 a step"),
    ),
    Broken(
        mistake="more steps than samples",
        without=("--global-batch-size",),
        flags="--num-steps-per-rollout 512",
        says=("--num-steps-per-rollout 512 is more than the 256 samples",),
    ),
    Broken(
        mistake="fewer samples in a step than data-parallel ranks",
        flags="--actor-num-gpus-per-node 8 --global-batch-size 4",
        says=("--global-batch-size 4", "8 data-parallel ranks"),
    ),
    Broken(
        mistake="micro-batches that do not divide over the ranks",
        flags="--global-batch-size 128 --micro-batch-size 3",
        says=("--global-batch-size 128", "--micro-batch-size 3", "8", "--use-dynamic-batch-size"),
    ),
    Broken(
        mistake="no prompts in a rollout",
        without=("--rollout-batch-size",),
        says=("--rollout-batch-size is not given",),
    ),
    Broken(
        mistake="over-sampling fewer than are kept",
        flags="--over-sampling-batch-size 16",
        says=("--over-sampling-batch-size 16 is below --rollout-batch-size 32",),
    ),
    Broken(
        mistake="dynamic batches without a size",
        flags="--use-dynamic-batch-size",
        says=("--use-dynamic-batch-size needs --max-tokens-per-gpu",),
    ),
    Broken(
        mistake="a size of dynamic batches that nobody uses",
        flags="--max-tokens-per-gpu 8192",
        says=("--max-tokens-per-gpu", "no effect without --use-dynamic-batch-size"),
        error=None,
    ),
    Broken(
        mistake="responses longer than a micro-batch",
        flags="--use-dynamic-batch-size --max-tokens-per-gpu 4096 --context-parallel-size 2 "
        "--rollout-max-response-len 32768",
        says=("--rollout-max-response-len 32768", "--max-tokens-per-gpu 4096", "8192", "a larger micro-batch"),
        error=None,
    ),
    Broken(
        mistake="balancing what is not packed",
        flags="--balance-by-flops",
        says=("--balance-by-flops", "needs --use-dynamic-batch-size"),
    ),
    Broken(
        mistake="groups of one answer",
        flags="--n-samples-per-prompt 1 --global-batch-size 32",
        says=("--n-samples-per-prompt 1", "grpo", "every advantage is 0", "--disable-rewards-normalization"),
    ),
    Broken(
        mistake="groups of one answer, and an estimator of one's own",
        flags="--n-samples-per-prompt 1 --global-batch-size 32 "
        "--advantage-estimator examples.custom_estimator.rloo.rloo",
        says=("--n-samples-per-prompt 1", "rloo", "every advantage is 0"),
    ),
    Broken(
        mistake="neither rollouts nor epochs",
        without=("--num-rollout",),
        says=("Neither --num-rollout nor --num-epoch",),
    ),
    Broken(
        mistake="fewer prompts than one rollout of an epoch takes",
        without=("--num-rollout",),
        flags="--num-epoch 3 --rollout-batch-size 64",
        says=("--num-epoch 3", "40 prompts", "--rollout-batch-size 64"),
    ),
    Broken(
        mistake="epochs that leave prompts out",
        without=("--num-rollout",),
        flags="--num-epoch 3",
        says=("--num-epoch 3 takes 96 of 120 prompts", "40 prompts", "--rollout-batch-size 32", "--num-rollout 4"),
        error=None,
    ),
    Broken(
        mistake="a warm-up longer than the run",
        flags="--lr-decay-style linear --lr-warmup-iters 100",
        says=("warms up for 100 of 100", "--lr-warmup-iters", "--num-rollout"),
    ),
    Broken(
        mistake="a warm-up longer than the epochs",
        without=("--num-rollout",),
        flags="--num-epoch 2 --lr-decay-style cosine --lr-warmup-iters 10",
        says=("warms up for 10 of 2", "--lr-warmup-iters", "--num-epoch"),
    ),
    Broken(
        mistake="two lengths of the warm-up",
        flags="--lr-warmup-iters 5 --lr-warmup-fraction 0.1",
        says=("--lr-warmup-fraction", "--lr-warmup-iters", "one length"),
    ),
    Broken(
        mistake="a start behind the end",
        flags="--start-rollout-id 100 --num-rollout 100",
        says=("--start-rollout-id 100", "--num-rollout 100", "nothing"),
    ),
)

LENGTHS = (
    Broken(
        mistake="prompts as long as the context",
        flags="--rollout-max-context-len 4096 --rollout-max-prompt-len 4096",
        says=("--rollout-max-prompt-len 4096", "--rollout-max-context-len 4096", "at most 4095"),
    ),
    Broken(
        mistake="responses longer than the engine's context",
        flags="--rollout-max-response-len 8192 --sglang-context-length 8192",
        says=("--rollout-max-response-len 8192", "--sglang-context-length 8192", "prompt"),
    ),
    Broken(
        mistake="responses longer than the model's positions",
        config={"max_position_embeddings": 4096},
        flags="--rollout-max-response-len 8192",
        says=("--rollout-max-response-len 8192", "max_position_embeddings", "4096"),
    ),
    Broken(
        mistake="a prompt for which the model has no positions",
        config={"max_position_embeddings": 2100},
        files={"prompts.jsonl": PROMPTS + json.dumps(LONG_ROW), "model/tokenizer.json": WORDS},
        error=DataError,
        says=("line 41", "60 tokens", "at most 52", "max_position_embeddings", "2100", "--rollout-max-prompt-len 52"),
    ),
    Broken(
        mistake="an evaluation prompt for which the engines have no context",
        files={"eval.jsonl": json.dumps(LONG_ROW), "model/tokenizer.json": WORDS},
        flags="--sglang-context-length 2059 --eval-prompt-data held_out $folder/eval.jsonl --eval-interval 5 "
        "--eval-max-response-len 2000 --eval-max-prompt-len 4000",
        error=DataError,
        says=("eval.jsonl line 1", "60 tokens", "at most 59", "--sglang-context-length 2059", "--eval-max-prompt-len"),
    ),
)

MODELS = (
    Broken(
        mistake="no model's flags",
        script="",
        checkpoint=DENSE,
        flags="--num-layers 0",
        says=("--num-layers is 0; num_hidden_layers is", "scripts/models"),
    ),
    Broken(
        mistake="the script of a larger model",
        script="qwen3-8B",
        checkpoint="qwen3-4B",
        says=(
            "The model flags disagree with",
            "--hidden-size is 4096; hidden_size is 2560",
            "--ffn-hidden-size",
            "--untie-embeddings-and-output-weights is given; tie_word_embeddings is True",
            "Leave the model flags out, or source the file of scripts/models",
        ),
    ),
    Broken(
        mistake="a vocabulary that loses rows",
        flags="--vocab-size 32000",
        says=("--vocab-size is 32000; vocab_size is 151936",),
    ),
    Broken(
        mistake="a padded vocabulary smaller than the real one",
        flags="--padded-vocab-size 151808",
        says=("--padded-vocab-size is 151808", "at least --vocab-size 151936"),
    ),
    Broken(
        mistake="a family that nobody knows",
        config={"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]},
        says=("mamba2", "--model-name"),
    ),
    Broken(
        mistake="MTP trained without its layer",
        flags="--enable-mtp-training",
        says=("--enable-mtp-training has no effect without --mtp-num-layers",),
    ),
    Broken(
        mistake="an MTP layer that the checkpoint does not have",
        flags="--mtp-num-layers 1 --enable-mtp-training",
        says=("--mtp-num-layers is 1", "num_nextn_predict_layers"),
    ),
    Broken(
        mistake="a frozen indexer where there is none",
        flags="--freeze-indexer",
        says=("--freeze-indexer", "sparse attention"),
    ),
)

BROKEN = (*GPUS, *TRAINER, *BATCHES, *LENGTHS, *MODELS)
