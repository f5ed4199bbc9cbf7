"""``--fit``: its order against measured runs (benchmarks/results), what it keeps, prints and refuses."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published_configs import PUBLISHED, WITHOUT_A_FILE
from benchmarks.train_mfu import first_layers, sequence_lengths
from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.compose import flag_groups
from slime.ext.plan.command import complete_run
from slime.ext.plan.fit import FIT_MFU, fitted, rollout_seconds, train_seconds
from slime.ext.plan.make_plan import make_plan
from slime.ext.plan.plan import PlanOptions, find_card
from slime.ext.plan.run_flags import RunFlags
from slime.utils.errors import ConfigError
from tests.contracts.source_tree import REPO

RUN = "--num-rollout 3 --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128 --prompt-data /x.jsonl"
RUN += " --rm-type math --rollout-max-response-len 1024"
H200 = PlanOptions(card=find_card("H200"), mfu=FIT_MFU, lengths=(1024,) * 128)


def checkpoint(folder: Path, model: str, **more: Any) -> list[str]:
    """A folder with a published config.json, which is all that a plan reads."""
    (folder / "config.json").write_text(json.dumps({**(PUBLISHED | WITHOUT_A_FILE)[model], **more}))
    (folder / "tokenizer.json").write_text("{}")
    return ["--hf-checkpoint", str(folder)]


def seconds(folder: Path, model: str, flags: str, options: PlanOptions = H200, **more: Any) -> tuple[float, float]:
    """Predicted training and generation times of 128 samples of 1,024 tokens on H200s without ``options``."""
    run = complete_run([*checkpoint(folder, model, **more), *RUN.split(), *flags.split()], folder, flag_groups())
    assert run.args is not None and run.problems == []
    plan, dims = make_plan(run.args, run.hf_config, options), model_dims(run.args, run.hf_config)
    flags = RunFlags.of(run.args)
    return train_seconds(flags, plan, dims), rollout_seconds(flags, plan, dims, options)


def measured(file: str, row: str) -> list[Any]:
    """The row of a recorded result with this beginning."""
    document = json.loads((REPO / f"benchmarks/results/{file}.json").read_text())
    rows = [line for table in document["tables"] for line in table["rows"]]
    return next(line for line in rows if line[0].startswith(row))


TWO = (
    "--actor-num-gpus-per-node 2 --num-gpus-per-node 2 --colocate --use-dynamic-batch-size --max-tokens-per-gpu 16384"
)
ONE = TWO.replace("-node 2", "-node 1")
SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel"
TP2 = f"{TWO} {SPLIT}"
NORMS = "--recompute-granularity selective --recompute-modules layernorm"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ON_H100, ON_H200, EARLIER = "train_mfu_h100", "train_mfu_h200", "train_mfu_gpu"


@dataclass(frozen=True)
class Measured:
    """A recorded training step (benchmarks/train_mfu.py): its row and its command."""

    file: str
    row: str
    column: int
    """Seconds per step, or tokens per second and GPU if ``in_tokens``."""
    model: str
    flags: str = ""
    card: str = "H100"
    num_gpus: int = 1
    layers: int | None = None
    tokens: int = 16384
    """Tokens of a micro-batch."""
    microbatches: int = 2
    in_tokens: bool = False

    @property
    def ranks(self) -> int:
        return self.num_gpus // (2 if SPLIT in self.flags else 1)

    def measured(self) -> float:
        """Measured tokens per second and GPU."""
        value = float(measured(self.file, self.row)[self.column])
        return value if self.in_tokens else self.tokens * self.microbatches * self.ranks / self.num_gpus / value

    def predicted(self, folder: Path) -> float:
        """The prediction for the median step; the benchmark measures steps 2 to 4."""
        config, rates = PUBLISHED[self.model], []
        cut = {} if self.layers is None else first_layers(config, self.layers)
        for step in (2, 3, 4):
            seeds = range(step * 1000, step * 1000 + self.microbatches * self.ranks)
            lengths = tuple(length for seed in seeds for length in sequence_lengths(self.tokens, self.tokens, seed))
            place = ONE.replace("-node 1", f"-node {self.num_gpus}").replace("16384", str(self.tokens))
            batch = f"--rollout-batch-size {len(lengths)} --n-samples-per-prompt 1 --global-batch-size {len(lengths)}"
            words = f"{place} {batch} --disable-rewards-normalization {self.flags}"
            options = PlanOptions(card=find_card(self.card), mfu=FIT_MFU, lengths=lengths)
            taken, _ = seconds(folder, self.model, words, options, **cut)
            rates.append(sum(lengths) / self.num_gpus / taken)
        return statistics.median(rates)


STEPS = {
    "0.6B": Measured(EARLIER, "Qwen3-0.6B, one", 2, "qwen3-0.6B", microbatches=4, in_tokens=True),
    "1.7B": Measured(EARLIER, "Qwen3-1.7B, one", 2, "qwen3-1.7B", microbatches=4, in_tokens=True),
    "1.7B recomputed": Measured(EARLIER, "the same with", 2, "qwen3-1.7B", FULL, microbatches=4, in_tokens=True),
    "1.7B, DP 2": Measured(ON_H100, "Qwen3-1.7B, DP2", 1, "qwen3-1.7B", num_gpus=2),
    "4B": Measured(ON_H200, "Qwen3-4B at", 2, "qwen3-4B", NORMS, "H200"),
    "4B, TP 2 of H200": Measured(
        EARLIER, "Qwen3-4B, two", 2, "qwen3-4B", f"{NORMS} {SPLIT}", "H200", 2, in_tokens=True
    ),
    "4B, adapters": Measured(ON_H200, "the same at", 2, "qwen3-4B", f"{NORMS} --lora-rank 32", "H200"),
    "4B, TP 2": Measured(ON_H100, "Qwen3-4B, TP2", 3, "qwen3-4B", f"{NORMS} {SPLIT}", num_gpus=2),
    "4B, DP 2": Measured(ON_H100, "Qwen3-4B, DP2", 3, "qwen3-4B", NORMS, num_gpus=2, tokens=8192, microbatches=4),
    "4B recomputed": Measured(ON_H100, "all weights", 1, "qwen3-4B", FULL, tokens=8192, microbatches=1),
    "experts": Measured(ON_H100, "Qwen3-30B-A3B, 4", 1, "qwen3-30B-A3B", layers=4),
    "experts, EP 2": Measured(
        ON_H100, "Qwen3-30B-A3B, 6", 1, "qwen3-30B-A3B", "--expert-model-parallel-size 2", num_gpus=2, layers=6
    ),
    "latent attention": Measured(ON_H200, "Moonlight", 2, "moonlight", card="H200", layers=6, microbatches=4),
}
"""The 4B rows on two H100 use flash-attn-4, which was measured in both layouts; others use torch's attention."""
ROUGH = {"0.6B", "experts", "experts, EP 2", "latent attention"}
ORDERS = [
    ["1.7B", "1.7B, DP 2", "1.7B recomputed"],
    ["4B", "4B, TP 2 of H200"],
    ["4B, adapters", "4B"],
    ["4B, DP 2", "4B, TP 2", "4B recomputed"],
    ["experts", "experts, EP 2"],
]
"""Fastest first, in tokens per second."""


