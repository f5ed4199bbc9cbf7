"""Old path of ``slime.rollout.prompt_dataset``."""

from slime.rollout.prompt_dataset import Dataset, get_source
from slime.rollout.prompt_files import read_file

__all__ = ["Dataset", "get_source", "read_file"]
