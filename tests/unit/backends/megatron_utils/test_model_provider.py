"""From flags to a model: the spec, the head, and the trained parameters."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from slime.backends.megatron_utils.flags.config_builders import transformer_config_from_args
from slime.backends.megatron_utils.layers import layer_specs
from slime.backends.megatron_utils.layers.layer_specs import RoutedExperts, get_block_spec
from slime.backends.megatron_utils.layers.value_head import ValueHead
from slime.backends.megatron_utils.model import build_model
from slime.backends.megatron_utils.model_provider import freeze_parameters, get_model_provider
from slime.backends.megatron_utils.training_names import share_args
from slime.utils.errors import ConfigError, HookError
from tests.unit.backends.megatron_utils.megatron_case import packed_logits, parse, start_single_process

DENSE = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --vocab-size 8 --swiglu".split()
DENSE += "--disable-bias-linear --ffn-hidden-size 24 --normalization RMSNorm".split()
DENSE += "--use-rotary-position-embeddings --make-vocab-size-divisible-by 8".split()
HERE = __name__


def build(*flags: str, role: str = "actor") -> torch.nn.Module:
    args = parse(*DENSE, *flags)
    start_single_process(args)
    return get_model_provider(args, role)()


def short_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """A user's spec function, which omits query and key norms."""
    spec = get_block_spec(config, vp_stage)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.q_layernorm = layer_specs.IdentityOp
    return spec


not_a_spec = 3


def test_the_logits_are_those_of_the_padded_vocabulary() -> None:
    model = build("--padded-vocab-size", "12")
    [logits] = packed_logits(model, [torch.tensor([1, 2, 3])])
    assert logits.shape == (3, 12)


def test_a_spec_function_shapes_the_layers() -> None:
    model = build("--qk-layernorm", "--spec", HERE, "short_spec")
    names = [name for name, _ in model.named_parameters()]
    assert any("k_layernorm" in name for name in names) and not any("q_layernorm" in name for name in names)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("no.such.module", "f"), "--spec no.such.module f cannot be imported"),
        ((HERE, "no_such_name"), "has no name 'no_such_name'"),
        ((HERE, "not_a_spec"), "is int; a function is needed"),
    ],
)
def test_a_spec_that_cannot_be_used_is_refused(spec: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("--spec", *spec)


def custom_provider(pre_process: bool = True, post_process: bool = True) -> torch.nn.Module:
    """A user's model provider."""
    return torch.nn.Linear(2, 2)


def test_a_custom_provider_builds_the_model() -> None:
    assert isinstance(build("--custom-model-provider-path", f"{HERE}.custom_provider"), torch.nn.Linear)


def megatrons_provider(pre_process: bool = True, post_process: bool = True) -> torch.nn.Module:
    """A model provider with Megatron-LM's signature."""
    from megatron.training import get_args, print_rank_0
    from megatron.training.arguments import core_transformer_config_from_args

    print_rank_0("building")
    args = get_args()
    assert not args.fp16_lm_cross_entropy
    return torch.nn.Linear(core_transformer_config_from_args(args).hidden_size, 2)


def test_a_custom_provider_gets_the_flags_as_megatron_gives_them(capfd) -> None:
    model = build("--custom-model-provider-path", f"{HERE}.megatrons_provider")
    assert model.in_features == 16 and "building" in capfd.readouterr().out
    import megatron.training

    with pytest.raises(ImportError, match="pretrain of megatron.training .* checkout of Megatron-LM"):
        megatron.training.pretrain  # noqa: B018


def test_a_checkouts_get_args_gives_the_flags_too(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "megatron/training"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from megatron.training.global_vars import get_args")
    (folder / "global_vars.py").write_text(
        "def set_args(args):\n    global ARGS\n    ARGS = args\ndef get_args():\n    return ARGS\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("megatron.training")]:
        monkeypatch.delitem(sys.modules, name)
    first, second = Namespace(), Namespace()
    share_args(first)
    training = importlib.import_module("megatron.training")
    assert training.__file__.startswith(str(tmp_path)) and training.get_args() is first
    share_args(second)
    assert training.get_args() is second
    for name in [name for name in sys.modules if name.startswith("megatron.training")]:
        del sys.modules[name]


def failing_provider(pre_process: bool = True, post_process: bool = True) -> torch.nn.Module:
    raise KeyError("x")


def test_what_a_custom_provider_raises_is_told_under_its_flag() -> None:
    with pytest.raises(KeyError) as error:
        build("--custom-model-provider-path", f"{HERE}.failing_provider")
    assert error.value.__notes__[0].startswith(f"--custom-model-provider-path {HERE}.failing_provider raised KeyError")


def test_a_custom_provider_that_does_not_import_is_refused() -> None:
    with pytest.raises(HookError, match="no_such_provider"):
        build("--custom-model-provider-path", f"{HERE}.no_such_provider")


def test_a_critic_gives_one_value_for_each_token() -> None:
    model = build(role="critic")
    assert isinstance(model, GPTModel) and isinstance(model.output_layer, ValueHead)
    [values] = packed_logits(model, [torch.tensor([1, 2, 3])])
    assert values.shape == (3, 1) and values.dtype == torch.float32


def test_parameters_outside_of_the_list_do_not_train() -> None:
    model = build("--only-train-params-name-list", "linear_fc1", "final_layernorm")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == [
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.1.mlp.linear_fc1.weight",
        "decoder.final_layernorm.weight",
    ]


RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


@pytest.mark.parametrize("lists", ["--freeze-params-name-list embedding", "--only-train-params-name-list mlp"])
def test_a_frozen_embedding_lets_recomputed_layers_train(lists: str) -> None:
    model = build(*RECOMPUTED, *lists.split(), "--untie-embeddings-and-output-weights").train()
    packed_logits(model, [torch.tensor([1, 2, 3])])[0].float().square().sum().backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any(".mlp." in name for name in trained)
    assert [name for name, parameter in trained.items() if parameter.grad is None] == []


def test_a_tied_weight_is_frozen_by_one_name_on_the_first_and_on_the_last_stage() -> None:
    stage = torch.nn.ModuleDict({"output_layer": torch.nn.Linear(2, 2, bias=False)})
    for is_tied, freeze, trains in (
        (True, "embedding", False),
        (True, "output_layer", True),
        (False, "embedding", True),
    ):
        stage.share_embeddings_and_output_weights = is_tied  # type: ignore[assignment]
        stage.requires_grad_()
        freeze_parameters(stage, freeze=[freeze])
        assert stage["output_layer"].weight.requires_grad is trains


def test_layers_are_frozen_by_their_numbers_in_the_whole_model() -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)])
    for number, layer in enumerate(layers, 3):  # the second stage of two: layers 2 and 3 of the model
        layer.layer_number = number  # type: ignore[assignment]
    stage = torch.nn.ModuleDict({"decoder": torch.nn.ModuleDict({"layers": layers})})
    freeze_parameters(stage, freeze=[r"layers\.0\.", r"layers\.3\."])
    assert [layer.weight.requires_grad for layer in layers] == [True, False]


