"""From a command line or a recipe to a printed plan: what ``tools/plan.py`` and ``train.py ... --plan`` share."""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils.flags.hf_config_check import fill_model_flags, read_hf_config
from slime.backends.megatron_utils.flags.resolve_arguments import derived_arguments
from slime.backends.megatron_utils.models import IS_PARTIAL, published_config
from slime.ext.plan.make_plan import make_plan
from slime.ext.plan.plan import Plan, PlanOptions, find_card
from slime.ext.plan.prompts import prompt_lengths
from slime.ext.plan.tables import plan_tables
from slime.flags.group import FlagGroup
from slime.flags.parse import GROUPS, backend_checks, parse_flags, parser_of, slime_validate_args
from slime.flags.words import flags_with_values
from slime.utils import env
from slime.utils.errors import SlimeError

EXIT_OK, EXIT_TOO_LARGE, EXIT_ILLEGAL = 0, 1, 2


@dataclass(frozen=True, slots=True)
class CompleteRun:
    """A run's flags as the run would have them, and what is wrong with them."""

    args: Namespace | None
    """None when not even the shape of the run could be made out."""
    hf_config: Mapping[str, Any]
    problems: list[str]
    notes: list[str]
    checkpoint: str = ""
    """As it was given."""


def complete_run(words: Sequence[str], folder: Path, groups: Sequence[FlagGroup] = GROUPS) -> CompleteRun:
    """Parse and check ``words`` as train.py does, in every stage, so that all that is wrong is told at once.

    Files need not be there: of ``--hf-checkpoint`` only config.json is read, and where that is missing, too, the plan
    goes by the flags and by what is known of published checkpoints.

    Args:
        folder: takes a stand-in for a checkpoint that is not here; the args name it.
    """
    notes: list[str] = []
    try:
        args = parse_flags(words, groups=groups)
        checkpoint = str(args.hf_checkpoint)
        if (Path(checkpoint) / "config.json").is_file():
            hf_config = read_hf_config(checkpoint)
        else:
            known = published_config(checkpoint)
            notes.append(_assumption(checkpoint, known))
            hf_config = {**known, IS_PARTIAL: True}
        if not any(Path(checkpoint).glob("*.safetensors*")):
            stand_in = str(_stand_in(folder, checkpoint, hf_config))
            args = parse_flags([*words, "--hf-checkpoint", stand_in], groups=groups)
    except SlimeError as error:
        return CompleteRun(None, {}, str(error).splitlines(), notes)
    vars(args).update(runs_here=False)
    problems = _check(args, groups)
    is_known = vars(args).get("padded_vocab_size") is not None and bool(vars(args).get("world_size"))
    return CompleteRun(args if is_known else None, hf_config, problems, notes, checkpoint)


def _check(args: Namespace, groups: Sequence[FlagGroup]) -> list[str]:
    def problems_of(check: Callable[[Namespace], None]) -> list[str]:
        try:
            check(args)
        except SlimeError as error:
            return str(error).splitlines()
        return []

    problems = problems_of(partial(slime_validate_args, parser=parser_of(args, groups)))
    if "critic_args" not in vars(args):
        return problems  # a flag was refused before anything could be derived, which the other checks need
    checks = [*backend_checks(args, groups), *([_complete_model] if args.debug_rollout_only else [])]
    return problems + [problem for check in checks for problem in problems_of(check)]


_ONE_RANK: dict[str, Any] = {
    "world_size": 1,
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"), 1),
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), 1),
    **dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")),
    **dict.fromkeys(("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout")),
    "use_dynamic_batch_size": False,
}


def _complete_model(args: Namespace) -> None:
    vars(args).update(_ONE_RANK)
    vars(args).update(fill_model_flags(args))
    vars(args).update(derived_arguments(args))


def _assumption(checkpoint: str, config: Mapping[str, Any]) -> str:
    if config:
        return f"{checkpoint}: no config.json here; the plan uses what is known of that checkpoint."
    return (
        f"{checkpoint}: no config.json here; the plan uses the flags alone (engines in bf16). "
        "--hf-checkpoint FOLDER with a config.json makes it exact."
    )


def _stand_in(parent: Path, checkpoint: str, config: Mapping[str, Any]) -> Path:
    """Make a folder with what is known of the config, for the checks that read it.

    Without how it is quantized: the check of that reads the names of all tensors, which are not here.
    """
    folder = parent / "assumed" / (Path(checkpoint).name or "checkpoint")
    folder.mkdir(parents=True, exist_ok=True)
    known = {name: value for name, value in config.items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(known))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run_plan(
    words: Sequence[str],
    options: PlanOptions,
    *,
    groups: Sequence[FlagGroup] = GROUPS,
    as_json: bool = False,
    all_ranks: bool = False,
) -> int:
    """Print the plan of a command line; gives the exit code.

    0: the run is valid and fits; 1: it is valid, but needs more memory than there is; 2: it is invalid.
    """
    plan: Plan | None = None
    with tempfile.TemporaryDirectory(prefix="slime-plan-") as folder:
        run = complete_run(words, Path(folder), groups)
        problems = list(run.problems)
        if run.args is not None:
            try:
                prompts = prompt_lengths(run.args, run.checkpoint)
                made = make_plan(run.args, run.hf_config, replace(options, prompts=prompts))
                plan = replace(made, model=run.checkpoint)
            except SlimeError as error:
                problems.append(str(error))
    if plan is not None:
        problems += [problem for problem in plan.problems if problem not in problems]
    problems = list(dict.fromkeys(problems))
    notes = run.notes + (plan.notes if plan else [])
    if as_json:
        print(json.dumps({"problems": problems, "notes": notes, "plan": as_document(plan)}))
    else:
        print(plan_tables(plan, problems, notes, all_ranks=all_ranks))
    if problems:
        return EXIT_ILLEGAL
    return EXIT_TOO_LARGE if plan is not None and plan.too_large else EXIT_OK


def as_document(plan: Plan | None) -> dict[str, Any] | None:
    """Return the plan as plain lists, mappings and numbers, sums that the classes compute included."""
    if plan is None:
        return None
    document = asdict(plan)
    for entry, stage in zip(document["stages"], plan.stages, strict=True):
        entry["memory"] |= {"static": stage.memory.static, "peak": stage.memory.peak, "outside": stage.memory.outside}
        entry["parameters"] |= {"total": stage.parameters.total, "trained": stage.parameters.trained}
    document["host"]["total"] = plan.host.total
    document["sizes"] |= {"data": plan.sizes.data, "expert_data": plan.sizes.expert_data}
    return document


def plan_of_train(words: Sequence[str], groups: Sequence[FlagGroup]) -> int:
    """Plan ``train.py ... --plan`` for H100s; tools/plan.py has options for other cards."""
    as_json = any(flag == "--plan" and "json" in values for flag, values in flags_with_values(words))
    options = PlanOptions(card=find_card("H100"), environment=env.copy())
    code = run_plan(words, options, groups=groups, as_json=as_json)
    sys.stdout.flush()
    return code
