"""LaTeX as plain characters, in bounded time whatever the text is."""

from __future__ import annotations

import logging
import re
from typing import Any

from pylatexenc.latex2text import LatexNodes2Text
from pylatexenc.latexwalker import LatexWalker

logger = logging.getLogger(__name__)
logging.getLogger("pylatexenc").setLevel(logging.ERROR)  # it warns of every command without its arguments

READS_PER_CHARACTER, MIN_READS = 2, 100
"""Bound the tokens read: pylatexenc reads what follows an open group twice, so each group in a group doubles it."""
_SYMBOLS = {"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"}


class _BoundedWalker(LatexWalker):
    """Gives up when it reads a text again and again."""

    num_reads = 0

    def get_token(self, *args: Any, **options: Any) -> Any:
        self.num_reads += 1
        if self.num_reads > MIN_READS + READS_PER_CHARACTER * len(self.s):
            raise ValueError(f"{self.num_reads} tokens read of {len(self.s)} characters")
        return super().get_token(*args, **options)


def latex_to_text(latex: str) -> str:
    """Return LaTeX as plain characters; the text itself when it cannot be read."""
    prepared = re.sub(r"\\[td]?frac", r" \\frac", latex)  # the space keeps "7\frac{3}{4}" a mixed number
    try:
        text = LatexNodes2Text().nodelist_to_text(_BoundedWalker(prepared).get_latex_nodes()[0])
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        logger.debug("Not readable as LaTeX: %r (%s)", latex, error)
        return latex
    for symbol, name in _SYMBOLS.items():
        text = text.replace(symbol, name)
    return str(text.strip())
