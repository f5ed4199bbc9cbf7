"""Old path of ``slime.rollout.prompt_dataset``."""

from slime.rollout.prompt_dataset import Dataset
from slime.rollout.prompt_files import read_file
from slime.train_data.convert import source_name as get_source

__all__ = ["Dataset", "get_source", "read_file"]
