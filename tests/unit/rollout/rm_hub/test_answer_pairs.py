"""Pairs of an answer and the right answer, with a person's verdict, and each math grader's.

A line is ``answer | right answer | verdict``: 1 for a right answer, 0 for a wrong one.  After the verdict follow the
graders that do not agree: m for ``math`` and ``deepscaler``, d for ``dapo``, v for ``math_verify``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.rm_hub.math_utils import (
    compute_math_verify_reward,
    grade_answer_verl,
    is_math_verify_installed,
)

PAIRS = r"""
# fractions
\frac{1}{2} | \frac{1}{2} | 1
\dfrac{1}{2} | \frac{1}{2} | 1 d
1/2 | \frac{1}{2} | 1 d
\frac{2}{4} | \frac{1}{2} | 1 md
\frac{1}{3} | 0.33 | 0
\frac{1}{2} | \frac{1}{3} | 0
1 1/2 | 1.5 | 1 dv
# roots
\sqrt2 | \sqrt{2} | 1
\sqrt[3]{2} | \sqrt2 | 0
\sqrt[3]{2} | 2^{1/3} | 1 d
\sqrt[3]{2} | 3\sqrt{2} | 0
\sqrt[3]{8} | 2 | 1 md
2\sqrt{3} | \sqrt{12} | 1 d
# powers
2^{10} | 1024 | 1 md
2^{10} | 2^10 | 1 d
2^{10} | 20 | 0
2^{10} | 2^1 0 | 0
10^{-3} | 0.001 | 1 d
3 \cdot 10^{8} | 3e8 | 1 mdv
# numbers
42 | 42 | 1
42.0 | 42 | 1 d
-42 | 42 | 0
+42 | 42 | 1 d
1e-8 | 0 | 0
1e3 | 1000 | 1 dv
# thousands
1,000 | 1000 | 1
10\,000 | 10000 | 1 dv
1,000 | 1 | 0
12,34 | 1234 | 0
# units
5 \text{ cm} | 5 | 1
5 \text{ m} | 5 \text{ cm} | 0
30^\circ | 60^\circ | 0
5 dollars | 5 | 1 mv
# percent
50\% | 50 | 1 d
50\% | 50\% | 1
50\% | 5\% | 0
25 percent | 25 | 1 md
# text
Monday | Monday | 1
monday | Monday | 1 d
Monday | mon | 0
Sunday | Sun | 0
\text{yes} | Yes | 1 d
B. | B | 1 mdv
infinity | \infty | 1 md
# lists and sets
3 \text{ and } 5 | 3 | 0
3 \text{ or } 5 | 3 | 0
3,5 | 5,3 | 1 md
\{1,2\} | 1,2 | 1 d
3 \text{ and } 5 | 3, 5 | 1
\{1\} | 1 | 1 d
# tuples
(1,2) | (1, 2) | 1
(1,2) | (2,1) | 0
(1,2,3) | (1,2) | 0
\left(\frac{1}{2}, 3\right) | (0.5, 3) | 1 d
(3, \frac{\pi}{2}) | \left( 3, \frac{\pi}{2} \right) | 1 d
(1,2),(3,4) | (3,4),(1,2) | 1 md
# intervals
[0,1] | (0,1) | 0
[0,1) | [0,1] | 0
(-\infty, 3) | (-\infty,3) | 1
(0,1) \cup (2,3) | (2,3) \cup (0,1) | 1 md
x > 3 | (3, \infty) | 1 mdv
x \leq 3 | x \le 3 | 1 d
# equations
x=5 | 5 | 1
x=5 | x=6 | 0
x=5 | y=5 | 0
y=2x+1 | 2x+1=y | 1 md
x^2+y^2=1 | y^2+x^2=1 | 1 m
# expressions
2x+3x | 5x | 1 d
x+1 | 1+x | 1 d
x+1 | x-1 | 0
(x+1)^2 | x^2+1 | 0
2\pi r | 2 \pi r | 1
\sin^2 x | (\sin x)^2 | 1 md
\ln 2 | \log 2 | 1 mdv
\overline{AB} | AB | 1 v
# matrices
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&2\\3&4\end{pmatrix} | 1
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | 1 d
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix}1&2\\3&4\end{bmatrix} | 1 d
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix} | 0
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1&2\end{pmatrix} | 0
# bases, times, ratios
1011_2 | 11 | 1 mdv
1011_{2} | 1011_2 | 1 d
10:30 | 10:30 | 1
10:30 | 1030 | 0
10:30 | 1:03 | 0
3:2 | 3/2 | 1 md
# words with units in them
2 million | 2000000 | 1 mdv
2 million | 2 | 0
1 \text{ year} | 1 \text{ month} | 0
36 \text{ cm}^2 | 36 | 1
12 \text{ miles} | 12 | 1 d
# spaces
1 2 | 12 | 0
3 5 | 35 | 0
x y | xy | 1
# further ones
36\text{cm}^2 | 1296 | 0
36\text{cm}^{2} | 36 | 1 d
\binom{5}{2} | 52 | 0
2^\frac{1}{2} | 2^{\frac{1}{2}} | 1 dv
6/\frac{2}{3} | 9 | 1 md
\Delta | \delta | 0 v
\sqrt{2}^3 | \sqrt{8} | 1 d
10 000 | 10000 | 1
# nothing, and powers of powers
\text{None} | 5 | 0
\emptyset | 0 | 0
\emptyset | \varnothing | 1 dv
2^{3^2} | 2^9 | 1 md
"""

GRADERS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "math": ("m", lambda answer, truth: grade_answer_verl(f"\\boxed{{{answer}}}", truth)),
    "deepscaler": ("m", lambda answer, truth: get_deepscaler_rule_based_reward(f"</think>\\boxed{{{answer}}}", truth)),
    "dapo": ("d", lambda answer, truth: compute_score(f"Answer: {answer}", truth)["acc"]),
    "math_verify": ("v", lambda answer, truth: compute_math_verify_reward(f"\\boxed{{{answer}}}", truth)),
}
ROWS = [line.split(" | ") for line in PAIRS.strip().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("name", GRADERS)
def test_a_grader_agrees_with_a_person_but_where_the_table_says_so(name):
    if name == "math_verify" and not is_math_verify_installed():
        pytest.skip("the extra math is not installed")
    letter, grader = GRADERS[name]
    for answer, truth, verdict in ROWS:
        is_right = verdict.startswith("1") != (letter in verdict)
        assert bool(grader(answer, truth)) == is_right, (answer, truth)


def test_no_wrong_answer_earns_a_point():
    wrong = [row for row in ROWS if row[2].startswith("0")]
    assert [row for row in wrong if row[2] != "0"] == [["\\Delta", "\\delta", "0 v"]]
