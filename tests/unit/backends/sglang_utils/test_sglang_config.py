from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from slime.backends.sglang_utils.sglang_config import load_sglang_config, resolve_sglang_config
from slime.utils.errors import ConfigError


def load(tmp_path: Path, text: str):
    path = tmp_path / "engines.yaml"
    path.write_text(text)
    return load_sglang_config(str(path), hf_checkpoint="/hf", rollout_num_gpus_per_engine=2)


def flags(**given) -> Namespace:
    defaults = {
        "sglang_config": None,
        "prefill_num_servers": None,
        "rollout_num_gpus": 8,
        "rollout_num_gpus_per_engine": 2,
        "hf_checkpoint": "/hf",
        "num_gpus_per_node": 8,
        "eval_in_background": False,
    }
    return Namespace(**defaults | given)


def test_a_whole_file_is_read_with_defaults_filled_in(tmp_path):
    config = load(
        tmp_path,
        """
sglang:
  - name: default
    server_groups:
      - {worker_type: prefill, num_gpus: 2}
      - {worker_type: decode, num_gpus: 4, num_gpus_per_engine: 4, overrides: {context-length: 8192}}
      - {worker_type: placeholder, num_gpus: 1}
  - name: judge
    model_path: /judge
    num_gpus_per_engine: 1
    engine_groups:
      - {worker_type: regular, num_gpus: 3}
""",
    )
    policy, judge = config.models
    assert config.num_gpus == 10
    assert (policy.model_path, policy.update_weights, policy.has_prefill_decode) == ("/hf", True, True)
    assert [g.num_gpus_per_engine for g in policy.server_groups] == [2, 4, 2]
    assert policy.server_groups[1].overrides == {"context_length": 8192}
    assert (judge.model_path, judge.update_weights, judge.num_gpus) == ("/judge", False, 3)


GROUP = "{worker_type: regular, num_gpus: 2}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sglang: []", "top key must be `sglang`"),
        (f"sglang: [{{server_groups: [{GROUP}]}}]", "`name` is None"),
        ("sglang: [{name: a}]", "`server_groups` is None"),
        ("sglang: [{name: a, server_groups: [{worker_type: fast, num_gpus: 2}]}]", "`worker_type` is 'fast'"),
        ("sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 0}]}]", "num_gpus is 0"),
        (
            f"sglang: [{{name: a, server_groups: [{GROUP}]}}, {{name: a, server_groups: [{GROUP}]}}]",
            "must be different",
        ),
        (
            "sglang: [{name: a, server_groups: [{worker_type: prefill, num_gpus: 2, overrides: {model_path: /b}}, "
            "{worker_type: decode, num_gpus: 2}]}]",
            "its groups serve /b, /hf; all groups of a model serve one checkpoint",
        ),
        (f"sglang: [{{name: a, update_weights: 3, server_groups: [{GROUP}]}}]", "must be true or false"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(tmp_path, text, message):
    with pytest.raises(ConfigError, match=f"^--sglang-config:? .*{message}"):
        load(tmp_path, text)


@pytest.mark.parametrize("group", ["", ", overrides: {model_path: ~/hf}"])
def test_the_home_folder_may_be_named_in_the_file(tmp_path, monkeypatch, group):
    monkeypatch.setenv("HOME", "")  # so that ~/hf is /hf, the --hf-checkpoint
    path = "" if group else "model_path: ~/hf, "
    groups = f"server_groups: [{{worker_type: regular, num_gpus: 2{group}}}]"
    [model] = load(tmp_path, f"sglang: [{{name: policy, {path}{groups}}}]").models
    assert (model.model_path, model.update_weights) == ("/hf", True)


def test_the_groups_may_give_the_path_that_they_serve(tmp_path):
    group = "{worker_type: %s, num_gpus: 2, overrides: {model-path: /b, context_length: 9}}"
    (model,) = load(
        tmp_path, f"sglang: [{{name: a, server_groups: [{group % 'prefill'}, {group % 'decode'}]}}]"
    ).models
    assert (model.model_path, model.update_weights) == ("/b", False)
    assert [dict(group.overrides) for group in model.server_groups] == [{"context_length": 9}] * 2
    (model,) = load(tmp_path, f"sglang: [{{name: a, model_path: /c, server_groups: [{group % 'regular'}]}}]").models
    assert model.model_path == "/b"
    left = "{worker_type: placeholder, num_gpus: 2}"
    (model,) = load(tmp_path, f"sglang: [{{name: a, server_groups: [{left}, {group % 'regular'}]}}]").models
    assert model.model_path == "/b"  # a placeholder group serves nothing


def test_the_model_that_evaluates_takes_no_updates_of_its_own(tmp_path):
    path = tmp_path / "engines.yaml"

    def models(*entries: str) -> list:
        path.write_text("sglang:\n" + "".join(f"  - {{{entry}}}\n" for entry in entries))
        num_gpus = 2 * "".join(entries).count("worker_type")
        args = flags(sglang_config=str(path), rollout_num_gpus=num_gpus, eval_in_background=True)
        return [(model.name, model.update_weights) for model in resolve_sglang_config(args).models]

    first, second = (f"name: {name}, server_groups: [{GROUP}]" for name in ("default", "eval"))
    assert models(first, second) == [("default", True), ("eval", False)]
    for wrong in ([first], [second, first], [first, "name: eval, server_groups: []"]):
        with pytest.raises(ConfigError, match=r"it needs one named eval with engines, after the one"):
            models(*wrong)
    with pytest.raises(ConfigError, match="give --sglang-config with a second model, named eval"):
        resolve_sglang_config(flags(eval_in_background=True))
    with pytest.raises(ConfigError, match="the model eval has the model_path /b, and gets the weights that are tr"):
        models(first, f"{second}, model_path: /b")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("{worker_type: encoder, num_gpus: 2}", "no regular or prefill engines"),
        ("{worker_type: decode, num_gpus: 2}, {worker_type: encoder, num_gpus: 2}", "no regular or prefill"),
        ("{worker_type: prefill, num_gpus: 2}, {worker_type: encoder, num_gpus: 2}", None),
    ],
)
def test_encoders_need_engines_that_ask_them(groups, message, tmp_path):
    path = tmp_path / "engines.yaml"
    path.write_text(f"sglang: [{{name: m, server_groups: [{groups}]}}]")
    args = flags(sglang_config=str(path), rollout_num_gpus=2 * groups.count("num_gpus"))
    if message is None:
        assert resolve_sglang_config(args).models[0].num_engines == 1
    else:
        with pytest.raises(ConfigError, match=message):
            resolve_sglang_config(args)
