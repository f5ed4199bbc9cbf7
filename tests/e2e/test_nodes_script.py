"""scripts/nodes.sh with two nodes on this machine: what ``ssh`` would start elsewhere starts here."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import psutil
import pytest

from slime.utils.net import get_current_node_ip, get_free_port
from tests.contracts.source_tree import REPO
from tests.e2e.job import grpo_flags
from tests.eventually import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.whole, pytest.mark.timeout(1200)]


def cluster(
    tmp_path: Path, hosts: list[str], expected: int, timeout_s: int, then: str = ""
) -> subprocess.CompletedProcess[str]:
    """Start ``expected`` nodes of two GPUs with the hostfile of ``hosts``; run the command ``then`` on them."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# the nodes\n" + "".join(f"{host} slot=2\n" for host in hosts))
    port = get_free_port(28000, consecutive=2)
    script = f"""
        ssh() {{ bash -c "${{@: -1}}"; }}; export -f ssh
        source {REPO}/scripts/lib.sh; source {REPO}/scripts/nodes.sh
        export MASTER_ADDR={get_current_node_ip()} RAY_PORT={port} RAY_DASHBOARD_PORT={port + 1}
        export HOSTFILE={hostfile} NODES_TIMEOUT_S={timeout_s}
        start_nodes {expected} 2 || exit
        {then}
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=900, check=False)
    wait_until(
        lambda: not any(f"={port}" in " ".join(words) for words in command_lines()),
        "the end of the cluster's processes",
        timeout_s=120,
    )
    return done


def command_lines() -> list[list[str]]:
    lines = []
    for process in psutil.process_iter(["cmdline"]):
        lines.append(process.info["cmdline"] or [])
    return lines


def test_the_nodes_of_a_hostfile_join_refuse_a_job_that_is_too_large_and_end_with_the_script(task, tmp_path):
    flags = "--actor-num-gpus-per-node 8 --colocate --cluster-wait-timeout-s 2".split()
    command = ["python3", str(REPO / "train.py"), *grpo_flags(task, tmp_path, *flags)]
    then = f"RAY_ADDRESS=${{MASTER_ADDR}}:${{RAY_PORT}} PYTHONPATH={REPO} {shlex.join(command)}"
    done = cluster(tmp_path, [get_current_node_ip(), "127.0.0.2"], expected=2, timeout_s=600, then=then)
    assert "ray: 2 nodes with 4 GPUs" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the job needs 8 GPUs and 9 CPUs; the Ray cluster has 4 GPUs and " in done.stderr


def test_a_node_that_never_comes_is_said_after_the_deadline(tmp_path):
    done = cluster(tmp_path, [get_current_node_ip()], expected=2, timeout_s=1)
    assert done.returncode == 1
    assert "after 1 s (NODES_TIMEOUT_S)" in done.stderr
    assert "expected 2 nodes of 2 GPUs" in done.stderr
