"""The report in a real browser: every view, several runs, keyboard, accessibility, hostile texts, the watch's door.

``make test`` puts Chromium into .venv/browser; without it the machine's own serves, and without one all are skipped.
``SLIME_SCREENSHOTS=RUN`` makes the docs' screenshots from RUN; ``-s`` prints how long 200,000 samples take to open and
to filter (benchmarks/results/record_cpu.json).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from argparse import Namespace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime.ext.record.run_reader import read_run
from slime.observability.metrics_file import append_record
from slime.utils.types import Sample
from tests.contracts.source_tree import REPO
from tests.ext.record import recording
from tests.ext.record.prepared_runs import WORDS, write_prepared_run, write_tokenizer
from tests.ext.record.test_report import write_run, write_run_with_pictures
from tools import report, watch

BROWSER = Path(sys.prefix) / "browser"
CHROMIUM = str(BROWSER / "chromium")
sys.path.append(str(BROWSER / "python"))
if not (BROWSER / "pins").exists():
    CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if CHROMIUM is None:
        missing = BROWSER / "missing"
        why = missing.read_text().strip() if missing.exists() else "scripts/browser.sh has not run"
        pytest.skip(f"there is no Chromium: {why}", allow_module_level=True)
    pytest.importorskip("playwright", reason="the extra `browser` is not installed")
from axe_playwright_python.sync_playwright import Axe  # noqa: E402
from playwright.sync_api import expect, sync_playwright  # noqa: E402

expect.set_options(timeout=30_000)
VIEWS = ("Summary", "Metrics", "Where the time goes", "Samples", "Health", "Config")
RELOAD_MS = 20_000
"""Of page.js."""
RTL, BELL = "\u202e", "\x07"
SCRIPT = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """A page of a new browser context; the test fails for anything on its console."""
    said, contexts = [], []

    def open_page(url="about:blank", width=1200, **options):
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.said = said
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def write_page(folder: Path, *beside: Path) -> str:
    path = folder / "report.html"
    path.write_text(report.page_of(read_run(folder), [read_run(one) for one in beside]), encoding="utf-8")
    return path.as_uri()


def status_of(page):
    return page.locator("main [role=status]").first


def count_of(page) -> int:
    """How many samples the page has found."""
    return int(status_of(page).inner_text().split()[0])


def fits(page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def violations(page) -> list[tuple[str, str, str]]:
    """What axe finds: rule, element, why.  The page must be one of a context with ``bypass_csp``."""
    return [
        (one["id"], one["nodes"][0]["html"][:90], one["nodes"][0]["failureSummary"][:150])
        for one in Axe().run(page).response["violations"]
    ]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> str:
    return write_page(write_prepared_run(tmp_path_factory.mktemp("run") / "off-policy", "off-policy"))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_every_view_is_accessible_fits_and_says_nothing_on_the_console(open_page, faulty, scheme, width):
    page = open_page(faulty, width, color_scheme=scheme, bypass_csp=True)
    for view in VIEWS:
        page.get_by_role("tab", name=view).click()
        if view == "Samples":
            page.locator("details.sample > summary").first.click()
            page.locator("pre[aria-label=Response]").press("ArrowRight")
        for summary in page.locator("details:not(.sample) > summary").all():
            summary.click()
        assert violations(page) == [], view
        assert fits(page), view


def test_the_page_goes_by_keyboard(open_page, faulty):
    page = open_page(faulty)
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", selected=True).inner_text() == VIEWS[1]
    page.keyboard.press("End")
    assert page.get_by_role("tab", selected=True).inner_text() == "Config"
    page.keyboard.press("Home")
    assert page.url.endswith("#Summary")
    page.get_by_role("tab", name="Samples").press("Enter")
    page.locator("details.sample > summary").first.press("Enter")
    page.get_by_role("group", name="Response").press("ArrowRight")
    expect(page.get_by_text("log-prob -")).to_contain_text("token 1 of")
    page.get_by_role("button", name="All answers to this prompt").press("Enter")
    page.keyboard.press("Enter")  # the focus is on the prompt's own button, which gives all samples back
    assert count_of(page) == 512
    page.keyboard.type("16")
    assert page.get_by_label("rollout").input_value() == "16" and count_of(page) == 32


def test_the_tab_key_reaches_every_control_and_shows_where_it_is(open_page, faulty):
    page = open_page(faulty)
    for view in VIEWS:
        page.get_by_role("tab", name=view).click()
        left = page.evaluate("""() => {
            const all = "a[href], button, input, select, summary, [tabindex='0']";
            window.left = new Set([...main.querySelectorAll(all)].filter((one) => one.checkVisibility()));
            return left.size;
        }""")
        for _ in range(left):
            page.keyboard.press("Tab")
            assert page.evaluate("""() => {
                const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);
                return left.delete(document.activeElement) && outlineStyle !== "none" && outlineWidth !== "0px";
            }"""), (view, page.evaluate("document.activeElement.outerHTML.slice(0, 90)"))


def test_metrics_are_found_by_words_which_a_reload_and_another_width_leave(open_page, faulty):
    page = open_page(faulty + "#Metrics")
    plots = page.get_by_role("group")
    assert re.fullmatch(r"24 of \d\d metrics; write more letters\.", status_of(page).inner_text())
    assert plots.count() == 24
    page.get_by_label("Metrics with").fill("LAYER_3 idle")
    for change in (
        lambda: None,
        lambda: page.set_viewport_size({"width": 390, "height": 900}),
        lambda: page.emulate_media(color_scheme="dark"),
        lambda: page.get_by_role("tab", name="Health").click() or page.get_by_role("tab", name="Metrics").click(),
        page.reload,
    ):
        change()
        expect(status_of(page)).to_have_text("1 of 1 metrics.")
        expect(plots).to_have_count(1)
        expect(plots).to_have_attribute("aria-label", re.compile(r"^train/expert_load/layer_3/idle\. At the end: "))
        expect(page.get_by_label("Metrics with")).to_have_value("LAYER_3 idle")
        assert fits(page)
    page.get_by_label("Metrics with").fill("no such")
    assert status_of(page).inner_text() == "0 of 0 metrics." and plots.count() == 0


def test_several_runs_are_told_apart_and_read_at_the_pointer(open_page, tmp_path):
    runs = [write_run(tmp_path / f"lr-{i}", lr=i / 8) for i in range(1, 7)]
    page = open_page(write_page(*runs) + "#Metrics", 390, bypass_csp=True)
    page.get_by_label("Metrics with").fill("train/loss")
    plot = page.get_by_role("group")
    ends = ", ".join(f"{run} {i / 8}" for i, run in enumerate(runs, 1))
    expect(plot).to_have_attribute("aria-label", f"train/loss. At the end: {ends}.")
    lines = plot.locator(".u-series")
    assert lines.locator("th").all_inner_texts() == ["step", *map(str, runs)]
    assert lines.locator("td").all_inner_texts() == ["8", *(str(i / 8) for i in range(1, 7))]
    marks = [mark.evaluate("node => node.style.borderTop") for mark in lines.locator(".u-marker").all()[1:]]
    assert len(set(marks)) == len(runs)
    assert fits(page) and violations(page) == []
    plot.locator(".u-over").hover(position={"x": 2, "y": 20})
    expect(lines.locator("td").nth(0)).to_have_text("1")
    assert lines.locator("td").all_inner_texts() == ["1", *["0"] * 6]


def test_a_step_shows_its_spans_and_a_cell_its_number(open_page, faulty):
    page = open_page(faulty + "#Where%20the%20time%20goes")
    step = page.get_by_label("Step:")
    assert step.input_value() == "15"  # the last one
    step.select_option("2")
    page.get_by_text("As a table").click()
    spans = page.get_by_role("region", name="Spans").get_by_role("row")
    processes = [row.inner_text().split("\t")[:2] for row in spans.all()[1:]]
    assert ["actor 0", "backward"] in processes and ["rollout manager", "rollout"] in processes
    assert page.get_by_role("region", name="Answers").get_by_role("row").count() == 33
    assert page.get_by_role("img", name="Step 3 by process").count() == 1
    page.get_by_role("tab", name="Health").click()
    heat = page.locator(".plot", has_text="share of the tokens").filter(has=page.locator("canvas.heat"))
    heat.locator("canvas").hover(position={"x": 100, "y": 4})
    expect(heat.locator("p")).to_have_text(re.compile(r"^Step 1, 1 and more: [\d.]+$"))


def test_the_page_takes_the_dark_when_the_machine_does(open_page, faulty):
    page = open_page(faulty + "#Samples", color_scheme="light")
    page.locator("details.sample > summary").first.click()
    page.get_by_role("button", name="All answers to this prompt").click()
    assert count_of(page) == 128

    def colours():
        page.locator("details.sample > summary").first.click()
        token = page.get_by_role("group", name="Response").first.locator("span[style]").first
        return [
            node.evaluate("node => getComputedStyle(node).backgroundColor") for node in (page.locator("body"), token)
        ]

    light = colours()
    page.emulate_media(color_scheme="dark")
    expect(page.locator("details.sample[open]")).to_have_count(0)  # drawn again
    dark = colours()
    assert light[0] != dark[0] and light[1] != dark[1]
    page.set_viewport_size({"width": 390, "height": 900})
    assert fits(page) and count_of(page) == 128
    page.get_by_role("button", name="Prompt:").click()  # what hides samples can be taken away
    assert count_of(page) == 512


def test_samples_are_found_by_facts_and_text_and_shown_beside_their_group(open_page, faulty):
    page = open_page(faulty + "#Samples")
    status = status_of(page)
    assert status.inner_text() == "512 of 512 samples."
    page.locator("details.sample > summary").first.click()
    page.get_by_role("button", name="More (462)").click()
    assert page.locator("details.sample").count() == 150 and page.locator("details.sample[open]").count() == 1
    assert page.evaluate(
        "document.activeElement.closest('details.sample') === document.querySelectorAll('.sample')[50]"
    )
    page.get_by_label("rollout").fill("16")
    page.get_by_label("reward from").fill("0.99")
    found = count_of(page)
    assert 0 < found < 32 and page.locator("details.sample").count() == found
    page.get_by_label("reward from").fill("")
    page.get_by_label("regular expression").fill("^ maybe")
    assert 0 < count_of(page) < 32
    page.get_by_label("regular expression").fill("(")
    assert status.inner_text().startswith("No regular expression")
    page.get_by_label("regular expression").fill("")
    page.get_by_label("order").select_option("most reward first")
    first = page.locator("details.sample").first
    first.locator("summary").first.click()
    first.get_by_text("The group side by side (4)").click()
    assert first.locator(".beside pre").count() == 4
    for mode in ("advantage", "trainer - engine", "weight version"):
        page.get_by_label("colour tokens by").select_option(mode)
        page.locator("details.sample > summary").first.click()
        assert "background" in page.get_by_role("group", name="Response").locator("span").first.get_attribute("style")
    page.get_by_role("button", name="All answers to this prompt").click()
    page.get_by_label("rollout").fill("")
    assert status.inner_text().startswith("128 of 512")


def test_groups_stand_in_a_table_and_turns_beside_their_answer(open_page, tmp_path):
    args = Namespace(save=str(tmp_path), value_origins={}, hf_checkpoint=str(tmp_path / "hf"))
    write_tokenizer(tmp_path / "hf")
    recording.start(args, "rollout manager", primary=True)
    append_record(tmp_path / "metrics.jsonl", {"rollout/step": 0})
    turns = [("good", 1), ("so", 1), ("bad", 0), ("maybe", 1)]
    recording.rollout(0, [
        Sample(
            index=i, group_index=i // 2, prompt=f"p {i // 2}", response="good so bad maybe", reward=float(i == 3),
            response_length=4, tokens=[0, *(WORDS.index(word) for word, _ in turns)],
            loss_mask=[mask for _, mask in turns], status=Sample.Status.COMPLETED,
        )
        for i in range(4)
    ], None)  # fmt: skip
    recording.stop()
    page = open_page(write_page(tmp_path) + "#Samples")
    page.get_by_text("Groups: 2, in 1 all rewards are equal").click()
    page.get_by_role("region", name="Groups").get_by_role("button").first.click()
    assert page.get_by_label("group", exact=True).input_value() == "1" and count_of(page) == 2
    page.locator("details.sample > summary").first.click()
    page.get_by_text("Turns (3)").click()
    assert [one.inner_text().split() for one in page.locator(".turn").all()] == [
        ["1.", "model", "good", "so"],
        ["2.", "environment", "bad"],
        ["3.", "model", "maybe"],
    ]


def test_hostile_texts_are_shown_as_text_and_run_nothing(open_page, tmp_path):
    folder = write_run(tmp_path / f"hostile{BELL}<img src=x>", is_hostile=True)
    path = folder / "samples/rollout_000000.parquet"
    table = pq.read_table(path)
    broken = pa.array([b"\xff\xfe broken"] * 4, pa.binary()).view(pa.string())  # no UTF-8
    huge = pa.array(["A" * 1_000_000] * 4)
    table = table.set_column(table.column_names.index("prompt"), "prompt", broken)
    pq.write_table(table.set_column(table.column_names.index("response"), "response", huge), path)
    with open(folder / "events.jsonl", "ab") as file:
        file.write(b'{"event": "warning", "text": "\xff\xfe ' + SCRIPT.replace('"', '\\"').encode() + b'"}\n')
    append_record(folder / "metrics.jsonl", {f"eval/{SCRIPT}": 0.5, "eval/step": 0})
    page = open_page(write_page(folder))
    for view in VIEWS:
        page.get_by_role("tab", name=view).click()
        assert page.locator("main img").count() == 0 and page.locator("script").count() == 2
    page.get_by_role("tab", name="Samples").click()
    page.get_by_label("rollout").fill("2")
    page.locator("details.sample > summary").first.click()
    assert "\\u202e\\u0007" in page.get_by_role("group", name="Prompt", exact=True).inner_text()
    assert SCRIPT[:20] in page.get_by_role("group", name="Prompt", exact=True).inner_text()
    page.get_by_label("rollout").fill("1")
    page.locator("details.sample > summary").first.click()
    assert len(page.get_by_role("group", name="Text of the response").inner_text()) < 30_000
    assert page.title().startswith("slime: hostile")


def test_pictures_are_shown_beside_their_answer_and_none_from_elsewhere(open_page, tmp_path):
    page = open_page(write_page(write_run_with_pictures(tmp_path / "seen")))
    page.get_by_role("tab", name="Samples").click()
    page.locator("details.sample > summary").first.click()
    pictures = page.locator("details.sample[open] .pictures img")
    expect(pictures).to_have_count(2)
    for picture, name, size in zip(pictures.all(), ("Picture 1 of 2", "Picture 2 of 2"), ((64, 64), (40, 20))):
        assert picture.get_attribute("alt") == name
        for side, length in zip(("naturalWidth", "naturalHeight"), size):
            expect(picture).to_have_js_property(side, length)
    assert page.said == []
    for source in ("https://example.org/x.png", "x.png"):
        with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
            page.evaluate("src => document.body.append(Object.assign(document.createElement('img'), { src }))", source)
    assert len(page.said) == 2
    page.said.clear()


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A run of 1,000 steps with 200,000 samples; its files of samples are a few, under many names."""
    folder, few = tmp_path_factory.mktemp("run") / "large", 8
    write_run(folder, num_samples=200, length=40)
    for step in range(few, 1000):
        for name in ("rollout_{:06d}.parquet", "train_{:06d}_r0.parquet"):
            os.link(folder / "samples" / name.format(step % few), folder / "samples" / name.format(step))
        append_record(folder / "metrics.jsonl", {"rollout/raw_reward": step / 1000, "rollout/step": step})
    spans = (folder / "spans.json").read_text().splitlines()[1:6]
    with open(folder / "spans.json", "a") as file:
        for step in range(few, 1000):
            shift = f'"ts": {1000_000_000 + step * 10_000_000}'
            file.writelines(line.replace('"ts": 1000000000', shift) + "\n" for line in spans)
    return folder


