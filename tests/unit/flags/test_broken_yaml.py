"""YAML values go through the command line's parser; an error in a file is one line with its place."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.flags.evaluation import eval_datasets_from_args
from slime.flags.overlay import read_yaml
from slime.flags.parse import parse_args, slime_validate_args
from slime.flags.parser import Parser
from slime.utils.errors import ConfigError
from tests.unit.flags.broken_configurations import Broken
from tests.unit.flags.test_broken_configurations import parse

MakeArgs = Callable[..., Namespace]


def told(call: Callable[..., Any], *given: Any) -> str:
    """The error of ``call``, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        call(*given)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1500, message
    return message


BROKEN_FILES = {
    "a key twice": (b"lr: 1e-6\nkl_coef: 0\nlr: 1e-5\n", "line 3: the key lr is there already in line 1"),
    "not closed": (b"a: 1\nb: [1,\n", "is not YAML: line 3"),
    "an object of Python": (b"a: !!python/object/apply:os.system ['true']\n", "is not YAML: line 1"),
    "not UTF-8": (b"a: \xff\xfe\n", "is not UTF-8 text"),
    "nested too deeply": (b"[" * 20000 + b"]" * 20000, "nested too deeply"),
    "a map that holds itself": (b"a: &a\n  b: *a\n", "hold themselves"),
    "anchors that multiply": (
        b"a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + b"".join(b"%c: &%c [%s]\n" % (i, i, b",".join([b"*%c" % (i - 1)] * 10)) for i in range(98, 106)),
        "its anchors written out",
    ),
    "two megabytes": (b"# " + b"x" * 2**21, "a file of settings has at most"),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_a_broken_file_is_named_with_its_line(name, tmp_path):
    content, says = BROKEN_FILES[name]
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    message = told(read_yaml, str(file), "--some-flag")
    assert message.startswith(f"--some-flag: {file} ") and says in message


@pytest.mark.parametrize("flag", ["--custom-config-path", "--megatron-config-path", "--eval-config"])
def test_every_flag_with_a_yaml_file_reads_it_strictly(flag, make_args, tmp_path):
    (tmp_path / "file.yaml").write_text("lr: 1\nlr: 2\n")
    for path, says in ((tmp_path / "file.yaml", "line 2: the key lr"), (tmp_path, "is not a file")):
        assert says in told(slime_validate_args, make_args(flag, str(path)))


def test_merged_maps_and_anchors_are_legal(tmp_path):
    file = tmp_path / "file.yaml"
    file.write_text("base: &base {a: 1, b: 2}\nmine: {<<: *base, b: 3}\n")
    assert read_yaml(str(file), "--x")["mine"] == {"a": 1, "b": 3}


OVERLAYS = {
    "lr: [1e-6]": "lr is ['1e-6']: '[\"1e-6\"]' is not a number",
    "lr: .inf": "lr is inf: inf is not a finite number",
    'colocate: "false"': "colocate is 'false': it must be true or false, without quotes",
    "num-rollout: 2.5": "num-rollout is 2.5: '2.5' is not a whole number",
    "save: ''": "save is '': '' is empty",
    "save: [a]": "save is ['a']: it must be a text or a number, not a list or a map",
    "rollout_stop: []": "rollout_stop is []: it must be a list of + values",
    "rollout_stop_token_ids: [1, x]": "rollout_stop_token_ids is [1, 'x']: 'x' is not a whole number",
    "train_env_vars: [1]": "train_env_vars is [1]: '[1]' is not JSON as it is needed (it holds a list, not an object)",
    "disable_rollout_global_dataset: true": "write the attribute that the flag sets, rollout_global_dataset: false",
    "1: a": "has the key 1; a key is the name",
    "__dict__: {}": "has the key '__dict__'",
    "__class__: x": "has the key '__class__'",
    "num_rollout: 1\nnum-rollout: 2": "num-rollout is given twice, in two spellings",
}


@pytest.mark.parametrize("text", OVERLAYS)
def test_a_value_of_the_overlay_is_refused_as_on_the_command_line(text, make_args: MakeArgs, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(text)
    args = make_args("--custom-config-path", str(tmp_path / "mine.yaml"))
    assert OVERLAYS[text] in told(slime_validate_args, args)


def test_values_of_the_overlay_become_what_the_flags_make_of_them(make_args: MakeArgs, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(
        "lr: 1e-5\nkl_loss_type: low_var_kl\nrollout_stop: END\nsave_interval: null\n"
        "apply_chat_template_kwargs: {enable_thinking: false}\nwandb_run_id: 2024-01-02\noffload_train: true\n"
        "rollout_sample_hook_path: [slime.rollout.sleep_rollout.sleep]\nn_samples_per_prompt: '4'\n"
        "my_plugin: {depth: .inf, lr: -1, colocate: 'false'}\nmax-turns: 3\n"
    )
    args = make_args("--custom-config-path", str(tmp_path / "mine.yaml"))
    from slime.flags.overlay import apply_overlay
    from slime.flags.parse import GROUPS

    apply_overlay(args, Parser(GROUPS))
    assert (args.lr, args.rollout_stop, args.save_interval) == (1e-5, ["END"], None)
    assert (args.apply_chat_template_kwargs, args.wandb_run_id) == ({"enable_thinking": False}, "2024-01-02")
    assert (args.offload_train, args.n_samples_per_prompt, args.max_turns) == (True, 4, 3)
    assert args.rollout_sample_hook_path == ["slime.rollout.sleep_rollout.sleep"]
    assert args.my_plugin == {"depth": float("inf"), "lr": -1, "colocate": "false"}


EVALS = {
    "temperature: -1": "temperature of {} is -1: -1 is not a finite number of 0 or more",
    "max_response_len: 1.5": "max_response_len of {} is 1.5: '1.5' is not a whole number",
    "n_samples_per_eval_prompt: true": "n_samples_per_eval_prompt of {} is True",
    "apply_chat_template: 'no'": "apply_chat_template of {} is 'no': it must be true or false, without quotes",
    "stop_token_ids: [-1]": "stop_token_ids of {} is [-1]",
    "input_key: [a]": "input_key of {} is ['a']: it must be a text or a number, not a list or a map",
    "multimodal_keys: {image: 3}": "multimodal_keys of {} is {{'image': 3}}",
}


@pytest.mark.parametrize("text", EVALS)
def test_a_value_of_the_eval_file_is_refused_as_on_the_command_line(text, make_args: MakeArgs, tmp_path: Path):
    file = tmp_path / "eval.yaml"
    for layout, where in (
        ("datasets: [{name: a, path: p, %s}]", "data set 'a'"),
        ("defaults: {%s}\ndatasets: [{name: a, path: p}]", "defaults"),
    ):
        file.write_text(layout % text)
        message = told(eval_datasets_from_args, make_args("--eval-config", str(file)))
        assert message.startswith("--eval-config: ") and EVALS[text].format(where) in message


def test_the_eval_file_says_what_cannot_work_together(make_args: MakeArgs, tmp_path: Path):
    file = tmp_path / "eval.yaml"
    for text, says in (
        ("datasets: [{name: a, path: p, min_new_tokens: 9, max_response_len: 8}]", "has min_new_tokens 9"),
        ("datasets: [{name: a, path: p}]\ndatasets: []", "line 2: the key datasets is there already"),
        ("datasets: [{name: a, path: p, temperature: '${no.such}'}]", "cannot be read"),
        ("datasets: [{name: a, path: p, temperature: '${'}]", "cannot be read"),
    ):
        file.write_text(text)
        assert says in told(eval_datasets_from_args, make_args("--eval-config", str(file)))


def test_numbers_of_the_eval_file_are_numbers(make_args: MakeArgs, tmp_path: Path):
    file = tmp_path / "eval.yaml"
    file.write_text("datasets: {a: {path: p, temperature: 1e-1, top_k: '5', stop: END, rm_type: null}}")
    [one] = eval_datasets_from_args(make_args("--eval-config", str(file)))
    assert (one.temperature, one.top_k, one.stop, one.rm_type) == (0.1, 5, ["END"], None)


GROUP = "sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 8, overrides: {%s}}]}]"
OVERRIDES = {
    "context_length: long": "the override context_length of the regular engines of a is 'long'",
    "context_length: '8192'": "is '8192', which ServerArgs does not convert; write 8192",
    "enable_dp_attention: 'false'": "is 'false': it must be true or false, without quotes",
    "cuda_graph_bs_decode: 8": "is 8, which ServerArgs does not convert; write [8]",
    "no_such_field: 1": "the override no_such_field of the regular engines of a is no field of the installed SGLang",
    "context_length: 8, context-length: 9": "the override context_length is given twice, in two spellings",
}
LAYOUTS = {
    "sglang: {a: {}}": "the top key must be `sglang`, with a list of models under it",
    "sglang: [{name: a, server_groups: 3}]": "`server_groups` is 3; it must be a list",
    "sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: many}]}]": "num_gpus is 'many'",
    "sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 8, overrides: x}]}]": "`overrides` is 'x'",
    "sglang: [{name: a, model_path: [x], server_groups: []}]": "`model_path` is ['x']",
    "sglang: [{name: a, server_groups: [], engine_groups: []}]": "has both server_groups and engine_groups",
    "sglang: [{1: a, b: 2}]": "unknown key 1, b",
}


@pytest.mark.parametrize("text", [*(GROUP % text for text in OVERRIDES), *LAYOUTS])
def test_a_broken_layout_of_engines_is_refused(text, tmp_path: Path):
    says = LAYOUTS.get(text) or next(OVERRIDES[one] for one in OVERRIDES if GROUP % one == text)
    case = Broken(
        mistake="a layout", flags="--sglang-config $folder/engines.yaml", files={"engines.yaml": text}, says=(says,)
    )
    message = told(parse, case, tmp_path)
    assert "engines.yaml" in message and says in message


def test_overrides_that_sglang_takes_are_accepted(tmp_path: Path):
    text = "context_length: 8192, mem_fraction_static: 0.5, cuda_graph_bs_decode: [1, 2], cuda_graph_max_bs: 8, "
    text += "disable_radix_cache: true, chunked_prefill_size: -1, deepep_mode: auto, context-length: 4096"
    case = Broken(
        mistake="none",
        flags="--sglang-config $folder/e.yaml",
        files={"e.yaml": GROUP % text.rsplit(",", 1)[0]},
        says=(),
    )
    parse(case, tmp_path)


ROLES = {
    "min_lr: 0, min-lr: 1": "min-lr is given twice, in two spellings",
    "lr: [1]": "lr of the actor is [1]: '[1]' is not a number",
    "min_lr: -1": "min_lr of the actor is -1: -1 is not a finite number of 0 or more",
    "tensor_model_parallel_size: 0": "tensor_model_parallel_size of the actor is 0",
    "sequence_parallel: 'true'": "sequence_parallel of the actor is 'true': it must be true or false",
    "__class__: x": "has the key '__class__'",
    "min_lr: 1": "--min-lr is 1, above the peak of the learning rate",
}


@pytest.mark.parametrize("text", ROLES)
def test_an_override_of_a_role_is_refused_as_on_the_command_line(text, tmp_path: Path):
    files = {"roles.yaml": f"megatron: [{{name: a, role: actor, overrides: {{{text}}}}}]"}
    case = Broken(mistake="a role", flags="--megatron-config-path $folder/roles.yaml", files=files, says=())
    assert ROLES[text] in told(parse, case, tmp_path)


def test_a_flag_of_the_drivers_own_is_checked_in_the_overlay(command, tmp_path):
    (tmp_path / "mine.yaml").write_text("depth: deep")

    def add(parser):
        parser.add_argument("--depth", type=int, default=1)

    words = [*command, "--custom-config-path", str(tmp_path / "mine.yaml")]
    assert "depth is 'deep': 'deep' is not a whole number" in told(parse_args, add, words)
