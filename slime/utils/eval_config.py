"""Old path of ``slime.flags.evaluation``."""

from slime.flags.evaluation import EvalDatasetConfig, build_eval_dataset_configs, ensure_dataset_list

__all__ = ["EvalDatasetConfig", "build_eval_dataset_configs", "ensure_dataset_list"]
