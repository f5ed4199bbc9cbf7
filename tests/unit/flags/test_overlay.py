"""--custom-config-path overrides the flags before anything is derived."""

from __future__ import annotations

import pytest

from slime.flags.first_look import first_look
from slime.flags.parse import slime_validate_args
from slime.utils.errors import ConfigError


@pytest.fixture
def overlay(tmp_path):
    def write(text: str) -> list[str]:
        (tmp_path / "overlay.yaml").write_text(text)
        return ["--custom-config-path", str(tmp_path / "overlay.yaml")]

    return write


def test_derived_values_see_the_overlay(make_args, overlay):
    args = make_args(*overlay("num_steps_per_rollout: 4\neps-clip: 0.1\n"))
    slime_validate_args(args)
    assert (args.global_batch_size, args.eps_clip_high) == (2, 0.1)


def test_other_keys_are_settings_of_plug_ins(make_args, overlay):
    args = make_args(*overlay("tis_mode: truncate\nmax_turns: 3\nnested: {a: [1]}\n"))
    slime_validate_args(args)
    assert (args.tis_mode, args.max_turns, args.nested) == ("truncate", 3, {"a": [1]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "holds a list; a mapping of keys to values is needed"),
        ("custom_config_path: x\n", "overlays do not nest"),
        ("weight_push_failure: refill\n", "--weight-push-failure refill has no effect without --use-fault-tolerance"),
    ],
)
def test_a_wrong_overlay_is_refused(make_args, overlay, text, says):
    with pytest.raises(ConfigError) as caught:
        slime_validate_args(make_args(*overlay(text)))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("words", "name", "reason"),
    [
        ("--advantage-estimator ppo", "use_critic", "--advantage-estimator ppo needs a critic's values"),
        ("--use-rollout-routing-replay", "use_routing_replay", "--use-rollout-routing-replay replays"),
        ("--load-debug-rollout-data x_{rollout_id}.pt", "debug_train_only", "--load-debug-rollout-data trains"),
        ("", "apply_chat_template", "input (--input-key) of "),
    ],
)
def test_a_written_false_that_cannot_work_is_refused(
    words, name, reason, make_args, command, overlay, prompt_file, tmp_path
):
    prompt_file.write_text('{"input": [{"role": "user", "content": "1+1="}], "label": "2"}\n' * 4)
    (tmp_path / "run.yaml").write_text(f"{name}: false\n")
    flag = f"--{name.replace('_', '-')}"
    for given in (overlay(f"{name}: false\n"), first_look([str(tmp_path / "run.yaml"), *command])[:1]):
        with pytest.raises(ConfigError) as caught:
            slime_validate_args(make_args(*words.split(), *given))
        assert flag in str(caught.value) and " is false, and " in str(caught.value) and reason in str(caught.value)


@pytest.mark.parametrize("text", ["offload_train: false\n", "offload: false\n"])
def test_a_critic_has_the_trainer_sleep_whatever_is_written_as_in_upstream(text, make_args, overlay, caplog):
    args = make_args("--advantage-estimator", "ppo", *overlay(text))
    slime_validate_args(args)
    assert args.offload_train
    assert (
        "--offload-train is on although false is given for it: --advantage-estimator ppo has a critic" in caplog.text
    )


def test_a_run_file_turns_off_what_follows_from_another_flag(command, tmp_path):
    (tmp_path / "run.yaml").write_text("colocate: true\noffload: false\nlog-expert-load: false\n")
    assert first_look([str(tmp_path / "run.yaml"), *command])[:3] == [
        "--colocate",
        "--no-offload",
        "--no-log-expert-load",
    ]
