"""``slime doctor``: one line per check, and the meaning of its measurements."""

from __future__ import annotations

import json
import re
import socket

import psutil
import pytest

from tools import doctor


def test_the_doctor_has_a_line_for_each_check_with_a_verdict(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "all_reduce", lambda: (doctor.UNKNOWN, "left out"))
    with pytest.raises(SystemExit):
        doctor.main(["--save", str(tmp_path / "not" / "there")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13 + len(list(doctor.table()))
    assert {line.split()[0] for line in lines} <= {"good", "bad", "unknown"}
    assert any(re.match(r"good +environment +(cpu|gpu), in ", line) for line in lines)
    assert "give --hf-checkpoint" in lines[-1] and "all-reduce" in lines[2]
    assert doctor.space(tmp_path, 1e9, "buy")[0] == "bad"


@pytest.mark.parametrize(("host", "verdict"), [("127.0.0.1", "good"), ("0.0.0.0", "unknown")])
def test_where_a_job_listens_is_listed(host, verdict, monkeypatch):
    with socket.create_server((host, 0)) as server:
        process = psutil.Process()
        process.info = {"cmdline": ["python", "-m", "slime.backends.sglang_utils.router_main"]}
        port = server.getsockname()[1]
        # Other tests of this process may have left open sockets.
        own = [each for each in process.net_connections("tcp") if each.laddr.port == port]
        monkeypatch.setattr(process, "net_connections", lambda kind: own)
        with monkeypatch.context() as patches:
            patches.setattr(psutil, "process_iter", lambda names: [process])
            found, text = doctor.listening()
        place = f"{host}:{port} (slime.backends.sglang_utils.router_main)"
    assert found == verdict and (place in text) == (verdict == "unknown")


@pytest.mark.parametrize(
    ("backend", "speed", "cards", "linked", "verdict"),
    [
        ("nccl", 380.0, "GPU 0: NVIDIA H100 80GB HBM3", "NVLink between the GPUs", "good"),
        ("nccl", 30.0, "GPU 0: NVIDIA H100 80GB HBM3", "NVLink between the GPUs", "bad"),
        ("nccl", 20.0, "GPU 0: NVIDIA L40S", "NVLink between the GPUs", "unknown"),
        ("nccl", 20.0, "GPU 0: NVIDIA H100 PCIe", "no NVLink between some GPUs", "unknown"),
        ("gloo", 1.0, "", "no nvidia-smi", "unknown"),
    ],
)
def test_an_all_reduce_is_judged_by_what_the_links_give(backend, speed, cards, linked, verdict):
    found, text = doctor.judged_all_reduce({"backend": backend, "ranks": 2, "gb_per_s": speed}, cards, linked)
    assert found == verdict and f"{speed} GB/s over 2 ranks with {backend}" in text


def test_a_job_without_steps_is_judged_by_its_record(tmp_path):
    def write(name, lines):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    write("metrics.jsonl", [{"run/start": "x"}])
    (tmp_path / "config.json").write_text(json.dumps({"time": 100.0}))
    serving = {"event": "engine", "state": "serving", "time": 141.0}
    write("events.jsonl", [serving, {"event": "push", "seconds": 2.5}])
    found = doctor.judged_job(tmp_path, 0, "")
    assert found == {
        "engine's start": ("good", "serves after 41 s"), "push": ("good", "the first took 2.5 s, all digests equal")
    }  # fmt: skip
    write("events.jsonl", [serving, {"event": "error", "text": "no memory"}])
    found = doctor.judged_job(tmp_path, 1, "log")
    assert [verdict for verdict, _ in found.values()] == ["good", "bad"] and "no memory" in found["push"][1]
    found = doctor.judged_job(tmp_path / "nothing", None, "")
    assert {verdict for verdict, _ in found.values()} == {"bad"} and "no end within" in found["push"][1]
