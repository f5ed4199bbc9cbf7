"""The page of ``tools/diff.py --html``: tables and curves as plain HTML and SVG, without a script."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, MARGIN = 420, 130, 6
STYLE = """
:root { color-scheme: light dark; --a: light-dark(#0b6fb8, #62b5f0); --b: light-dark(#b4540a, #f0a35c); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; } caption { text-align: left; font-weight: 600; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #8886; vertical-align: top; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
figure { display: inline-block; margin: .5rem 1.5rem 1rem 0; } figcaption { font-size: .9em; }
svg { display: block; max-width: 100%; background: #8881; } polyline { fill: none; stroke-width: 1.5; }
.a { stroke: var(--a); color: var(--a); } .b { stroke: var(--b); color: var(--b); stroke-dasharray: 5 3; }
.d { stroke: currentColor; }
"""
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, names of columns, rows."""
Curve = Mapping[int, float]
"""Step -> value."""


def page_of(names: Sequence[str], tables: Sequence[Table], curves: Mapping[str, tuple[Curve, Curve]]) -> str:
    """Return the page.

    Args:
        names: of the two runs.
        tables: empty ones are said to be so.
        curves: metric -> of the first run and of the second.
    """
    first, second = (html.escape(name) for name in names)
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'sha256-{digest}'"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{first} and {second}</title><style>{STYLE}</style></head><body><main>",
        f'<h1><span class="a">A</span> {first}, <span class="b">B</span> {second}</h1>',
        *(_table(*table) for table in tables),
        "<h2>Curves</h2><p>A is solid, B is dashed; below them B - A.</p>",
        *(_figure(name, *pair) for name, pair in curves.items()),
        "</main></body></html>",
    ]
    return "\n".join(parts)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return f"<h2>{html.escape(title)}</h2><p>Nothing differs.</p>"
    names = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h2>{html.escape(title)}</h2><div class="wide" tabindex="0">{table}</div>'


def _figure(name: str, first: Curve, second: Curve) -> str:
    difference = {step: second[step] - first[step] for step in sorted(first.keys() & second.keys())}
    largest = max((abs(value) for value in difference.values()), default=0.0)
    said = f"{html.escape(name)}: B - A is at most {largest:.4g}"
    shown = _svg(said, {"a": first, "b": second}, HEIGHT) + _svg(
        f"{said} (difference)", {"d": difference}, HEIGHT // 2
    )
    return f"<figure>{shown}<figcaption>{said}</figcaption></figure>"


def _svg(label: str, lines: Mapping[str, Curve], height: int) -> str:
    """Return lines over their common range of steps and values."""
    steps = [step for line in lines.values() for step in line]
    values = [value for line in lines.values() for value in line.values()]
    if not steps:
        return ""
    low, span = min(values), max(values) - min(values) or 1.0
    begin, length = min(steps), max(steps) - min(steps) or 1
    drawn = ""
    for name, line in lines.items():
        points = " ".join(
            f"{MARGIN + (step - begin) / length * (WIDTH - 2 * MARGIN):.1f},"
            f"{height - MARGIN - (line[step] - low) / span * (height - 2 * MARGIN):.1f}"
            for step in sorted(line)
        )
        drawn += f'<polyline class="{name}" points="{points}"/>'
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg {size} role="img" aria-label="{label}">{drawn}</svg>'
