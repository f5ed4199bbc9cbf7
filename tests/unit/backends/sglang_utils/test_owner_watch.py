"""Process trees that end: killed by hand, and with their owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

from slime.backends.sglang_utils.owner_watch import kill_tree

SLEEPER = "import time; time.sleep(600)"
TREE = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); time.sleep(600)"
WATCHED_TREE = (
    "import os, subprocess, sys, time\n"
    "from slime.backends.sglang_utils.owner_watch import end_with_owner\n"
    "end_with_owner(int(sys.argv[1]), poll_s=0.1)\n"
    f"subprocess.Popen([sys.executable, '-c', {SLEEPER!r}])\n"
    "time.sleep(600)\n"
)
OWNER = (
    "import os, subprocess, sys, time\n"
    f"subprocess.Popen([sys.executable, '-c', {WATCHED_TREE!r}, str(os.getpid())])\n"
    "time.sleep(600)\n"
)


def wait_for_descendants(pid: int, count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while len(found := psutil.Process(pid).children(recursive=True)) < count:
        assert time.monotonic() < deadline, f"{found} are not {count} processes yet"
        time.sleep(0.05)
    return found


def test_killing_a_tree_leaves_none_of_it():
    root = subprocess.Popen([sys.executable, "-c", TREE])
    (child,) = wait_for_descendants(root.pid, 1)
    assert kill_tree(root.pid) == []
    assert root.wait(timeout=10) == -signal.SIGKILL
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_killing_what_is_gone_already_is_no_error():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=30)
    assert kill_tree(process.pid) == []


def test_a_tree_ends_when_its_owner_is_killed():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], env=os.environ | {"PYTHONPATH": os.getcwd()})
    tree = wait_for_descendants(owner.pid, 2)
    owner.kill()
    owner.wait(timeout=10)
    _, alive = psutil.wait_procs(tree, timeout=10)
    assert alive == []
