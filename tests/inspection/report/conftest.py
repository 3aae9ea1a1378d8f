"""Reports of small datasets, and a Chromium to look at them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from packprep.inspection.report import shards_shown, write_report
from packprep.verification import PROMISES, verify_dataset
from tests import made, packages
from tests.test_mixed_rows import recipe, write_corpus

HOSTILE = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\"> & &lt;b&gt; <!-- ]]>",
    "rtl \u202eabc\u202c \u200f\u05d0\u05d1\u05d2 zero\u200bwidth\u200d bom\ufeff",
    "nul \x00 esc \x1b[31m bell \x07 line\u2028paragraph\u2029next\x85",
    "long " + "m" * 300,
]


def report(directory: Path, html: Path, **options: Any) -> dict[str, Any]:
    """Verify what the report looks at and write it, as the command does."""
    verification = verify_dataset(
        directory,
        None,
        {},
        (0, 1),
        0,
        made.Silent(),
        only=options.get("only", shards_shown(directory)),
    )
    return write_report(directory, html, {}, verification, PROMISES, True)


def data_of(html: Path) -> dict[str, Any]:
    """What the script of a report reads."""
    text = html.read_text("utf-8")
    begin = '<script type="application/json" id="data">'
    return json.loads(text[text.index(begin) + len(begin) :].partition("</script>")[0])


@pytest.fixture(scope="session")
def mixed(tmp_path_factory) -> Path:
    """All objectives in its rows, with supervised documents; read only."""
    folder = tmp_path_factory.mktemp("mixed")
    write_corpus(folder)
    made.build(recipe(), folder, folder / "out")
    return folder / "out"


@pytest.fixture(scope="session")
def hostile(tmp_path_factory) -> Path:
    """Text, a source's, a task's and a file's name that try to be markup; read only."""
    folder = tmp_path_factory.mktemp("hostile")
    made.write_lines(folder / "a<b>&\u202e.jsonl", HOSTILE * 6)
    name = "<script>alert(1)</script>"
    table = {
        "tokenizer": "bytes",
        "seq_length": 256,
        "sources": [{"name": name, "paths": ["*.jsonl"]}],
        "tasks": [{"name": name, "objective": "span_corruption"}, {"preset": "llada"}],
    }
    made.build(table, folder, folder / "<b>out<")
    return folder / "<b>out<"


@pytest.fixture(scope="session")
def mixed_html(mixed: Path, tmp_path_factory) -> Path:
    """The report of `mixed`."""
    html = tmp_path_factory.mktemp("report") / "mixed.html"
    report(mixed, html)
    return html


@pytest.fixture(scope="session")
def browser():
    """Chromium; skips, with the reason, where there can be none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    try:
        packages.install(["chromium"], ["chromium"])
    except packages.Unavailable as reason:
        pytest.skip(str(reason))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    chromium = shutil.which("chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def look(browser):
    """Opens a report: (html, hash, **options of the context) → page; at the end nothing was asked
    for, said or thrown."""
    contexts, heard, asked = [], [], []

    def opened(html: Path, hash: str = "", **options: Any):
        context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **options}
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(html.as_uri() + hash)
        asked[:] = [url for url in asked if url.partition("#")[0] != html.as_uri()]
        return page

    yield opened
    for context in contexts:
        context.close()
    assert heard == [] and [url for url in asked if not url.startswith("data:,")] == []
