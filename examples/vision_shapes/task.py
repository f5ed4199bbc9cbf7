"""Images of colored shapes, questions about them, and disjoint data sets.

An image has 48 x 48 pixels and 3 x 3 cells, some of which hold a shape: a disc, a square or a triangle of varying
size, slightly off center.  The question is how many shapes have a given color::

    <image>how many red

A worked answer lists, for each of the three rows, its count followed by the running count, and boxes the last one::

    11 01 23 \\boxed{3}

A guess boxes a number immediately.  Counts from 0 to 5 are equally frequent, so a guess is right one time in six, and
so is an answer about another image.
"""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

SIDE = 3
CELL = 16
PIXELS = SIDE * CELL
MAX_COUNT = 5
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 220, 50),
}
SHAPES = ("disc", "square", "triangle")
BACKGROUNDS = ((255, 255, 255), (20, 20, 20), (130, 130, 130))


@dataclass(frozen=True)
class Shape:
    """One shape in an image."""

    kind: str
    colour: str
    cell: tuple[int, int]
    """(row, column)"""
    radius: int
    shift: tuple[int, int]
    """Offset of its center from the cell's center, in pixels (down, right)."""


@dataclass(frozen=True)
class Scene:
    """An image and the question about it."""

    shapes: tuple[Shape, ...]
    background: tuple[int, int, int]
    colour: str
    """The color to count."""

    @property
    def rows(self) -> list[int]:
        """Number of shapes with that color in each row."""
        return [sum(s.colour == self.colour and s.cell[0] == row for s in self.shapes) for row in range(SIDE)]

    @property
    def question(self) -> str:
        return f"how many {self.colour}"

    @property
    def answer(self) -> str:
        return str(sum(self.rows))


def draw_scene(rng: random.Random) -> Scene:
    """Return a random scene; the count of the color in question is uniform."""
    colour = rng.choice(list(COLOURS))
    others = [name for name in COLOURS if name != colour]
    count = rng.randint(0, MAX_COUNT)
    cells = rng.sample([(row, column) for row in range(SIDE) for column in range(SIDE)], count + rng.randint(1, 4))
    shapes = []
    for index, cell in enumerate(cells):
        radius = rng.randint(4, 6)
        room = CELL // 2 - 1 - radius
        shift = (rng.randint(-room, room), rng.randint(-room, room))
        own = colour if index < count else rng.choice(others)
        shapes.append(Shape(rng.choice(SHAPES), own, cell, radius, shift))
    return Scene(tuple(sorted(shapes, key=lambda shape: shape.cell)), rng.choice(BACKGROUNDS), colour)


def split_scenes(sizes: dict[str, int], seed: int) -> dict[str, list[Scene]]:
    """Return name -> list of ``sizes[name]`` scenes; no image occurs twice, within or across sets."""
    rng = random.Random(seed)
    seen, sets = set(), {}
    for name, size in sizes.items():
        sets[name] = []
        while len(sets[name]) < size:
            scene = draw_scene(rng)
            if (scene.shapes, scene.background) not in seen:
                seen.add((scene.shapes, scene.background))
                sets[name].append(scene)
    return sets


def paint(scene: Scene) -> Image.Image:
    """Return the image of a scene."""
    image = Image.new("RGB", (PIXELS, PIXELS), scene.background)
    pencil = ImageDraw.Draw(image)
    for shape in scene.shapes:
        y, x = (CELL * at + CELL // 2 + off for at, off in zip(shape.cell, shape.shift, strict=True))
        r, fill = shape.radius, COLOURS[shape.colour]
        if shape.kind == "disc":
            pencil.ellipse((x - r, y - r, x + r, y + r), fill=fill)
        elif shape.kind == "square":
            pencil.rectangle((x - r + 1, y - r + 1, x + r - 1, y + r - 1), fill=fill)
        else:
            pencil.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=fill)
    return image


def data_url(scene: Scene) -> str:
    """Return the image as a data URL, the form used in data rows."""
    buffer = io.BytesIO()
    paint(scene).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def worked_answer(scene: Scene, rng: random.Random, slip_rate: float) -> str:
    """Return the worked answer; at a slip, a row's count is off by one.  Slips are drawn from ``rng``."""
    total, steps = 0, []
    for count in scene.rows:
        if rng.random() < slip_rate:
            count = max(0, count + rng.choice((-1, 1)))
        total = min(total + count, 9)
        steps.append(f"{count}{total}")
    return " ".join(steps) + f" \\boxed{{{total}}}"


def guess(rng: random.Random) -> str:
    """Return a box with a random count."""
    return f"\\boxed{{{rng.randint(0, MAX_COUNT)}}}"


def sft_rows(scenes: list[Scene], worked_share: float, slip_rate: float, rng: random.Random) -> list[dict]:
    """Return conversations with a teacher who works out some answers, with slips, and guesses the others."""
    rows = []
    for scene in scenes:
        reply = worked_answer(scene, rng, slip_rate) if rng.random() < worked_share else guess(rng)
        turns = [{"role": "user", "content": f"<image>{scene.question}"}, {"role": "assistant", "content": reply}]
        rows.append({"messages": turns, "images": [data_url(scene)]})
    return rows


def prompt_rows(scenes: list[Scene], *, wrong_images: bool = False) -> list[dict]:
    """Return rows for reinforcement learning and evaluation; ``wrong_images`` gives each row the next row's image."""
    shown = [*scenes[1:], scenes[0]] if wrong_images else scenes
    return [
        {"prompt": f"<image>{scene.question}", "label": scene.answer, "images": [data_url(picture)]}
        for scene, picture in zip(scenes, shown, strict=True)
    ]
