"""The report of a run, its comparison with another, and the served page, on runs that the test writes."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from slime.ext.record.run_reader import read_run
from slime.observability.metric_utils import compute_rollout_step
from slime.observability.metrics_file import append_record
from slime.utils.errors import DataError
from slime.utils.types import Sample
from tests.ext.record import recording
from tests.ext.record.prepared_runs import FAULT_STEP, FAULTS, write_prepared_run
from tools import diff, replay_plan, report, runs, watch
from tools.report_samples import late_pushes, read_rollouts

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> \u202e\x07\ud800"
)
NUM_STEPS, STEP_S = 8, 10.0


def write_run(folder, *, lr=0.1, is_hostile=False, num_samples=4, length=3, has_ended=True):
    flags = {"lr": lr, "colocate": True, "rollout_num_gpus": 2, "actor_num_gpus_per_node": 2, "num_rollout": NUM_STEPS}
    args = Namespace(save=str(folder), value_origins=dict.fromkeys(flags, "flag"), **flags)
    recording.start(args, "driver", primary=True)
    recording.event("start", rollout=0)
    for step in range(NUM_STEPS):
        begin = 1000.0 + step * STEP_S
        for name, start, end in (("rollout", 0, 6), ("generation", 0, 4), ("longest answer", 4, 6), ("train", 6, 9)):
            recording.span(name, begin + start, begin + end)
        recording.span("step", begin, begin + STEP_S, rollout=step)
        reward = step / NUM_STEPS
        append_record(folder / "metrics.jsonl", {"rollout/raw_reward": reward, "rollout/step": step})
        loss = lr if step >= 5 else 0.0
        append_record(folder / "metrics.jsonl", {"train/loss": loss, "train/grad_norm": 1.0, "train/step": step})
        text = HOSTILE if is_hostile else "answer"
        samples = [
            Sample(
                index=i, group_index=i // 2, prompt=text, response=text, reward=reward, response_length=length,
                tokens=[1, *range(length)], rollout_log_probs=[-0.5] * length, status=Sample.Status.COMPLETED,
            )
            for i in range(num_samples)
        ]  # fmt: skip
        recording.rollout(step, samples, [0.0] * num_samples)
        columns = {name: torch.ones(num_samples, length) for name in ("advantages", "clipped")}
        columns["trainer_log_probs"] = torch.full((num_samples, length), -0.5 - loss)
        columns["clipped"][:, 1:] = 0
        recording.trained(step, 0, range(num_samples), columns)
    if has_ended:
        recording.event("finish")
    recording.stop()
    return folder


def data_in(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "steady")


def test_every_metric_has_a_plot_with_the_runs_beside_each_other(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", lr=0.2)
    append_record(tmp_path / "b" / "metrics.jsonl", {"rollout/only": 3.0, "rollout/note": "text", "rollout/step": 0})
    report.main([str(tmp_path / "a"), "--beside", str(tmp_path / "b")])
    page = (tmp_path / "a" / "report.html").read_text()
    found = re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page, re.DOTALL)
    plots = {one["title"]: one for one in json.loads(found[1])["metrics"]}
    assert not plots.keys() & {"rollout/step", "train/step", "time", "rollout/note"}
    loss = plots["train/loss"]
    assert loss["x"] == list(range(1, NUM_STEPS + 1))
    assert [(one["label"], one["y"][-1]) for one in loss["series"]] == [
        (str(tmp_path / "a"), 0.1),
        (str(tmp_path / "b"), 0.2),
    ]
    assert [one["label"] for one in plots["rollout/only"]["series"]] == [str(tmp_path / "b")]


def test_runs_are_listed_with_their_steps_reward_and_state(tmp_path, capsys):
    write_run(tmp_path / "a" / "done")
    write_run(tmp_path / "b", has_ended=False)
    (tmp_path / "a" / "done" / "deeper").mkdir()
    (tmp_path / "a" / "done" / "deeper" / "metrics.jsonl").touch()
    runs.main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == list(runs.COLUMNS)
    assert {line.split(maxsplit=2)[2] for line in lines[1:]} == {
        f"8/8    0.875   finished  {tmp_path}/a/done",
        f"8/8    0.875   running   {tmp_path}/b",
    }
    with pytest.raises(SystemExit):
        runs.main([str(tmp_path / "nothing")])
    assert "No run lies below" in capsys.readouterr().err


def test_a_run_of_epochs_without_a_trainer_has_the_length_that_it_started_with_and_no_gpus_of_one(tmp_path):
    flags = {"num_epoch": 2, "num_rollout": None, "debug_rollout_only": True, "rollout_num_gpus": 1}
    args = Namespace(
        save=str(tmp_path), value_origins=dict.fromkeys(flags, "flag"), actor_num_gpus_per_node=8, **flags
    )
    recording.start(args, "driver", primary=True)
    recording.event("start", rollout=0, num_rollout=4)
    append_record(tmp_path / "metrics.jsonl", {"rollout/raw_reward": 0.5, "rollout/step": 0})
    recording.stop()
    facts = dict(report.facts_of(read_run(tmp_path)))
    assert (facts["steps"], facts["GPUs"]) == ("1 of 4", "none; logical ones: 1 engines")
    assert runs.row_of(tmp_path)[1] == "1/4"


def test_causes_add_up_to_the_time_of_the_gpus_in_all_and_in_each_step(run):
    time = report.time_of(read_run(run))
    assert sum(time["total"].values()) == pytest.approx(2 * NUM_STEPS * STEP_S, rel=0.02)
    assert [sum(row["s"].values()) for row in time["steps"]] == pytest.approx([2 * STEP_S] * NUM_STEPS, rel=0.02)
    assert time["total"]["longest answer"] == pytest.approx(2 * NUM_STEPS * 2)


def test_the_page_says_how_the_run_went_and_holds_everything_itself(run):
    page = report.page_of(read_run(run))
    data = data_in(page)
    assert data["state"] == "finished" and data["name"] == "steady"
    assert "Reward rose from 0 to 0.875 (best 0.875)." in data["verdict"] and data["alarms"] == []
    assert any("longest 3 %" in sentence for sentence in data["verdict"])
    assert data["samples"]["all"] == 4 * NUM_STEPS == len(data["samples"]["texts"])
    assert data["samples"]["texts"][-1]["d"] == pytest.approx(-0.1)
    assert [row[0] for row in data["config"]][:1] == ["actor_num_gpus_per_node"]
    assert not re.search(r"""(?:src|href)=["']?https?:""", page) and len(page) < 1e6


