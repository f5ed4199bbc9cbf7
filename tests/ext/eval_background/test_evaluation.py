"""Background evaluation: what the driver starts, skips and waits for, and which version answered."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from slime.ext.eval_background import evaluation as background_eval
from slime.ext.eval_background.evaluation import (
    BackgroundEvaluation,
    BackgroundEvaluator,
    evaluation_args,
    version_of,
)
from slime.observability import telemetry
from slime.observability.telemetry import Sink
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.utils.errors import DataError, WeightSyncError
from slime.utils.types import Sample
from slime.weights.push.participants import ExcludedEngine


class Trainer:
    """Takes part in pushes to the given engines."""

    def __init__(self, notes: list[Any]) -> None:
        self.notes = notes
        self.excluded: list[ExcludedEngine] = []
        self.next_excluded: list[ExcludedEngine] = []
        self.error: Exception | None = None

    def resend(self, engines: Any) -> None:
        self.notes.append(("push", engines.names))
        self.excluded, self.next_excluded = self.next_excluded, []
        if self.error is not None:
            raise self.error


class Evaluation(BackgroundEvaluation):
    """Manager and evaluator are this process; ``ended`` has evaluations that have returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, handles: tuple[str, ...] = ("e",)) -> None:
        self.notes: list[Any] = []
        self.trainer = Trainer(self.notes)
        self.ended: dict[str, Exception | None] = {}
        self.handles = handles
        super().__init__(Namespace(rollout_timeout_s=1), None, Namespace(push=self.trainer))  # type: ignore[arg-type]
        self._evaluator = Namespace(eval=Namespace(remote=self._eval))
        monkeypatch.setattr(
            background_eval.ray, "wait", lambda refs, timeout: ([r for r in refs if r in self.ended], [])
        )
        monkeypatch.setattr(background_eval, "wait_for", self._wait)

    def _ask(self, *asked: str) -> Any:
        assert asked == ("describe_engines", "evaluation")
        return Namespace(num=len(self.handles), names=list(self.handles))

    def _eval(self, rollout_id: int) -> str:
        self.notes.append(("eval", rollout_id))
        return f"evaluation {rollout_id}"

    def _wait(self, ref: str, **_: Any) -> None:
        self.notes.append(("wait", ref))
        if (error := self.ended.get(ref)) is not None:
            raise error


def test_the_weights_go_first_and_nothing_waits_for_the_answers(monkeypatch):
    evaluation = Evaluation(monkeypatch)
    evaluation.begin(4)
    assert evaluation.notes == [("push", ["e"]), ("eval", 4)]
    evaluation.raise_if_failed()
    evaluation.finish()
    evaluation.finish()
    assert evaluation.notes[2:] == [("wait", "evaluation 4")]


def test_while_one_runs_the_next_is_left_out_and_its_engines_are_not_touched(monkeypatch, caplog):
    evaluation = Evaluation(monkeypatch)
    evaluation.begin(4)
    evaluation.begin(9)
    assert evaluation.notes == [("push", ["e"]), ("eval", 4)]
    assert "after rollout 9 is left out: that of rollout 4 still runs" in caplog.text
    evaluation.ended["evaluation 4"] = None
    evaluation.begin(14)
    assert evaluation.notes[2:] == [("wait", "evaluation 4"), ("push", ["e"]), ("eval", 14)]


def test_an_evaluation_that_fails_ends_the_run_at_the_next_look(monkeypatch):
    evaluation = Evaluation(monkeypatch)
    evaluation.begin(4)
    evaluation.ended["evaluation 4"] = DataError("no such file")
    with pytest.raises(DataError, match="no such file"):
        evaluation.raise_if_failed()


def test_engines_that_do_not_take_the_weights_evaluate_nothing(monkeypatch, caplog):
    evaluation = Evaluation(monkeypatch)
    evaluation.trainer.next_excluded = [ExcludedEngine(0, "it holds other bytes")]
    evaluation.begin(4)
    assert "after rollout 4 is left out: engine 0 did not take the weights: it holds other bytes" in caplog.text
    evaluation.trainer.error = WeightSyncError("nobody took them")
    evaluation.begin(5)
    assert "left out: its engines did not take the weights: nobody took them" in caplog.text
    evaluation.handles = ()
    evaluation.trainer.error = None
    evaluation.begin(6)
    assert "no engine of the model eval is there" in caplog.text
    assert evaluation.trainer.excluded == [] and not [note for note in evaluation.notes if note[0] == "eval"]


