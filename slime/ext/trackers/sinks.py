"""Trackers as sinks.  The driver makes the run; other processes join it with their first record, at the latest.

One run of Weights & Biases has several writers: the driver is the primary one, the others join by the run id.  With
``--wandb-mode offline`` nothing leaves the machine: each writer keeps a folder under ``--wandb-dir``, all with the
same run id, and ``wandb sync --append`` puts them together later.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import threading
import time
import uuid
from argparse import Namespace
from collections.abc import Mapping
from numbers import Real
from typing import Any

from slime.ext.trackers.flags import TrackersConfig
from slime.flags.observability import TrackingConfig
from slime.observability.metrics_file import plain, run_folder
from slime.observability.telemetry import Sink
from slime.utils import env
from slime.utils.redaction import redacted, redacted_text, redacted_words

AXES = {
    "train/step": ("train/*",),
    "rollout/step": ("rollout/*", "multi_turn/*", "multi_turn_metric/*", "passrate/*", "perf/*"),
    "eval/step": ("eval/*",),
}
TABLE_ROWS = 32
"""Samples of a rollout in the table."""
TABLE_CHARS = 4000
"""Of a prompt or response, from its start."""
TABLE_COLUMNS = ("group", "index", "prompt", "response", "label", "reward", "length", "status")
PARAMS_AT_ONCE = 100
"""That MLflow takes in one call."""
MAX_PARAM_CHARS = 500
CLOSE_S = 30.0
"""That the last records may take; MLflow's own wait has no end."""
RUN_TAG = "slime.run"
"""Of an MLflow run: the id by which the processes of a job find it."""


class _Tracker(Sink):
    def __init__(self, args: Namespace, process: str = "", *, primary: bool = False) -> None:
        self._args, self._is_primary = args, primary
        self._config = TrackersConfig.of(args)
        tracking = TrackingConfig.of(args)
        self._folder, self._run_id = run_folder(tracking), tracking.wandb_run_id
        self._name = self._run_id or str(self._folder)
        self._is_open = False
        if primary:
            self._join()

    def _join(self) -> None:
        if not self._is_open:
            self._open()
            self._is_open = True

    def _open(self) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self._is_open:
            self._close()

    def _flags(self) -> dict[str, Any]:
        """Return the run's arguments without secrets."""
        shown = vars(redacted(self._args))
        return {name: plain(vars(one) if isinstance(one, Namespace) else one) for name, one in shown.items()}


class WandbSink(_Tracker):
    """A writer of a run of Weights & Biases: metrics, and the first samples of each rollout as a table."""

    _rows: tuple[list[Any], ...] = ()

    def __init__(self, args: Namespace, process: str = "", *, primary: bool = False) -> None:
        super().__init__(args, process, primary=primary)
        if process == "rollout manager":  # its plug-ins call wandb.log, maybe before its first record
            self._join()

    def _join(self) -> None:
        if self._config.wandb_mode != "disabled":
            super()._join()

    def _open(self) -> None:
        import wandb

        config = self._config
        is_offline = config.wandb_mode == "offline"
        if not is_offline and config.wandb_key:
            wandb.login(key=config.wandb_key, host=config.wandb_host)
        group = config.wandb_group
        if group and config.wandb_random_suffix:  # it keeps runs of one group apart
            group = f"{group}_{self._run_id or uuid.uuid4().hex[:6]}"
        if config.wandb_dir:
            os.makedirs(config.wandb_dir, exist_ok=True)
        settings: dict[str, Any] = {"console": "off", "silent": True}
        if is_offline:
            settings["mode"] = "offline"
        else:
            settings.update(mode="shared", x_primary=self._is_primary, x_update_finish_state=self._is_primary)
        words, sys.argv = sys.argv, redacted_words(sys.argv)  # wandb writes the command line down
        try:
            self._run = wandb.init(
                id=self._run_id,
                entity=config.wandb_team,
                project=config.wandb_project,
                group=group,
                name=f"{group or 'slime'}-RANK_0",
                dir=config.wandb_dir,
                config=self._flags() if self._is_primary else None,
                settings=wandb.Settings(**settings),
            )
        finally:
            sys.argv = words
        for axis, patterns in AXES.items():
            self._run.define_metric(axis)
            for pattern in patterns:
                self._run.define_metric(pattern, step_metric=axis)

    def samples(self, kind: str, facts: Mapping[str, Any]) -> None:
        if kind == "rollout":
            self._rows = tuple(_table_row(sample) for sample in facts["samples"][:TABLE_ROWS])

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        """Send one record; the axes are defined by metric name, so ``step_key`` travels as a metric."""
        self._join()
        if not self._is_open:
            return
        import wandb

        record = dict(metrics)
        if step_key == "rollout/step" and self._rows:
            record["samples"] = wandb.Table(columns=list(TABLE_COLUMNS), data=list(self._rows))
            self._rows = ()
        self._run.log(record)

    def _close(self) -> None:
        self._run.finish()


