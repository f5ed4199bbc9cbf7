"""A driver whose raylet dies while an actor starts: Ray does not report it to that actor's calls."""

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.dist

DRIVER = """
import os, signal, threading, time
import ray
from slime.ray.cluster import _start, disconnect
from slime.ray.waiting import wait_for
from slime.utils.errors import ProcessError

_start(None, 1)

@ray.remote(num_cpus=1)
class Slow:
    def __init__(self):
        time.sleep(600)
    def echo(self):
        return 1

raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
threading.Timer(1.0, os.kill, (raylet, signal.SIGKILL)).start()
try:
    wait_for(Slow.remote().echo.remote(), what="an actor to start", timeout_s=250)
except ProcessError as error:
    print(type(error).__name__, error)
disconnect(keeps_logs=False)
print("left:", not ray.is_initialized())
"""


def test_a_dead_raylet_ends_the_wait_for_an_actor_that_starts():
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=280, check=False
    )  # fmt: skip
    assert re.search(
        r"ProcessError Ray's raylet \(process \d+\) ended with status -9.*\n--- end of .*raylet.out", done.stdout
    ), done.stdout + done.stderr
    assert done.stdout.endswith("left: True\n") and done.returncode == 0
