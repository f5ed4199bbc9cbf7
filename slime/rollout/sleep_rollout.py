"""A rollout that never ends, to keep the engines running for manual use or inspection."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 3600


def sleep(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> NoReturn:
    """Sleep until the job is stopped or its ``--rollout-timeout-s`` ends it."""
    began = time.monotonic()
    while True:
        logger.info("Engines have run for %.1f h; stop the job to stop them.", (time.monotonic() - began) / 3600)
        time.sleep(REPORT_INTERVAL_S)
