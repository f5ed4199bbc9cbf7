"""The documents' conversion over several nodes: torchrun with --nnodes and --node-rank, once for each node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slime.utils.net import get_free_port
from tests.unit.backends.megatron_utils.megatron_case import hf_flags, write_hf_model

REPO = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800)]

TYPED = r"""
torchrun \
--nproc-per-node 1 \
--master-addr ${MASTER_ADDR} --master-port ${MASTER_PORT} \
--nnodes=2 --node-rank ${NODE_RANK} \
tools/convert_hf_to_torch_dist.py \
${MODEL_ARGS[@]} \
--hf-checkpoint $BASE_DIR/hf/ \
--save $BASE_DIR/hf_torch_dist/
"""
"""As in the document on GLM-4.5, with one process a node and another port."""


def test_two_nodes_convert_a_model_together(tmp_path):
    write_hf_model(tmp_path / "hf", "qwen3")
    flags = [str(word) for word in hf_flags(tmp_path / "hf")]
    position = flags.index("--hf-checkpoint")
    del flags[position : position + 2]
    script = f"MODEL_ARGS=({' '.join(flags)})\n{TYPED}"
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port(29600)), "BASE_DIR": str(tmp_path)}
    path = f"{REPO / '.venv/bin'}:{os.environ['PATH']}"
    nodes = [
        subprocess.Popen(
            ["bash", "-c", script],
            cwd=REPO,
            env=dict(os.environ) | common | {"NODE_RANK": str(rank), "PATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [node.communicate(timeout=500)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(texts)
    saved = tmp_path / "hf_torch_dist"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "release"
    # Nothing said how to split, so that each of the two processes had a pipeline stage, and wrote it.
    assert {name.split("_")[2] for name in os.listdir(saved / "release") if name.endswith(".distcp")} == {"0", "1"}