def test_200_000_samples_open_and_filter_on_less_than_10_mb(open_page, large):
    url = write_page(large)
    assert (large / "report.html").stat().st_size < 10e6
    page = open_page()
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable")
    page.goto(url + "#Samples")
    status = status_of(page)
    assert status.inner_text().startswith("200,000 of 200,000 samples. It has the texts of ")
    busy = {one["name"]: one["value"] for one in client.send("Performance.getMetrics")["metrics"]}
    print(f"opened in {busy['TaskDuration']:.2f} s of the page's work")
    seconds = page.evaluate("""() => {
        const begin = performance.now(), input = (label, value) => {
            const fields = [...document.querySelectorAll(".filters label")];
            const field = fields.find((one) => one.textContent.startsWith(label));
            field.lastChild.value = value;
            field.lastChild.dispatchEvent(new Event("input"));
        };
        input("reward from", "0.5");
        const one = performance.now();
        input("regular expression", "answer$");
        return [one - begin, performance.now() - one].map((ms) => ms / 1000);
    }""")
    print(f"filtered in {seconds[0]:.3f} s by reward, in {seconds[1]:.3f} s by text")
    assert status.inner_text().split()[0] != "200,000"
    for view in VIEWS:
        page.get_by_role("tab", name=view).click()
        assert page.locator("main").inner_text()


