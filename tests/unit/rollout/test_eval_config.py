"""Evaluation data sets: precedence of values, and refusals."""

import pytest

from slime.flags.evaluation import (
    EvalDatasetConfig,
    build_eval_dataset_configs,
    eval_datasets_from_args,
)
from slime.utils.errors import ConfigError
from tests.flag_values import args_with


def make_args(**values):
    given = {
        "apply_chat_template": True,
        "eval_top_p": 0.7,
        "n_samples_per_eval_prompt": 4,
        "n_samples_per_prompt": 8,
        "rollout_stop": ["END"],
    }
    return args_with(**given | values)


def test_a_value_comes_from_the_entry_then_the_defaults_then_eval_flags_then_rollout_flags():
    raw = [{"name": "a", "path": "a.jsonl", "temperature": 0.0}, {"name": "b", "path": "b.jsonl"}]
    first, second = build_eval_dataset_configs(make_args(), raw, {"temperature": 0.5, "rm_type": "math"})
    assert (first.temperature, second.temperature) == (0.0, 0.5)
    assert second.top_p == 0.7
    assert second.n_samples_per_eval_prompt == 4
    assert second.input_key == "input"
    assert second.apply_chat_template is True
    assert second.stop == ["END"]
    assert second.rm_type == "math"
    [plain] = build_eval_dataset_configs(make_args(), raw[1:], None)
    assert plain.temperature == 1.0


@pytest.mark.parametrize(
    ("entry", "defaults", "flags", "grader"),
    [
        ({"rm_type": "math"}, {}, {"custom_rm_path": "my.rm"}, ("math", None)),
        ({"rm_type": "math"}, {}, {"eval_custom_rm_path": "my.rm"}, ("math", None)),
        ({"rm_type": "math"}, {"custom_rm_path": "my.rm"}, {}, ("math", None)),
        ({}, {"rm_type": "math"}, {"custom_rm_path": "my.rm"}, ("math", None)),
        ({"custom_rm_path": "my.rm"}, {"rm_type": "math"}, {"custom_rm_path": "other.rm"}, ("math", "my.rm")),
        ({"rm_type": "math", "custom_rm_path": "my.rm"}, {}, {}, ("math", "my.rm")),
        ({}, {}, {"custom_rm_path": "my.rm"}, (None, "my.rm")),
    ],
)
def test_the_grader_of_a_data_set_wins_over_a_function_of_the_run(entry, defaults, flags, grader):
    [config] = build_eval_dataset_configs(make_args(**flags), [{"name": "a", "path": "a.jsonl", **entry}], defaults)
    assert (config.rm_type, config.custom_rm_path) == grader


def test_names_and_paths_come_in_pairs_and_a_single_path_is_aime():
    pairs = eval_datasets_from_args(make_args(eval_prompt_data=["x", "x.jsonl", "y", "y.jsonl@[0:8]"]))
    assert [(config.name, config.path) for config in pairs] == [("x", "x.jsonl"), ("y", "y.jsonl@[0:8]")]
    [single] = eval_datasets_from_args(make_args(eval_prompt_data=["/data/aime.jsonl"]))
    assert (single.name, single.path) == ("aime", "/data/aime.jsonl")
    assert eval_datasets_from_args(make_args()) == []
    with pytest.raises(ConfigError, match="--eval-prompt-data has 3 values .x x.jsonl y."):
        eval_datasets_from_args(make_args(eval_prompt_data=["x", "x.jsonl", "y"]))


@pytest.mark.parametrize(
    "text",
    [
        "datasets: [{name: a, path: a.jsonl, top_k: 5}]",
        "eval: {defaults: {top_k: 5}, datasets: {a: {path: a.jsonl}}}",
        "k: 5\neval: {datasets: [{name: a, path: a.jsonl, top_k: '${k}'}]}",
    ],
)
def test_a_yaml_file_lists_or_maps_data_sets_at_its_root_or_under_eval(tmp_path, text):
    path = tmp_path / "eval.yaml"
    path.write_text(text)
    [config] = eval_datasets_from_args(make_args(eval_config=str(path)))
    assert (config.name, config.path, config.top_k) == ("a", "a.jsonl", 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets: []", "has no datasets"),
        ("- 1", "has no datasets"),
        ("defaults: {path: p}\ndatasets: [{name: a, path: p}]", "defaults has unknown keys path"),
        ("datasets: [{name: a}]", "has path ''"),
        ("datasets: [{path: a}]", "has name ''"),
        (
            "datasets: [{name: a, path: p, min_eval_samples: 0}]",
            "min_eval_samples .* is 0: 0 is not a whole number of 1 or more",
        ),
        ("datasets: [{name: a, path: p, metadata_overrides: 1}]", "metadata_overrides of 'a' is 1"),
        ("datasets: [1]", "0 is 1; it must be a map"),
        ("datasets: 3", "datasets is 3; it must be a list or a map"),
    ],
)
def test_a_malformed_file_says_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "eval.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        eval_datasets_from_args(make_args(eval_config=str(path)))


def test_overrides_and_grader_are_put_over_the_metadata_of_a_copy():
    config = EvalDatasetConfig(name="a", path="p", rm_type="math", metadata_overrides={"x": 1})
    metadata = {"x": 0, "y": 2}
    assert config.inject_metadata(metadata) == {"x": 1, "y": 2, "rm_type": "math"}
    assert metadata == {"x": 0, "y": 2}
    assert EvalDatasetConfig(name="a", path="p").inject_metadata(None) == {}
