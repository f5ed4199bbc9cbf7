"""A rollout that never ends: it keeps engines up, so that they can be used or examined by hand."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 3600


def sleep(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> NoReturn:
    """Wait until the job is stopped; the job's own ``--rollout-timeout-s`` applies."""
    began = time.monotonic()
    while True:
        logger.info("Engines have run for %.1f h; stop the job to end them.", (time.monotonic() - began) / 3600)
        time.sleep(REPORT_INTERVAL_S)
