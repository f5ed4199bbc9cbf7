"""The shell scripts: they parse, and they stop only what they started."""

import re
import subprocess
from pathlib import Path

from tests.contracts.source_tree import REPO

SCRIPTS = sorted(
    [*REPO.glob("scripts/**/*.sh"), *REPO.glob("examples/**/*.sh"), REPO / "scripts/check", REPO / ".ci/run"]
)


def test_every_script_parses() -> None:
    subprocess.run(["bash", "-c", 'for script; do bash -n "$script" || exit; done', "bash", *SCRIPTS], check=True)


def test_no_script_kills_by_name() -> None:
    for script in SCRIPTS:
        code = "\n".join(line for line in script.read_text().splitlines() if not line.lstrip().startswith("#"))
        assert not re.search(r"\bpkill\b|\bkillall\b|\bray stop\b", code), script


def lib(command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in a shell that has sourced scripts/lib.sh."""
    shell = ["bash", "-c", f'source "{REPO}/scripts/lib.sh"; {command}']
    return subprocess.run(shell, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_a_script_ends_with_the_code_of_what_failed() -> None:
    assert lib("exit 7").returncode == 7
    assert lib("false").returncode == 1


START_LOG = """Local node IP: 10.0.0.2
Traceback (most recent call last):
  File "ray/_private/node.py", line 388, in __init__
    raise RuntimeError(
RuntimeError: Failed to start GCS.  Last 1 lines of error files:
[2026-11-22 19:15:20,770 C 11392 11392] (gcs_server) grpc_server.cc:134:  An unexpected system state has occurred.

.Please check logs/gcs_server.out for details. Last connection error: None
"""
GCS_LOG = "E1122 19:15:20.683 1392 chttp2.cc:1059] UNKNOWN:No address added for '0.0.0.0:57797' {created_time:1}\n"


def test_the_cause_of_a_failed_start_is_shown_wherever_ray_wrote_it(tmp_path: Path) -> None:
    logs = tmp_path / "ray/session_latest/logs"
    logs.mkdir(parents=True)
    (tmp_path / "ray-start.log").write_text(START_LOG)
    (logs / "gcs_server.err").write_text(GCS_LOG * 3)
    (logs / "gcs_server.out").write_text("I am well\nRAY_ERROR_INFO_CHANNEL\n")
    (logs / "dashboard_agent.log").write_text("ModuleNotFoundError: No module named 'aiohttp_cors'\n")
    shown = lib(f'_RAY_DIR="{tmp_path}"; _show_cause').stdout
    assert "RuntimeError: Failed to start GCS" in shown
    assert "No module named 'aiohttp_cors'" in shown
    assert shown.count("No address added for '0.0.0.0:57797'") == 1
    assert f"{logs}/gcs_server.err:" in shown and "RAY_ERROR_INFO_CHANNEL" not in shown


def test_a_node_that_ssh_starts_looks_for_ray_in_the_folder_of_the_head(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    own = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "hosts").write_text(f"{own} slots=8\n10.9.9.9 slots=8\n10.9.9.8 slots=8\n")
    for name, text in (
        ("ray", "sleep 60"),
        ("ssh", f'echo "$@" >>"{asked}.part"; sleep 1; mv "{asked}.part" "{asked}"; sleep 60'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = lib(
        f'PATH="{tmp_path}:$PATH"; source "{REPO}/scripts/nodes.sh"; _joined() {{ [[ -e "{asked}" ]]; }}; '
        f'_dashboard_answers() {{ true; }}; HOSTFILE="{tmp_path}/hosts" MASTER_ADDR=10.9.9.9 start_nodes 2 8'
    )
    assert done.returncode == 0, done.stderr
    words = asked.read_text()
    assert words.count("root@") == 1  # the head's own name and address in the list are not other nodes
    assert "root@10.9.9.8" in words and f"REPO_DIR='{REPO}'" in words and "--node-ip-address 10.9.9.8" in words
