"""Code shared by the pytest files of this folder: which plug-in is tested for a hook, and running a file as a
script."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.arguments.hooks import HOOKS
from tools.check import ENVIRONMENT, main
from tools.plugin_check.bench import Bench
from tools.plugin_check.examine import examine

EXAMPLE_FOLDER = Path(__file__).resolve().parents[1] / "plugin_package"
SETTINGS = EXAMPLE_FOLDER / "calculator_plugin" / "calculator.yaml"
EXAMPLES = {
    "--rollout-function-path": "rollouts.generate_rollout",
    "--eval-function-path": "rollouts.eval_function",
    "--data-source-path": "sources.TaggingSource",
    "--custom-generate-function-path": "generate.generate",
    "--rollout-sample-hook-path": "hooks.note_length",
    "--custom-rm-path": "rewards.custom_rm",
    "--dynamic-sampling-filter-path": "filters.dynamic_filter",
    "--buffer-filter-path": "filters.buffer_newest_first",
    "--rollout-sample-filter-path": "filters.drop_long_calls",
    "--rollout-all-samples-process-path": "filters.remember_all",
    "--custom-reward-post-process-path": "rewards.post_process",
    "--custom-convert-samples-to-train-data-path": "training.convert",
    "--custom-rollout-log-function-path": "hooks.log_rollout",
    "--custom-eval-rollout-log-function-path": "hooks.log_eval",
    "--rollout-data-postprocess-path": "training.postprocess",
    "--custom-advantage-function-path": "training.advantages",
    "--custom-loss-function-path": "training.loss",
    "--custom-tis-function-path": "training.truncated_is",
    "--custom-pg-loss-reducer-function-path": "training.pg_loss_reducer",
    "--custom-megatron-init-path": "training.megatron_init",
    "--custom-megatron-before-log-prob-hook-path": "training.before_log_prob",
    "--custom-megatron-before-train-step-hook-path": "training.before_train_step",
}
"""Plug-ins tested by default: a module and a name of the example package."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scratch space for the model, shared by the tests of a file."""
    return tmp_path_factory.mktemp("bench")


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example package can be imported."""
    monkeypatch.syspath_prepend(EXAMPLE_FOLDER)
    yield


def check_contract(flag: str, folder: Path) -> None:
    """The plug-in named by ``SLIME_CONTRACT_<FLAG>``, else the example, keeps the contract."""
    hook = next(hook for hook in HOOKS if hook.flag == flag)
    path = os.environ.get(ENVIRONMENT + hook.dest.upper())
    flags = os.environ.get(ENVIRONMENT + "FLAGS", "").split()
    if path is None:
        path = f"calculator_plugin.{EXAMPLES[flag]}"
        flags = ["--custom-config-path", str(SETTINGS)]
        if flag == "--custom-rm-path":
            flags += ["--reward-key", "score"]
    findings = examine(flag, path, Bench(folder, flags))
    assert not findings.failures, findings.report()


def run_as_script() -> None:
    """``python tests/plugin_contracts/test_plugin_x_contracts.py --some-path my.module.hook``"""
    sys.exit(main())
