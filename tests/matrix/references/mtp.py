"""Multi-token prediction in plain torch around transformers' layers: checkpoints with MTP layers, and their loss.

transformers has no MTP layers.  Inside they are one more decoder layer of the model, so a model with D
additional layers is built, whose last D serve the MTP layers:

    hidden_0 = input of the model's vocabulary projection
    hidden_k[p] = final_norm(layer([enorm(embedding of token p + k); hnorm(hidden_(k-1)[p])] through eh_proj))
    loss of depth k = minus the mean of log softmax(lm_head(hidden_k[p]))[token p + 1 + k] over the trained tokens
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.matrix.case import (
    FamilyCase,
    hide_broken_torchvision,
    quiet_transformers,
    random_tensor,
    read_config,
    read_tensors,
    write_tensors,
    write_with_transformers,
)

LOSS_FACTOR = 0.2
"""The default of --mtp-loss-scaling-factor."""


@dataclass(frozen=True)
class MtpFormat:
    """How a family's checkpoints name and lay out MTP layers."""

    prefix: Callable[[int, int], str] = lambda index, num_layers: f"model.layers.{num_layers + index}."
    """Function of (MTP layer, layers of the model) that returns the prefix of its names."""
    inner: str = ""
    """Between the prefix and the names of the MTP layer's decoder layer."""
    norm_centre: float = 0.0
    """What is added to the weights of norms."""
    enorm: str = "enorm.weight"
    hnorm: str = "hnorm.weight"
    eh_proj: str = "eh_proj.weight"
    final_norm: str = "shared_head.norm.weight"
    hidden_first: bool = False
    """Whether ``eh_proj`` takes [hidden; embedding] instead of [embedding; hidden]."""
    copies: tuple[tuple[str, str], ...] = (
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("lm_head.weight", "shared_head.head.weight"),
    )
    """The model's tensors that the MTP layer duplicates, and their names there."""
    model_type: str | None = None
    """transformers' name of the model, if it does not know the family's own."""

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the tensors outside the decoder layer."""
        return self.enorm, self.hnorm, self.eh_proj, self.final_norm


DEEPSEEK_FORMAT = MtpFormat()


def num_mtp_layers(config: Mapping[str, Any]) -> int:
    """MTP layers of a config."""
    return int(config["num_nextn_predict_layers"])


def write_with_mtp(case: FamilyCase, folder: Path, seed: int, mtp: MtpFormat = DEEPSEEK_FORMAT) -> None:
    """A random checkpoint with MTP layers, for ``FamilyCase.write``."""
    config = dict(case.config)
    num_layers, num_mtp = config["num_hidden_layers"], num_mtp_layers(config)
    settings = _with_more_layers(config, num_mtp)
    if mtp.model_type:
        settings["model_type"] = mtp.model_type
    write_with_transformers(replace(case, config=settings), folder, seed)
    written = read_config(folder)
    for name, value in written.items():
        if isinstance(value, list) and len(value) == num_layers + num_mtp:
            written[name] = value[:num_layers]
    written |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": num_mtp}
    if case.architecture:
        written |= {"architectures": [case.architecture], "model_type": config["model_type"]}
    (folder / "config.json").write_text(json.dumps(written, indent=2))
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = _to_checkpoint(read_tensors(folder), num_layers, num_mtp, mtp)
    size = config["hidden_size"]
    for index in range(num_mtp):
        for name in mtp.own:
            shape = (size, 2 * size) if name == mtp.eh_proj else (size,)
            tensors[mtp.prefix(index, num_layers) + name] = random_tensor(name, shape, generator)
    write_tensors(folder, tensors)


def _with_more_layers(config: Mapping[str, Any], num_mtp: int) -> dict[str, Any]:
    """The config of a model with the MTP layers' decoder layers after its own; per-layer lists are extended."""
    num_layers = config["num_hidden_layers"]
    settings = {
        name: [*value, *value[-1:] * num_mtp] if isinstance(value, list) and len(value) == num_layers else value
        for name, value in config.items()
    }
    return {**settings, "num_hidden_layers": num_layers + num_mtp}


def _to_checkpoint(tensors: Mapping[str, Tensor], num_layers: int, num_mtp: int, mtp: MtpFormat) -> dict[str, Tensor]:
    """The larger model's tensors under the names of a checkpoint with MTP layers, including copies."""
    renamed = dict(tensors)
    for index in range(num_mtp):
        prefix = mtp.prefix(index, num_layers)
        source, target = f"model.layers.{num_layers + index}.", prefix + mtp.inner
        for name in [name for name in renamed if name.startswith(source)]:
            renamed[target + name.removeprefix(source)] = renamed.pop(name)
        renamed |= {prefix + copy: tensors[name].clone() for name, copy in mtp.copies}
    return renamed