def test_training_takes_what_was_measured_and_layouts_have_their_order(tmp_path):
    was = {name: step.measured() for name, step in STEPS.items()}
    said = {name: step.predicted(tmp_path) for name, step in STEPS.items()}
    for name in STEPS:  # small matrices and routing cost more than their FLOPs
        assert said[name] == pytest.approx(was[name], rel=0.3 if name in ROUGH else 0.1), name
    for names in ORDERS:
        for rates in (was, said):
            assert sorted(names, key=rates.__getitem__, reverse=True) == names


def test_the_choice_is_legal_keeps_what_is_given_and_shows_the_next_best(tmp_path):
    words = [
        *checkpoint(tmp_path, "qwen3-4B"),
        *RUN.split(),
        "--tensor-model-parallel-size",
        "2",
        "--sequence-parallel",
    ]
    options = replace(H200, card=find_card("H100"))
    chosen, table = fitted([*words, "--fit"], options, num_gpus=4)
    assert chosen[: len(words)] == words and "--fit" not in chosen
    assert chosen.count("--tensor-model-parallel-size") == 1 and "--colocate" in chosen
    run = complete_run(chosen, tmp_path, flag_groups())
    assert run.problems == [] and run.args is not None
    assert run.args.tensor_model_parallel_size == 2 and run.args.world_size == 4
    plan = make_plan(run.args, run.hf_config, options)
    assert plan.problems == [] and plan.too_large == []
    lines = [line.strip() for line in table.splitlines()]
    assert [line.split(":")[0] for line in lines[1:7:2]] == ["chosen", "next 1", "next 2"]
    steps = [float(line.split()[1 if line.startswith("chosen") else 2]) for line in lines[1:7:2]]
    assert steps == sorted(steps)


def test_adapters_fit_where_all_weights_do_not_and_a_base_in_four_bits_takes_a_third(tmp_path):
    words = [*checkpoint(tmp_path, "qwen3-14B"), *RUN.split(), "--fit"]
    options = replace(H200, card=find_card("H100"))
    with pytest.raises(ConfigError, match="no layout of 1 x H100 fits"):
        fitted(words, options, 1, flag_groups())
    memory = []
    for base in ([], ["--lora-base-precision", "int4"]):
        chosen, _ = fitted([*words, "--lora-rank", "32", *base], options, 1, flag_groups())
        run = complete_run(chosen, tmp_path, flag_groups())
        assert run.problems == [] and run.args is not None
        memory.append(make_plan(run.args, run.hf_config, options).stages[0].memory)
    whole, quantized = memory
    assert whole.frozen == pytest.approx(2 * 14.77e9, rel=1e-3)  # embedding and projection stay in bf16
    assert quantized.frozen == pytest.approx((0.5 + 1 / 64) * 13.21e9 + 2 * 1.556e9, rel=1e-3)
    assert whole.gradients == quantized.gradients < 0.02 * 4 * 14.77e9