def test_a_pattern_without_a_parameter_is_told_and_a_model_without_trained_parameters_is_refused(caplog) -> None:
    for flag in ("--freeze-params-name-list", "--only-train-params-name-list"):
        args = parse(*DENSE, flag, "mlp", "mpl")
        start_single_process(args)
        build_model(args, wrap_with_ddp=False)
        assert f"{flag}: no parameter of the model matches mpl." in caplog.text
    args = parse(*DENSE, "--only-train-params-name-list", "mpl")
    with pytest.raises(ConfigError, match=r"No parameter of the model is trained.*\['mpl'\].*names such as"):
        build_model(args, wrap_with_ddp=False)


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("", [True, True]),
        ("--moe-layer-freq 2", [True, False]),
        ("--moe-layer-freq [0]+[1]", [False, True]),
    ],
)
def test_the_expert_layers_follow_the_pattern(flags: str, pattern: list[bool]) -> None:
    args = parse(*DENSE, "--num-experts", "2", "--moe-ffn-hidden-size", "8", *flags.split())
    specs = get_block_spec(transformer_config_from_args(args)).layer_specs
    assert [spec.submodules.mlp is RoutedExperts for spec in specs] == pattern


def test_a_pattern_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="--moe-layer-freq has 3 entries; --num-layers is 2"):
        parse(*DENSE, "--num-experts", "2", "--moe-ffn-hidden-size", "8", "--moe-layer-freq", "[0,1,1]")


def test_a_deterministic_run_and_a_user_hook_are_set_up_by_init(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Namespace] = []
    monkeypatch.setitem(globals(), "init_hook", seen.append)
    args = parse(*DENSE, "--custom-megatron-init-path", f"{HERE}.init_hook")
    start_single_process(args)
    assert seen == [args]
