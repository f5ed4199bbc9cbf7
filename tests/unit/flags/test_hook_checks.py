"""A plug-in that cannot be called as documented is refused before anything starts, with the reason."""

from __future__ import annotations

import itertools
from argparse import Namespace
from types import SimpleNamespace

import pytest

from slime.flags.hook_checks import (
    check_hooks_on_driver,
    check_import,
    check_source,
    check_spec_source,
    named_hooks,
)
from slime.flags.hooks import HOOKS, Hook
from slime.utils.errors import HookError

BY_FLAG = {hook.flag: hook for hook in HOOKS}
_module_numbers = itertools.count()


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Write source into a fresh module; returns its import path."""

    def write(source: str, attribute: str = "hook") -> str:
        name = f"plug_in_{next(_module_numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        return f"{name}.{attribute}"

    return write


def check(flag: str, path: str) -> None:
    hook = BY_FLAG[flag]
    (check_import if hook.side == "rollout" else check_source)(hook, path, flag)


@pytest.mark.parametrize(
    ("flag", "source"),
    [
        ("--rollout-function-path", "def hook(args, rollout_id, data_buffer, evaluation=False): ..."),
        ("--rollout-function-path", "def hook(args, rollout_id, source, *, evaluation): ..."),
        ("--custom-generate-function-path", "async def hook(args, sample, sampling_params): ..."),
        ("--custom-generate-function-path", "async def hook(args, sample, sampling_params, evaluation=False): ..."),
        ("--custom-rm-path", "async def hook(args, sample, **kwargs): ..."),
        ("--rollout-sample-hook-path", "def hook(args, sample): ..."),
        ("--rollout-sample-hook-path", "async def hook(args, sample, *, rollout_id): ..."),
        ("--dynamic-sampling-filter-path", "def hook(args, samples, **kwargs): ..."),
        ("--custom-tis-function-path", "def hook(args, *, pg_loss, rollout_log_probs, **kwargs): ..."),
        ("--custom-model-provider-path", "def hook(pre_process, post_process): ..."),
        ("--custom-model-provider-path", "def hook(pre_process=True, post_process=True, vp_stage=None): ..."),
        ("--rollout-data-postprocess-path", "import missing_library\ndef hook(args, rollout_id, rollout_data): ..."),
        ("--custom-megatron-init-path", "from missing_library import hook"),
        ("--custom-megatron-init-path", "import os\nmatch os.name:\n    case 'posix':\n        def hook(args): ..."),
        ("--custom-megatron-init-path", "for hook in (print,):\n    pass"),
        ("--custom-megatron-init-path", f"total = {' + '.join(['1'] * 2000)}\n(hook, [*rest]) = print, [total]"),
    ],
)
def test_what_fits_is_accepted(plug_in, flag, source):
    check(flag, plug_in(source))


@pytest.mark.parametrize(
    ("flag", "source", "says"),
    [
        (
            "--rollout-data-postprocess-path",
            "def hook(args, samples): ...",
            "hook(args, samples) cannot be called as (args, rollout_id, rollout_data): too many positional arguments. "
            "See RolloutDataPostprocess in slime/flags/hooks.py.",
        ),
        (
            "--rollout-function-path",
            "def hook(args, rollout_id, data_source): ...",
            "cannot be called as (args, rollout_id, data_source, evaluation=...): got an unexpected keyword argument",
        ),
        ("--custom-rm-path", "async def hook(args, sample, key): ...", "missing a required argument: 'key'"),
        (
            "--custom-generate-function-path",
            "def hook(a, s, p): ...",
            "is a plain function, but its result is awaited",
        ),
        ("--custom-rm-path", "hook = 3", "is a int and cannot be called"),
        ("--custom-rm-path", "raise ValueError('no key')", "raised ValueError: no key"),
        ("--custom-rm-path", "import sys\nsys.exit(0)", "raised SystemExit: 0"),
        ("--custom-rm-path", "other = 3", "has no hook. Correct the path"),
        ("--custom-rm-path", "def hooks(args, sample): ...", "has no hook. Did you mean hooks? Correct the path"),
        ("--dynamic-sampling-filter-path", "async def hook(args, samples): ...", "nobody awaits it"),
        ("--data-source-path", "class hook:\n    def __init__(self, args): ...", "lacks get_samples, add_samples"),
        ("--custom-megatron-init-path", "def other(args): ...", "has no hook. Correct the path"),
        ("--custom-megatron-init-path", "def hooks(args): ...", "has no hook. Did you mean hooks? Correct the path"),
        ("--custom-megatron-init-path", "def hook(args:", "is no Python: SyntaxError: '(' was never closed"),
        ("--custom-megatron-init-path", "async def hook(args): ...", "nobody awaits it"),
        ("--custom-advantage-function-path", "if True:\n    def hook(args): ...", "too many positional arguments"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(plug_in, flag, source, says):
    path = plug_in(source)
    with pytest.raises(HookError) as caught:
        check(flag, path)
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{flag}: ")


def test_a_module_that_is_not_there_is_answered_with_the_name_of_one_that_is(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_mine.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HookError, match="Did you mean rewards_of_mine?") as caught:
        check("--custom-rm-path", "reward_of_mine.hook")
    assert "File" not in str(caught.value)  # no frame belongs to the user
    with pytest.raises(HookError, match="rewards_of_mine.py") as caught:
        check("--custom-rm-path", "rewards_of_mine.hook")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("path", ["hook", "mod.py:hook", "dir/mod.hook", "my-mod.hook", ""])
def test_only_dotted_paths_are_paths(path):
    with pytest.raises(HookError, match="package.module.attribute, with dots only"):
        check("--custom-rm-path", path)


def test_a_wrapped_function_is_judged_by_what_it_returns(plug_in):
    source = """
