"""The report's page in a real browser: it answers to clicks and keys, and fetches nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partc.amounts import time_text
from partc.reports.report import report
from tests.patience import slowness
from tests.reports.report_programs import compiled

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
if CHROMIUM is None:
    pytest.skip("there is no chromium here", allow_module_level=True)

LOAD_MS = 1000
WIDE, PHONE = {"width": 1280, "height": 960}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


PROGRAMS = {"one stage": ("megatron-sp", "dp=2,tp=2", 1), "pipeline": ("ddp", "pp=2,dp=2", 4)}
LIT = """(() => {  // for each line how many bars of transfers light up with it
    const lit = {};
    for (const row of report.rows.filter(r => r.kind === "transfers"))
        for (const l of row.line.filter(Boolean)) {
            const name = row.file + " " + l;
            lit[name] = (lit[name] || 0) + 1;
        }
    return lit;
})()"""
FIRST_LINKED = """(() => {
    const r = report.rows.findIndex(row => row.kind === "transfers" && row.line.some(Boolean));
    return [r, report.rows[r].line.findIndex(Boolean)];
})()"""


@pytest.fixture(scope="module", params=[*PROGRAMS])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    report(compiled(*PROGRAMS[request.param])).save(path)
    return path


class Shown:
    """A page of the browser, with what went wrong on it and what it asked for."""

    def __init__(self, browser: Any, file: Path, size: dict[str, int], scheme: str) -> None:
        self.page = browser.new_page(viewport=size, color_scheme=scheme)
        self.errors: list[str] = []
        self.urls: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.goto(file.as_uri())

    @property
    def told(self) -> str:
        return str(self.page.text_content("#told"))

    def span(self) -> list[float]:
        found: list[float] = self.page.evaluate("report.span()")
        return found


@pytest.fixture
def shown(browser: Any, file: Path) -> Iterator[Shown]:
    found = Shown(browser, file, WIDE, "light")
    yield found
    found.page.close()


@pytest.mark.rows(3)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_nothing_is_fetched_and_nothing_overflows(
    browser: Any, file: Path, size: dict[str, int], scheme: str
) -> None:
    shown = Shown(browser, file, size, scheme)
    assert not shown.errors
    assert shown.urls == [file.as_uri()]
    assert shown.page.evaluate("document.documentElement.scrollWidth") == size["width"]
    shown.page.close()


@pytest.mark.exhaustive
def test_the_page_is_there_within_a_second(shown: Shown) -> None:
    """As the browser counts it, from the request to the end of the script; the best of three."""

    def load_ms() -> float:
        shown.page.reload()
        found: float = shown.page.evaluate(
            "performance.timing.loadEventEnd - performance.timing.navigationStart"
        )
        return found

    assert min(load_ms() for _ in range(3)) < LOAD_MS * slowness()


@pytest.mark.rows(1)
def test_a_click_on_a_bar_names_its_line(shown: Shown) -> None:
    row, bar = shown.page.evaluate(FIRST_LINKED)
    x, y = shown.page.evaluate(f"report.place({row}, {bar})")
    shown.page.click("#line", position={"x": x, "y": y})
    line = re.search(r"line (\d+)", shown.told)
    assert line
    on = shown.page.locator(".l.on")
    assert on.count() == 1
    assert on.locator(".n").text_content() == line[1]
    assert on.evaluate("e => e.getBoundingClientRect().top < innerHeight")


def test_marks_and_bars_are_those_of_the_data(shown: Shown) -> None:
    """The mark beside each line says its transfers and their time, and as many bars light up."""
    told = json.loads(str(shown.page.text_content("#data")))
    lit = shown.page.evaluate(LIT)
    marked = [each for each in told["timeline"]["lines"] if each["line"]]
    for each in marked:
        key = f"{each['file']} {each['line']}"
        assert lit[key] == each["transfers"], key
        if each["file"] == told["timeline"]["file"]:
            mark = str(shown.page.locator(f"#L{each['line']} .g").text_content())
            seconds = time_text(float(f"{each['seconds']:.4g}"))
            assert mark[1:].startswith(f"{each['transfers']} {seconds}")  # behind a sign
            waits = round(100 * each["waits_s"] / each["seconds"])
            assert mark.endswith(f" {waits}% waits" if each["waits_s"] > 0 else seconds)
    assert sum(lit.values()) == sum(each["transfers"] for each in marked)


@pytest.mark.exhaustive
def test_any_line_names_its_module_and_the_users_line(shown: Shown) -> None:
    shown.page.locator(".l", has_text="F.gelu(").first.hover()
    assert "blocks." in shown.told
    assert "report_programs.py" in shown.told


def test_a_measured_step_stands_below_the_predicted_one(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled("megatron-sp")
    step = {"predicted_s": 0.01, "measured_s": 0.02, "low_s": 0.02, "high_s": 0.02}
    row = {"kind": "measured", "file": "", "waits_ns": [], "bytes": [], "line": []}
    blocks = {"name": "measured", "axis": "", "begin_ns": [5, 10_000_000], "ns": [9, 9_000_000]}
    told = {
        "machine": "2 cores", "ranks": 4, "rank": 0, "steps": 2, "figures": {"step": step},
        "end_s": 0.02, "streams": [{**row, **blocks, "layer": [0, 1], "call": [0, 1]}],
        "calls": [["forward", "blocks.*", ""], ["backward", "blocks.*", ""]],
    }  # fmt: skip
    monkeypatch.setattr("partc.reports.stamps.read_outcomes", lambda _: {"measured": told})
    report(program).save(tmp_path / "report.html")
    shown = Shown(browser, tmp_path / "report.html", WIDE, "light")
    assert not shown.errors
    assert shown.page.locator(".stamps .s-yes").count() == 1
    assert "20 ms a step, 10 ms predicted" in str(shown.page.text_content(".stamps"))
    assert shown.span()[1] == pytest.approx(20e6)
    row_number = shown.page.evaluate("report.rows.findIndex(r => r.kind === 'measured')")
    x, y = shown.page.evaluate(f"report.place({row_number}, 1)")
    shown.page.hover("#line", position={"x": x, "y": y})
    assert "backward" in shown.told
    assert "blocks.1" in shown.told
    assert "measured" in shown.told
    shown.page.close()


@pytest.mark.rows(1)
def test_a_click_on_a_line_says_what_it_moves(shown: Shown) -> None:
    marked = shown.page.locator(".l.m").first
    marked.click()
    assert "transfer" in shown.told
    assert "line " + str(marked.locator(".n").text_content()) in shown.told
    shown.page.keyboard.press("Escape")
    assert shown.page.locator(".l.on").count() == 0


@pytest.mark.exhaustive
def test_keys_move_and_zoom(shown: Shown) -> None:
    press = shown.page.keyboard.press
    begin, end = shown.span()
    press("+")
    nearer = shown.span()
    assert nearer[1] - nearer[0] == pytest.approx((end - begin) / 2)
    press("ArrowRight")
    assert shown.span()[0] > nearer[0]
    press("ArrowLeft")
    press("-")
    assert shown.span() == pytest.approx([begin, end])
    press("n")
    first = shown.told
    assert "waits" in first
    press("n")
    press("p")
    assert shown.told == first
    press("0")
    assert shown.span() == pytest.approx([begin, end])


@pytest.mark.exhaustive
def test_tab_reaches_the_marked_lines(shown: Shown) -> None:
    shown.page.locator(".l.m").first.focus()
    first = shown.told
    shown.page.keyboard.press("Tab")
    assert shown.told != first
    shown.page.keyboard.press("Enter")
    assert "from" in shown.told  # of a bar: its length, and when it begins


@pytest.mark.exhaustive
def test_what_is_pointed_at_is_told_aloud(shown: Shown) -> None:
    assert shown.page.get_attribute("#told", "aria-live") == "polite"
    x, y = shown.page.evaluate("report.place(1, 0)")
    shown.page.hover("#line", position={"x": x, "y": y})
    assert " from " in shown.told
