"""An estimator that needs a new column changes three files: CONTRIBUTING.md's example, applied to a copy."""

from __future__ import annotations

import pytest

from tests.contracts.copied_tree import copy_by_links, printed_by, with_edits
from tests.contracts.source_tree import REPO

pytestmark = pytest.mark.timeout(300)  # starts a Python with torch and Megatron, perhaps on a busy machine

COLUMN = """\
    step_rewards: Sequence[Floats] | None = _column(
        torch.float32, span="response", read=lambda sample: (sample.metadata or {}).get("step_rewards")
    )
    \"\"\"[R] reward of the step that ends with each token.\"\"\"
"""
ESTIMATOR = '''\
"""Rewards to go: the sum of the rewards of the steps that are still to come, and of the whole response."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algorithms.advantages.inputs import AdvantageConfig, AdvantageInputs


def step_reward_advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[list[Tensor], list[Tensor]]:
    """``A[t] = reward + sum_{s >= t} step_reward[s]``, returns likewise."""
    returns_N = [
        reward + step_R.flip(0).cumsum(0).flip(0)
        for reward, step_R in zip(inputs.rewards_N, inputs.columns["step_rewards"], strict=True)
    ]
    return list(returns_N), returns_N
'''
IMPORT = "from slime.algorithms.advantages.step_rewards import step_reward_advantages\n"
ROW = """\
        "step_rewards": Estimator(
            compute=step_reward_advantages, columns=("step_rewards",), needs_whole_responses=True
        ),
"""
EDITS = {
    # file -> {a line of it: the text inserted before that line}
    "slime/train_data/columns.py": {"    extra: dict[str, Sequence[Any]]": COLUMN},
    "slime/algorithms/advantages/__init__.py": {
        "from slime.algorithms.group_baselines import": IMPORT,
        '        "ppo": Estimator(': ROW,
    },
}
NEW_FILE = "slime/algorithms/advantages/step_rewards.py"

PROGRAM = """
import json, sys, tempfile
from argparse import Namespace
from pathlib import Path

import slime
assert Path(slime.__path__[0]).parent == Path.cwd(), slime.__path__

import torch.distributed as dist
from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
from slime.train_data.convert import samples_to_train_data
from slime.train_data.schedule import ScheduleConfig, build_dp_schedule
from slime.train_data.split import split_by_rank
from slime.utils.errors import DataError
from slime.utils.types import Sample
from megatron.core import mpu

dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", world_size=1, rank=0)
mpu.initialize_model_parallel()
args = Namespace(
    advantage_estimator="step_rewards", custom_advantage_function_path=None,
    normalize_advantages=False, kl_coef=0.0, gamma=1.0, lambd=1.0,
)

def sample(index, step_rewards):
    metadata = {} if step_rewards is None else {"step_rewards": step_rewards}
    return Sample(index=index, tokens=[1, 2, 3, 4, 5], response_length=3, metadata=metadata)

def train_data(*steps):
    samples = [sample(index, rewards) for index, rewards in enumerate(steps)]
    rewards = [float(index) for index in range(len(samples))]
    batch = samples_to_train_data(samples, rewards, rewards)
    schedule = build_dp_schedule(
        ScheduleConfig(dp_size=1), [5] * len(samples), global_batch_size=len(samples),
        rollout_indices=batch.rollout_ids,
    )
    return prepare_rollout_data(split_by_rank(batch, schedule)[0])

def refusal(call):
    try:
        call()
    except DataError as error:
        return str(error)

data = train_data([0.0, 0.5, 0.25], [1.0, 0.0, 0.0])
compute_advantages_and_returns(args, data)
print(json.dumps({
    "advantages": dict(zip(data["partition"], [values.tolist() for values in data["advantages"]])),
    "loss": get_data_iterator(data, 1)[0].get_next(["step_rewards"])["step_rewards"][0].dtype.__str__(),
    "too short": refusal(lambda: train_data([0.0], [0.0, 0.0, 0.0])),
    "only some": refusal(lambda: train_data(None, [0.0, 0.0, 0.0])),
    "none": refusal(lambda: compute_advantages_and_returns(args, train_data(None, None))),
}))
"""


def test_an_estimator_with_a_column_of_its_own_touches_three_files(tmp_path):
    copy_by_links(REPO / "slime", tmp_path / "slime", {REPO / name for name in EDITS})
    for name, edits in EDITS.items():
        (tmp_path / name).write_text(with_edits((REPO / name).read_text(), edits))
    (tmp_path / NEW_FILE).write_text(ESTIMATOR)
    found = printed_by(PROGRAM, tmp_path)
    assert found["advantages"] == {"0": [0.75, 0.75, 0.25], "1": [2.0, 1.0, 1.0]}
    assert found["loss"] == "torch.float32"
    assert "sample 0 has 1 entries in step_rewards and response_length 3" in found["too short"]
    assert "sample 0 has no step_rewards while other samples of the rollout have" in found["only some"]
    assert "--advantage-estimator step_rewards needs step_rewards, and the samples have none" in found["none"]