class ModelWithMtp(torch.nn.Module):
    """A transformers model, and its MTP layers' tensors outside the decoder layer."""

    def __init__(self, folder: Path, mtp: MtpFormat = DEEPSEEK_FORMAT) -> None:
        """From a checkpoint with MTP layers, in fp32."""
        super().__init__()
        hide_broken_torchvision()
        import transformers

        self.format = mtp
        config = read_config(folder)
        self.num_layers, self.num_mtp = config["num_hidden_layers"], num_mtp_layers(config)
        settings = _with_more_layers(config, self.num_mtp)
        model_type = settings.pop("model_type")
        tensors = read_tensors(folder)
        for index in range(self.num_mtp):
            source = mtp.prefix(index, self.num_layers) + mtp.inner
            target = f"model.layers.{self.num_layers + index}."
            names = [name for name in tensors if name.startswith(source) and name.removeprefix(source) not in mtp.own]
            if source != target:
                tensors |= {target + name.removeprefix(source): tensors.pop(name) for name in names}
        with tempfile.TemporaryDirectory() as larger, quiet_transformers():
            known = transformers.AutoConfig.for_model(mtp.model_type or model_type, **settings)
            known.save_pretrained(larger)
            write_tensors(Path(larger), tensors)
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                larger, dtype=torch.float32, attn_implementation="eager"
            )
        layers = self.model.model.layers
        self.model.model.layers, self.inner = layers[: self.num_layers], layers[self.num_layers :]
        own = [
            [tensors[mtp.prefix(index, self.num_layers) + name] for name in mtp.own] for index in range(self.num_mtp)
        ]
        self.own = torch.nn.ModuleList(
            torch.nn.ParameterList([torch.nn.Parameter(tensor.clone()) for tensor in layer]) for layer in own
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [1, L, vocab] of the model itself."""
        return self.model(tokens).logits

    def logits_ahead(self, tokens: Tensor) -> list[Tensor]:
        """[depth] logits [L, vocab] for one sequence [L]; only the MTP layers get gradients."""
        trunk, length = self.model.model, len(tokens)
        with torch.no_grad():
            hidden = trunk(tokens[None]).last_hidden_state
            embeddings = trunk.embed_tokens(tokens)[None]
        positions = torch.arange(length)[None]
        rotary = trunk.rotary_emb(hidden, positions)
        mask = torch.full((length, length), torch.finfo(hidden.dtype).min).triu(1)[None, None]
        result = []
        for depth, (enorm, hnorm, eh_proj, final_norm) in enumerate(self.own, start=1):
            ahead = torch.zeros_like(embeddings)
            ahead[:, : max(length - depth, 0)] = embeddings[:, depth:]
            pair = [self._norm(ahead, enorm), self._norm(hidden, hnorm)]
            joined = torch.cat(pair[::-1] if self.format.hidden_first else pair, dim=-1) @ eh_proj.T
            hidden = self.inner[depth - 1](
                joined, attention_mask=mask, position_ids=positions, position_embeddings=rotary
            )
            hidden = self._norm(hidden[0] if isinstance(hidden, tuple) else hidden, final_norm)
            result.append((hidden @ self.model.lm_head.weight.detach().T)[0])
        return result

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        mean_square = hidden.square().mean(dim=-1, keepdim=True)
        return hidden / (mean_square + self.model.config.rms_norm_eps).sqrt() * (weight + self.format.norm_centre)

    def save_pretrained(self, folder: str) -> None:
        """All parameters under the names of the checkpoint."""
        trunk = self.model.model
        trunk.layers = torch.nn.ModuleList([*trunk.layers, *self.inner])
        self.model.save_pretrained(folder)
        trunk.layers = trunk.layers[: self.num_layers]
        tensors = _to_checkpoint(read_tensors(Path(folder)), self.num_layers, self.num_mtp, self.format)
        for index, layer in enumerate(self.own):
            prefix = self.format.prefix(index, self.num_layers)
            tensors |= {prefix + name: tensor for name, tensor in zip(self.format.own, layer, strict=True)}
        write_tensors(Path(folder), tensors)


def mtp_losses(model: ModelWithMtp, samples: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The loss of each depth, token by token; samples as in ``batch.samples_of``."""
    losses = [torch.zeros(()) for _ in range(model.num_mtp)]
    for sample in samples:
        tokens, mask = sample["tokens"], sample["mask"]
        prompt = len(tokens) - len(mask)
        for depth, logits in enumerate(model.logits_ahead(tokens), start=1):
            log_probs = logits.log_softmax(dim=-1)
            for target in range(max(prompt, 1 + depth), len(tokens)):
                log_prob = log_probs[target - 1 - depth, tokens[target]]
                losses[depth - 1] = losses[depth - 1] - sample["weight"] * mask[target - prompt] * log_prob
    return losses


def mtp_extra_loss(model: torch.nn.Module, samples: Sequence[Mapping[str, Any]]) -> Tensor:
    """MTP training's addition to the loss, for ``FamilyCase.extra_loss``."""
    assert isinstance(model, ModelWithMtp)
    return LOSS_FACTOR * torch.stack(mtp_losses(model, samples)).mean()


def mtp_flags(folder: Path, *, is_trained: bool = True) -> list[str]:
    """Build the MTP layers, and train or freeze them."""
    built = ["--mtp-num-layers", str(num_mtp_layers(read_config(folder)))]
    return [*built, "--enable-mtp-training"] if is_trained else built
