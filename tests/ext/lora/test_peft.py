"""The trainer's adapters against ``peft`` on transformers' model: log-probs, gradients, folders both ways."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from slime.backends.megatron_utils import initialize
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
from slime.backends.megatron_utils.parameters import iter_shards
from slime.backends.megatron_utils.policies import ModelSwitch
from slime.ext.lora.frozen_base import hold_quantized, value_of
from slime.ext.lora.peft_folder import TENSOR_FILE, read_peft_config
from slime.ext.lora.state import adapter_table, load_peft, save_peft
from slime.utils.errors import DataError
from tests.matrix import trainer
from tests.matrix.batch import make_train_data, reference_loss
from tests.matrix.case import FamilyCase, load_cases
from tests.matrix.comparisons import gradient_errors
from tests.matrix.parity import one_process_world

BOUND = 1e-5
DEEP = {"gemma4-small": 1e-4}
"""The matrix's bound for gradients of nine layers; PEFT's own log-probs are 1e-5 from fp64 there."""
EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")
TARGETS = {
    "llama3": ["all-linear"],
    "qwen3": ["q_proj", "v_proj", "down_proj"],
    "olmo3": ["all-linear"],
    "gemma4": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gemma4-small": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gemma4-moe": ["q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
    "seed_oss": ["all-linear"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}


def peft_model(model: torch.nn.Module, targets: list[str]) -> torch.nn.Module:
    """The model with random adapters, including B."""
    from peft import LoraConfig, get_peft_model

    chosen = targets[0] if targets == ["all-linear"] else targets
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=chosen, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return model.eval()


def lora_args(
    case: FamilyCase, folder: Path, *targets: str, experts: str = "each", lora_load: Path | None = None
) -> Namespace:
    flags = ("--lora-rank", 4, "--lora-alpha", 6, "--lora-experts", experts, "--moe-router-bias-update-rate", 0)
    flags += () if lora_load is None else ("--lora-load", lora_load)
    # Adapters leave MTP layers frozen, which the case trains.
    frozen = replace(case, flags=lambda path: [flag for flag in case.flags(path) if flag != "--enable-mtp-training"])
    return trainer.make_args(frozen, folder, *flags, "--lora-target-modules", *targets)


def log_probs(args: Namespace, model: list[torch.nn.Module], data: dict) -> Tensor:
    prepared = trainer.prepare(args, data)
    mine = dict(zip(prepared["partition"], trainer.response_log_probs(args, model, prepared), strict=True))
    return torch.cat([mine[index] for index in range(len(mine))])


@pytest.mark.parametrize("family", TARGETS)
def test_log_probs_gradients_and_folders_are_those_of_peft(family: str, tmp_path: Path) -> None:
    from peft import PeftModel

    case, targets, bound = load_cases([family])[family], TARGETS[family], DEEP.get(family, BOUND)
    case.write_checkpoint(tmp_path / "hf")
    reference = peft_model(case.load_reference(tmp_path / "hf"), targets)
    reference.save_pretrained(tmp_path / "adapter")
    data = make_train_data(case.vocab_size)
    loss, expected = reference_loss(case, reference, data)
    loss.backward()
    with one_process_world():
        args = lora_args(case, tmp_path / "hf", *targets)
        initialize.init(args)
        model = trainer.load_model(args)
        load_peft(adapter_table(args), model, tmp_path / "adapter")
        actual = log_probs(args, model, data)
        trainer.run_backward(args, model, trainer.prepare(args, data))
        gradients = trainer.model_gradients(args, model)
        save_peft(adapter_table(args), tmp_path / "out", model, base_model=args.hf_checkpoint)
    assert float((actual - torch.cat(expected)).abs().max()) < bound
    named = {name.replace(".default", ""): p.grad for name, p in reference.named_parameters() if "lora_" in name}
    assert gradients.keys() == named.keys()
    assert max(gradient_errors(gradients, named).values()) < bound
    # The trainer writes what it read, and peft accepts it.
    theirs, ours = (load_file(tmp_path / folder / TENSOR_FILE) for folder in ("adapter", "out"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = PeftModel.from_pretrained(case.load_reference(tmp_path / "hf"), tmp_path / "out").eval()
    _, read = reference_loss(case, again, data)
    assert torch.equal(torch.cat(read), torch.cat(expected))


EXPERTS = {
    # family -> the folder's name of its MLP, and gate, up and down of an expert
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}


def with_expert_adapters(
    model: torch.nn.Module, leaves: dict[str, Tensor], names: tuple[str, ...], scale: float, *, is_shared: bool
) -> None:
    """Add ``scale * B A`` to the experts of transformers' model, which hold one stacked tensor for gates and ups.

    Args:
        model: the model, with its experts in ``layer.mlp``.
        leaves: by PEFT's names; only of the first expert if all share them.
        names: a value of ``EXPERTS``.
        scale: alpha over rank.
        is_shared: one adapter for all experts of a layer.
    """
    mlp, gate, to_up, to_down = names
    for index, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "experts"):
            continue

        def product(expert: int, module: str, index: int = index) -> Tensor:
            prefix = f"base_model.model.model.layers.{index}.{mlp}.experts.{0 if is_shared else expert}.{module}.lora_"
            return leaves[f"{prefix}B.weight"] @ leaves[f"{prefix}A.weight"]

        experts = layer.mlp.experts
        numbers = range(len(experts.down_proj))
        up = [torch.cat([product(n, gate), product(n, to_up)]) for n in numbers]
        down = [product(n, to_down) for n in numbers]
        for name, added in (("gate_up_proj", up), ("down_proj", down)):
            changed = experts._parameters.pop(name).detach() + scale * torch.stack(added)
            setattr(experts, name, changed)


@pytest.mark.parametrize(("family", "experts"), [("qwen3_moe", "each"), ("qwen3_moe", "shared"), ("mixtral", "each")])
def test_adapters_of_experts_are_those_of_a_plain_reference(family: str, experts: str, tmp_path: Path) -> None:
    case, is_shared = load_cases([family])[family], experts == "shared"
    case.write_checkpoint(tmp_path / "hf")
    data = make_train_data(case.vocab_size)
    with one_process_world():
        args = lora_args(case, tmp_path / "hf", "experts.linear_fc1", "experts.linear_fc2", experts=experts)
        initialize.init(args)
        model = trainer.load_model(args)
        trainer.draw_adapters(model)
        save_peft(adapter_table(args), tmp_path / "out", model, base_model=args.hf_checkpoint)
        actual = log_probs(args, model, data)
        trainer.run_backward(args, model, trainer.prepare(args, data))
        gradients = trainer.model_gradients(args, model)
        again = trainer.load_model(args)
        load_peft(adapter_table(args), again, tmp_path / "out")
        pairs = zip(iter_shards(model, added=True), iter_shards(again, added=True), strict=True)
        assert all(torch.equal(one.tensor, other.tensor) for one, other in pairs)
        save_hf_model_to_path(args, tmp_path / "merged", model)
        saved = load_file(tmp_path / "out" / TENSOR_FILE)
        if is_shared:  # experts that differ do not fit one adapter
            changed = {name: tensor + int(".experts.1." in name) for name, tensor in saved.items()}
            save_file(changed, tmp_path / "out" / TENSOR_FILE)
            with pytest.raises(DataError, match=r"weight1 than for .*weight0, .*use --lora-experts each"):
                load_peft(adapter_table(args), again, tmp_path / "out")
    leaves = {name: t.requires_grad_() for name, t in saved.items() if not is_shared or ".experts.0." in name}
    reference = case.load_reference(tmp_path / "hf")
    with_expert_adapters(reference, leaves, EXPERTS[family], 6 / 4, is_shared=is_shared)
    loss, expected = reference_loss(case, reference, data)
    loss.backward()
    assert float((actual - torch.cat(expected)).abs().max()) < BOUND
    grads = {name: leaves[EXPERT_NUMBER.sub(".experts.0.", name) if is_shared else name].grad for name in gradients}
    assert len(grads) == 6 * args.num_experts * sum(args.moe_layer_freq)
    assert max(gradient_errors(gradients, grads).values()) < BOUND
    _, after = reference_loss(case, case.load_reference(tmp_path / "merged"), data)
    assert float((actual - torch.cat(after)).abs().max()) < 2 * BOUND


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "deepseek_v4"])
def test_a_merged_export_answers_as_the_model_with_adapters(family: str, tmp_path: Path) -> None:
    case = load_cases([family])[family]
    case.write_checkpoint(tmp_path / "hf")
    data = make_train_data(case.vocab_size)
    with one_process_world():
        args = lora_args(case, tmp_path / "hf", "all-linear")
        initialize.init(args)
        model = trainer.load_model(args)
        plain = log_probs(args, model, data)
        trainer.draw_adapters(model)
        adapted = log_probs(args, model, data)
        save_hf_model_to_path(args, tmp_path / "merged", model)
    _, before = reference_loss(case, case.load_reference(tmp_path / "hf"), data)
    _, after = reference_loss(case, case.load_reference(tmp_path / "merged"), data)
    assert float((plain - torch.cat(before)).abs().max()) < 2 * BOUND  # B is zero
    assert float((adapted - plain).abs().max()) > 0.1
    assert float((adapted - torch.cat(after)).abs().max()) < 2 * BOUND


@pytest.mark.parametrize(("family", "precision"), [("qwen3", "int4"), ("deepseek_v3", "fp8"), ("qwen3_moe", "int4")])
def test_a_base_in_fewer_bits_is_that_of_its_export(family: str, precision: str, tmp_path: Path) -> None:
    case = load_cases([family])[family]
    case.write_checkpoint(tmp_path / "hf")
    data = make_train_data(case.vocab_size)
    with one_process_world():
        args = lora_args(case, tmp_path / "hf", "all-linear")
        args.lora_base_precision = precision
        initialize.init(args)
        model = trainer.load_model(args)
        plain = log_probs(args, model, data)
        whole = sum(p.nbytes for p in model[0].parameters() if p.dim() > 1)
        assert hold_quantized(model, args.lora_base_precision) >= 4 * args.num_layers
        stored = {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model[0].parameters() if p.dim() > 1
        }
        assert sum(stored.values()) < whole / 2
        trainer.draw_adapters(model)
        actual = log_probs(args, model, data)
        trainer.run_backward(args, model, trainer.prepare(args, data))
        gradients = trainer.model_gradients(args, model)
        save_hf_model_to_path(args, tmp_path / "merged", model)
        # The same adapters on a model that holds the dequantized numbers.
        weights = ModelSwitch(model)
        weights.backup("actor")
        weights.backup_frozen()
        for shard in iter_shards(model):
            assert torch.equal(value_of(shard), value_of(shard, weights.get("actor")))
        twin = trainer.load_model(args)
        for own, other in zip(iter_shards(twin), iter_shards(model), strict=True):
            own.tensor.data.copy_(value_of(other))
        for own, other in zip(iter_shards(twin, added=True), iter_shards(model, added=True), strict=True):
            own.tensor.data.copy_(other.tensor)
        expected = log_probs(args, twin, data)
        trainer.run_backward(args, twin, trainer.prepare(args, data))
        expected_gradients = trainer.model_gradients(args, twin)
    assert float((actual - expected).abs().max()) < BOUND
    assert max(gradient_errors(gradients, expected_gradients).values()) < BOUND
    _, after = reference_loss(case, case.load_reference(tmp_path / "merged"), data)
    assert float((actual - torch.cat(after)).abs().max()) < 2 * BOUND
    assert float((actual - plain).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("change", "says"),
    [("r", "r and lora_alpha are 5 and 6"), ("use_dora", "use_dora"), ("target", "no adapter, such as .*k_proj")],
)
def test_a_folder_that_means_something_else_is_refused(change: str, says: str, tmp_path: Path) -> None:
    case = load_cases(["qwen3"])["qwen3"]
    case.write_checkpoint(tmp_path / "hf")
    with one_process_world():
        args = lora_args(case, tmp_path / "hf", "q_proj", "v_proj")
        initialize.init(args)
        model = trainer.load_model(args)
        save_peft(adapter_table(args), tmp_path / "out", model, base_model=args.hf_checkpoint)
        config, tensors = tmp_path / "out" / "adapter_config.json", tmp_path / "out" / TENSOR_FILE
        if change == "r":
            config.write_text(config.read_text().replace('"r": 4', '"r": 5'))
        elif change == "use_dora":
            config.write_text(config.read_text().replace("{", '{"use_dora": true,', 1))
        else:
            there = load_file(tensors)
            extra = {n.replace("q_proj", "k_proj"): t.clone() for n, t in there.items() if "q_proj" in n}
            save_file(there | extra, tensors)
        with pytest.raises(DataError, match=says):
            load_peft(adapter_table(args), model, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("init_lora_weights", "pissa"), ("use_dora", True), ("lora_bias", True), ("rank_pattern", {"q_proj": 8})],
        *[("bias", "all"), ("peft_type", "LOHA"), ("modules_to_save", ["lm_head"]), ("a_key_of_tomorrow", "on")],
    ],
)
def test_what_is_not_plain_lora_is_refused_by_its_name(key: str, value: object, tmp_path: Path) -> None:
    from peft import LoraConfig

    plain = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"]).to_dict() | {"target_modules": ["q_proj"]}
    config = tmp_path / "adapter_config.json"
    for change in ({}, {"init_lora_weights": "gaussian"}, {"peft_version": "0.99", "a_key_of_tomorrow": None}):
        config.write_text(json.dumps(plain | change))
        assert read_peft_config(tmp_path, flag="--lora-load")["r"] == 4
    config.write_text(json.dumps(plain | {key: value}))
    with pytest.raises(DataError, match=rf"--lora-load.*{key} "):
        read_peft_config(tmp_path, flag="--lora-load")
