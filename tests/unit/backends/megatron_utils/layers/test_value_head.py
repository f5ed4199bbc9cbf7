"""The critic's output layer: its result, and the origin of its weights."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.checkpoint import load_checkpoint, publish_checkpoint, save_checkpoint
from slime.backends.megatron_utils.layers.value_head import ValueHead, find_value_head
from slime.backends.megatron_utils.model import ModelChunks, build_model
from slime.utils.errors import DataError
from tests.unit.backends.megatron_utils.megatron_case import hf_flags, parse, start_single_process, write_hf_model


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def hf_folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    write_hf_model(folder, "qwen3", tie_word_embeddings=request.param)
    return folder


@pytest.fixture
def args(hf_folder: Path, tmp_path: Path) -> Namespace:
    args = parse(*hf_flags(hf_folder), "--load", str(tmp_path / "run"))
    args.save = str(tmp_path / "run")
    start_single_process(args)
    return args


def saved(args: Namespace, model: ModelChunks) -> None:
    save_checkpoint(args, 3, model, None, None)
    publish_checkpoint(args.save, 3)


def build(args: Namespace, role: str) -> ModelChunks:
    return build_model(args, role, wrap_with_ddp=False)


def state(model: ModelChunks) -> dict[str, torch.Tensor]:
    return {
        name: value.clone()
        for name, value in unwrap_model(model)[0].state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def critic_args(args: Namespace) -> Namespace:
    return Namespace(**{**vars(args), "untie_embeddings_and_output_weights": True})


def test_a_critic_takes_all_of_an_actors_checkpoint_but_the_head(args):
    actor = build(args, "actor")
    saved(args, actor)
    critic = build(critic_args(args), "critic")
    head = find_value_head(critic)
    fresh = head.weight.clone()
    with torch.no_grad():
        head.weight.fill_(7)
        head.bias.fill_(7)
    assert load_checkpoint(_weights_only(args), critic) == 0
    ours, theirs = state(critic), state(actor)
    assert torch.equal(ours["output_layer.weight"], fresh) and ours["output_layer.bias"].item() == 0
    shared = [name for name in ours if not name.startswith("output_layer.")]
    assert len(shared) > 10 and all(torch.equal(ours[name], theirs[name]) for name in shared)


def _weights_only(args: Namespace) -> Namespace:
    return Namespace(**{**vars(critic_args(args)), "finetune": True})


def test_a_critic_takes_all_of_a_hugging_face_folder_but_the_head(args, hf_folder):
    args.load = str(hf_folder)
    actor, critic = build(args, "actor"), build(critic_args(args), "critic")
    fresh = find_value_head(critic).weight.clone()
    load_checkpoint(args, actor)
    load_checkpoint(critic_args(args), critic)
    ours, theirs = state(critic), state(actor)
    assert torch.equal(ours["output_layer.weight"], fresh)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if not name.startswith("output_layer."))


def test_an_actor_does_not_take_a_critics_checkpoint(args):
    saved(critic_args(args), build(critic_args(args), "critic"))
    with pytest.raises(DataError, match="output_layer"):
        load_checkpoint(args, build(args, "actor"))


def test_the_head_is_the_same_wherever_it_is_drawn_and_as_wide_as_asked(args):
    head = find_value_head(build(args, "critic"))
    config = unwrap_model(build(args, "critic"))[0].config
    torch.manual_seed(99)
    assert torch.equal(head.weight, ValueHead(config, args.seed).weight)
    assert not torch.equal(head.weight, ValueHead(config, args.seed + 1).weight)
    config.hidden_size, config.init_method_std = 40_000, 0.05
    assert ValueHead(config, 1).weight.std().item() == pytest.approx(0.05, rel=0.02)
