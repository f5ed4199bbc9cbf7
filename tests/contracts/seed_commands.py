"""The flag groups of the documents that the project started from, verbatim; every one must parse."""

GLM_45_355B = """
--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --context-parallel-size 2
--expert-model-parallel-size 16 --expert-tensor-parallel-size 1
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--use-dynamic-batch-size --max-tokens-per-gpu 16384
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
--eps-clip 0.2 --eps-clip-high 0.28
--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
--rollout-num-gpus-per-engine 32 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 4
--moe-enable-deepep --moe-token-dispatcher-type flex
"""

GLM_45_355B_FP8_ROLLOUT = """
--rollout-num-gpus-per-engine 32 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 32
--sglang-ep-size 32 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head
--sglang-cuda-graph-bs 1 2 4 8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128
--sglang-moe-a2a-backend deepep --sglang-deepep-mode auto
"""

GLM4_9B = """
--hf-checkpoint /root/GLM-Z1-9B-0414 --ref-load /root/GLM-Z1-9B-0414_torch_dist
--load /root/GLM-Z1-9B-0414_slime/ --save /root/GLM-Z1-9B-0414_slime/ --save-interval 20
--prompt-data /root/dapo-math-17k/dapo-math-17k.jsonl --input-key prompt --label-key label --apply-chat-template
--rollout-shuffle --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
--rollout-max-response-len 8192 --rollout-temperature 0.8 --num-steps-per-rollout 1 --balance-data
--eval-interval 5 --eval-prompt-data /root/aime-2024/aime-2024.jsonl --n-samples-per-eval-prompt 16
--eval-max-response-len 16384 --eval-top-p 0.7
--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 2
--expert-model-parallel-size 1 --expert-tensor-parallel-size 1
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--use-dynamic-batch-size --max-tokens-per-gpu 4608
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
--eps-clip 0.2 --eps-clip-high 0.28
--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
--rollout-num-gpus-per-engine 2
--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4
--rotary-base 10000
"""

GLM4_9B_VARIANTS = """
--colocate --actor-num-nodes 1 --actor-num-gpus-per-node 8 --sglang-mem-fraction-static 0.8
--rollout-batch-size 32 --n-samples-per-prompt 8 --over-sampling-batch-size 64
--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
--partial-rollout --buffer-filter-path slime.rollout.data_source.pop_first
"""

DEEPSEEK_R1 = """
--hf-checkpoint /base/DeepSeek-R1/ --ref-load /base/DeepSeek-R1_torch_dist/
--load /base/DeepSeek-R1_slime/ --save /base/DeepSeek-R1_slime/ --save-interval 20
--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --context-parallel-size 4
--expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --decoder-last-pipeline-num-layers 13
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--use-dynamic-batch-size --max-tokens-per-gpu 16384
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
--eps-clip 0.2 --eps-clip-high 0.28
--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
--rollout-num-gpus-per-engine 64 --sglang-mem-fraction-static 0.7 --sglang-enable-ep-moe
--sglang-enable-dp-attention --sglang-dp-size 8 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head
--sglang-enable-deepep-moe --sglang-deepep-mode auto --sglang-server-concurrency 1024
--moe-enable-deepep --moe-token-dispatcher-type flex
"""

DEEPSEEK_R1_CONVERT = """
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 8 --expert-tensor-parallel-size 1
--expert-model-parallel-size 4 --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 6
--hf-checkpoint /base/DeepSeek-R1-bf16/ --save /base/DeepSeek-R1_torch_dist/
"""

GLM_52_744B = """
--allgather-cp
--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --decoder-first-pipeline-num-layers 14
--decoder-last-pipeline-num-layers 16 --context-parallel-size 8 --expert-model-parallel-size 32
--expert-tensor-parallel-size 1
--hf-checkpoint /base/GLM-5.2-FP8 --ref-load /base/GLM-5.2_torch_dist --load /base/GLM-5.2_slime
--save /base/GLM-5.2_slime --save-interval 20 --prompt-data /base/dapo-math-17k/dapo-math-17k.jsonl
--sglang-config /base/pd.yaml
--sglang-disaggregation-transfer-backend mooncake --sglang-disaggregation-ib-device mlx5_100,mlx5_107
--sglang-enable-dp-attention --sglang-ep-size 64 --sglang-dp-size 64 --sglang-kv-cache-dtype fp8_e4m3
--sglang-nsa-decode-backend flashmla_kv --sglang-nsa-prefill-backend flashmla_sparse --sglang-attention-backend nsa
--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 4 --sglang-speculative-eagle-topk 1
--sglang-speculative-num-draft-tokens 5
"""

GLM_47_FLASH = """
--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1
--expert-model-parallel-size 8 --expert-tensor-parallel-size 1
--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 8
--sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1
--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 2 --sglang-speculative-eagle-topk 1
--sglang-speculative-num-draft-tokens 3
--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2
"""

GLM_47_FLASH_24_GPUS = """
--rollout-num-gpus-per-engine 24 --sglang-mem-fraction-static 0.7 --sglang-ep-size 24 --sglang-enable-dp-attention
--sglang-dp-size 3 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head --sglang-ep-num-redundant-experts 16
"""

SEED_COMMANDS = {
    "GLM-4.5 355B": GLM_45_355B,
    "GLM-4.5 355B, FP8 rollout": GLM_45_355B_FP8_ROLLOUT,
    "GLM4 9B": GLM4_9B,
    "GLM4 9B, colocated, dynamic sampling, partial rollout": GLM4_9B_VARIANTS,
    "DeepSeek R1": DEEPSEEK_R1,
    "DeepSeek R1, conversion": DEEPSEEK_R1_CONVERT,
    "GLM-5.2 744B": GLM_52_744B,
    "GLM-4.7 Flash": GLM_47_FLASH,
    "GLM-4.7 Flash, 24 GPUs": GLM_47_FLASH_24_GPUS,
}