def test_the_summary_is_printed_with_what_equal_groups_mean_and_no_page_is_written(run, capsys):
    report.main([str(run), "--text"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "state:     finished" and "Reward rose from 0 to 0.875 (best 0.875)." in lines
    assert any(line.startswith("In 100% of the last groups all answers got the same reward") for line in lines)
    assert "No alarm." in lines and not (run / "report.html").exists()


@pytest.mark.parametrize("of_run", [{"advantage_estimator": "ppo"}, {"use_opd": True}])
def test_equal_groups_teach_where_nothing_compares_the_answers_of_a_group_alone(run, of_run):
    config = {"values": {name: {"value": value} for name, value in of_run.items()}}
    other = replace(read_run(run), config=config)
    assert not any("teach nothing" in line for line in report.lines_of(other))


def write_run_with_pictures(folder, *, num_groups=4, side=64):
    """A run whose samples have images: one per group, and one shared by all."""
    recording.start(Namespace(save=str(folder), value_origins={}), "rollout manager", primary=True)
    append_record(folder / "metrics.jsonl", {"rollout/step": 0})
    of_all = Image.new("RGB", (40, 20), (200, 30, 40))
    samples = []
    for group in range(num_groups):
        own = Image.effect_noise((side, side), 100).convert("RGB")
        samples += [
            Sample(
                index=2 * group + i, group_index=group, prompt=f"p {group}", response="a", reward=0.0,
                response_length=1, tokens=[0, 1], status=Sample.Status.COMPLETED,
                multimodal_inputs={"images": [own, of_all]},
            )
            for i in range(2)
        ]  # fmt: skip
    recording.rollout(0, samples, None)
    recording.stop()
    return folder


def test_pictures_stand_beside_their_answers_each_once_and_nothing_else_may_be_shown(tmp_path):
    folder = write_run_with_pictures(tmp_path / "seen")
    page = report.page_of(read_run(folder))
    samples = data_in(page)["samples"]
    assert len(samples["pictures"]) == 5 == len(set(samples["pictures"]))
    assert all(re.match(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+$", url) for url in samples["pictures"])
    shown = [text["im"] for text in samples["texts"]]
    assert (
        shown[::2] == shown[1::2]
        and {one[1] for one in shown} == {shown[0][1]}
        and len({one[0] for one in shown}) == 4
    )
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "img-src data:;" in policy and "default-src 'none'" in policy and "connect-src" not in policy


def test_pictures_of_a_record_that_somebody_changed_are_left_out(tmp_path):
    folder = write_run_with_pictures(tmp_path / "hostile", num_groups=1)
    path = folder / "samples/rollout_000000.parquet"
    rows = pq.read_table(path)
    hostile = [[b"<svg onload=alert(1)>", b"\x89PNG" * 100_000], None]
    column = pa.array(hostile, rows.schema.field("pictures").type)
    pq.write_table(rows.set_column(rows.column_names.index("pictures"), "pictures", column), path)
    samples = data_in(report.page_of(read_run(folder)))["samples"]
    assert (
        samples["pictures"] == [] and all("im" not in text for text in samples["texts"]) and len(samples["texts"]) == 2
    )


def test_figures_of_a_rollout_are_over_all_of_its_samples(tmp_path):
    args = Namespace(save=str(tmp_path), value_origins={}, eps_clip=0.2)
    recording.start(args, "rollout manager", primary=True)
    append_record(tmp_path / "metrics.jsonl", {"rollout/step": 0})
    rewards, lengths = [1.0, 0.0, 0.5, 0.5, 0.0], [4, 2, 3, 3, 9]
    samples = [
        Sample(
            index=i, group_index=(0, 0, 1, 1, 2)[i], prompt="p", response="same" if i in (2, 3) else str(i),
            reward=rewards[i], response_length=n, tokens=[0] * n, rollout_log_probs=[-1.0] * n,
            loss_mask=[0] + [1] * (n - 1), weight_versions=["3" if i else "1"],
            status=Sample.Status.TRUNCATED if i == 0 else Sample.Status.COMPLETED,
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip
    for i, one in enumerate(samples):
        one.trace = answered(i, one.response_length)
    recording.dropped(samples[4:], "too easy")
    recording.rollout(0, samples[:4], None)
    ratio = torch.tensor([9.0, 0.5, 1.5, 1.0]).log() - 1  # the first token of each is not trained
    columns = {"trainer_log_probs": [ratio[:n] for n in reversed(lengths[:4])], "advantages": [torch.ones(n) for n in reversed(lengths[:4])]}  # fmt: skip  # noqa: E501
    recording.trained(0, 0, [3, 2, 1, 0], columns)
    recording.stop()
    (rollout,) = read_rollouts(read_run(tmp_path))
    figures = {name.removeprefix("samples/"): value for name, value in rollout.figures.items()}
    assert rollout.dropped == {"too easy": 1} and figures["groups"] == 2 and figures["equal_groups"] == 0.5
    assert figures["reward/middle"] == 0.5 and figures["group_spread"] == 0.25 and figures["length_pays"] == 1
    assert (figures["length/max"], figures["truncated"], figures["duplicates"]) == (4, 0.25, 0.25)
    assert (figures["newest_version"], figures["lag/max"], figures["late_pushes"]) == (3, 2, 0)
    assert figures["ratio/max"] == pytest.approx(1.5) and figures["outside_clip"] == pytest.approx(7 / 8)
    assert figures["difference/high"] < 0.7 and sum(rollout.differences) == pytest.approx(1)
    assert rollout.rates == pytest.approx({"fast:1": 4.0, "slow:1": 0.25}) and figures["slowest_engine"] == "slow:1"


def test_a_version_is_overdue_once_it_has_answered_more_rollouts_than_it_may():
    assert late_pushes([1, 2, 3, 3, 3, 3, 4], per_version=1) == [0, 0, 0, 1, 2, 3, 0]
    assert late_pushes([1, 1, 1, 3, 3, 3, 3], per_version=3) == [0, 0, 0, 0, 0, 0, 1]
    assert late_pushes([None, None, 1], per_version=1) == [0, 0, 0]


def record_evaluations(folder) -> None:
    """Two evaluations of two sets, one of which shares a training prompt."""
    recording.start(Namespace(save=str(folder), value_origins={}), "rollout manager", primary=True)
    for rollout_id in (None, 3):
        sets = {
            name: [
                Sample(
                    index=i, group_index=0, prompt=text, response=f"{name} {i}", reward=0.25, response_length=2,
                    tokens=[1, 5, 6], rollout_log_probs=[-9.0, -9.0], status=Sample.Status.TRUNCATED,
                )
                for i in range(2)
            ]
            for name, text in (("sums", "answer"), ("other", "a prompt"))
        }  # fmt: skip
        recording.evaluation(rollout_id, {name: {"samples": many} for name, many in sets.items()})
    recording.stop()


def test_answers_of_evaluations_are_shown_and_change_no_figure_no_difference_and_no_replay(run, tmp_path):
    folder = write_run(tmp_path / "steady")
    config = (folder / "config.json").read_bytes()
    record_evaluations(folder)
    (folder / "config.json").write_bytes(config)
    before, after = (data_in(report.page_of(read_run(one))) for one in (run, folder))
    for part in ("summary", "health", "heat", "alarms", "dropped", "verdict", "time"):
        assert after[part] == before[part], part
    assert list(diff.first_differences(read_run(run), read_run(folder))) == []
    assert len(replay_plan.recorded_samples(read_run(folder), 3)) == 4
    samples = after["samples"]
    assert samples["all"] == before["samples"]["all"] + 8
    shown = [(one["f"], one["r"], {samples["statuses"][s] for s in one["s"]}) for one in samples["rollouts"]]
    assert shown[:3] == [
        ("eval_start.parquet", 0, {"evaluation: other"}), ("eval_start.parquet", 0, {"evaluation: sums"}),
        ("rollout_000000.parquet", 1, {"completed"}),
    ]  # fmt: skip
    assert [one[0] for one in shown].index("eval_000003.parquet") == 6
    assert [one["x"] for one in samples["texts"][:4]] == ["other 0", "other 1", "sums 0", "sums 1"]
    assert samples["prompts"] == [
        "a prompt",
        "answer",
        "answer",
    ]  # an evaluation prompt has a separate history


@pytest.mark.parametrize("kind", ["rollout", "train"])  # a plug-in may log rollouts elsewhere
def test_the_evaluation_before_training_is_where_the_curve_begins(tmp_path, kind):
    args = Namespace(save=str(tmp_path), value_origins={})
    recording.start(args, "driver", primary=True)
    recording.stop()
    for value, step in ((0.4, None), (0.5, 0), (0.6, 1)):  # eval/step of the first one is 0 too
        if step is not None:
            append_record(tmp_path / "metrics.jsonl", {f"{kind}/loss": 0.1, f"{kind}/step": step})
        append_record(tmp_path / "metrics.jsonl", {"eval/math": value, "eval/step": step or 0})
    run = read_run(tmp_path)
    (plot,) = [one for one in data_in(report.page_of(run))["summary"] if one["title"] == "Evaluation: math"]
    assert (plot["x"], plot["series"][0]["y"]) == ([0, 1, 2], [0.4, 0.5, 0.6])
    assert "Evaluation math rose from 0.4 to 0.6 (best 0.6)." in report.lines_of(run)


def answered(index: int, tokens: int) -> dict:
    """A request that took a second at one of two engines; the slow one takes ten."""
    name, span_id, slow = "sglang_generate", str(index), index in (1, 3)
    attrs = {"engine": "slow:1" if slow else "fast:1", "completion_tokens": tokens}
    start = {"type": "span_start", "name": name, "ts": 1000.0, "span_id": span_id, "attrs": {}}
    return {"events": [start, start | {"type": "span_end", "ts": 1010.0 if slow else 1001.0, "attrs": attrs}]}


def test_a_run_that_was_cut_off_is_shown_as_far_as_it_went(tmp_path):
    folder = write_run(tmp_path / "cut", has_ended=False)
    for name in ("metrics.jsonl", "events.jsonl", "spans.json", "samples/rollout_000007.parquet"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) - 20])
    data = data_in(report.page_of(read_run(folder)))
    assert data["state"] == "running" and data["samples"]["all"] == 4 * (NUM_STEPS - 1)
    for name in ("config.json", "events.jsonl", "spans.json"):
        (folder / name).unlink()
    assert data_in(report.page_of(read_run(folder)))["time"]["total"] == {}
    with pytest.raises(DataError, match="give the folder of a run"):
        read_run(tmp_path)


def test_a_run_with_deaths_and_recoveries_says_so(tmp_path):
    folder = write_run(tmp_path / "recovered")
    recording.start(Namespace(save=str(folder), value_origins={}), "driver", primary=True)
    logger = logging.getLogger("slime.ext.recovery.trainer_recovery")
    logger.error("%s. The trainer is started again from its last checkpoint.", "actor rank 0 died: killed")
    logger.warning("The trainer is back after %.1f s: it went on from rollout %d.", 4.0, 2)
    recording.event("engine", engine="engine 1", state="evicted", why="no answer within 60 s")
    recording.event("start", rollout=3)
    recording.event("finish")
    recording.stop()
    verdict = " ".join(data_in(report.page_of(read_run(folder)))["verdict"])
    assert "The trainer died 1 time (actor rank 0 died: killed." in verdict
    assert "is back after 4.0 s" in verdict and "1 engine was evicted; the first: no answer" in verdict
    assert "It was started 2 times." in verdict


@pytest.mark.parametrize(
    ("right", "said"),
    [
        ((2, 1), "Evaluation math: no clear change (n=16 prompts), 0.125 to 0.0625 (best 0.125)."),
        ((2, 10), "Evaluation math rose from 0.125 to 0.625 (best 0.625)."),
    ],
)
def test_a_change_is_one_only_beyond_the_noise_of_its_answers(tmp_path, right, said):
    args = Namespace(save=str(tmp_path), value_origins={})
    recording.start(args, "driver", primary=True)
    for step, count in enumerate(right):
        answers = [Sample(index=i, prompt=f"{i}", response="", reward=float(i < count), tokens=[1]) for i in range(16)]
        recording.evaluation(step, {"math": {"samples": answers}})
        append_record(tmp_path / "metrics.jsonl", {"eval/math": count / 16, "eval/step": step})
    recording.stop()
    assert said in report.lines_of(read_run(tmp_path))


def test_the_time_between_two_jobs_of_a_run_and_what_an_older_run_did_are_no_time_of_it(tmp_path):
    folder = tmp_path / "run"
    flags = {"colocate": True, "rollout_num_gpus": 2, "actor_num_gpus_per_node": 2}
    args = Namespace(save=str(folder), value_origins={}, **flags)
    recording.start(args, "driver", primary=True)
    for step in range(2):
        append_record(folder / "metrics.jsonl", {"train/loss": 2.0 - step, "train/step": step})
        append_record(folder / "metrics.jsonl", {"rollout/raw_reward": 0.0, "rollout/step": step})
    recording.span("generation", 100.0, 110.0)  # a replayed rollout
    for begin in (1000.0, 2000.0):
        recording.span("step", begin, begin + 10, rollout=0)
    recording.stop()
    spans = (folder / "spans.json").read_text().replace('"name": "generation", "ph": "X", "pid": "driver"', '"name": "generation", "ph": "X", "pid": "rollout manager"')  # fmt: skip  # noqa: E501
    (folder / "spans.json").write_text(spans)
    for one in ({"event": "failed", "time": 1011.0, "code": 130}, {"event": "start", "time": 1999.0}):
        append_record(folder / "events.jsonl", one)
    time = report.time_of(read_run(folder))
    assert time["wall"] == pytest.approx(21) and sum(time["total"].values()) == pytest.approx(42)
    assert "Loss fell from 2 to 1." in data_in(report.page_of(read_run(folder)))["verdict"]
    assert read_run(folder).state == "running"
    append_record(folder / "events.jsonl", {"event": "failed", "code": 130})
    assert read_run(folder).state == "stopped"


def test_the_time_between_a_killed_job_and_its_resume_does_not_count(tmp_path):
    args = Namespace(save=str(tmp_path), value_origins={}, colocate=True, rollout_num_gpus=1)
    recording.start(args, "driver", primary=True)
    append_record(tmp_path / "metrics.jsonl", {"rollout/raw_reward": 0.0, "rollout/step": 0})
    for begin in (1000.0, 2000.0):  # killed within step 2, which leaves an event behind
        recording.span("start", begin, begin + 10)
        recording.span("step", begin + 10, begin + 20, rollout=0)
    recording.stop()
    killed = {"event": "recorded", "time": 1023.0, "file": "rollout_000001.parquet"}
    append_record(tmp_path / "events.jsonl", killed)
    time = report.time_of(read_run(tmp_path))
    assert time["wall"] == pytest.approx(43) and sum(time["total"].values()) == pytest.approx(43)
    assert time["total"]["start and recovery"] == pytest.approx(20)


@pytest.mark.parametrize("has_gpus", [False, True])
def test_gpus_are_named_where_the_run_has_some(tmp_path, has_gpus):
    flags = {"colocate": True, "rollout_num_gpus": 2, "actor_num_gpus_per_node": 2}
    args = Namespace(save=str(tmp_path), value_origins=dict.fromkeys(flags, "flag"), **flags)
    recording.start(args, "driver", primary=True)
    recording.event("start", rollout=0, num_rollout=1, has_gpus=has_gpus)
    recording.span("step", 1000.0, 1010.0, rollout=0)
    append_record(tmp_path / "metrics.jsonl", {"rollout/raw_reward": 0.5, "rollout/step": 0})
    recording.stop()
    data = data_in(report.page_of(read_run(tmp_path)))
    facts = dict(data["facts"])
    assert facts["GPUs"] == ("2 all; driver: no GPU" if has_gpus else "none; logical ones: 2 all")
    what = "GPUs" if has_gpus else "processes"
    assert f"The {what} are idle for 100% of the time." in data["verdict"]
    assert data["time"]["unit"] == ("GPU" if has_gpus else "logical GPU")


def test_a_killed_run_of_this_machine_is_cut_off_and_a_resumed_one_runs_again(tmp_path):
    folder = write_run(tmp_path / "run", has_ended=False)
    config = json.loads((folder / "config.json").read_text())

    def state_of(**process) -> str:
        changed = config | {"process": config["process"] | process}
        (folder / "config.json").write_text(json.dumps(changed))
        return read_run(folder).state

    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    killed.kill()
    assert os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # a zombie still
    assert state_of(pid=killed.pid) == "cut off"
    killed.wait()
    assert state_of(pid=killed.pid) == "cut off"
    assert state_of(started=config["process"]["started"] - 1) == "cut off"  # another process has its PID
    assert state_of(machine="elsewhere") == "running or cut off"
    assert state_of() == "running"
    append_record(folder / "events.jsonl", {"event": "failed", "code": 1})
    assert state_of() == "failed"
    config["time"] += 3600  # it was started again
    assert (state_of(), state_of(pid=killed.pid), state_of(machine="elsewhere")) == ("running", "failed", "failed")


def test_an_evaluation_alone_does_not_change_the_length_of_the_run(tmp_path):
    folder = write_run(tmp_path / "run")
    for num_rollout in (NUM_STEPS, 0):
        append_record(folder / "events.jsonl", {"event": "start", "num_rollout": num_rollout})
    assert read_run(folder).num_rollout == NUM_STEPS


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_of_a_prepared_run_is_named_with_its_step(tmp_path, fault):
    alarms = data_in(report.page_of(read_run(write_prepared_run(tmp_path / "run", fault))))["alarms"]
    assert {one["name"] for one in alarms} == FAULTS[fault]
    if fault in ("dead expert", "straggling engine"):
        assert alarms[0]["step"] == FAULT_STEP
    words = {"dead expert": "layer 3", "straggling engine": "10.0.0.2:15000", "wrong template": "<|im_start|>",
             "length hack": "earned with length", "off-policy": "off-policy", "healthy": ""}  # fmt: skip
    assert words[fault] in " ".join(one["text"] for one in alarms)


@pytest.mark.parametrize(
    "name",
    [
        "@@DATA@@", "</title><script>alert(1)</script>", "'\"&lt;", "a\nb\x1b[31mred", os.fsdecode(b"\xff\xfe"),
        "\\1\\g<0>",
    ],
)  # fmt: skip
def test_a_folder_of_any_name_has_a_report(name, tmp_path, capsys):
    folder = tmp_path / name.replace("/", "\u2215")
    write_run(folder, num_samples=2)
    report.main([str(folder)])
    page = (folder / "report.html").read_bytes().decode()
    assert data_in(page)["name"] == folder.name
    assert page.count("<script") == 2 and page.count("</script>") == 2 and page.count("</title>") == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isprintable() and "report.html" in line
    with served(folder) as ask:
        assert data_in(ask()[1])["name"] == folder.name
    with pytest.raises(SystemExit):
        diff.main([str(folder), str(folder), "--html", str(tmp_path / "diff.html")])
    assert "differ in nothing" in capsys.readouterr().out and (tmp_path / "diff.html").read_bytes().decode()


@contextmanager
def served(run, **options):
    with watch.server_of(run, 0, **options) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def ask(path="/", body=None, **headers):
            request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}{path}", body, headers)
            try:
                with opener.open(request, timeout=60) as answer:
                    return answer.status, answer.read().decode(), answer.headers
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode(), error.headers

        yield ask
        server.shutdown()


def test_watch_serves_the_page_to_this_machine_under_its_own_name(run):
    with served(run) as ask:
        assert data_in(ask()[1])["live"] is True
        assert ask(Host="elsewhere.example:80")[0] == 403 and ask("/config.json")[0] == 404


def test_beyond_loopback_the_page_needs_the_token_which_is_in_no_address(run):
    with served(run, token="right") as ask:
        code, door, _ = ask()
        assert code == 401 and "steady" not in door and "connect-src 'self'" in door
        assert ask("/?token=right")[0] == 404
        assert [ask("/enter", body)[0] for body in (b"wrong", b"r\xff", b"x" * 201)] == [403, 403, 404]
        code, _, headers = ask("/enter", b"right")
        cookie = headers["Set-Cookie"]
        assert code == 204 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert [ask(Cookie=cookie.partition(";")[0])[0], ask(Authorization="Bearer right")[0]] == [200, 200]
        assert ask(Authorization="Bearer wrong")[0] == 401


def test_a_run_that_counts_optimizer_steps_is_read_by_rollout(tmp_path):
    args = Namespace(
        save=str(tmp_path), wandb_always_use_train_step=True, rollout_batch_size=5, n_samples_per_prompt=20,
        global_batch_size=32,
    )  # fmt: skip
    recording.start(args, "driver", primary=True)
    for rollout_id in range(9):
        for key in ("rollout/step", "eval/step"):
            append_record(tmp_path / "metrics.jsonl", {key: compute_rollout_step(args, rollout_id), "id": rollout_id})
    recording.stop()
    run = read_run(tmp_path)
    for metrics in (run.rollouts, run.evaluations):
        assert {rollout_id: of["id"] for rollout_id, of in metrics.items()} == {number: number for number in range(9)}
