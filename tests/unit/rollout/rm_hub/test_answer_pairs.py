"""Answers beside the right one, with what a person says of them, and what each grader of mathematics says.

A line is ``answer | right answer | verdict``: 1 for a right answer, 0 for a wrong one.  Behind the verdict are the
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
0.5 | \frac{1}{2} | 1 d
\frac12 | \frac{1}{2} | 1
-\frac{1}{2} | \frac{-1}{2} | 1 d
\frac{2}{4} | \frac{1}{2} | 1 md
\frac{1}{3} | 0.33 | 0
\frac{1}{2} | \frac{1}{3} | 0
\frac{1+\sqrt5}{2} | 1+\frac{\sqrt5}{2} | 0
\frac{1+\sqrt{5}}{2} | \frac{1}{2}+\frac{\sqrt{5}}{2} | 1 d
\frac{a}{b+c} | \frac{a}{b}+c | 0
\frac{x+1}{x-1} | x+1/x-1 | 0
\frac{x+1}{x-1} | (x+1)/(x-1) | 1 d
\frac{2x}{3y} | \frac{2x}{3}y | 0
\frac{1}{2\sqrt{3}} | \frac{1}{2}\sqrt{3} | 0
\frac{\sqrt{3}}{6} | \frac{1}{2\sqrt{3}} | 1 d
\frac{3}{4}\pi | \frac{3\pi}{4} | 1 d
\frac{3}{4\pi} | \frac{3}{4}\pi | 0
\frac{x^2+1}{2} | \frac{x^2}{2}+1 | 0
\frac{1}{\frac{2}{3}} | \frac{3}{2} | 1 d
\frac{1}{\frac{2}{3}} | \frac{1}{6} | 0
2\frac{1}{3} | \frac{7}{3} | 1 d
2\frac{1}{3} | \frac{2}{3} | 0
7\frac{3}{4} | 7.75 | 1 d
-2\frac{1}{2} | -2.5 | 1 d
-2\frac{1}{2} | -1.5 | 0
1 1/2 | 1.5 | 1 dv
1 1/2 | 11/2 | 0
# roots
\sqrt2 | \sqrt{2} | 1
\sqrt[3]{2} | \sqrt2 | 0
\sqrt[3]{2} | 2^{1/3} | 1 d
\sqrt[3]{2} | 3\sqrt{2} | 0
\sqrt[3]{8} | 2 | 1 md
\sqrt[4]{2} | \sqrt{2} | 0
\sqrt{2x} | \sqrt{2}x | 0
\sqrt{x+1} | \sqrt{x}+1 | 0
2\sqrt{3} | \sqrt{12} | 1 d
2\sqrt{3} | \sqrt{6} | 0
\sqrt{8} | 2\sqrt{2} | 1 d
\frac{1}{\sqrt{2}} | \frac{\sqrt{2}}{2} | 1 d
\sqrt{23} | \sqrt{2}3 | 0
\sqrt{10} | \sqrt{1}0 | 0
# powers
2^{10} | 1024 | 1 md
2^{10} | 2^10 | 1 d
2^{10} | 20 | 0
2^{10} | 2^1 0 | 0
x^{2y} | x^2y | 0
x^{10} | x^1 | 0
10^{-3} | 0.001 | 1 d
10^{-3} | 10-3 | 0
e^{x+1} | e^x+1 | 0
x^2 | x_2 | 0
x_{12} | x_1 2 | 0
x^{n+1} | x^n+1 | 0
3 \times 10^8 | 300000000 | 1 md
3 \times 10^8 | 3 \times 10^9 | 0
3 \cdot 10^{8} | 3e8 | 1 mdv
# numbers
42 | 42 | 1
42.0 | 42 | 1 d
-42 | 42 | 0
+42 | 42 | 1 d
1e-8 | 0 | 0
0 | 1e-8 | 0
0.00000001 | 0 | 0
3.00000001 | 3 | 0
2.9999999999 | 3 | 0
0.1 | 0.10 | 1 d
0.3 | 0.33 | 0
3.14 | \pi | 0
1.414 | \sqrt{2} | 0
.5 | 0.5 | 1 d
1e3 | 1000 | 1 dv
12345678901234567890 | 12345678901234567891 | 0
0 | -0 | 1
0.0 | 0 | 1 d
007 | 7 | 1 d
# thousands
1,000 | 1000 | 1
1,234,567 | 1234567 | 1
10\,000 | 10000 | 1 dv
1{,}000 | 1000 | 1
1,000 | 1 | 0
12,34 | 1234 | 0
1,2 | 12 | 0
1,234 | 1 | 0
(1,234) | 1234 | 0
\$1,000 | 1000 | 1
# units
5 \text{ cm} | 5 | 1
5\text{ cm} | 5 \text{ cm} | 1
5 cm | 5 | 1
5 \text{ m} | 5 \text{ cm} | 0
5\text{ cm}^2 | 5 \text{ cm}^2 | 1
10 \text{ minutes} | 10 | 1
90^\circ | 90 | 1
90^{\circ} | 90^\circ | 1
90 \text{ degrees} | 90^\circ | 1
30^\circ | 60^\circ | 0
\$5 | 5 | 1
5 dollars | 5 | 1 mv
2 days | 2 weeks | 0
3 \text{ hours} | 3 \text{ minutes} | 0
# percent
50\% | 50 | 1 d
50\% | 50\% | 1
50\% | 5\% | 0
25 percent | 25 | 1 md
# text
Monday | Monday | 1
\text{Monday} | Monday | 1
monday | Monday | 1 d
Monday | mon | 0
Sunday | Sun | 0
Friday | Fri | 0
Friday | Saturday | 0
yes | no | 0
\text{yes} | Yes | 1 d
yearly | ly | 0
\text{even} | \text{odd} | 0
hourglass | glass | 0
meter | inch | 0
feet | cm | 0
minute | second | 0
January | Jan | 0
\text{red} | \text{blue} | 0
(A) | A | 1 d
\text{(C)} | C | 1 d
\textbf{(C)} | C | 1 d
\mathrm{C} | C | 1 d
C | D | 0
A | a | 1 d
B. | B | 1 mdv
east | \text{east} | 1
never | ever | 0
\text{Evelyn} | Evelyn | 1
Evelyn | Eve | 0
none | 0 | 0
infinity | \infty | 1 md
# lists and sets
3 \text{ and } 5 | 3 | 0
3 \text{ or } 5 | 3 | 0
3, 5 | 3 | 0
3 | 3, 5 | 0
3,5 | 5,3 | 1 md
1,2,3 | 1,2,4 | 0
1,2,3 | 123 | 0
\{1,2,3\} | \{3,2,1\} | 1 md
\{1,2\} | \{1,2,3\} | 0
\{1,2\} | 1,2 | 1 d
x=1 \text{ or } x=2 | 1, 2 | 1 md
3 \text{ and } 5 | 3, 5 | 1
3, 5 | 3 \text{ and } 5 | 1
-2, 2 | \pm 2 | 1 md
\pm 2 | 2 | 0
\{1\} | 1 | 1 d
\{1\} \cup \{2\} | \{1,2\} | 1 md
# tuples
(1,2) | (1, 2) | 1
(1,2) | (2,1) | 0
(1,2,3) | (1,2) | 0
\left(\frac{1}{2}, 3\right) | (0.5, 3) | 1 d
(1,2) | [1,2] | 0
(3, \frac{\pi}{2}) | \left( 3, \frac{\pi}{2} \right) | 1 d
(1,2) | 12 | 0
(1,2),(3,4) | (1,2) | 0
(1,2),(3,4) | (3,4),(1,2) | 1 md
# intervals
[0,1] | (0,1) | 0
[0,1) | [0,1] | 0
(-\infty, 3) | (-\infty,3) | 1
(-\infty, 3] | (-\infty,3) | 0
(-\infty, 3) | (\infty, 3) | 0
(0,1) \cup (2,3) | (0,1) | 0
(0,1) \cup (2,3) | (2,3) \cup (0,1) | 1 md
[0,1] \cup [2,3] | [0,1] \cup [2,4] | 0
x > 3 | (3, \infty) | 1 mdv
x \ge 3 | x > 3 | 0
x < 3 | x > 3 | 0
x \leq 3 | x \le 3 | 1 d
# equations
x=5 | 5 | 1
x=5 | x=6 | 0
x=5 | y=5 | 0
y=2x+1 | 2x+1 | 1
y=2x+1 | y=2x-1 | 0
y=2x+1 | 2x+1=y | 1 md
x^2+y^2=1 | x^2+y^2=2 | 0
x^2+y^2=1 | y^2+x^2=1 | 1 m
x = 3, y = 4 | x=3,y=4 | 1
x = 3, y = 4 | x=4,y=3 | 0
a=1,b=2 | 1,2 | 1 md
f(x)=x^2 | x^2 | 1 m
# expressions
2x+3x | 5x | 1 d
x+1 | 1+x | 1 d
x+1 | x-1 | 0
(x+1)^2 | x^2+2x+1 | 1 d
(x+1)^2 | x^2+1 | 0
xy | yx | 1 d
2\pi r | 2 \pi r | 1
2\pi | 2\pi r | 0
\sin^2 x | (\sin x)^2 | 1 md
\sin 2x | 2 \sin x | 0
\log_2 8 | 3 | 1 md
\log_2 x | \log_{10} x | 0
\ln 2 | \log 2 | 1 mdv
|x| | x | 0
|-5| | 5 | 1 md
|x-1| | x-1 | 0
\lfloor x \rfloor | x | 0
5! | 120 | 1 md
n! | n | 0
\binom{5}{2} | 10 | 1 md
\binom{5}{2} | \frac{5}{2} | 0
\binom{n}{k} | \frac{n}{k} | 0
x' | x | 0
\bar{x} | x | 0
\overline{AB} | AB | 1 v
\vec{v} | v | 1 mdv
\hat{x} | x | 0
0.\overline{3} | 0.3 | 0
0.\overline{3} | \frac{1}{3} | 1 mdv
3+4i | 4i+3 | 1 d
3+4i | 3-4i | 0
\mathbf{v} | v | 1 md
\angle ABC | ABC | 1 mdv
# matrices
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&2\\3&4\end{pmatrix} | 1
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | 1 d
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix}1&2\\3&4\end{bmatrix} | 1 d
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix} | 0
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1&2\end{pmatrix} | 0
\begin{pmatrix}1&2\end{pmatrix} | 12 | 0
\begin{pmatrix}12\\3\end{pmatrix} | \begin{pmatrix}1\\23\end{pmatrix} | 0
# bases, times, ratios
1011_2 | 11 | 1 mdv
1011_{2} | 1011_2 | 1 d
10:30 | 10:30 | 1
10:30 | 1030 | 0
10:30 | 1:03 | 0
3:2 | 3/2 | 1 md
3:2 | 2:3 | 0
3:30 \text{ PM} | 3:30 \text{ AM} | 0
# words with units in them
2 million | 2000000 | 1 mdv
2 million | 2 | 0
1 \text{ year} | 1 \text{ month} | 0
5 \text{ feet} | 5 \text{ inches} | 0
36 \text{ cm}^2 | 36 | 1
12 \text{ miles} | 12 | 1 d
# spaces
1 2 | 12 | 0
3 5 | 35 | 0
2 3/4 | 23/4 | 0
x y | xy | 1
# further ones
36\text{cm}^2 | 1296 | 0
36\text{cm}^{2} | 36 | 1 d
\binom{5}{2} | 52 | 0
2^\frac{1}{2} | 1 | 0
2^\frac{1}{2} | 2^{\frac{1}{2}} | 1 dv
6/\frac{2}{3} | 1 | 0
6/\frac{2}{3} | 9 | 1 md
7 \tag{1} | 71 | 0
x^{1/2} | x/2 | 0
x^{a}b | x^{ab} | 0
2^{3}5 | 2^{35} | 0
x \ne 3 | x3 | 0
5 \pmod{7} | 57 | 0
7 \text{ or more} | 7 | 0
3 \text{ by } 5 | 3 | 0
3 \text{ by } 5 | 5 | 0
1 2 | 2 | 0
1 2 | 3 | 0
\Delta | \delta | 0 v
\begin{pmatrix}1&23\end{pmatrix} | \begin{pmatrix}12&3\end{pmatrix} | 0
\overline{12} | 12 | 0
\cancel{5} | 5 | 0
\gcd(4, 6) | (4, 6) | 0
\det A | A | 0
\neg p | p | 0
\sqrt{2}^3 | \sqrt{8} | 1 d
\frac ab | a/b | 1 dv
\frac 1 2 | 0.5 | 1 d
10 000 | 10000 | 1
5\text{cm} | 5 \text{ centimeters} | 1 d
5 \text{ miles per hour} | 5 \text{ mph} | 1 d
5\text{ miles per hour} | 5 \text{ kilometers per hour} | 0
5 \text{ m} | 5 | 1
5m | 5 \text{ m} | 1 d
5 \mathrm{kg} | 5 \mathrm{g} | 0
12 \text{ square units} | 12 | 1
$5$ | 5 | 1
\(5\) | 5 | 1 d
5. | 5 | 1 d
\text{(A)} | (A) | 1
A, C | A | 0
A | A, C | 0
AC | A | 0
t = 3 | x = 3 | 0
X = 3 | x = 3 | 1
-\frac{3}{4} | \frac{3}{4} | 0
\frac{-3}{-4} | \frac{3}{4} | 1 d
(-1, 2) | (1, -2) | 0
2\sqrt{2}+1 | 2\sqrt{2+1} | 0
\sqrt{\frac{1}{2}} | \frac{\sqrt{1}}{2} | 0
\frac{\sqrt{2}}{2} | \sqrt{\frac{2}{2}} | 0
e^{2x} | e^2x | 0
\sin(x+1) | \sin x + 1 | 0
\log(10)x | \log(10x) | 0
\frac{n(n+1)}{2} | \frac{n(n+1)}{2} | 1
\frac{n(n+1)}{2} | n(n+1)/2 | 1 d
\frac{n(n+1)}{2} | \frac{n^2+n}{2} | 1 d
\frac{n(n+1)}{2} | n\frac{n+1}{2} | 1 d
\frac{abc}{2} | abc/2 | 1 d
# nothing, and powers of powers
\text{None} | 5 | 0
\emptyset | 0 | 0
\emptyset | \varnothing | 1 dv
\infty | -\infty | 0
2^{3^2} | 2^9 | 1 md
2^{3^2} | 64 | 0
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
    assert len(ROWS) > 300 and len(wrong) > 140
    assert [row for row in wrong if row[2] != "0"] == [["\\Delta", "\\delta", "0 v"]]


def test_math_verify_refuses_the_fewest_right_answers():
    refused = {letter: sum(letter in row[2] for row in ROWS if row[2].startswith("1")) for letter in "mdv"}
    assert refused["v"] < refused["m"] < refused["d"]
