"""Real trainers push over disk, full versions and deltas, to engines that fail, come late and return.

An engine must always serve the bytes that the trainer gathers, under that version.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ext.fast_push.dist.disk_engine import DiskEngine
from tests.dist.trainer_case import cut, make_args, make_train_data, new_updater, run_workers, start_worker, write_model
from tests.contracts.source_tree import REPO

pytestmark = [pytest.mark.dist]


LAYOUTS = {
    "tensors in two": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "two stages": ("--pipeline-model-parallel-size", "2"),
    "experts on two ranks": ("--expert-model-parallel-size", "2"),
}
MODES = {
    "whole": (),
    "whole, through copies": ("--update-weight-local-checkpoint-dir", "{root}/local"),
    "xor": ("--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", "{root}/local"),
    "fp8, xor": (
        *("--hf-checkpoint", "{fp8}"),
        *("--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", "{root}/local"),
    ),
    "overwrite": (
        *("--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", "{root}/local"),
        *("--update-weight-delta-encoding", "overwrite", "--update-weight-delta-checksum", "adler32"),
    ),
}


def note_hook(args: Any, version_dir: str, rollout_engines: list[Any]) -> None:
    """--custom-update-weight-post-write-path of the test."""
    import torch.distributed as dist

    folder = Path(version_dir)
    assert (folder / "model.safetensors.index.json").exists()
    with (folder.parents[1] / f"hooked by {dist.get_rank()}").open("a") as file:
        file.write(f"{folder.name} for {len(rollout_engines)} engines\n")


class Case:
    """One trainer in one layout and mode, with two engines of rank 0 on two hosts."""

    def __init__(self, rank: int, world_size: int, port: int, folder: str, layout: str, mode: str) -> None:
        self.rank = rank
        self.root = Path(folder) / f"{layout} {mode}".replace(" ", "_").replace(",", "")
        flags = [flag.format(root=self.root, fp8=f"{folder}-fp8") for flag in MODES[mode]]
        args = make_args(
            *(Path(folder), "--actor-num-gpus-per-node", world_size, *LAYOUTS[layout], *flags),
            *("--update-weight-transport", "disk", "--update-weight-disk-dir", self.root / "shared"),
            *("--update-weight-buffer-size", "20000"),
            *("--custom-update-weight-post-write-path", "test_disk_push.note_hook"),
        )
        self.args, self.is_quantized = args, "fp8" in mode
        self.worker = start_worker(args, rank, world_size, port)
        parallel = self.worker.get_parallel_config()
        self.rank_data = cut(args, make_train_data(), parallel)[parallel["dp_rank"]]
        has_copies = args.update_weight_local_checkpoint_dir is not None
        self.engines = [
            DiskEngine(
                index, local=self.root / f"host{index}" if has_copies else None, shared=self.root / "shared",
                model=Path(args.hf_checkpoint),
            )
            for index in range(2)
        ]  # fmt: skip
        self.connect()

    def connect(self, *indices: int) -> None:
        self.worker.connect_rollout_engines([self.engines[i] for i in indices or (0, 1)], 1)

    def train(self) -> None:
        self.worker.train(0, self.rank_data)

    def expected(self) -> dict[str, bytes]:
        """What the trainer gathers now, independently of the push."""
        import torch

        from slime.backends.megatron_utils.megatron_to_hf import hf_form
        from slime.backends.megatron_utils.update_weight.gather import iter_hf_tensors
        from slime.ext.fast_push.gathered_buckets import named_views

        updater = self.worker._updater
        if self.is_quantized:
            source = updater.transport._gathered_buckets()
            views = (
                view for index, flat in source.iter_buckets()
                for view in named_views(flat.clone(), source.manifest.buckets[index], source.manifest)
            )  # fmt: skip
            return {name: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, t in views}
        tensors = iter_hf_tensors(
            hf_form(self.args, self.worker._hf_config["model_type"]),
            self.worker.model,
            dtype=self.args.params_dtype,
        )
        return {name: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors}

    def push(self, verb: str = "update_weights") -> str:
        """Push; return the error, if any."""
        from slime.utils.errors import WeightSyncError

        try:
            getattr(self.worker, verb)()
        except WeightSyncError as error:
            return str(error)
        return ""

    def check(self, version: str, *indices: int) -> None:
        """Check that the engines serve the trainer's bytes under this version."""
        expected = self.expected()
        if self.rank == 0:
            for index in indices or (0, 1):
                engine = self.engines[index]
                assert not engine.is_paused
                assert engine.served[-1] == (version, engine.held | expected), index
                assert engine.held.keys() >= expected.keys()

    def versions(self) -> list[str]:
        import torch.distributed as dist

        dist.barrier(group=self.worker_group())
        found = sorted(path.name for path in (self.root / "shared").iterdir())
        dist.barrier(group=self.worker_group())
        return found

    def last_pull(self, index: int) -> Any:
        return self.engines[index].pulls[-1] if self.engines[index].pulls else None

    def worker_group(self) -> Any:
        from slime.utils.distributed_utils import get_gloo_group

        return get_gloo_group()


