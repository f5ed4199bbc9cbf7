"""Old path of ``slime.rollout.eval_config``."""

from slime.rollout.eval_config import EvalDatasetConfig, build_eval_dataset_configs, ensure_dataset_list

__all__ = ["EvalDatasetConfig", "build_eval_dataset_configs", "ensure_dataset_list"]
