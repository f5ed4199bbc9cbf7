"""A backend in one process with transformers and PEFT: the tests' service, and the reference for its numbers.

Each model is a separate PEFT model, so that clients cannot affect each other.  Sequences run one by one,
without padding.
"""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime.ext.training_api.backend import (
    AdamParams,
    Backend,
    BackendDied,
    Datum,
    LoraSpec,
    PassRequest,
    PassResult,
    RequestRefused,
    SampledSequence,
    SampleResult,
    SamplingParams,
)

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
SCALE = 2.0
"""Scale of an adapter's output: alpha over rank."""

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


def cross_entropy(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """``- sum(weights * logprobs)``."""
    return -(inputs["weights"] * logprobs).sum()


def importance_sampling(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """``- sum(ratio * advantages)``, ratio = exp(logprobs - sampler's)."""
    return -(torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]).sum()


def clip_range(inputs: Inputs, config: Config) -> tuple[Tensor | float, Tensor | float]:
    """The bounds of a ratio: a datum's own, else the request's, else 0.8 and 1.2."""
    low, high = "clip_low_threshold", "clip_high_threshold"
    return inputs.get(low, config.get(low, 0.8)), inputs.get(high, config.get(high, 1.2))


def clamp(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    low, high = (torch.as_tensor(bound) for bound in clip_range(inputs, config))
    return torch.minimum(torch.maximum(ratio, low), high)


def ppo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """``- sum(min(ratio * A, clip(ratio) * A))``."""
    ratio = torch.exp(logprobs - inputs["logprobs"])
    return -torch.minimum(ratio * inputs["advantages"], clamp(ratio, inputs, config) * inputs["advantages"]).sum()


def cispo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """``- sum(stop_gradient(clip(ratio)) * logprobs * A)``."""
    ratio = torch.exp(logprobs - inputs["logprobs"]).detach()
    return -(clamp(ratio, inputs, config) * logprobs * inputs["advantages"]).sum()


def dro(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """``- sum(logprobs * A - beta / 2 * (logprobs - sampler's)^2)``, beta 0.05 by default."""
    distance = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - 0.5 * config.get("beta", 0.05) * distance).sum()


def gspo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """PPO's formula on the tokens of ``sequence_ratio_mask``, each with the ratio of their mean log-probs."""
    mask = inputs["sequence_ratio_mask"]
    mean = ((logprobs - inputs["logprobs"]) * mask).sum() / mask.sum().clamp(min=1)
    ratio, advantages = torch.exp(mean).expand_as(logprobs), inputs["advantages"]
    return -(mask * torch.minimum(ratio * advantages, clamp(ratio, inputs, config) * advantages)).sum()


LOSSES: dict[str, Callable[[Tensor, Inputs, Config], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
"""``tinker``'s name of a loss -> its value on one datum; a request's loss is the sum."""


@dataclass
class Trained:
    """One client's model."""

    model: PeftModel
    adam: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        self.adam = torch.optim.AdamW(self.parameters().values())

    def parameters(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def gradients(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.parameters().items()}


class ReferenceBackend(Backend):
    """Serves one Hugging Face folder, in fp32 on the CPU.

    Args:
        pause_s: seconds that each call waits before its work, for tests in which requests must meet.
    """

    def __init__(self, hf_checkpoint: str | Path, *, pause_s: float = 0.0) -> None:
        self.base = AutoModelForCausalLM.from_pretrained(hf_checkpoint, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(hf_checkpoint)
        self.models: dict[str, Trained] = {}
        self.samplers: dict[str, PeftModel] = {}
        self.calls: list[list[str]] = []
        """The models of each call of :meth:`passes`."""
        self.pause_s = pause_s
        self.death: BackendDied | None = None

    async def add_model(self, model_id: str, lora: LoraSpec) -> None:
        modules = ATTENTION * lora.train_attn + MLP * lora.train_mlp
        config = LoraConfig(
            r=lora.rank, lora_alpha=SCALE * lora.rank, target_modules=list(modules), task_type="CAUSAL_LM"
        )
        with torch.random.fork_rng():
            torch.manual_seed(0 if lora.seed is None else lora.seed)
            self.models[model_id] = Trained(get_peft_model(copy.deepcopy(self.base), config).eval())

    async def remove_model(self, model_id: str) -> None:
        del self.models[model_id]

    async def passes(self, requests: Sequence[PassRequest]) -> list[PassResult | Exception]:
        await asyncio.sleep(self.pause_s)
        self.calls.append([request.model_id for request in requests])
        return [self._pass(request) for request in requests]

    def _pass(self, request: PassRequest) -> PassResult | Exception:
        if request.loss not in LOSSES:
            return RequestRefused(f"loss_fn {request.loss!r} is not served; it may be {', '.join(LOSSES)}.")
        outputs, total = [], 0.0
        for datum in request.data:
            inputs = {name: torch.tensor(value) for name, value in datum.inputs.items()}
            if "weights" not in inputs and request.loss == "cross_entropy":
                inputs["weights"] = torch.ones(inputs["target_tokens"].shape)
            with torch.set_grad_enabled(request.backward):
                logprobs = self.logprobs(self.models[request.model_id].model, datum)
                loss = LOSSES[request.loss](logprobs, inputs, request.loss_config)
            if request.backward:
                loss.backward()
            total += loss.item()
            outputs.append({"logprobs": logprobs.detach().numpy()})
        return PassResult(outputs, {"loss:sum": total})

    def logprobs(self, model: torch.nn.Module, datum: Datum) -> Tensor:
        """Log-probs of the targets, in their shape: [T] or [T, K]."""
        targets = torch.tensor(datum.inputs["target_tokens"])
        table = model(torch.tensor([datum.tokens])).logits[0].log_softmax(-1)
        return table.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)

    def gradients(self, model_id: str) -> dict[str, Tensor]:
        """Gradients accumulated since the last step, by PEFT's names."""
        return {name: gradient.clone() for name, gradient in self.models[model_id].gradients().items()}

    async def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        trained = self.models[model_id]
        gradients = trained.gradients()
        norm = torch.linalg.vector_norm(torch.stack([one.norm() for one in gradients.values()])).item()
        clip = adam.grad_clip_norm / norm if 0 < adam.grad_clip_norm < norm else 1.0
        for name, parameter in trained.parameters().items():
            parameter.grad = gradients[name] * clip
        betas = (adam.beta1, adam.beta2)
        trained.adam.param_groups[0] |= {"lr": adam.learning_rate, "betas": betas, "eps": adam.eps}
        trained.adam.param_groups[0]["weight_decay"] = adam.weight_decay
        trained.adam.step()
        trained.adam.zero_grad()
        return {"grad_norm": norm}

    async def drop_gradients(self, model_id: str) -> None:
        self.models[model_id].adam.zero_grad()

    async def save_state(self, model_id: str, folder: Path, with_optimizer: bool) -> None:
        trained, part = self.models[model_id], folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        trained.model.save_pretrained(str(part), save_embedding_layers=False)
        if with_optimizer:
            torch.save(trained.adam.state_dict(), part / "optimizer.pt")
        os.rename(part, folder)

    async def load_state(self, model_id: str, folder: Path, with_optimizer: bool) -> None:
        model = PeftModel.from_pretrained(copy.deepcopy(self.base), str(folder), is_trainable=True).eval()
        trained = Trained(model)
        if with_optimizer:
            trained.adam.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
        self.models[model_id] = trained

    async def publish_sampler(self, folder_or_model_id: Path | str, name: str) -> None:
        if isinstance(folder_or_model_id, Path):
            self.samplers[name] = PeftModel.from_pretrained(copy.deepcopy(self.base), str(folder_or_model_id)).eval()
        else:
            self.samplers[name] = copy.deepcopy(self.models[folder_or_model_id].model)

    async def drop_sampler(self, name: str) -> None:
        del self.samplers[name]

    async def sample(
        self,
        name: str | None,
        tokens: Sequence[int],
        params: SamplingParams,
        n: int = 1,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> SampleResult:
        await asyncio.sleep(self.pause_s)
        model = self.base if name is None else self.samplers[name]
        with torch.no_grad():
            table = model(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)
            seeds = [None if params.seed is None else params.seed + number for number in range(n)]
            sequences = [self._draw(model, list(tokens), params, seed) for seed in seeds]
        scored = table[:-1].gather(1, torch.tensor(list(tokens[1:])).reshape(-1, 1))[:, 0].tolist()
        best, which = table[:-1].topk(topk_prompt_logprobs)
        rows = [list(zip(*row, strict=True)) for row in zip(which.tolist(), best.tolist(), strict=True)]
        return SampleResult(
            sequences,
            prompt_logprobs=[None, *scored] if prompt_logprobs else None,
            topk_prompt_logprobs=[None, *rows] if topk_prompt_logprobs else None,
        )

    def _draw(
        self, model: torch.nn.Module, tokens: list[int], params: SamplingParams, seed: int | None
    ) -> SampledSequence:
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        ends = [self.base.config.eos_token_id] if params.stop is None else params.stop
        drawn: list[int] = []
        scores: list[float] = []
        cache, fed = None, tokens
        while len(drawn) < (params.max_tokens or self.base.config.max_position_embeddings - len(tokens)):
            answer = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
            cache, row = answer.past_key_values, answer.logits[0, -1].log_softmax(-1)
            token = int(row.argmax() if params.temperature == 0 else _pick(row, params, generator))
            drawn, fed = [*drawn, token], [token]
            scores.append(row[token].item())
            if token in ends or any(isinstance(end, str) and end in self.tokenizer.decode(drawn) for end in ends):
                return SampledSequence(drawn, scores, "stop")
        return SampledSequence(drawn, scores, "length")

    async def check(self) -> None:
        if self.death is not None:
            raise self.death

    async def close(self) -> None:
        self.models.clear()
        self.samplers.clear()


def _pick(row: Tensor, params: SamplingParams, generator: torch.Generator) -> Tensor:
    probs, order = (row / params.temperature).softmax(-1).sort(descending=True, stable=True)
    if params.top_k > 0:
        probs[params.top_k :] = 0.0
    probs[probs.cumsum(-1) - probs > params.top_p] = 0.0
    return order[torch.multinomial(probs, 1, generator=generator)]
