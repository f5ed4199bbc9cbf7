"""Images in packed sequences: places, positions, refusals, and a frozen tower."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils import initialize
from slime.backends.megatron_utils.data import forward_arguments
from slime.backends.megatron_utils.flags.hf_config_check import read_hf_config
from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.hf_to_megatron.tensors import in_layout_of
from slime.backends.megatron_utils.layers.mtp import GPTModelWithMtp
from slime.backends.megatron_utils.model_provider import get_model_provider
from slime.backends.megatron_utils.models import find_weight_map
from slime.backends.megatron_utils.policies import ModelSwitch
from slime.backends.megatron_utils.train_metrics import image_patches
from slime.compose import parts
from slime.ext.vision.flags import complete_vision
from slime.ext.vision.images import ImageBatch, place_images
from slime.ext.vision.towers import tower_of
from slime.ext.vision.transform import JoinedInputs, VisionTower
from slime.ray.parts import load_all
from slime.utils.errors import ConfigError, DataError
from slime.utils.processing_utils import full_pixels
from tests.matrix import trainer
from tests.matrix.batch import make_train_data
from tests.matrix.case import FamilyCase, load_cases, read_config, read_tensors
from tests.matrix.families import glm4v, qwen3_5_vl, qwen3_vl
from tests.matrix.parity import one_process_world
from tests.matrix.references.vision import END, IMAGE, START
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process
from tests.unit.backends.megatron_utils.test_hf_weights import check_extra_tensor

CASE = qwen3_vl.CASE
SEEING = (*qwen3_vl.CASES, *qwen3_5_vl.CASES, *glm4v.CASES)


def place(tokens: list[int], grids: list[tuple[int, int, int]]) -> tuple[list[int], list[list[int]]]:
    rows, positions = place_images(
        torch.tensor(tokens), torch.tensor(grids).reshape(-1, 3), image_token=IMAGE, merge=2
    )
    return rows.tolist(), positions.tolist()


def test_an_image_has_axes_from_where_it_begins_and_text_goes_on_behind_its_longer_side():
    rows, positions = place([7, *[IMAGE] * 6, 8, 9, IMAGE, 5], [(1, 4, 6), (1, 2, 2)])
    assert rows == [-1, 0, 1, 2, 3, 4, 5, -1, -1, 6, -1]
    assert positions == [
        [0, *[1] * 6, 4, 5, 6, 7],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6, 7],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7],
    ]


@pytest.mark.parametrize("case", SEEING, ids=lambda case: case.name)
def test_positions_are_those_of_transformers(case: FamilyCase, tmp_path: Path):
    case.write_checkpoint(tmp_path)
    model = case.load_reference(tmp_path)
    data = make_train_data(case.vocab_size, add_images=case.add_images)
    for tokens, images in zip(data["tokens"], data["multimodal_train_inputs"], strict=True):
        if images is None:
            continue
        ids, grids = torch.tensor(tokens), images["image_grid_thw"]
        expected, _ = model.model.get_rope_index(
            ids[None], mm_token_type_ids=(ids == IMAGE)[None].int(), image_grid_thw=grids
        )
        assert torch.equal(place_images(ids, grids, image_token=IMAGE, merge=2)[1], expected[:, 0])


def test_an_image_token_that_the_policy_sampled_is_text():
    rows, positions = place([START, IMAGE, END, IMAGE], [(1, 2, 2)])
    assert rows == [-1, 0, -1, -1]
    assert positions[0] == [0, 1, 2, 3]


def test_a_cut_image_is_refused_with_its_size():
    with pytest.raises(DataError, match=r"2 image tokens \(128\) and images of 3: .*\[\[1, 2, 6\]\]"):
        place([START, IMAGE, IMAGE], [(1, 2, 6)])


@pytest.mark.parametrize("inputs", [{"pixel_values_videos": 1}, {"image_grid_thw": 1, "video_grid_thw": 1}])
def test_videos_are_refused_and_not_left_out(inputs):
    with pytest.raises(DataError, match="video.*; the vision towers here take images alone"):
        ImageBatch([torch.tensor([1])], [inputs]).grids()


def test_a_frozen_tower_gets_no_gradient_and_text_gets_the_same(tmp_path: Path):
    CASE.write_checkpoint(tmp_path)
    data = make_train_data(CASE.vocab_size, add_images=CASE.add_images)
    gradients = []
    for is_trained in (True, False):
        with one_process_world():
            args = trainer.make_args(CASE, tmp_path)
            args.train_vision_tower = is_trained
            initialize.init(args)
            model = trainer.load_model(args)
            trainer.run_backward(args, model, trainer.prepare(args, data))
            gradients.append(trainer.model_gradients(args, model))
    for name, gradient in gradients[1].items():
        if name.startswith("model.visual."):
            assert not gradient.any() and gradients[0][name].any()
        else:
            assert torch.equal(gradient, gradients[0][name])


def test_a_tower_that_is_not_asked_for_is_left_out(tmp_path: Path):
    case = load_cases(["qwen3_5_vl"])["qwen3_5_vl"]
    case.write_checkpoint(tmp_path)
    config = read_config(tmp_path)
    args = trainer.make_args(case, tmp_path)
    args.train_vision_tower = False
    complete_vision(text := Namespace(**{**vars(args), "tower_dims": None}))
    assert not text.has_own_tower and model_dims(text, config).tower is None
    for asked in ({"multimodal_keys": {"image": "images"}}, {"spec": ["slime_plugins.models.qwen3_5_vl", "any"]}):
        complete_vision(seeing := Namespace(**{**vars(text), **asked}))
        assert seeing.has_own_tower and not model_dims(seeing, config).tower.is_trained
    without = {key: value for key, value in config.items() if key != "vision_config"}
    assert tower_of(without, seeing.spec, is_asked=True) is None
    seeing.enable_mtp_training = True
    with pytest.raises(ConfigError, match="--enable-mtp-training is given for a model with a vision tower"):
        complete_vision(seeing)


def test_an_export_has_the_tower_of_the_trainer_or_else_that_of_the_folder(tmp_path: Path):
    case = load_cases(["qwen3_5_vl"])["qwen3_5_vl"]
    case.write_checkpoint(tmp_path)
    stored, name = read_tensors(tmp_path), "model.visual.merger.norm.weight"
    mine = {key: tensor for key, tensor in stored.items() if not key.startswith("model.visual.") or key == name}
    mine[name] = stored[name] + 1
    exported = list(in_layout_of(tmp_path, find_weight_map("qwen3_5").is_untrained, mine.items()))
    assert len(exported) == len(stored) and dict(exported).keys() == stored.keys()
    assert torch.equal(dict(exported)[name], mine[name])


def test_a_towers_operations_are_those_that_torch_counts(tmp_path: Path):
    CASE.write_checkpoint(tmp_path)
    tower = CASE.load_reference(tmp_path).model.visual
    dims = model_dims(trainer.make_args(CASE, tmp_path), read_hf_config(str(tmp_path)))
    for grid in ([(1, 2, 6)], [(1, 4, 2), (1, 6, 10), (1, 2, 2)]):
        patches = [height * width for _, height, width in grid]
        with FlopCounterMode(display=False) as counter:
            tower(torch.randn(sum(patches), dims.tower.patch_size), grid_thw=torch.tensor(grid))
        assert dims.tower_flops(patches) == counter.get_total_flops()
    assert dims.train_flops(1.0, 5.0) == 18.0
    frozen = replace(dims, tower=replace(dims.tower, is_trained=False))
    assert frozen.train_flops(1.0, 5.0) == 8.0
    assert image_patches([None, {"image_grid_thw": torch.tensor([[1, 2, 6], [2, 4, 2]])}, {}]) == [12, 8, 8]


def test_pixels_in_bytes_are_those_in_floats(tmp_path: Path):
    CASE.write_checkpoint(tmp_path)
    data = make_train_data(CASE.vocab_size, add_images=CASE.add_images)
    limits = torch.tensor([127.5, 127.5])
    log_probs = []
    with one_process_world():
        args = trainer.make_args(CASE, tmp_path)
        initialize.init(args)
        model = trainer.load_model(args)
        for in_bytes in (True, False):
            for images in filter(None, data["multimodal_train_inputs"]):
                if in_bytes:
                    images["pixel_values"] = (images["pixel_values"] * 60 + 128).clamp(0, 255).byte()
                    images["pixel_range"] = limits
                else:
                    images["pixel_values"] = full_pixels(images)
                    del images["pixel_range"]
            log_probs.append(torch.cat(trainer.response_log_probs(args, model, trainer.prepare(args, data))))
    assert torch.equal(*log_probs)


def test_a_model_in_bf16_computes_with_the_frequencies_of_its_tower(tmp_path: Path):
    CASE.write_checkpoint(tmp_path)
    expected = CASE.load_reference(tmp_path).model.visual.rotary_pos_emb.inv_freq
    with one_process_world():
        args = trainer.make_args(CASE, tmp_path, "--bf16")
        initialize.init(args)
        (chunk,) = trainer.load_model(args)
        tower = unwrap_model(chunk).vision_model
        switch = ModelSwitch([chunk])
        switch.backup("actor")
        switch.backup("ref")
        data = make_train_data(CASE.vocab_size, add_images=CASE.add_images)
        trainer.response_log_probs(args, [chunk], trainer.prepare(args, data))
        switch.switch_to("ref")
    assert expected.dtype == torch.float32 and torch.equal(tower.rotary_pos_emb.inv_freq, expected)
    assert tower.patch_embed.proj.weight.dtype == torch.bfloat16


def test_a_users_model_gets_the_pixels_of_all_samples_joined_as_floats(tmp_path: Path):
    limits = torch.tensor([127.5, 127.5])
    in_bytes = {"pixel_values": torch.tensor([[0], [255]], dtype=torch.uint8), "pixel_range": limits}
    inputs = [
        {**in_bytes, "image_grid_thw": torch.tensor([[1, 1, 2]])},
        None,
        {"pixel_values": torch.tensor([[0.5]]), "image_grid_thw": torch.tensor([[1, 1, 1]])},
    ]
    batch = {
        "tokens": torch.zeros(1, 4), "packed_seq_params": None, "full_loss_masks": None,
        "multimodal_train_inputs": inputs, "host_tokens": ["ids"] * 3,
    }  # fmt: skip
    model, theirs = torch.nn.Module(), JoinedInputs(Namespace())
    vars(model)["transforms"] = [theirs]
    theirs.after_build(model)
    given = forward_arguments(model, batch)
    assert given["pixel_values"].tolist() == [[-1.0], [1.0], [0.5]]
    assert given["image_grid_thw"].tolist() == [[1, 1, 2], [1, 1, 1]]
    assert "pixel_range" not in given and "images" not in given
    assert "pixel_values" not in forward_arguments(model, {**batch, "multimodal_train_inputs": [None]})
    wrapped = torch.nn.Module.__new__(Float16Module)
    torch.nn.Module.__init__(wrapped)
    vars(wrapped)["module"] = object.__new__(GPTModelWithMtp)
    for text_model in (object.__new__(GPTModel), wrapped):
        theirs.after_build(text_model)
        with pytest.raises(DataError, match="the trainer's model takes none"):
            forward_arguments(model, batch)
    CASE.write_checkpoint(tmp_path)
    own = VisionTower(Namespace(hf_checkpoint=str(tmp_path))).arguments(batch)["images"]
    assert own.inputs is inputs and own.sequences == ["ids"] * 3


@pytest.mark.parametrize(
    ("kind", "name"),
    [("glm4v", "model.visual.merger.extra.weight"), ("qwen3_vl", "model.visual.blocks.99.norm1.weight")],
)
def test_a_tensor_that_no_part_of_the_tower_reads_is_an_error(tmp_path: Path, kind: str, name: str) -> None:
    case = load_cases([kind])[kind]
    case.write_checkpoint(tmp_path)
    args = parse("--hf-checkpoint", tmp_path, *case.flags(tmp_path))
    start_single_process(args)
    build = get_model_provider(args, transforms=[make(args) for make in load_all(parts(args).transforms)])
    check_extra_tensor(args, build, tmp_path, name)
