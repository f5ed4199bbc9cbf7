"""slime's rollout side in this process: real flags, real manager, no Ray cluster, a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.compose import parse_args, parts
from slime.flags.parse import record_runtime
from slime.observability.rollout_metrics import log_rollout
from slime.ray.engines.fleet import EngineFleet
from slime.ray.gpus import GpuSlice
from slime.ray.rollout import RolloutManager
from slime.ray.rollout_data import check_fan_out, split_for_ranks, train_data_from_samples
from slime.rollout.base_types import leaf_samples
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.async_utils import run
from slime.utils.http_utils import close_http_client
from tests.e2e.tiny_qwen3 import save_tiny_model
from tests.plugin_package.talking_engine import TalkingEngine, talking_script

PLUGIN_FOLDER = Path(__file__).resolve().parent
SETTINGS = PLUGIN_FOLDER / "calculator_plugin" / "calculator.yaml"
MODEL = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 16 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 10000
--use-rotary-position-embeddings --disable-bias-linear --qk-layernorm --vocab-size 512
--untie-embeddings-and-output-weights""".split()


class Product:
    """One run's rollout side.  ``flags`` are given as on the command line."""

    def __init__(self, folder: Path, *flags: str, script: Any = None) -> None:
        model = folder / "model"
        if not model.exists():
            save_tiny_model(model, seed=0)
        prompts = folder / "prompts.jsonl"
        rows = [{"input": f"What is {i} + {5 - i}?", "label": "5"} for i in range(6)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = [
            *("--hf-checkpoint", str(model), "--ref-load", str(model), "--save", str(folder / "save")),
            *("--prompt-data", str(prompts), "--label-key", "label"),
            *("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "64"),
            *("--num-rollout", "2", "--num-steps-per-rollout", "1"),
            *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--custom-config-path", str(SETTINGS)),
            *MODEL,
        ]
        self.args = parse_args(argv=[*words, *flags])
        self.engine = TalkingEngine(script or talking_script())
        self.engine.start()
        record_runtime(
            self.args,
            sglang_router_ip="127.0.0.1",
            sglang_router_port=self.engine.port,
            sglang_model_routers={"default": ("127.0.0.1", self.engine.port)},
        )
        GenerateState.clear_instances()
        self.manager = RolloutManager(self.args, GpuSlice(None, [], []), EngineFleet(self.args), parts(self.args))

    def rollout(self, rollout_id: int = 0) -> list[Any]:
        """The groups of one rollout, as the rollout function returns them."""
        self.manager.work.rollout_id = rollout_id
        set_current_rollout_id(rollout_id)
        self.manager.engines.begin_rollout()
        groups, self.metrics = self.manager.work._make_samples(rollout_id)
        check_fan_out(groups)
        self.samples = list(leaf_samples(groups))
        log_rollout(self.args, rollout_id, self.samples, self.metrics, 1.0)
        return groups

    def train_data(self, samples: list[Any]) -> dict[str, Any]:
        """The input of a trainer's only rank."""
        data = train_data_from_samples(self.args, samples)
        layout = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        per_rank = split_for_ranks(self.args, data, layout)
        return per_rank[0].to_dict()

    def close(self) -> None:
        """Stop the engine and clear the process-wide state."""
        for observer in self.manager.work.run.observers:
            observer.close()
        run(close_http_client())
        self.engine.stop()
        GenerateState.clear_instances()