def _table_row(sample: Any) -> list[Any]:
    texts = (redacted_text(str(text))[:TABLE_CHARS] for text in (sample.prompt, sample.response, sample.label))
    outcome = (str(sample.reward), sample.response_length, sample.status.value)
    return [sample.group_index, sample.index, *texts, *outcome]


class TensorboardSink(_Tracker):
    """A writer of each number of a record as a scalar.  Plug-ins make one of ``args`` and call ``log(data=, step=)``.

    Its folder is ``TENSORBOARD_DIR``, else ``--tensorboard-dir``, else
    ``tensorboard_log/{--tb-project-name}/{--tb-experiment-name or run id}``.
    """

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        project = self._config.tb_project_name or "slime"
        run = self._config.tb_experiment_name or self._run_id or time.strftime("%Y%m%d-%H%M%S")
        own = env.get_str("TENSORBOARD_DIR") or self._config.tensorboard_dir
        folder = own or f"tensorboard_log/{project}/{run}"
        self._writer = SummaryWriter(folder, flush_secs=10)

    def log(
        self,
        metrics: Mapping[str, Any] | None = None,
        step_key: str | None = None,
        *,
        data: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        """Write one record, ``(metrics, step_key)`` or ``data=, step=``; the step key itself is not a scalar."""
        self._join()
        values = metrics if metrics is not None else data or {}
        at = step if step is not None else values[step_key] if step_key else None
        for name, value in _numbers(values).items():
            if name != step_key:
                self._writer.add_scalar(name, value, at)

    def _close(self) -> None:
        self._writer.close()


class TrackioSink(_Tracker):
    """A run of trackio, in its folder of this machine."""

    def _open(self) -> None:
        import trackio

        settings: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        settings["config"] = self._flags()  # from every process: trackio keeps the last one's
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = trackio.init(project=self._config.trackio_project, name=self._name, resume="allow", **settings)

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        self._join()
        self._run.log(_numbers(metrics), step=int(metrics[step_key]))

    def _close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


class MlflowSink(_Tracker):
    """A run of MLflow; a server that does not answer costs records, never a step."""

    def _open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        config = self._config
        self._client = MlflowClient(config.mlflow_uri or f"sqlite:///{self._folder}/mlflow.db")
        found = self._client.get_experiment_by_name(config.mlflow_experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(config.mlflow_experiment)
        runs = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{self._name}'", max_results=1)
        run = runs[0] if runs else self._client.create_run(experiment, run_name=self._name, tags={RUN_TAG: self._name})
        self._mlflow_run = run.info.run_id
        self._pending: Any = None
        if self._is_primary and not run.data.params:
            params = [Param(name, str(value)[:MAX_PARAM_CHARS]) for name, value in self._flags().items()]
            for first in range(0, len(params), PARAMS_AT_ONCE):
                self._client.log_batch(self._mlflow_run, params=params[first : first + PARAMS_AT_ONCE])

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        from mlflow.entities import Metric

        self._join()
        now, step = int(time.time() * 1e3), int(metrics[step_key])
        rows = [Metric(_mlflow_name(name), value, now, step) for name, value in _numbers(metrics).items()]
        self._pending = self._client.log_batch(self._mlflow_run, metrics=rows, synchronous=False)

    def _close(self) -> None:
        if self._pending is not None:
            last = threading.Thread(target=self._pending.wait, daemon=True)
            last.start()
            last.join(CLOSE_S)
        if self._is_primary:
            self._client.set_terminated(self._mlflow_run)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    values = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return {name: float(value) for name, value in values.items() if isinstance(value, Real)}


def _mlflow_name(name: str) -> str:
    """Return the name of a metric in the letters that MLflow takes."""
    return re.sub(r"[^\w\-. /:]", "_", name, flags=re.ASCII)
