"""Kill the whole job with SIGKILL at three moments, restart it each time, and account for every prompt group.

    python -m tests.ext.ledger.kill_resume --tiny-dir runs/tiny --work-dir runs/kill --num-rollout 30
    python -m tests.ext.ledger.kill_resume --fully-async --num-rollout 12 --kill-after 2 4 6 --work-dir runs/kill2

Needs the warm start that ``make demo`` leaves in ``--tiny-dir``.  The job runs with dynamic sampling, over-sampling
and partial rollouts, so that the buffer is used; with ``--fully-async`` by ``train_async.py``, with groups in flight
across rollouts and saves.  It is killed

    1. during generation, while the buffer of the last save holds groups,
    2. during an optimizer step,
    3. during a save, when the folder of the new checkpoint exists and the tracker still names the old one,

and after each kill the same command is restarted.  At the end

    * every group that was ever issued was trained exactly once in the surviving lineage, or was dropped by the filter,
      or waits in the buffer or in flight; none was trained twice; the ledger agrees for each one,
    * no answer that an engine had returned before a kill was generated again: later records of a sample continue
      from the tokens and log-probs recorded before (answers of the last ``FLUSH_S`` seconds may not have
      reached the ledger's file yet; they are counted separately),
    * the evaluation is at least ``--quality``.

Exit code 0 when all of it holds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from slime.ext.ledger.frames import folder_bytes, read_folder
from slime.ext.ledger.records import ReplayState
from slime.rollout.plain_values import read_state
from tests.e2e.job import GONE_S, Job
from tools import ledger as ledger_tool

FLUSH_S = 0.2
"""Ten times --rollout-ledger-flush-s: an answer that is older when the job is killed is in the file."""
LOG_PROB_ERROR = 1e-6
"""The ledger keeps float32."""


def start(options: argparse.Namespace, number: int) -> Job:
    """Run the recipe, for the first time or again."""
    flags = [
        *("--num-rollout", str(options.num_rollout), "--save-interval", "1", "--eval-interval", "10"),
        *("--over-sampling-batch-size", "48", "--partial-rollout"),
        *("--dynamic-sampling-filter-path", "tests.e2e.audit_plugins.filter_and_note"),
        *("--rollout-sample-hook-path", "tests.e2e.audit_plugins.note_answer"),
        *("--custom-megatron-before-train-step-hook-path", "tests.e2e.audit_plugins.note_train_step"),
        *("--save-debug-rollout-data", str(options.work_dir / "dumps" / "{rollout_id}.pt")),
        *options.flags,
    ]
    return Job(
        f"scripts/run-tiny-{options.device}.sh",
        flags,
        options.work_dir / f"run{number}.log",
        TINY_DIR=str(options.tiny_dir),
        SAVE_DIR=str(options.work_dir / "save"),
        LOOP="async" if options.fully_async else "sync",
        JOB_EXTRA_ENV="AUDIT_DIR",
        AUDIT_DIR=str(options.work_dir),
    )


def tracker(save: Path) -> int:
    """The valid iteration, -1 if there is none."""
    path = save / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.exists() else -1


def data_state(save: Path, rollout_id: int) -> dict:
    """The saved position in the data."""
    return read_state(save / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt", what="It")


def lines(path: Path) -> list[dict]:
    """The complete records of a JSON-lines file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def kill_during_generation(job: Job, save: Path, after: int, timeout_s: float) -> str:
    """Kill shortly after a step whose save has groups in the buffer, while the next rollout is generated."""
    seen = {"step": tracker(save)}

    def groups_wait() -> bool:
        latest = tracker(save)
        if latest < after or latest == seen["step"]:
            return False
        seen["step"] = latest
        return len(waiting_groups(save, latest)) > 0

    job.wait_until(groups_wait, "groups that wait in a checkpoint", timeout_s, poll_s=0.02)
    step = seen["step"]
    marker = f"step {step + 1}/"
    job.wait_until(lambda: marker in job.text(), "the next rollout", 120, poll_s=0.02)
    time.sleep(0.3)
    return f"generating after rollout {step}, {len(waiting_groups(save, step))} groups wait in its checkpoint"


def kill_during_training(job: Job, work: Path, after: int, timeout_s: float) -> str:
    """Kill as soon as an optimizer step has begun."""
    start = len(lines(work / "steps.jsonl"))
    job.wait_until(
        lambda: any(record["rollout"] >= after for record in lines(work / "steps.jsonl")[start:]),
        "an optimizer step",
        timeout_s,
        poll_s=0.005,
    )
    return f"optimizer step of rollout {lines(work / 'steps.jsonl')[-1]['rollout']}"


def kill_during_save(job: Job, save: Path, after: int, timeout_s: float) -> str:
    """Kill when the next checkpoint's folder exists but is not valid yet."""

    def is_saving() -> bool:
        latest = tracker(save)
        return latest >= after and (save / f"iter_{latest + 1:07d}").exists()

    job.wait_until(is_saving, "a save", timeout_s, poll_s=0.001)
    return f"save of rollout {tracker(save) + 1}"


def waiting_groups(save: Path, rollout_id: int) -> set[int]:
    """Groups that a checkpoint holds for later: in the data source's buffer, or in flight."""
    position = read_state(save / "rollout" / f"ledger_position_{rollout_id}.pt", what="It")
    return {group[0]["group_index"] for group in data_state(save, rollout_id)["buffer"] + position["open"]}


