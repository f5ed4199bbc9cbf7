"""trackio and MLflow as sinks.  The driver makes the run; other processes join it with their first record."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import threading
import time
from argparse import Namespace
from collections.abc import Mapping
from numbers import Real
from typing import Any

from slime.flags.observability import tracking_config
from slime.observability.metrics_file import plain, run_folder
from slime.observability.telemetry import Sink
from slime.utils.redaction import redacted

PARAMS_AT_ONCE = 100
"""That MLflow takes in one call."""
MAX_PARAM_CHARS = 500
CLOSE_S = 30.0
"""That the last records may take; MLflow's own wait has no end."""
RUN_TAG = "slime.run"
"""Of an MLflow run: the id by which the processes of a job find it."""


class _Tracker(Sink):
    def __init__(self, args: Namespace, process: str, *, primary: bool) -> None:
        self._args, self._is_primary = args, primary
        tracking = tracking_config(args)
        self._folder = run_folder(tracking)
        self._name = tracking.wandb_run_id or str(self._folder)
        self._is_open = False
        if primary:
            self._join()

    def _join(self) -> None:
        if not self._is_open:
            self._open()
            self._is_open = True

    def _open(self) -> None:
        raise NotImplementedError

    def _config(self) -> dict[str, Any]:
        """Return the run's arguments without secrets."""
        return {name: plain(value) for name, value in vars(redacted(self._args)).items()}


class TrackioSink(_Tracker):
    """A run of trackio, in its folder of this machine."""

    def _open(self) -> None:
        import trackio

        config = self._config()  # from every process: trackio keeps the last one's
        settings: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=self._args.trackio_project, name=self._name, config=config, resume="allow", **settings
            )

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        self._join()
        self._run.log(_numbers(metrics), step=int(metrics[step_key]))

    def close(self) -> None:
        if self._is_open:
            with contextlib.redirect_stdout(io.StringIO()):
                self._run.finish()


class MlflowSink(_Tracker):
    """A run of MLflow; a server that does not answer costs records, never a step."""

    def _open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        args = self._args
        self._client = MlflowClient(args.mlflow_uri or f"sqlite:///{self._folder}/mlflow.db")
        found = self._client.get_experiment_by_name(args.mlflow_experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(args.mlflow_experiment)
        runs = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{self._name}'", max_results=1)
        run = runs[0] if runs else self._client.create_run(experiment, run_name=self._name, tags={RUN_TAG: self._name})
        self._run_id = run.info.run_id
        self._pending: Any = None
        if self._is_primary and not run.data.params:
            params = [Param(name, str(value)[:MAX_PARAM_CHARS]) for name, value in self._config().items()]
            for first in range(0, len(params), PARAMS_AT_ONCE):
                self._client.log_batch(self._run_id, params=params[first : first + PARAMS_AT_ONCE])

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        from mlflow.entities import Metric

        self._join()
        now, step = int(time.time() * 1e3), int(metrics[step_key])
        rows = [Metric(_mlflow_name(name), value, now, step) for name, value in _numbers(metrics).items()]
        self._pending = self._client.log_batch(self._run_id, metrics=rows, synchronous=False)

    def close(self) -> None:
        if not self._is_open:
            return
        if self._pending is not None:
            last = threading.Thread(target=self._pending.wait, daemon=True)
            last.start()
            last.join(CLOSE_S)
        if self._is_primary:
            self._client.set_terminated(self._run_id)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    values = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return {name: float(value) for name, value in values.items() if isinstance(value, Real)}


def _mlflow_name(name: str) -> str:
    """Return the name of a metric in the letters that MLflow takes."""
    return re.sub(r"[^\w\-. /:]", "_", name, flags=re.ASCII)