def deliver(written: Any, engines: list[DiskEngine]) -> list[tuple[int, str]]:
    """Do what the driver does when the trainer has ended; return the excluded engines."""
    from slime.ext.fast_push.disk.disk import FolderCarrier
    from slime.ext.fast_push.push import push_weights
    from slime.weights.push.participants import Participants, PushClock
    from slime.weights.push.state import Push

    push = Push(str(written.number), Participants(engines, PushClock(30)))
    report = push_weights(push, written, FolderCarrier(push.ranks))
    return [(engine.index, engine.reason) for engine in report.excluded]


def push_three_times(case: Case) -> dict[str, Any]:
    """Nothing trained, a step, another step."""
    metrics = []
    for version in ("1", "2", "3"):
        assert case.push() == ""
        case.check(version)
        metrics.append(case.worker._updater.report.metrics)
        if version != "3":
            case.train()
    return {
        "metrics": metrics,
        "hooked": [(case.root / f"hooked by {rank}").read_text() for rank in range(2)],
        "versions": case.versions(),
        "pulls": [pull.applied for pull in case.engines[0].pulls],
        "calls": list(case.engines[0].calls),
    }


def lose_an_engine_and_refill_it(case: Case) -> dict[str, Any]:
    """An engine refuses at each step; the others continue, and it accepts the same version later."""
    assert case.push() == ""
    reasons = []
    has_copies = case.args.update_weight_local_checkpoint_dir is not None
    verbs = ["begin_weight_update", "receive_weight_folder", "acknowledge_weight_update", "commit_weight_update"]
    for number, verb in enumerate([*(["pull_weights"] if has_copies else []), *verbs], start=2):
        case.train()
        case.engines[1].fault = f"refuses {verb}"
        assert case.push() == ""
        case.check(str(number), 0)
        if case.rank == 0:
            assert case.engines[1].is_paused
            assert case.engines[1].served[-1][0] == str(number - 1)
        reasons += [engine.reason for engine in case.worker.excluded_engines()]
        case.engines[1].fault = ""
        case.connect(1)
        assert case.push("resend_weights") == ""
        case.connect()
        case.check(str(number))
    case.train()
    case.engines[1].fault = "flips receive_weight_folder"
    assert case.push() == ""
    reasons += [engine.reason for engine in case.worker.excluded_engines()]
    case.engines[1].fault = ""
    case.connect(1)
    assert case.push("resend_weights") == ""
    case.connect()
    case.check(str(number + 1))
    return {"reasons": reasons, "last pull": case.last_pull(1)}


def miss_versions(case: Case) -> dict[str, Any]:
    """An engine is away for some pushes; another replaces it on a new host."""
    assert case.push() == ""
    for number in (2, 3, 4):
        case.train()
        case.connect(0)
        assert case.push() == ""
        case.check(str(number), 0)
    case.connect()
    case.train()
    assert case.push() == ""
    case.check("5")
    return {"pull": case.last_pull(1), "versions": case.versions()}


def fail_altogether(case: Case) -> dict[str, Any]:
    """No engine accepts a version: nobody finds it, and the next one does not build on it."""
    assert case.push() == ""
    case.train()
    for engine in case.engines:
        engine.fault = "refuses commit_weight_update"
    message = case.push()
    versions = case.versions()
    for engine in case.engines:
        engine.fault, engine._push_id = "", ""
    case.train()
    assert case.push() == ""
    case.check("3")
    return {"message": message, "versions": versions, "pull": case.last_pull(0)}