@pytest.mark.parametrize(
    ("versions", "engines", "found"),
    [
        ([["3"], ["3", "3"]], {"3"}, 3),
        ([["3"], ["4"]], {"3"}, None),
        ([["3"]], {"3", "4"}, None),
        ([["3"], []], set(), 3),
        ([[], []], {"3"}, 3),
        ([[]], set(), None),
        ([["default"]], {"default"}, "default"),
    ],
)
def test_a_data_set_has_the_one_version_that_answered_it(versions, engines, found):
    assert version_of([Sample(weight_versions=each) for each in versions], engines) == found


def evaluator(monkeypatch, folder, data: dict[str, Any], told: list[list[str]]) -> BackgroundEvaluator:
    async def engine_versions(config: Any) -> list[str]:
        return told.pop(0)

    monkeypatch.setattr(background_eval, "engine_versions", engine_versions)
    monkeypatch.setattr(background_eval, "RolloutConfig", Namespace(of=lambda args: None))
    made: Any = object.__new__(BackgroundEvaluator)
    made.args = Namespace(
        eval_function_path="mine.evaluate",
        save_debug_rollout_data=str(folder / "{rollout_id}.pt"),
        debug_rollout_only=False,
    )
    made.run, made.data_source = Namespace(begin=lambda rollout_id: None), "the data"
    made.eval_rollout = lambda args, rollout_id, source, evaluation: RolloutFnEvalOutput(data, {"eval/mine": 1})
    return made


class Kept(Sink):
    """Keeps the samples it gets, and records when it must write them."""

    def __init__(self, args: Namespace, process: str, *, primary: bool) -> None:
        self.taken: list[Any] = []

    def samples(self, kind: str, facts: Mapping[str, Any]) -> None:
        self.taken.append((kind, facts))

    def flush(self) -> None:
        self.taken.append("flushed")


def test_metrics_and_dump_say_the_version_and_a_mixed_data_set_is_left_out(monkeypatch, tmp_path, caplog):
    telemetry.start(Namespace(save=str(tmp_path)), "evaluation", (Kept,))
    (*_, kept) = telemetry._Stream.sinks
    logged: list[Any] = []
    monkeypatch.setattr(background_eval, "log_eval", lambda args, *what: logged.append(what) or {})
    data = {
        "one": {"rewards": [1.0], "samples": [Sample(weight_versions=["7"])]},
        "mixed": {"rewards": [0.0, 1.0], "samples": [Sample(weight_versions=["7"]), Sample(weight_versions=["8"])]},
    }
    evaluator(monkeypatch, tmp_path, data, [["7", "7"], ["7"]]).eval(4)
    ((rollout_id, shown, extra, _),) = logged
    assert (rollout_id, shown.keys()) == (4, {"one"})
    assert extra == {"eval/mine": 1, "eval/one/weight_version": 7}
    assert "Evaluation of mixed after rollout 4 is not logged" in caplog.text
    dump = torch.load(tmp_path / "eval_4.pt", weights_only=False)
    assert dump["weight_versions"] == {"one": 7, "mixed": None} and len(dump["samples"]) == 3
    assert kept.taken == [("evaluation", {"rollout_id": 4, "data": data}), "flushed"]
    telemetry.stop()
    evaluator(monkeypatch, tmp_path, data, [["7"], ["8"]]).eval(5)  # an engine that was restarted meanwhile
    assert len(logged) == 1


def test_its_requests_go_to_the_router_of_its_own_model(tmp_path):
    path = tmp_path / "engines.yaml"
    group = "{worker_type: regular, num_gpus: %d}"
    path.write_text(
        f"sglang: [{{name: default, server_groups: [{group % 1}]}}, {{name: eval, server_groups: [{group % 2}]}}]"
    )
    args = Namespace(
        sglang_config=str(path), hf_checkpoint="/hf", rollout_num_gpus_per_engine=1, rollout_num_gpus=3,
        num_gpus_per_node=8, eval_in_background=True, critic_args=None,
        sglang_router_ip="a", sglang_router_port=1,
        sglang_model_routers={"default": ("a", 1), "eval": ("b", 2)}, rollout_num_engines=1,
    )  # fmt: skip
    own = evaluation_args(args)
    assert (own.sglang_router_ip, own.sglang_router_port, own.rollout_num_engines) == ("b", 2, 2)
    assert (args.sglang_router_ip, args.sglang_router_port, args.rollout_num_engines) == ("a", 1, 1)