import functools
def retry(f):
    @functools.wraps(f)
    def again(*args, **kwargs):
        return f(*args, **kwargs)
    return again
def anonymous(f):
    return lambda *args: f(*args)
@retry
async def hook(args, sample): ...
@anonymous
async def other(args, sample): ...
"""
    check("--custom-rm-path", plug_in(source))
    check("--custom-rm-path", plug_in(source, "other"))


def test_the_trainers_plug_ins_are_not_imported_on_the_driver(plug_in):
    check("--custom-loss-function-path", plug_in("1 / 0\ndef hook(args, batch, logits, reducer): ..."))


def no_hooks(**named: object) -> Namespace:
    values: dict[str, object] = {hook.dest: [] if hook.repeatable else None for hook in HOOKS}
    values |= {"eval_datasets": [], "plugin_import_timeout_s": 60.0}
    return Namespace(**values | named)


def test_plug_ins_of_eval_data_sets_are_checked_under_their_name(plug_in):
    path = plug_in("async def hook(args): ...")
    dataset = SimpleNamespace(name="aime", custom_rm_path=path, custom_generate_function_path=None)
    with pytest.raises(HookError, match="custom_rm_path of eval data set aime: .* too many positional arguments"):
        check_hooks_on_driver(no_hooks(eval_datasets=[dataset]))


def test_each_path_of_a_repeated_flag_is_named():
    named = list(named_hooks(no_hooks(rollout_sample_hook_path=["a.b", "c.d"])))
    assert [(hook.flag, path) for hook, path, _ in named] == [
        ("--rollout-sample-hook-path", "a.b"),
        ("--rollout-sample-hook-path", "c.d"),
    ]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.flag)
def test_every_contract_has_a_description_and_a_call(hook: Hook):
    assert (hook.protocol.__doc__ or "").strip()
    assert hook.protocol.__call__.__annotations__["return"]


def test_the_model_spec_is_looked_for_without_importing_it(plug_in):
    path = plug_in("1 / 0\ndef get_spec(args, config, vp_stage): ...", "get_spec")
    module, name = path.rsplit(".", 1)
    broken = plug_in("def get_spec(:", "get_spec").split(".")
    check_hooks_on_driver(no_hooks(spec=[module, name]))
    check_spec_source(None)
    for spec, says in (
        ([module, "other"], "has no other"),
        (["nowhere.at_all", "f"], "nowhere"),
        (broken, "--spec: .* is no Python: SyntaxError"),
    ):
        with pytest.raises(HookError, match=says):
            check_hooks_on_driver(no_hooks(spec=list(spec)))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("print(sample)", "returns None only"),
        ("x = lambda: 1\n    def inner():\n        return 1\n    inner()", "returns None only"),
        ("return 'yes' if sample else None", "returns None and str only"),
        ("if sample:\n        return f'{sample}'\n    return", "returns None and str only"),
        ("return 1.0 if sample else None", None),
        ("return score(sample)", None),
        ("raise RuntimeError('no server')", None),
        ("if sample:\n        return 0\n    print(sample)", None),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_reward_function_that_returns_no_reward_is_refused_without_a_call(plug_in, make_args, kind, body, said):
    path = plug_in(f"{kind} hook(args, sample, **kwargs):\n    {body}\n")
    args = make_args("--custom-rm-path", path)
    args.eval_datasets, args.runs_here = [], True
    if said is None:
        return check_hooks_on_driver(args)
    with pytest.raises(HookError, match=rf"--custom-rm-path: {path} {said}; .*`slime check {path}`"):
        check_hooks_on_driver(args)
    args.custom_reward_post_process_path = plug_in("def hook(args, samples): ...")
    check_hooks_on_driver(args)


def test_a_plug_in_may_refuse_a_run_that_cannot_work_with_it(plug_in):
    source = (
        "async def hook(args, sample, sampling_params): ...\n"
        "def refuse(args): raise ValueError(f'no sandbox for {args.who}')\n"
        "hook.check_args = refuse\n"
    )
    args = no_hooks(custom_generate_function_path=plug_in(source), runs_here=True, who="anybody")
    with pytest.raises(ValueError, match="no sandbox for anybody"):
        check_hooks_on_driver(args)
    args.runs_here = False  # the machine that plans is not the machine that runs
    check_hooks_on_driver(args)
