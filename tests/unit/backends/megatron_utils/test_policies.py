"""The origin of the reference's weights."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import policies
from slime.backends.megatron_utils.policies import ModelSwitch, Policies
from slime.flags.algorithm import FrozenPolicy
from slime.utils.errors import ConfigError
from tests.flag_values import args_with

FRESH = {"finetune": True, "load": "hf", "earlier_load": None, "ref_load": "hf", "ckpt_step": None}


def load(
    monkeypatch: pytest.MonkeyPatch, *, is_from_load: bool = True, iteration: int = 0, **changed: Any
) -> tuple[torch.nn.Linear, ModelSwitch, list[str]]:
    """Load the policies of a model of ones; a loaded checkpoint holds twos."""
    read: list[str] = []
    model = torch.nn.Linear(3, 2)
    torch.nn.init.ones_(model.weight)

    def load_weights(
        args: Namespace, chunks: list[torch.nn.Module], root: str, added: None, *, flag: str, step: int, step_flag: str
    ) -> None:
        read.append(root)
        torch.nn.init.constant_(model.weight, 2)

    monkeypatch.setattr(policies.checkpoint, "load_weights", load_weights)
    switch = ModelSwitch([model])
    kept = Policies(args_with(**FRESH | changed), [model], switch)
    kept.load(with_ref=True, is_from_load=is_from_load, iteration=iteration)
    return model, switch, read


def test_a_reference_that_the_actor_starts_from_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, switch, read = load(monkeypatch)
    assert read == []
    torch.nn.init.constant_(model.weight, 5)  # a step
    switch.backup("actor")
    switch.switch_to("ref")
    assert model.weight.eq(1).all()
    switch.switch_to("actor")
    assert model.weight.eq(5).all()


@pytest.mark.parametrize(
    "changed",
    [{"is_from_load": False}, {"ref_load": "other"}, {"finetune": False}, {"ckpt_step": 4}],
    ids=["from a copy in memory", "another folder", "a run that goes on", "another step"],
)
def test_any_other_reference_is_read(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    model, switch, read = load(monkeypatch, **changed)
    assert read == [changed.get("ref_load", "hf")]
    assert model.weight.eq(1).all(), "the actor is in the model afterwards"
    switch.switch_to("ref")
    assert model.weight.eq(2).all()


@pytest.mark.parametrize(
    ("iteration", "weight", "sources"),
    [(0, 2, ["hf"]), (1, 1, []), (2, 2, ["iter_0000001"]), (4, 2, ["hf"])],
    ids=["not updated yet", "updated by what is loaded", "updated by an earlier save", "that save is gone"],
)
@pytest.mark.parametrize("how", [{"finetune": False}, {"is_from_load": False}], ids=["resumed", "from a copy"])
def test_a_run_that_goes_on_has_the_reference_that_it_had(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    iteration: int,
    weight: int,
    sources: list[str],
    how: dict[str, Any],
) -> None:
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001/metadata.json").touch()
    folders = {"save": tmp_path, "load": "hf" if "is_from_load" in how else str(tmp_path), "ref_update_interval": 2}
    model, switch, read = load(monkeypatch, iteration=iteration, **folders, **how)
    assert [Path(folder).name for folder in read] == sources
    switch.switch_to("ref")
    assert model.weight.eq(weight).all()
    assert ("the actor of rollout 3" in caplog.text) == (iteration == 4)


@pytest.mark.parametrize(("load_arg", "flag"), [("ref_load", "--ref-load"), ("one_of_several", "--one-of-several")])
def test_a_policy_that_is_not_there_is_named_by_the_flag_that_gave_it(load_arg: str, flag: str) -> None:
    asked = [FrozenPolicy("other", load_arg, "gone", "other_step", None, "other_log_probs")]
    model = torch.nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=f"{flag}: gone is not a folder"):
        kept = Policies(args_with(**FRESH, frozen_policies=asked), [model], ModelSwitch([model]))
        kept.load(with_ref=False, is_from_load=True, iteration=0)


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("b", {"is_from_load": False, "finetune": False}),
        ("a", {"is_from_load": False, "finetune": False}),
        ("a", {"is_from_load": True, "finetune": False, "load": "b", "earlier_load": "a"}),
        (None, {"is_from_load": False, "finetune": True}),
    ],
    ids=["copy, saved since", "copy, saved before", "checkpoint, saved before", "another run's"],
)
def test_a_run_with_two_folders_finds_the_reference_in_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str | None, how: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = Path(place or "a", "iter_0000001")
    saved.mkdir(parents=True)
    (saved / "metadata.json").touch()
    _, _, read = load(monkeypatch, iteration=2, **{"load": "a", "save": "b", "ref_update_interval": 2, **how})
    assert read == (["hf"] if place is None else [str(saved)])


def test_a_step_that_is_not_there_is_named_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    asked = [FrozenPolicy("teacher", "opd_teachers", str(tmp_path), "opd_teacher_ckpt_step", 2, "other_log_probs")]
    model = torch.nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="no checkpoint iter_0000002, .* those: --opd-teacher-ckpt-step"):
        kept = Policies(args_with(**FRESH, frozen_policies=asked), [model], ModelSwitch([model]))
        kept.load(with_ref=False, is_from_load=True, iteration=0)


@pytest.mark.parametrize(
    ("changed", "is_warned"),
    [({}, False), ({"finetune": False}, True), ({"finetune": True, "is_from_load": False}, True)],
)
def test_a_run_that_goes_on_says_that_the_old_actor_is_not_the_one_that_drew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changed: dict[str, bool], is_warned: bool
) -> None:
    load(monkeypatch, keep_old_actor=True, **changed)
    assert ("no checkpoint has the weights that drew" in caplog.text) == is_warned
