"""Real jobs of tiny vision-language models of all families on two CPU cores: the scripts of examples/geo3k_vlm and
geo3k_vlm_multi_turn unmodified, with the flags of a small job added.

    python -m tests.e2e.vision_jobs                                       every family, every way
    python -m tests.e2e.vision_jobs --family qwen3_5 --way one several    some of them
    python -m tests.e2e.vision_jobs --write-docs                          and benchmarks/results/vision_jobs_cpu.json

The ways: one turn; several turns, where the environment answers with images; an encoder that computes image features
for a separate engine (``encoder`` in ``--sglang-config``).  Two rollouts each, the second after a push.  Exit
code 0 if the log-probs of trainer and engine agree in every job.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image, ImageDraw

from benchmarks import results_page
from examples.vision_shapes import model
from slime.observability.metrics_file import FILE_NAME, read_records

REPO = Path(__file__).resolve().parents[2]
JOB_S = 1200
"""Deadline of a job in seconds, on a machine with a load of ten."""
LIMIT = 1e-4
"""Bound on the mean log-prob difference between trainer and engine in a step, in nats."""
METRIC = "train/train_rollout_logprob_abs_diff"
PICTURES = [[(48, 48)], [(96, 33), (41, 17), (48, 48)], [], [(60, 1)], [(48, 48)] * 12, [(17, 90)]]
"""Sizes of the images in each row."""
WAYS = {
    "one": "one turn",
    "several": "three turns, pictures in the answers",
    "encoder": "one turn, pictures through an encoder; two trainers",
}
FLAGS = """
    --no-bf16 --num-rollout 2 --rollout-batch-size 6 --n-samples-per-prompt 4 --global-batch-size 24 --rm-type random
    --rollout-max-response-len 12 --max-tokens-per-gpu 1024 --lr 1e-3 --save-interval 100
"""
ENCODER = {
    "sglang": [
        {
            "name": "default",
            "server_groups": [{"worker_type": "regular", "num_gpus": 1}, {"worker_type": "encoder", "num_gpus": 1}],
        }
    ]
}


def write_rows(path: Path) -> None:
    """Rows like Geometry3K's: a question, its images as bytes, an answer."""
    rows: list[dict[str, Any]] = []
    for number, sizes in enumerate(PICTURES):
        pictures = []
        for width, height in sizes:
            picture = Image.new("RGB", (width, height), (30 * number, 120, 200 - 20 * number))
            ImageDraw.Draw(picture).ellipse((1, 0, width // 2, height - 1), fill=(250, 40 * number, 10))
            buffer = io.BytesIO()
            picture.save(buffer, format="PNG")
            pictures.append({"bytes": buffer.getvalue(), "path": None})
        rows.append({"problem": "<image>" * len(sizes) + "how many", "images": pictures, "answer": str(number)})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("problem", pa.string()), ("images", pa.list_(kind)), ("answer", pa.string())])
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def run_job(folder: Path, family: str, way: str) -> list[str]:
    """Run a job in an empty folder; return its row of the table.

    Raises:
        CalledProcessError: it failed; its log is in ``folder``.
    """
    number = model.write_model(folder / "model", 3, family)
    write_rows(folder / "geo3k/train.parquet")
    script, flags = "geo3k_vlm/run_geo3k_vlm.sh", shlex.split(FLAGS)
    if way == "several":
        script = "geo3k_vlm_multi_turn/run_geo3k_vlm_multi_turn.sh"
        config = {"max_turns": 3, "rollout_interaction_env_path": "tests.e2e.showing_env"}
        (folder / "turns.yaml").write_text(yaml.safe_dump(config))
        flags += ["--custom-config-path", f"{folder}/turns.yaml", "--rollout-max-response-len", "80"]
    if way == "encoder":
        (folder / "engines.yaml").write_text(yaml.safe_dump(ENCODER))
        flags += ["--sglang-config", f"{folder}/engines.yaml"]
    else:
        flags += ["--train-vision-tower"]
    flags += ["--save-debug-rollout-data", f"{folder}/samples/{{rollout_id}}.pt"]
    variables = {
        **{"BASE_DIR": str(folder), "MODEL": "model", "SAVE_DIR": str(folder / "run")},
        "NUM_GPUS": "2" if way == "encoder" else "1",
    }
    start = time.monotonic()
    with open(folder / "log.txt", "wb") as log:
        subprocess.run(
            [REPO / "examples" / script, *flags], cwd=REPO, env=dict(os.environ) | variables, stdout=log,
            stderr=subprocess.STDOUT, check=True, timeout=JOB_S,
        )  # fmt: skip
    seconds = time.monotonic() - start
    steps = [record[METRIC] for record in read_records(folder / "run" / FILE_NAME) if METRIC in record]
    samples = [s for k in range(2) for s in torch.load(folder / f"samples/{k}.pt", weights_only=False)["samples"]]
    counts = sorted(len((s["multimodal_train_inputs"] or {}).get("image_grid_thw", ())) for s in samples)
    said = [f"{step:.1e}" for step in steps]
    return [family, f"{number:,}", WAYS[way], f"{len(samples)}, {counts[0]} to {counts[-1]}", *said, f"{seconds:.0f}"]


COLUMNS = (
    *("model", "parameters", "job", "samples, pictures of each"),
    *("mean abs(dlogp), first step", "after a push", "job, s"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=model.FAMILIES, default=list(model.FAMILIES))
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--write-docs", action="store_true", help="write benchmarks/results/vision_jobs_cpu.json")
    options = parser.parse_args()
    rows, is_bad = [], False
    for family, way in itertools.product(options.family, options.way):
        if way == "encoder" and family.startswith("glm"):
            continue  # SGLang has no encoders of GLM-4V
        with tempfile.TemporaryDirectory(prefix=f"vision-{family}-") as folder:
            try:
                rows.append(run_job(Path(folder), family, way))
            except (subprocess.SubprocessError, OSError) as error:
                log = (Path(folder) / "log.txt").read_text(errors="replace")[-4000:]
                sys.exit(f"tests.e2e.vision_jobs: {family}, {way}: {error}\n{log}")
        print(json.dumps(rows[-1]), flush=True)
        is_bad |= not all(float(value) < LIMIT for value in rows[-1][4:6]) or len(rows[-1]) != len(COLUMNS)
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if options.write_docs:
        results_page.record("vision_jobs_cpu", text, hardware=f"{os.cpu_count()} CPU cores")
    print(text)
    sys.exit(is_bad)


if __name__ == "__main__":
    main()