def test_the_door_of_watch_opens_for_the_token_in_the_address_and_forgets_it(open_page, faulty):
    run = Path(faulty.removeprefix("file://")).parent
    with watch.server_of(run, 0, token="right") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        page = open_page(url + "#token=wrong", 390)
        page.get_by_text("This is not the token").wait_for()
        assert fits(page) and violations(page) == []
        page.get_by_label("Token").fill("right")
        page.get_by_role("button", name="Open").click()
        page.get_by_role("tab", name="Summary").wait_for()
        other = open_page(url + "#token=right")
        other.get_by_role("tab", name="Summary").wait_for()
        assert "right" not in other.url and "right" not in other.evaluate("document.cookie")
        page.said[:] = [text for text in page.said if "401" not in text and "403" not in text]
        server.shutdown()


def test_the_page_of_watch_shows_a_step_that_came_meanwhile_unless_samples_are_read(open_page, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "FRESH_S", 0.0)
    folder = write_run(tmp_path / "growing", has_ended=False)
    with watch.server_of(folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = open_page()
        page.clock.install()

        def pass_time():
            with page.expect_response("**/") as answer:
                page.clock.run_for(RELOAD_MS)
            assert answer.value.request.method == "HEAD"

        def steps_are(text):
            page.locator("tr", has_text=re.compile(f"^steps{text}$")).wait_for()

        page.goto(f"http://127.0.0.1:{server.server_port}/#Summary")
        steps_are("8 of 8")
        append_record(folder / "metrics.jsonl", {"rollout/raw_reward": 0.5, "rollout/step": 8})
        pass_time()
        steps_are("9 of 8")
        page.get_by_role("tab", name="Samples").click()
        append_record(folder / "metrics.jsonl", {"rollout/raw_reward": 0.5, "rollout/step": 9})
        page.clock.run_for(3 * RELOAD_MS)
        page.get_by_role("tab", name="Summary").click()
        steps_are("9 of 8")  # the same page still
        pass_time()
        steps_are("10 of 8")
        assert page.url.endswith("#Summary")
        (folder / "metrics.jsonl").rename(folder / "elsewhere")
        pass_time()
        page.get_by_role("heading", name="growing: slime watch gives no newer page than this").wait_for()
        steps_are("10 of 8")
        (folder / "elsewhere").rename(folder / "metrics.jsonl")
        pass_time()
        page.get_by_role("heading", name="growing: running").wait_for()
        page.said[:] = [text for text in page.said if "503" not in text]
        server.shutdown()


def test_screenshots_of_the_docs_can_be_made(open_page, faulty, tmp_path):
    run = os.environ.get("SLIME_SCREENSHOTS")
    folder = REPO / "docs" if run else tmp_path
    url = write_page(Path(run)) if run else faulty
    for name, view in (("report_summary.png", "Summary"), ("report_time.png", "Where the time goes")):
        page = open_page(url, 1100)
        page.get_by_role("tab", name=view).click()
        page.screenshot(path=folder / name)
        assert (folder / name).stat().st_size > 20_000
