"""The report in a real browser: every view, keyboard, accessibility, hostile texts, 200,000 samples, the watch's door.

Needs Chromium and ``pip install -e .[browser]``.  ``SLIME_SCREENSHOTS=RUN`` makes the docs' screenshots from RUN;
``-s`` prints how long 200,000 samples take to open and to filter (benchmarks/results/record_cpu.json).
"""

from __future__ import annotations

import os
import re
import shutil
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

sync_api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
VIEWS = ("Summary", "Metrics", "Where the time goes", "Samples", "Health", "Config")
RELOAD_MS = 20_000
"""Of page.js."""
RTL, BELL = "\u202e", "\x07"
SCRIPT = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
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


def write_page(folder: Path, **options) -> str:
    path = folder / "report.html"
    path.write_text(report.page_of(read_run(folder), **options), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> str:
    return write_page(write_prepared_run(tmp_path_factory.mktemp("run") / "off-policy", "off-policy"))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_every_view_is_accessible_fits_and_says_nothing_on_the_console(open_page, faulty, scheme, width):
    page = open_page(faulty, width, color_scheme=scheme, bypass_csp=True)  # axe brings a script of its own
    for view in VIEWS:
        page.get_by_role("tab", name=view).click()
        if view == "Samples":
            page.locator("details.sample > summary").first.click()
            page.get_by_text("The group side by side").click()
            page.locator("pre[aria-label=Response]").press("ArrowRight")
        found = axe.Axe().run(page).response["violations"]
        assert [
            (one["id"], one["nodes"][0]["html"][:90], one["nodes"][0]["failureSummary"][:150]) for one in found
        ] == [], view
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


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
    assert "token 1 of" in page.get_by_text("log-prob -").inner_text()


def test_samples_are_found_by_facts_and_text_and_shown_beside_their_group(open_page, faulty):
    page = open_page(faulty + "#Samples")
    status = page.locator("main [role=status]").first
    assert status.inner_text() == "512 of 512 samples."
    page.get_by_label("rollout").fill("16")
    page.get_by_label("reward from").fill("0.99")
    found = int(status.inner_text().split()[0])
    assert 0 < found < 32 and page.locator("details.sample").count() == found
    page.get_by_label("reward from").fill("")
    page.get_by_label("regular expression").fill("^ maybe")
    assert int(status.inner_text().split()[0]) < 32
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
    assert page.get_by_label("group", exact=True).input_value() == "1" and page.locator("details.sample").count() == 2
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
    assert [one.get_attribute("alt") for one in pictures.all()] == ["Picture 1 of 2", "Picture 2 of 2"]
    assert [one.evaluate("node => [node.naturalWidth, node.naturalHeight]") for one in pictures.all()] == [
        [64, 64],
        [40, 20],
    ]
    assert page.said == []
    page.evaluate("""() => { for (const src of ["https://example.org/x.png", "x.png"])
        document.body.append(Object.assign(document.createElement("img"), { src })); }""")
    page.wait_for_timeout(300)
    assert len(page.said) == 2 and all("Content Security Policy" in text for text in page.said)
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
    status = page.locator("main [role=status]").first
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
        page = open_page(url + "#token=wrong")
        page.get_by_text("This is not the token").wait_for()
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
        page.get_by_role("heading", name="growing: running or cut off").wait_for()
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
