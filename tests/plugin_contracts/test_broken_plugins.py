"""``slime check`` finds what is wrong with a plug-in, and says so."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.arguments.hooks import HOOKS
from tools.check import main
from tools.plugin_check.bench import Bench
from tools.plugin_check.examine import CONTRACTS, examine, find_hook

_numbers = itertools.count()

GENERATE = "async def hook(args, sample, params):\n"
BLOCKING = """
import time
async def hook(args, sample):
    time.sleep(0.2)
    return [1.0] * 4 if isinstance(sample, list) else 1.0
"""

BROKEN = {
    "custom-rm": [
        ("async def hook(args, sample: list): return 1.0", "a list of rewards"),
        ("async def hook(args, sample): return {'score': 1}", "give --reward-key"),
        ("async def hook(args, sample): return float('nan')", "must be finite"),
        ("import asyncio\nasync def hook(args, sample): return await asyncio.sleep(9)", "did not finish within 1 s"),
        ("def hook(args, sample): return None", "a run with it starts: --custom-rm-path"),
        ("def hook(args, sample): return sample.label", "the reward is '5' (str); it must be a number"),
    ],
    "custom-generate": [
        ("async def hook(args, sample, params): return None", "must return a Sample"),
        (
            "async def hook(args, sample, params):\n    sample.status = sample.Status.COMPLETED\n    return sample",
            "tokens",
        ),
        ("async def hook(args, sample, params):\n    raise ValueError('odd')", "raised ValueError: odd"),
        (
            f"import copy\n{GENERATE}    sample.tokens, sample.response_length = [1, 2], 1\n"
            "    sample.status = sample.Status.COMPLETED\n    return [sample, copy.deepcopy(sample)]",
            "rollout_id",
        ),
    ],
    "dynamic-sampling-filter": [
        ("def hook(args, group): return 'keep'", "must return a DynamicFilterOutput or a bool")
    ],
    "buffer-filter": [
        ("def hook(args, rollout_id, buffer, n): return buffer[:n]", "left groups in the buffer"),
        ("def hook(args, rollout_id, buffer, n): return list(buffer)", "asked for 2 it gave 3"),
    ],
    "data-source": [
        (
            "class hook:\n    def __init__(self, args): pass\n    def get_samples(self, n): return []\n"
            "    def add_samples(self, g): pass\n    def save(self, r): pass\n    def load(self, r=None): pass\n"
            "    def __len__(self): return 1",
            "asked for 3 and 2 groups it gave 0",
        )
    ],
    "rollout-sample-hook": [("def hook(args, sample): return 3", "must return a Sample or None")],
    "rollout-sample-filter": [("def hook(args, groups): groups[0].pop()", "set sample.remove_sample instead")],
    "custom-reward-post-process": [("def hook(args, samples): return [1.0], [1.0]", "1 raw rewards for 8 samples")],
    "custom-convert-samples-to-train-data": [("def hook(args, samples): return {}", "split among trainer ranks")],
    "rollout-data-postprocess": [
        ("def hook(args, rollout_id, data): data['advantages'] = None", "advantages is a NoneType")
    ],
    "custom-advantage": [
        ("def hook(args, data): return data['rewards']", '["returns"], each a list of one tensor'),
        ("def hook(args, data): return data['rewards']", "advantages is not set; it returned a list"),
        ("def hook(args, data): data['advantages'] = data['returns'] = [1.0] * 8", "advantages is a list of float"),
        ("def hook(args, data): raise ValueError('odd')", "raised ValueError: odd"),
    ],
    "custom-loss": [
        ("def hook(args, batch, logits, r): return logits.detach().sum(), {}", "a finite loss with a gradient"),
        ("def hook(args, batch, logits, r): return logits, {}", "no scalar tensor"),
    ],
    "eval": [("def hook(args, rollout_id, source, evaluation): return {'a': {'scores': []}}", "has no rewards")],
}


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    name = f"broken_plug_in_{next(_numbers)}"
    (folder / f"{name}.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(folder)
    return f"{name}.hook"


@pytest.mark.parametrize(
    ("hook", "source", "says"), [(hook, *case) for hook, cases in BROKEN.items() for case in cases]
)
def test_a_broken_promise_is_found_and_named(tmp_path, monkeypatch, hook, source, says):
    path = write(tmp_path, monkeypatch, source)
    findings = examine(hook, path, Bench(tmp_path, ["--rm-timeout-s", "5"], timeout_s=1.0))
    assert any(says in failure for failure in findings.failures), findings.report()


def test_a_blocked_event_loop_is_a_warning(tmp_path, monkeypatch):
    findings = examine("custom-rm", write(tmp_path, monkeypatch, BLOCKING), Bench(tmp_path))
    assert not findings.failures and any("blocked for" in detail for _, _, detail in findings.steps)


ADVANTAGES = """
def hook(args, data):
    data["advantages"] = data["returns"] = [reward + 0 * one for reward, one in zip(data["rewards"], data["{}"])]
"""


@pytest.mark.parametrize(
    ("column", "flags", "verdicts"),
    [
        ("log_probs", [], ["ok", "warn"]),
        ("rollout_log_probs", [], ["ok"]),
        ("log_probs", ["--use-rollout-logprobs"], ["FAIL"]),
        ("rollout_log_probs", ["--use-rollout-logprobs"], ["ok"]),
    ],
)
def test_an_advantage_function_may_read_the_log_probs_that_its_run_has(tmp_path, monkeypatch, column, flags, verdicts):
    path = write(tmp_path, monkeypatch, ADVANTAGES.format(column))
    findings = examine("custom-advantage", path, Bench(tmp_path, flags))
    assert [verdict for verdict, *_ in findings.steps][1:] == verdicts, findings.report()


def test_every_hook_has_a_contract_and_is_found_by_its_short_name():
    assert set(CONTRACTS) == {hook.flag for hook in HOOKS}
    assert find_hook("custom_rm").flag == find_hook("--custom-rm-path").flag == "--custom-rm-path"
    assert find_hook("custom-generate").flag == "--custom-generate-function-path"
    assert find_hook("rollout-sample").flag == "--rollout-sample-hook-path"


@pytest.fixture
def root_level() -> Iterator[None]:
    """The command silences its process's log, which here is that of all tests."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.mark.usefixtures("root_level")
def test_the_command_tells_by_its_exit_code(tmp_path, monkeypatch, capsys):
    good = write(tmp_path, monkeypatch, "def hook(args, group): return True")
    bad = write(tmp_path, monkeypatch, "def hook(args): return True")
    assert main(["--hook", "dynamic-sampling-filter", "--path", good]) == 0
    assert "passed" in capsys.readouterr().out
    monkeypatch.setenv("SLIME_CONTRACT_DYNAMIC_SAMPLING_FILTER_PATH", bad)
    assert main([]) == 1
    assert "too many positional arguments" in capsys.readouterr().out
    monkeypatch.delenv("SLIME_CONTRACT_DYNAMIC_SAMPLING_FILTER_PATH")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
