"""The shell blocks of the documents that the project started from, verbatim, and what is wrong with some.

A block whose text cannot work anywhere as written is listed with what a reader would type instead.
"""

# ruff: noqa: E501  lines are verbatim

from __future__ import annotations

CONVERT_TWO_NODES = r"""
cd slime/
source scripts/models/glm4.5-355B-A32B.sh
PYTHONPATH=/root/Megatron-LM/ torchrun \
--nproc-per-node 8 \
--master-addr ${MASTER_ADDR} --master-port 12345 \
--nnodes=2 --node-rank ${NODE_RANK} \
tools/convert_hf_to_torch_dist.py \
${MODEL_ARGS[@]} \
--hf-checkpoint $BASE_DIR/GLM-4.5-355B-A32B/ \
--save $BASE_DIR/GLM-4.5-355B-A32B_torch_dist/
"""

CONVERT_ONE_PROCESS = r"""
# mcore checkpoint
cd /root/slime
source scripts/models/glm4-9B.sh
PYTHONPATH=/root/Megatron-LM python tools/convert_hf_to_torch_dist.py \
    ${MODEL_ARGS[@]} \
    --hf-checkpoint /root/GLM-Z1-9B-0414 \
    --save /root/GLM-Z1-9B-0414_torch_dist
"""

CONVERT_FOUR_NODES_R1 = r"""
cd slime/
source scripts/models/deepseek-v3.sh
PYTHONPATH=/root/Megatron-LM/ torchrun \
--nproc-per-node 8 \
--master-addr ${MASTER_ADDR} --master-port 12345 \
--nnodes=4 --node-rank ${NODE_RANK} \
tools/convert_hf_to_torch_dist.py \
${MODEL_ARGS[@]} \
--tensor-model-parallel-size 1 \
--pipeline-model-parallel-size 8 \
--expert-tensor-parallel-size 1 \
--expert-model-parallel-size 4 \
--decoder-first-pipeline-num-layers 7 \
--decoder-last-pipeline-num-layers 6 \
--hf-checkpoint $BASE_DIR/DeepSeek-R1-bf16/ \
--save $BASE_DIR/DeepSeek-R1_torch_dist/
"""

CONVERT_FOUR_NODES_GLM = r"""
cd /root/slime
pip install -e . --no-deps
source scripts/models/glm5.2-744B-A40B.sh
PYTHONPATH=/root/Megatron-LM/ torchrun \
   --nproc-per-node 8 \
   --master-addr ${MASTER_ADDR} --master-port 12345 \
   --nnodes=4 --node-rank ${NODE_RANK} \
   tools/convert_hf_to_torch_dist.py \
   ${MODEL_ARGS[@]} \
   --tensor-model-parallel-size 8 \
   --pipeline-model-parallel-size 2 \
   --decoder-last-pipeline-num-layers 40 \
   --expert-model-parallel-size 16 \
   --expert-tensor-parallel-size 1 \
   --hf-checkpoint $BASE_DIR/GLM-5.2/ \
   --save $BASE_DIR/GLM-5.2_torch_dist/
"""

CONVERT_ONE_NODE = r"""
cd /root/slime
pip install -e . --no-deps
source scripts/models/glm4.7-30B-A3B.sh
PYTHONPATH=/root/Megatron-LM/ torchrun --nproc-per-node 8 \
   tools/convert_hf_to_torch_dist.py \
   ${MODEL_ARGS[@]} \
   --hf-checkpoint /root/GLM-4.7-Flash/ \
   --save /root/GLM-4.7-Flash_torch_dist/
"""

CONVERSIONS = {
    # block -> nodes, processes of a node
    "GLM-4.5 355B, two nodes": (CONVERT_TWO_NODES, 2, 8),
    "GLM4 9B, one process": (CONVERT_ONE_PROCESS, 1, 1),
    "DeepSeek R1, four nodes": (CONVERT_FOUR_NODES_R1, 4, 8),
    "GLM-5.2, four nodes": (CONVERT_FOUR_NODES_GLM, 4, 8),
    "GLM-4.7 Flash, one node": (CONVERT_ONE_NODE, 1, 8),
}

FP8 = r"""
cd slime/
python tools/convert_hf_to_fp8.py \
--model-dir $BASE_DIR/GLM-4.5-355B-A32B/ \
--save-dir $BASE_DIR/GLM-4.5-355B-A32B-FP8/ \
--strategy block --block-size 128 128 \
--max-workers 4
"""

