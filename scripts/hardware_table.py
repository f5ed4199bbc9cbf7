"""README.md's tables of ``slime plan``: GPUs that a size of model needs at least, and what large recipes take."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.published_configs import PUBLISHED
from slime.compose import flag_groups
from slime.ext.plan.command import complete_run
from slime.ext.plan.fit import fitted
from slime.ext.plan.make_plan import make_plan
from slime.ext.plan.plan import Plan, PlanOptions, find_card
from slime.ext.plan.recipe import read_recipe
from slime.ext.plan.trainer_memory import GIB
from slime.utils.errors import ConfigError

REPO = Path(__file__).parents[1]
MODELS = ("qwen3-0.6B", "qwen3-4B", "qwen3-8B", "qwen3-14B", "qwen3-30B-A3B", "qwen3-32B")
RECIPES = ("qwen3-235B-A22B", "glm4.5-355B-A32B", "deepseek-r1", "glm5.2-744B-A40B")
CARDS = ("H100", "H200")
NODE = (1, 2, 4, 8)
RUN = (
    *("--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--global-batch-size", "256"),
    *("--num-rollout", "1", "--rollout-max-response-len", "8192", "--prompt-data", "data.jsonl", "--rm-type", "math"),
)
ADAPTERS = ("--lora-rank", "32")


def hardware_tables() -> str:
    """Return both tables as Markdown."""
    columns = [(card, more) for more in ((), ADAPTERS) for card in CARDS]
    head = ["model", *(f"{'LoRA' if more else 'all weights'}, {card}" for card, more in columns)]
    sizes = [[_name(model), *(_fewest_gpus(model, card, more) for card, more in columns)] for model in MODELS]
    recipes = [_recipe_row(name) for name in RECIPES]
    return "\n".join(
        [
            _markdown(head, sizes),
            "",
            _markdown(["recipe", "parameters", "H100s", "GiB a GPU in training", "GiB a host"], recipes),
        ]
    )


def _fewest_gpus(model: str, card: str, more: tuple[str, ...]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(PUBLISHED[model]))
        (Path(folder) / "tokenizer.json").write_text("{}")
        words = ["--hf-checkpoint", folder, *RUN, *more, "--fit"]
        for num_gpus in NODE:
            try:
                chosen, _ = fitted(words, PlanOptions(card=find_card(card)), num_gpus, flag_groups())
            except ConfigError:
                continue
            return f"{num_gpus}*" if "--optimizer-cpu-offload" in chosen else str(num_gpus)
    return "more than a node"


def _recipe_row(name: str) -> list[str]:
    script = f"scripts/run-{name}.sh"
    plan = _planned(script)
    assert plan.phases.train is not None and not plan.too_large
    return [
        f"[{_name(name)}]({script})",
        f"{plan.num_parameters / 1e9:.0f} B",
        str(plan.num_gpus),
        f"{plan.phases.train / GIB:.0f}",
        f"{plan.host.total / GIB:.0f}",
    ]


def _planned(script: str) -> Plan:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = read_recipe(str(REPO / script), [], folder)
        run = complete_run(recipe.words, folder)
        assert run.args is not None, run.problems
        return make_plan(run.args, run.hf_config, PlanOptions(card=find_card("H100"), environment=recipe.environment))


def _name(model: str) -> str:
    words = {"qwen3": "Qwen3", "deepseek": "DeepSeek", "r1": "R1"}
    return "-".join(words.get(word, word.replace("glm", "GLM-")) for word in model.split("-"))


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *rows])