def grow_beyond_the_model(case: Case) -> dict[str, Any]:
    """Deltas grow until a full copy replaces them; a new host starts from it."""
    seen = []
    for number in range(1, 6):
        assert case.push() == ""
        case.check(str(number))
        seen.append(case.versions())
        case.train()
    late = DiskEngine(1, local=case.root / "late", shared=case.root / "shared", model=Path(case.args.hf_checkpoint))
    case.engines[1] = late
    case.connect()
    assert case.push() == ""
    case.check("6")
    return {"seen": seen, "pull": case.last_pull(1)}


def fill_the_disk(case: Case) -> dict[str, Any]:
    """Every kind of writing fails on one rank; then there is room again."""
    from slime.ext.fast_push.disk import versions

    assert case.push() == ""
    case.train()
    before = case.versions()
    save_tensors = versions.save_tensors

    def full(*arguments: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    if case.rank == 1:
        versions.save_tensors = full
    message = case.push()
    versions.save_tensors = save_tensors
    left = case.versions()
    assert case.push() == ""
    case.check("3")
    return {"message": message, "before": before, "left": left}


def end_the_trainer(case: Case) -> dict[str, Any]:
    """--release-train: the ranks write and end, the driver has the engines read; new ranks continue the numbers."""
    told: dict[str, Any] = {"versions": [], "excluded": []}
    for number in (1, 2, 3):
        case.args.update_weight_start_version = number - 1
        case.worker._updater = new_updater(case.worker)
        case.connect()
        written = case.worker.write_weights()
        told["versions"].append(case.versions())
        case.engines[1].fault = "refuses acknowledge_weight_update" if number == 2 else ""
        if case.rank == 0:
            told["excluded"] += deliver(written, case.engines)
        case.check(str(number), 0)
        if number == 2:
            case.engines[1].fault = ""
            if case.rank == 0:
                deliver(written, case.engines[1:])
        case.check(str(number))
        case.train()
    return told


STORIES: dict[str, tuple[str, str, Callable[[Case], dict[str, Any]]]] = {
    **{
        f"{layout}, {mode}": (layout, mode, push_three_times)
        for layout, mode in (
            ("tensors in two", "whole"), ("two stages", "whole, through copies"), ("two stages", "xor"),
            ("experts on two ranks", "overwrite"), ("experts on two ranks", "fp8, xor"),
        )
    },
    "a lost engine, whole": ("tensors in two", "whole", lose_an_engine_and_refill_it),
    "a lost engine, xor": ("two stages", "xor", lose_an_engine_and_refill_it),
    "missed versions": ("tensors in two", "xor", miss_versions),
    "failure, overwrite": ("experts on two ranks", "overwrite", fail_altogether),
    "a trainer that ends": ("tensors in two", "whole", end_the_trainer),
    "growth": ("tensors in two", "overwrite", grow_beyond_the_model),
    "full disk, xor": ("two stages", "xor", fill_the_disk),
}  # fmt: skip


def tell_all(rank: int, world_size: int, port: int, folder: str) -> dict[str, Any]:
    """All cases in one world of ranks, because starting it takes most of the time."""
    told = {}
    for name, (layout, mode, story) in STORIES.items():
        case = Case(rank, world_size, port, folder, layout, mode)
        told[name] = story(case)
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("moe")
    write_model(folder, "qwen3_moe", num_hidden_layers=2)
    command = [sys.executable, "tools/convert_hf_to_fp8.py", "--model-dir", folder, "--save-dir", f"{folder}-fp8"]
    subprocess.run([*map(str, command), "--block-size", "16", "16"], check=True, cwd=REPO, timeout=100)
    return run_workers(tell_all, 2, str(folder), timeout_s=280)[0]


PUSHED = [name for name, (_, _, story) in STORIES.items() if story is push_three_times]


@pytest.mark.parametrize("name", PUSHED)
def test_engines_hold_what_the_trainer_gathers_after_every_push(told, name) -> None:
    mode = STORIES[name][1]
    steps = [
        *(["pull_weights"] if mode != "whole" else []),
        "pause_generation",
        "flush_cache",
        "begin_weight_update",
    ]
    steps += ["receive_weight_folder", "acknowledge_weight_update", "commit_weight_update", "get_weight_version"]
    begin = steps.index("begin_weight_update")
    later = [*steps, "continue_generation"]
    assert told[name]["calls"] == [*later[:begin], steps[begin], *later[begin:], *later, *later]
    assert told[name]["hooked"] == ["".join(f"weight_v00000{n} for 2 engines\n" for n in (1, 2, 3))] * 2


@pytest.mark.parametrize("name", PUSHED)
def test_metrics_tell_the_bytes_on_the_wire_and_how_many_changed(told, name) -> None:
    untrained, *trained = told[name]["metrics"]
    wire, density = "perf/update_weights_wire_bytes", "perf/update_weights_density"
    if "whole" in STORIES[name][1]:
        assert {values[density] for values in told[name]["metrics"]} == {1.0}
        assert all(values[wire] == untrained[wire] > 100_000 for values in trained)
    else:
        # It started from --hf-checkpoint, so there is nothing to send.  In fp8 this also shows that a push quantizes to the
        # same bytes as the offline converter.
        assert untrained == {wire: 0.0, density: 0.0}
        assert all(0.3 < values[density] < 1 and values[wire] > 50_000 for values in trained)
        assert told[name]["pulls"] == [(1,), (2,), (3,)]


def test_whole_versions_go_when_all_engines_serve_them(told) -> None:
    assert told["tensors in two, whole"]["versions"] == []
    assert told["two stages, whole, through copies"]["versions"] == []


def test_an_engine_that_fails_is_excluded_with_its_reason_and_refilled(told) -> None:
    steps = ["beginning the push", "reading version 3", "acknowledging the push", "committing"]
    *refused, flipped = told["a lost engine, whole"]["reasons"]
    assert refused == [f"EngineError: out of memory (while {step})" for step in steps]
    assert "it holds the digest" in flipped
    assert "which was sent with the digest" in flipped


def test_the_copy_of_an_engine_that_held_other_bytes_is_made_anew(told) -> None:
    pulling, *_, flipped = told["a lost engine, xor"]["reasons"]
    assert pulling == "EngineError: out of memory (while pulling version 2)"
    assert "it holds the digest" in flipped
    assert Path(told["a lost engine, xor"]["last pull"].seed).name == "weight_v000007-full"


def test_an_engine_that_missed_versions_catches_up(told) -> None:
    pull = told["missed versions"]["pull"]
    assert Path(pull.seed).name == "weight_v000003-full"
    assert pull.applied == (4, 5)


def test_a_version_that_no_engine_took_disappears_and_the_base_stays(told) -> None:
    story = told["failure, overwrite"]
    assert "no engine took weight version 2 (committing version 2). engine 0: EngineError" in story["message"]
    assert story["versions"] == ["weight_v000001"]
    pull = story["pull"]
    assert pull.seed != "", "this host had version 2, which never came to be"
    assert pull.applied == (1, 3)


def test_changes_that_outgrow_the_model_make_room_for_a_whole_copy(told) -> None:
    seen = told["growth"]["seen"]
    assert seen[0] == ["weight_v000001"]
    assert seen[-1] == ["weight_v000005", "weight_v000005-full"]
    pull = told["growth"]["pull"]
    assert Path(pull.seed).name == "weight_v000005-full"
    assert pull.applied == (6,)


def test_a_full_disk_fails_the_push_with_the_flag_and_leaves_what_was_there(told) -> None:
    story = told["full disk, xor"]
    assert "trainer rank 1 failed while writing weight_v000002" in story["message"]
    assert "GiB are free" in story["message"]
    assert "--update-weight-disk-dir" in story["message"]
    assert story["left"] == story["before"]


def test_a_trainer_may_end_once_its_weights_are_written(told) -> None:
    story = told["a trainer that ends"]
    assert story["excluded"] == [(1, "EngineError: out of memory (while acknowledging the push)")]
    assert story["versions"] == [[f"weight_v00000{n}" for n in range(1, last + 1)] for last in (1, 2, 3)]