def account(work: Path, num_rollout: int) -> dict[str, object]:
    """Where every issued group went, in the surviving lineage."""
    save = work / "save"
    trained: Counter[int] = Counter()
    for rollout_id in range(num_rollout):
        samples = torch.load(work / "dumps" / f"{rollout_id}.pt", weights_only=False)["samples"]
        trained.update({sample["group_index"] for sample in samples})
    waiting = waiting_groups(save, num_rollout - 1)
    dropped = {record["group"] for record in lines(work / "dropped.jsonl")}
    issued = set(range(data_state(save, num_rollout - 1)["sample_group_index"]))
    return {
        "issued": len(issued),
        "trained": len(trained),
        "dropped": len(issued & dropped - set(trained)),
        "waiting": len(waiting),
        "lost": sorted(issued - set(trained) - dropped - waiting),
        "trained twice": sorted(group for group, count in trained.items() if count > 1),
        "trained and waiting": sorted(set(trained) & waiting),
        **compare_with_ledger(save, trained, dropped, waiting),
    }


def compare_with_ledger(save: Path, trained: Counter[int], dropped: set[int], waiting: set[int]) -> dict[str, object]:
    """What the ledger says of groups since the last checkpoint, and how much it holds."""
    balance = ledger_tool.Balance(ReplayState().read(read_folder(save / "ledger")))
    place = balance.place
    elsewhere = [
        f"group {name}: {place[name]}"
        for names, places in (
            (trained, {ledger_tool.TRAINED}),
            (waiting, {ledger_tool.WAITING, ledger_tool.FLIGHT, ledger_tool.FILTERED}),
            (place.keys() - trained.keys() - waiting, {ledger_tool.FILTERED}),
        )
        for name in place.keys() & names
        if place[name] not in places
    ]
    unnoted = sorted(name for name, where in place.items() if where == ledger_tool.FILTERED and name not in dropped)
    totals = {f"ledger: {name}": count for name, count in balance.totals().items()}
    return totals | {
        "ledger: bytes at the end": folder_bytes(save / "ledger"),
        "ledger: problems": balance.problems() + elsewhere + [f"group {name} was not dropped" for name in unnoted],
    }


def generated_again(work: Path, kills: list[float]) -> dict[str, int]:
    """Answers recorded before a kill that later records do not continue."""
    latest: dict[int, dict] = {}
    counts = Counter({"answers": 0, "taken over": 0, "generated again": 0, "generated again, of the last moment": 0})
    for record in lines(work / "answers.jsonl"):
        counts["answers"] += 1
        before = latest.get(record["sample"])
        latest[record["sample"]] = record
        crossed = [moment for moment in kills if before is not None and before["time"] < moment < record["time"]]
        if not crossed or not before["tokens"]:
            continue
        if goes_on_from(before, record):
            counts["taken over"] += 1
        elif before["time"] > crossed[0] - FLUSH_S:
            counts["generated again, of the last moment"] += 1
        else:
            counts["generated again"] += 1
            print(f"generated again: sample {record['sample']}, {len(before['tokens'])} tokens were there", flush=True)
    return dict(counts)


def goes_on_from(before: dict, after: dict) -> bool:
    """Whether the later record begins with the tokens and log-probs of the earlier one."""
    num_tokens = len(before["tokens"])
    pairs = zip(before["log_probs"], after["log_probs"], strict=False)
    is_same = all(abs(one - other) <= LOG_PROB_ERROR * max(1, abs(one)) for one, other in pairs)
    return after["tokens"][:num_tokens] == before["tokens"] and is_same


def main() -> None:
    """Run, kill, resume, account."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny-dir", type=Path, default=Path("runs/tiny"))
    parser.add_argument("--work-dir", type=Path, default=Path("runs/kill"))
    parser.add_argument("--num-rollout", type=int, default=30)
    parser.add_argument("--kill-after", type=int, nargs=3, default=(2, 6, 10), help="earliest rollouts of the kills")
    parser.add_argument("--quality", type=float, default=0.9, help="evaluation at the end, at least")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="which recipe of scripts/ is run")
    parser.add_argument("--fully-async", action="store_true", help="train_async.py, groups in flight across rollouts")
    parser.add_argument("--timeout-s", type=float, default=600, help="seconds until each moment must have come")
    parser.add_argument("flags", nargs="*", help="more flags for train.py, after --")
    options = parser.parse_args()
    options.work_dir = options.work_dir.resolve()
    options.tiny_dir = options.tiny_dir.resolve()
    (options.work_dir / "dumps").mkdir(parents=True)
    save = options.work_dir / "save"
    generation, training, saving = options.kill_after
    moments = (
        lambda job: kill_during_generation(job, save, generation, options.timeout_s),
        lambda job: kill_during_training(job, options.work_dir, training, options.timeout_s),
        lambda job: kill_during_save(job, save, saving, options.timeout_s),
    )
    kills: list[float] = []
    for number, moment in enumerate(moments):
        job = start(options, number)
        what = moment(job)
        before = tracker(save)
        kills.append(time.time())
        killed = job.kill_everything()
        job.seconds_until_gone(GONE_S)
        print(f"kill {number + 1}: {what}; {killed} processes killed; resumes after rollout {before}", flush=True)
    code = start(options, len(moments)).finish(options.timeout_s * 2)
    report = account(options.work_dir, options.num_rollout)
    report |= generated_again(options.work_dir, kills)
    for name, value in report.items():
        print(f"{name}: {value}")
    evaluations = [record for record in lines(save / "metrics.jsonl") if "eval/step" in record]
    figures = {k: v for k, v in evaluations[-1].items() if k.startswith("eval/") and k.count("/") == 1}
    print(f"last evaluation: {figures}")
    quality = max(value for name, value in figures.items() if name not in ("eval/step",) and "truncated" not in name)
    failures = ("lost", "trained twice", "trained and waiting", "ledger: problems", "generated again")
    is_good = code == 0 and not any(report[name] for name in failures)
    sys.exit(0 if is_good and quality >= options.quality else 1)


if __name__ == "__main__":
    main()
