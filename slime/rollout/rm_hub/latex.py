"""Converts LaTeX to plain text, in bounded time for any input."""

from __future__ import annotations

import logging
import re
from typing import Any

from pylatexenc.latex2text import LatexNodes2Text, MacroTextSpec, get_default_latex_context_db
from pylatexenc.latexwalker import LatexGroupNode, LatexWalker

logger = logging.getLogger(__name__)
logging.getLogger("pylatexenc").setLevel(logging.ERROR)  # it warns about every command without arguments

READS_PER_CHARACTER, MIN_READS = 2, 100
"""Limits on the tokens read.  pylatexenc reads an unclosed group twice, so each level of nesting doubles the work."""
_SYMBOLS = {"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"}
FRACTION = "\x02", "\x03"
"""Marks around a fraction.  The surrounding text decides later whether they become parentheses."""
_STYLES = (
    "mathbb mathcal mathfrak mathbf mathbin mathit mathrel mathrm mathsf mathtt boldsymbol bm text textnormal hbox bf "
    "rm it operatorname displaystyle textstyle scriptstyle large small left right middle big Big bigg Bigg bigl bigr "
    "Bigl Bigr biggl biggr limits nolimits degree angle triangle ! , ; : quad qquad"
).split()
"""Commands to remove: formatting, and symbols that are not part of a number.  All other commands unknown to pylatexenc
are kept, because dropping them could change the meaning of what follows.
"""
_ONE_FACTOR = re.compile(r"[0-9]+|[^\W\d_]|\([^()]*\)|\u221a\([^()]*\)")
_NO_SUM = re.compile(r"-?[^-+/]+|\([^()]*\)")


class _BoundedWalker(LatexWalker):
    """Gives up if it reads the text too many times."""

    num_reads = 0

    def get_token(self, *args: Any, **options: Any) -> Any:
        self.num_reads += 1
        if self.num_reads > MIN_READS + READS_PER_CHARACTER * len(self.s):
            raise ValueError(f"{self.num_reads} tokens read of {len(self.s)} characters")
        return super().get_token(*args, **options)


def _argument(node: Any, position: int, reader: LatexNodes2Text) -> str:
    """Return an argument of a command as text; empty if the argument is missing."""
    arguments = node.nodeargd.argnlist if node.nodeargd is not None else []
    argument = arguments[position] if position < len(arguments) else None
    if argument is None:
        return ""
    return str(
        reader.nodelist_to_text(argument.nodelist if isinstance(argument, LatexGroupNode) else [argument])
    ).strip()


def _factor(text: str, form: re.Pattern[str] = _ONE_FACTOR) -> str:
    return text if form.fullmatch(text) else f"({text})"


def _fraction(node: Any, l2tobj: LatexNodes2Text) -> str:
    over, under = (_argument(node, position, l2tobj) for position in (0, 1))
    return f"{FRACTION[0]}{_factor(over, _NO_SUM)}/{_factor(under)}{FRACTION[1]}"


def _root(node: Any, l2tobj: LatexNodes2Text) -> str:
    degree, inner = (_argument(node, position, l2tobj) for position in (0, 1))
    return f"{_factor(inner)}^(1/{_factor(degree)})" if degree else f"\u221a({inner})"


def _overline(node: Any, l2tobj: LatexNodes2Text) -> str:
    inner = _argument(node, 0, l2tobj)
    return f"\\overline({inner})" if inner.isdigit() else inner  # over digits it marks a repeating decimal


def _unknown(node: Any) -> str:
    return "" if node.macroname in _STYLES else f"\\{node.macroname} "


_CONTEXT = get_default_latex_context_db()
_CONTEXT.add_context_category(
    "structure",
    macros=[
        MacroTextSpec("frac", simplify_repl=_fraction),
        MacroTextSpec("sqrt", simplify_repl=_root),
        MacroTextSpec("overline", simplify_repl=_overline),
    ],
    prepend=True,
)
_CONTEXT.set_unknown_macro_spec(MacroTextSpec("", simplify_repl=_unknown))


def latex_to_text(latex: str) -> str:
    """Convert LaTeX to plain text, keeping braces and adding ``FRACTION`` marks; return it unchanged if unreadable."""
    prepared = re.sub(r"\\[cdt]?frac", r" \\frac", latex)  # the space keeps "7\frac{3}{4}" a mixed number
    try:
        reader = LatexNodes2Text(latex_context=_CONTEXT, keep_braced_groups=True, keep_braced_groups_minlen=0)
        text = reader.nodelist_to_text(_BoundedWalker(prepared).get_latex_nodes()[0])
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        logger.debug("Not readable as LaTeX: %r (%s)", latex, error)
        return latex
    for symbol, name in _SYMBOLS.items():
        text = text.replace(symbol, name)
    return str(text.strip())
