"""The Python sandbox, and a policy that uses it."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from pathlib import Path

import psutil
import pytest

from examples.coding_agent_rl import generate as coding_agent
from examples.retool import generate_with_retool as example
from examples.retool.tool_sandbox import Limits, run_program
from slime.isolation import view
from slime.isolation.view import IsolationError
from slime.rollout.sglang_rollout import generate_and_rm
from slime.utils.errors import ConfigError
from slime.utils.types import Sample

SMALL = Limits(time_s=1, memory_mib=256, output_characters=200)


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("print(6*7)", "42"),
        ("x = 1\nfor i in range(1, 6): x *= i\nprint(x)", "120"),
        ("import math\nfrom fractions import Fraction as F\nprint(math.gcd(12, 18), F(1, 3) + 1)", "6 4/3"),
        ("import os\nwith open('x', 'w') as f: f.write('y')\nprint(os.listdir())", "['x']"),
        ("import threading as t\nx = t.Thread(target=print, args=(1,))\nx.start(); x.join()", "1"),
        ("from statistics import mean\nimport random\nrandom.seed(1)\nprint(mean([1, 2]))", "1.5"),
        ("class P:\n    def __init__(self, x): self.x = x\nprint(P(3).x)", "3"),
        ("if __name__ == '__main__':\n    print('main')", "main"),
        ("pass", "(no output)"),
        ("import sys\nprint(2)\nsys.exit()", "2"),
        ("raise SystemExit(0)", "(no output)"),
    ],
)
def test_ordinary_programs_run(program, output):
    result = run_program(program, SMALL)
    assert (result.is_ok, result.output) == (True, output)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("print(1)\n1/0", "1\nZeroDivisionError: division by zero"),
        ("print(1", "SyntaxError"),
        ("print(unknown)", "NameError"),
        ("a = 'x' * 10**9", "MemoryError"),
        ("def f(): f()\nf()", "RecursionError"),
        ("print(1)\nraise SystemExit(3)", "1\nSystemExit: 3"),
        ("import sys\nsys.exit('no solution')", "SystemExit: no solution"),
    ],
)
def test_what_is_wrong_with_a_program_is_its_output(program, error):
    result = run_program(program, SMALL)
    assert not result.is_ok and result.output.startswith(error)
    assert "Traceback" not in result.output and "/" not in result.output


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os\nos.fork()", "PermissionError"),
        ("import subprocess\nsubprocess.run(['/bin/sh', '-c', 'id'])", "PermissionError"),
        ("import socket\nsocket.socket()", "PermissionError"),
        ("open('/etc/shadow')", "FileNotFoundError"),
        (f"open({str(Path(__file__))!r})", "FileNotFoundError"),
        ("import os\nfor key in os.environ: print(key)\nopen('/proc/1/environ')", "LANG\nPermissionError"),
        (
            "import os\nos.kill(1, 9)\nprint('lives')\nopen(os.__file__, 'a')",
            ("lives\nPermissionError", "lives\nOSError"),
        ),
    ],
)
def test_files_processes_and_the_network_are_out_of_reach(program, error):
    """The kernel enforces it; tests/ext/agent/test_isolation.py tries harder."""
    result = run_program(program, SMALL)
    assert not result.is_ok
    assert result.output.startswith(error), result.output


def test_a_run_that_cannot_isolate_does_not_start(monkeypatch):
    def refuse():
        raise IsolationError("unshare: not permitted")

    monkeypatch.setattr(view, "check_isolation", refuse)
    for generate in (example.generate, coding_agent.generate):
        with pytest.raises(ConfigError, match=r"not permitted.*namespaces.*--unsafe-local-sandbox"):
            generate.check_args(Namespace(unsafe_local_sandbox=False))
        generate.check_args(Namespace(unsafe_local_sandbox=True))


def test_a_program_that_does_not_end_is_killed_and_leaves_nothing():
    before = set(psutil.Process().children(recursive=True))  # graders keep their child processes
    began = time.monotonic()
    result = run_program("while True: pass", SMALL)
    assert result.output == "error: killed; 1 s and 256 MiB are allowed"
    assert time.monotonic() - began < 30
    started = set(psutil.Process().children(recursive=True)) - before
    assert not [one for one in started if "isolation" in str(one.cmdline())]


def policy(prompt):
    question = prompt.partition("user\n")[2].partition("<")[0]
    if "<|im_start|>tool" not in prompt:
        return f"```python\nprint({question})\n```"
    return f"\\boxed{{{prompt.rpartition('tool' + chr(10))[2].partition('<')[0]}}}"


@pytest.mark.parametrize(("label", "reward"), [("9716", 1.0), ("9717", 0.1)])
def test_a_sample_computes_reads_and_answers(talk, ask, label, reward):
    path = "examples.retool.generate_with_retool."
    args, _ = talk(policy, custom_generate_function_path=path + "generate", custom_rm_path=path + "reward_func")
    sample = asyncio.run(generate_and_rm(args, ask("347*28", label=label), {"max_new_tokens": 200}))
    assert sample.response.endswith(
        "\n<|im_start|>tool\n9716<|im_end|>\n<|im_start|>assistant\n\\boxed{9716}<|im_end|>"
    )
    assert sample.reward == reward
    assert sample.metadata["num_programs"] == 1 and sample.non_generation_time > 0
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length


@pytest.mark.parametrize(
    ("response", "status", "programs", "reward"),
    [
        ("\\boxed{7}<|im_end|>", "completed", 0, 1.0),
        ("\\boxed{8}<|im_end|>", "completed", 1, 0.1),
        ("\\boxed{8}<|im_end|>", "completed", 0, 0.0),
        ("\\boxed{7}", "truncated", 1, 0.0),
        ("\\boxed{7} or so<|im_end|>", "completed", 1, 0.0),
    ],
)
def test_the_reward(response, status, programs, reward):
    sample = Sample(response=response, label="7", status=Sample.Status(status), metadata={"num_programs": programs})
    assert asyncio.run(example.reward_func(None, sample)) == reward
    assert asyncio.run(example.reward_func(None, [sample, sample])) == [reward, reward]
