"""What ``python -m tests.e2e.algorithms`` runs: one entry an algorithm, its hyperparameters, and why they are these.

Everything that an entry does not name is that of ``scripts/run-tiny-cpu.sh``: 32 prompts x 8 samples a rollout, one
optimizer step, learning rate 5e-4, no KL and no entropy term, temperature 1, responses of 18 tokens or so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Loop(StrEnum):
    """Which training loop a job runs in, and with which rollout function: ``LOOP`` of the recipes."""

    SYNC = "sync"
    """``train.py``: engine and trainer take turns on one GPU."""
    AHEAD = "ahead"
    """``train_async.py``: rollout k + 1 is generated while rollout k is trained; a GPU each."""
    FULLY = "async"
    """``train_async.py`` with the fully asynchronous rollout: generation never stops; a GPU each."""

    @property
    def num_gpus(self) -> int:
        """GPUs that the job takes."""
        return 1 if self is Loop.SYNC else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One row of the table."""

    name: str
    """Of the run's folder, and for ``--only``."""
    title: str
    flags: tuple[str, ...]
    """Beside those of the recipe; of a flag given twice the last counts.  ``{run}`` is the run's folder."""
    why: str
    """Why the hyperparameters are these."""
    loop: Loop = Loop.SYNC
    all_seeds: bool = False
    """Run with every seed of ``--seeds``, not only with the first."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name in the run's folder -> text, of files that the flags name."""


def _flags(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TWO_STEPS = "--global-batch-size 128"
"""Two optimizer steps a rollout, so that the second meets ratios that are not 1 and the clip has something to do."""

VARIANTS: tuple[Variant, ...] = (
    Variant(
        name="grpo",
        title="GRPO",
        flags=_flags("--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28"),
        why="the demo's own numbers; one step a rollout, so on policy",
        all_seeds=True,
    ),
    Variant(
        name="gspo",
        title="GSPO",
        flags=_flags(f"--advantage-estimator gspo --eps-clip 0.01 --eps-clip-high 0.015 {TWO_STEPS}"),
        why=(
            "the ratio is a mean over the sequence, so it moves far less than a token's: the bounds must be small; "
            "the paper's 3e-4 are for learning rates of 1e-6, here a step moves a sequence by about 0.01"
        ),
    ),
    Variant(
        name="cispo",
        title="CISPO",
        flags=_flags(f"--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 4.0 {TWO_STEPS}"),
        why="no lower bound and a wide upper one, as in the paper: the clip only cuts weights, it stops no token",
    ),
    Variant(
        name="reinforce_plus_plus",
        title="REINFORCE++",
        flags=_flags("--advantage-estimator reinforce_plus_plus --normalize-advantages --kl-coef 0.001"),
        why=(
            "no groups: whitening over the batch is the only baseline, so it must be on; the KL penalty is part of "
            "the return and is kept small, for the warm start is a bad model to stay close to"
        ),
    ),
    Variant(
        name="reinforce_plus_plus_baseline",
        title="REINFORCE++ with baseline",
        flags=_flags("--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages --kl-coef 0.001"),
        why="the group's mean is the baseline, whitening sets the scale; KL as above",
    ),
    Variant(
        name="ppo",
        title="PPO",
        flags=_flags(
            "--advantage-estimator ppo --normalize-advantages --gamma 1.0 --lambd 1.0 --value-clip 0.2 "
            f"--num-critic-only-steps 1 --megatron-config-path {{run}}/roles.yaml {TWO_STEPS}"
        ),
        why=(
            "the reward comes at the end of a short response, so neither discount nor lambda below 1; two steps a "
            "rollout; the critic begins with a random head: it learns alone for a rollout, and twice as fast "
            "(`roles.yaml` sets its learning rate to 1e-3)"
        ),
        all_seeds=True,
        files={"roles.yaml": "megatron:\n  - {name: value, role: critic, overrides: {lr: 0.001}}\n"},
    ),
    Variant(
        name="dr_grpo",
        title="Dr. GRPO",
        flags=_flags(
            "--advantage-estimator grpo --disable-grpo-std-normalization "
            "--custom-pg-loss-reducer-function-path examples.DrGRPO.custom_reducer.get_pg_loss_reducer"
        ),
        why="no division by the group's deviation, and every response divided by the same constant",
    ),
    Variant(
        name="rloo",
        title="RLOO, a plug-in",
        flags=_flags("--advantage-estimator examples.custom_estimator.rloo.rloo"),
        why="the estimator that the page on customization adds; nothing else differs from GRPO",
    ),
    Variant(
        name="grpo_one_step_tis",
        title="GRPO with TIS, one rollout ahead",
        flags=_flags("--advantage-estimator grpo --use-tis --tis-clip 2.0"),
        why="the engine is one update behind; the weights pi_trainer / pi_engine make up for it, cut at 2",
        loop=Loop.AHEAD,
    ),
    Variant(
        name="grpo_fully_async_tis",
        title="GRPO with TIS, fully asynchronous",
        flags=_flags("--advantage-estimator grpo --use-tis --tis-clip 2.0 --max-staleness 2"),
        why="as above; groups may be two updates old, and weights change in the middle of responses",
        loop=Loop.FULLY,
    ),
)


def select(names: str | None) -> list[Variant]:
    """The variants of ``--only``, in the order of the table; all of them without it.

    Raises:
        ValueError: a name is not in the table.
    """
    if names is None:
        return list(VARIANTS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [variant.name for variant in VARIANTS]
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise ValueError(f"--only names {', '.join(unknown)}; there is {', '.join(known)}")
    return [variant for variant in VARIANTS if variant.name in wanted]
