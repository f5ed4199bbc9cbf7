"""``slime check`` recognizes plug-ins, and tries tools and environments as well as hooks."""

from __future__ import annotations

import itertools

import pytest

from slime.utils.errors import HookError
from tools.plugin_check.bench import Bench
from tools.plugin_check.examine import examine
from tools.plugin_check.recognise import recognise

_numbers = itertools.count()


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """A function from source text to the import path of its ``hook``."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        name = f"checked_plug_in_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(source + "\n")
        return f"{name}.hook"

    return write


@pytest.mark.parametrize(
    ("source", "flag", "settings"),
    [
        ("async def hook(args, sample): ...", "--custom-rm-path", ()),
        ("def hook(args, sample, **kwargs): ...", "--custom-rm-path", ()),
        ("async def hook(args, samples): ...", "--custom-rm-path", ("--group-rm",)),
        ("def hook(args, sample, rollout_id=None): ...", "--rollout-sample-hook-path", ()),
        ("async def hook(args, sample, params, evaluation=False): ...", "--custom-generate-function-path", ()),
        ("def hook(args, group): ...", "--dynamic-sampling-filter-path", ()),
        ("def hook(args, rollout_id, data_buffer, evaluation=False): ...", "--rollout-function-path", ()),
        ("def hook(args, batch, logits, sum_of_sample_mean): ...", "--custom-loss-function-path", ()),
        ("def hook(args, rollout_data): ...", "--custom-advantage-function-path", ()),
        ("def hook(args): ...", "--custom-megatron-init-path", ()),
        ('def hook(city: str):\n    """Return the weather."""', "--rollout-tools", ()),
        ("class hook:\n    def reset(self): ...\n    def step(self, a): ...", "--rollout-environment", ()),
        ("from slime.rollout.data_source import RolloutDataSource as hook", "--data-source-path", ()),
        ("from examples.custom_estimator.rloo import rloo as hook", "--advantage-estimator", ()),
    ],
)
def test_a_plug_in_is_known_by_its_signature(plug_in, source, flag, settings):
    found = recognise(plug_in(source))
    assert (found.flag, found.settings) == (flag, settings)


GAME = """
class hook:
    def reset(self, *, seed=None, options=None):
        return {begin}
    def step(self, action):
        return {taken}
"""


@pytest.mark.parametrize(
    ("flag", "source", "says"),
    [
        ("tools", "def hook(city):\n    return 1", "cannot be offered to the model"),
        ("environment", GAME.format(begin="'go'", taken="('on', 1.0, True, False, {})"), "no pair"),
        ("environment", GAME.format(begin="('go', {})", taken="('on', 1.0, True)"), "no five values"),
        ("environment", GAME.format(begin="('go', {})", taken="('on', None, True, False, {})"), "no number"),
        ("environment", GAME.format(begin="('go', {})", taken="(3, 1.0, False, False, {})"), "text or messages"),
    ],
)
def test_a_broken_tool_or_environment_is_found(tmp_path, plug_in, flag, source, says):
    findings = examine(flag, plug_in(source), Bench(tmp_path))
    assert any(says in failure for failure in findings.failures), findings.report()


ESTIMATOR = """
import torch
from slime.algorithms.advantages import Baseline, Estimator, group_relative_advantages

def baseline(reward_G, config):
    return Baseline({baseline}, torch.ones_like(reward_G))

hook = Estimator(compute=group_relative_advantages, group_baseline=baseline)
"""


@pytest.mark.parametrize(
    ("baseline", "says"),
    [
        ("reward_G.mean().expand_as(reward_G)", []),
        ("reward_G", ["all advantages are 0"]),
        ("reward_G / 0", ["must be finite numbers"]),
    ],
)
def test_an_estimator_gives_each_token_a_number_and_the_loss_a_gradient(tmp_path, plug_in, baseline, says):
    findings = examine("advantage-estimator", plug_in(ESTIMATOR.format(baseline=baseline)), Bench(tmp_path))
    assert [text in str(findings.failures) for text in says] == [True] * len(says), findings.report()
    assert bool(findings.failures) is bool(says), findings.report()


def test_a_tool_and_an_environment_that_work_pass(tmp_path, plug_in):
    tool = 'def hook(a: int, b: int) -> int:\n    """Add.\n\n    Args:\n        a: one.\n        b: two.\n    """\n'
    added = examine("tools", plug_in(tool + "    return a + b"), Bench(tmp_path))
    assert not added.failures and "hook(a=2, b=2)" in added.report()
    dice = "import random\n" + GAME.format(begin="(str(random.random()), {})", taken="('', 1, True, False, {})")
    played = examine("environment", plug_in(dice), Bench(tmp_path))
    assert not played.failures and "two resets with one seed differ" in played.report()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def hook(args, samples): ...", "may be for --custom-reward-post-process-path or .* with --group-rm"),
        ("def hook(a, b): ...", "fits no flag by the names of its parameters"),
        ("class hook: ...", "neither a data source .* nor an environment"),
        ("hook = 3", "is of type int; name a function"),
        ("other = 3", "has no hook"),
    ],
)
def test_what_may_be_several_things_is_asked_for(plug_in, source, says):
    with pytest.raises(HookError, match=says):
        recognise(plug_in(source))