BF16 = r"""
cd slime/
python tools/fp8_cast_bf16.py --input-fp8-hf-path $BASE_DIR/DeepSeek-R1 --output-bf16-hf-path $BASE_DIR/DeepSeek-R1-bf16/
"""

START_WORKERS = r"""
for WORKER_IP in $(awk '{print $1}' $BASE_DIR/mpi_hostfile); do
if [[ "$WORKER_IP" == "$MASTER_ADDR" ]]; then
continue
fi
echo "Starting Ray worker on ${WORKER_IP}"
ssh root@"${WORKER_IP}" \
"pkill -9 sglang ; ray stop --force ; pkill -9 python ; ray start --address=${MASTER_ADDR}:6379 --num-gpus 8 --node-ip-address ${WORKER_IP} --disable-usage-stats" &
done
wait
"""

INSTALL = """
cd /root/
git clone https://github.com/THUDM/slime.git
cd slime/
pip install -e .
"""

DOWNLOADS = r"""
# hf checkpoint
huggingface-cli download zai-org/GLM-Z1-9B-0414 --local-dir /root/GLM-Z1-9B-0414

# train data
huggingface-cli download --repo-type dataset zhuzilin/dapo-math-17k \
  --local-dir /root/dapo-math-17k

# eval data
huggingface-cli download --repo-type dataset zhuzilin/aime-2024 \
  --local-dir /root/aime-2024
hf download zai-org/GLM-4.5 --local-dir $BASE_DIR/GLM-4.5-355B-A32B
hf download deepseek-ai/DeepSeek-R1 --local-dir $BASE_DIR/DeepSeek-R1
hf download zai-org/GLM-5.2 --local-dir $BASE_DIR/GLM-5.2
hf download zai-org/GLM-5.2-FP8 --local-dir $BASE_DIR/GLM-5.2-FP8
hf download THUDM/GLM-4.7-Flash --local-dir /root/GLM-4.7-Flash
"""

EXTEND_MODEL_ARGS = """
source "${SCRIPT_DIR}/models/glm4.7-30B-A3B.sh"
# 在模型配置中添加 MTP 层数
MODEL_ARGS+=(--mtp-num-layers 1)

# 启用 MTP 训练
SPEC_ARGS=(
   --enable-mtp-training
   --mtp-loss-scaling-factor 0.2
)
"""

SEPARATE_GPUS = r"""
ray job submit ... \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 4 \
   --rollout-num-gpus 4 \
   ...
"""

SHARED_GPUS = r"""
ray job submit ... \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   ...
"""


CUDA_GRAPH_SIZES = "SGLANG_ARGS=(--sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 128))"

RUN_BLOCKS = """
cd slime/
bash scripts/run-glm4.5-355B-A32B.sh
cd /root/slime
bash script/run-glm4-9B.sh
cd slime/
bash scripts/run-deepseek-r1.sh
cd /root/slime
export BASE_DIR=/shared/path
export MASTER_ADDR=10.0.0.1
export HOSTFILE=$BASE_DIR/hostfile
bash scripts/run-glm5.2-744B-A40B.sh
bash scripts/run-glm4.7-30B-A3B-8gpus.sh
export BASE_DIR=/shared/path  # 所有节点都可以访问的路径
bash scripts/run-glm4.7-30B-A3B.sh
"""

TYPING_ERRORS = {
    # a line that no shell accepts -> its meaning
    "MODEL_ARGS += ( --rotary-base 10000 )": "MODEL_ARGS+=(--rotary-base 10000)",
    'ray start --address=${MASTER_ADDR}:6379 --num-gpus 8 --node-ip-address ${WORKER_IP} --disable-usage-stats"': (
        "ray start --address=${MASTER_ADDR}:6379 --num-gpus 8 --node-ip-address ${WORKER_IP} --disable-usage-stats"
    ),
}

BLOCKS = {
    **{name: block for name, (block, _, _) in CONVERSIONS.items()},
    "fp8": FP8,
    "bf16": BF16,
    "start workers": START_WORKERS,
    "install": INSTALL,
    "downloads": DOWNLOADS,
    "model args": EXTEND_MODEL_ARGS,
    "separate": SEPARATE_GPUS,
    "shared": SHARED_GPUS,
    "graph sizes": CUDA_GRAPH_SIZES,
    "runs": RUN_BLOCKS,
}
