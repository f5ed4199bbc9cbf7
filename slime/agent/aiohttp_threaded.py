"""The public path of ``slime.utils.aiohttp_threaded``."""

from slime.utils.aiohttp_threaded import AppHandle, FilteredAccessLogger, run_app_in_thread

__all__ = ["AppHandle", "FilteredAccessLogger", "run_app_in_thread"]
