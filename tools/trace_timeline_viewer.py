"""Show a rollout dump (``--save-debug-rollout-data``) as a timeline of each sample's spans.

    python tools/trace_timeline_viewer.py dump/0.pt [--rebuild] [--no-serve] [--port 9999]

Writes two files beside the dump: ``0.trace.json``, trace events for https://ui.perfetto.dev, and
``0.timeline.html``, a self-contained page; then serves the folder until interrupted.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.flags.kinds import port_number
from slime.observability.dumps import read_dump
from slime.observability.trace_export import Track, trace_events, tracks_of
from slime.utils.errors import DataError
from tools.cli import clean_exit

TEMPLATE = Path(__file__).with_name("trace_timeline.html")
DATA_MARK = "/*TIMELINE*/null"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pt_path", type=Path, help="A rollout dump.")
    parser.add_argument("--rebuild", action="store_true", help="Write the files even if they are newer than the dump.")
    parser.add_argument(
        "--serve", action=argparse.BooleanOptionalAction, default=True, help="Serve the files on localhost afterwards."
    )
    parser.add_argument("--port", type=port_number, default=9999, help="Port of the server.")
    args = parser.parse_args(argv)
    with clean_exit():
        trace, page = build(args.pt_path, rebuild=args.rebuild)
    print(f"{trace}: open it at https://ui.perfetto.dev (Open trace file)\n{page}: open it in a browser")
    if args.serve:
        serve(page, args.port)


def build(dump: Path, *, rebuild: bool = False) -> tuple[Path, Path]:
    """Write the trace events and the page beside ``dump``, unless they are up to date; returns their paths.

    Raises:
        DataError: the dump is missing, or none of its samples has a trace.
    """
    if not dump.is_file():
        raise DataError(f"{dump} does not exist; it must be a file written by --save-debug-rollout-data.")
    trace, page = dump.with_suffix(".trace.json"), dump.with_suffix(".timeline.html")
    made = [path for path in (trace, page) if path.exists() and path.stat().st_mtime >= dump.stat().st_mtime]
    if len(made) == 2 and not rebuild:
        return trace, page
    tracks = tracks_of(read_traces(dump))
    if not tracks:
        raise DataError(f"{dump} holds no traces; it was written by a rollout function that does not trace samples.")
    trace.write_text(json.dumps(trace_events(tracks), default=str))
    data = json.dumps(page_data(dump.name, tracks), default=str).replace("</", "<\\/")
    page.write_text(TEMPLATE.read_text().replace(DATA_MARK, data))
    return trace, page


def read_traces(dump: Path) -> list[Any]:
    """Return ``sample.trace`` of every sample of a dump; None for those without one."""
    return [sample.get("trace") for sample in read_dump(dump)]


def page_data(title: str, tracks: Sequence[Track]) -> dict[str, Any]:
    """Return the page's data: rows of [name, start, end, depth, attrs], in seconds from the first slice."""
    begin = min((one.start for track in tracks for one in track.slices), default=0.0)
    rows = []
    for track in tracks:
        slices = [
            [one.name, round(one.start - begin, 6), round(one.end - begin, 6), one.depth, one.attrs]
            for one in track.slices
        ]
        moments = [[name, round(time - begin, 6), attrs] for name, time, attrs in track.moments]
        rows.append({"group": track.group_id, "sample": track.sample_id, "slices": slices, "moments": moments})
    end = max((one[2] for row in rows for one in row["slices"]), default=0.0)
    return {"title": title, "seconds": end, "rows": rows}


def serve(page: Path, port: int) -> None:
    """Serve the page's folder on localhost until interrupted."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(page.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/{page.name} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
