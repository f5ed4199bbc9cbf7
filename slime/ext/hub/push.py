"""Pushes each export of ``--save-hf hub:ORG/NAME`` from the driver, in a thread beside the next steps."""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import HfApi

from slime.observability.telemetry import Sink
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

CLOSE_S = 3600.0
"""For the pushes that are under way when the run ends."""
SAY_S = 60.0
"""Between two lines on what the end of the run waits for."""


class HubSink(Sink):
    """The repository of a run; idle in other processes than the driver.

    Raises:
        ConfigError: the repository cannot be made, or written to.
    """

    def __init__(self, args: Namespace, process: str, *, primary: bool) -> None:
        self._repository, self._folder, self._is_primary = args.hub_repository, args.save_hf, primary
        self._last: threading.Thread | None = None
        if not primary:
            return
        self._api = HfApi(library_name="slime")
        try:
            self._api.create_repo(self._repository, private=True, exist_ok=True)
        except (OSError, ValueError, httpx.HTTPError) as error:
            raise ConfigError(
                f"--save-hf hub:{self._repository}: {self._api.endpoint} refuses it ({' '.join(str(error).split())}). "
                "Give a repository that HF_TOKEN may write to."
            ) from error

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Push what a save has exported, after the pushes before it."""
        if self._is_primary and name == "save":
            words = (fields["rollout"], self._last)
            self._last = threading.Thread(target=self._push, args=words, name="hub-push", daemon=True)
            self._last.start()

    def _push(self, rollout_id: int, before: threading.Thread | None) -> None:
        if before is not None:
            before.join(CLOSE_S)
        folder = Path(self._folder.format(rollout_id=rollout_id))
        try:
            self._api.upload_folder(
                repo_id=self._repository, folder_path=folder, commit_message=f"Rollout {rollout_id}"
            )
        except Exception as error:  # the edge of a thread: the export is on disk, and training continues
            logger.error("%s is not on the hub: %s; hf upload %s %s", folder, error, self._repository, folder)
        else:
            logger.info("%s is %s/%s", folder, self._api.endpoint, self._repository)

    def close(self) -> None:
        until_s = time.monotonic() + CLOSE_S
        while self._last is not None and self._last.is_alive():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                logger.error(
                    "The last push to %s has not ended in %.0f s (slime.ext.hub.push.CLOSE_S); hf upload pushes the "
                    "exports in %s.", self._repository, CLOSE_S, self._folder,
                )  # fmt: skip
                return
            logger.info(
                "The run is over; its last push to %s is under way, for %.0f s more at most.", self._repository, left_s
            )
            self._last.join(min(SAY_S, left_s))
