"""The table of the benchmark: medians, shares and ratios by hand value.  Nothing is timed here."""

from benchmarks.phase_table import Row, Stopwatch, format_table, median_ratio, step_seconds

ROWS = [
    Row("rollout", "rollout", bare="requests", bare_label="requests alone"),
    Row("through the router", "routed", bare="requests", bare_label="requests alone", depth=1),
    Row("convert", "convert"),
    Row("train", "train", bare="bare_train", bare_label="forward and backward"),
]
SPANS = {
    "rollout": [3.0, 6.0, 30.0],
    "requests": [2.0, 5.0, 10.0],
    "routed": [2.0, 5.5, 20.0],
    "convert": [0.25, 0.25, 0.5],
    "train": [4.0, 5.0, 6.0],
    "bare_train": [2.0, 5.0, 4.0],
}


def test_the_ratio_is_the_median_of_the_pairs_not_the_ratio_of_the_medians() -> None:
    assert median_ratio([3.0, 6.0, 30.0], [2.0, 5.0, 10.0]) == 1.5


def test_a_step_sums_phases_but_not_their_parts() -> None:
    whole, bare = step_seconds(ROWS, SPANS)
    assert whole == [7.25, 11.25, 36.5]
    assert bare == [4.0, 10.0, 14.0]


def test_the_table_has_a_line_for_each_row_and_one_for_the_step() -> None:
    lines = format_table(ROWS, SPANS).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["phase", "ms", "of step", "bare ms", "ratio", "what bare is"]
    assert cells[2] == ["rollout", "6,000.0", "53.3%", "5,000.0", "1.50", "requests alone"]
    assert cells[3] == ["- through the router", "5,500.0", "48.9%", "5,000.0", "1.10", "requests alone"]
    assert cells[4] == ["convert", "250.0", "2.2%", "", "", ""]
    assert cells[6] == ["**step**", "11,250.0", "100.0%", "10,000.0", "1.81", "their sum"]
    assert len(lines) == 2 + len(ROWS) + 1
    assert len({len(line) for line in lines}) == 1


def test_a_stopwatch_forgets_the_warm_up() -> None:
    watch = Stopwatch()
    with watch.time("phase"):
        pass
    watch.clear()
    watch.add("phase", 2.0)
    assert watch.spans["phase"] == [2.0]
