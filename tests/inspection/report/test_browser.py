"""Reports in Chromium, opened from a file as a person does. `look` holds that nothing is asked for
and nothing thrown."""

import shutil

import pytest

from packprep import open_dataset
from packprep.dataset.attention import block_mask, dense_mask
from tests import made
from tests.inspection.report.conftest import data_of, report

pytestmark = pytest.mark.long

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
CONTRAST = """
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((v) => v / 255 <= 0.04045 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color[3] > 250) return color;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.disabled || e.closest(".hidden, .skip, svg")) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push([e.tagName, e.className, e.textContent.slice(0, 30), ratio]);
  }
  return found;
}
"""
"""Texts whose contrast with what lies behind them is less than 4.5 (WCAG 2, AA)."""
SMALL = """
() => [...document.querySelectorAll("body *")].filter((e) => {
  if (e.closest(".hidden, .skip, script, option") || !e.getClientRects().length) return false;
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) return false;
  return parseFloat(getComputedStyle(e).fontSize) < 13.99;
}).map((e) => [e.tagName, e.textContent.slice(0, 20), getComputedStyle(e).fontSize])
"""
"""Texts of less than 14 pixels."""
INKED = """
(id) => {
  const canvas = document.getElementById(id), copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  return data.filter((value, i) => i % 4 === 3 && value > 127).length / (data.length / 4);
}
"""
"""The share of a canvas that is drawn on."""
MISSING = """
() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const drawn = (character, font) => {
    context.font = font;
    context.clearRect(0, 0, 60, 60);
    context.fillText(character, 20, 40);
    return `${context.measureText(character).width} ${context.getImageData(0, 0, 60, 60).data.join("")}`;
  };
  const seen = new Set(), found = [];
  for (const e of document.querySelectorAll("body *")) {
    const style = getComputedStyle(e), font = `${style.fontSize} ${style.fontFamily}`;
    const own = [...e.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data).join("");
    for (const character of e.tagName === "SCRIPT" ? "" : own + (e.dataset?.wraps || "")) {
      if (character <= "~" || seen.has(character + font)) continue;
      seen.add(character + font);
      if (drawn(character, font) === drawn("\uffff", font)) found.push(character);
    }
  }
  return { found, seen: [...seen].map((each) => each[0]).join("") };
}
"""
"""Characters of the page, but for ASCII, that are drawn as one is that no font has; and all that
were looked at."""
UNNAMED = """
() => [...document.querySelectorAll("button, input, select, canvas, svg[role=img], [role=region]")].filter((e) =>
  !(e.textContent.trim() || e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.labels?.length)).length
"""


@pytest.fixture
def page(look, mixed_html):
    return look(mixed_html)


def row_of(page):
    return int(page.locator("#number").input_value())


def test_it_opens_whole(page, mixed_html):
    data = data_of(mixed_html)
    assert page.title() == "out · packprep" and page.locator("h1").inner_text() == "out"
    assert page.locator("#verdict-title").inner_text().endswith("Every invariant holds")
    assert row_of(page) == data["first"]
    assert page.locator("#segments article").count() == len(
        next(r for r in data["rows"] if r["row"] == data["first"])["segments"]
    )
    assert page.locator(".balance.good").count() == 3 and page.locator(".balance.bad").count() == 0
    assert page.locator("svg.chart").count() == page.locator("#distributions figure").count() > 10


def test_a_row_stands_beside_itself_in_epoch_1(page, mixed_html):
    data = data_of(mixed_html)
    assert page.locator("#epochs .about").inner_text().startswith(f"Row {data['first']} as stored")
    articles = page.locator("#anew article")
    assert articles.count() == len(data["anew"]["segments"])
    sides = [
        articles.nth(i).locator(".sides > div").all_inner_texts() for i in range(articles.count())
    ]
    assert all(a.startswith("stored: ") and b.startswith("epoch 1: ") for a, b in sides)
    assert any(a.removeprefix("stored: ") != b.removeprefix("epoch 1: ") for a, b in sides)


@pytest.mark.long
def test_paging_by_button_by_key_and_by_number(page, mixed_html):
    rows = [row["row"] for row in data_of(mixed_html)["rows"]]
    at = rows.index(row_of(page))
    page.locator("#next").click()
    assert row_of(page) == rows[at + 1]
    page.locator("#previous").click()
    assert row_of(page) == rows[at]
    page.locator("h1").click()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert row_of(page) == rows[at + 2] and page.evaluate("location.hash") == f"#row={rows[at + 2]}"
    page.keyboard.press("ArrowLeft")
    assert row_of(page) == rows[at + 1]
    page.locator("#number").fill(str(rows[-1]))
    page.locator("#number").press("Enter")
    assert row_of(page) == rows[-1] and page.locator("#next").is_disabled()
    missing = next(n for n in range(max(rows)) if n not in rows)
    page.locator("#number").fill(str(missing))
    page.locator("#number").press("Enter")
    assert row_of(page) in rows and "is not among the" in page.locator("#status").inner_text()
    page.locator("#number").press("ArrowLeft")  # in a field the arrows are the field's
    assert row_of(page) in rows


@pytest.mark.long
def test_rows_by_hash(look, mixed_html):
    rows = [row["row"] for row in data_of(mixed_html)["rows"]]
    page = look(mixed_html, f"#row={rows[7]}")
    assert row_of(page) == rows[7]
    page.evaluate(f"location.hash = '#row={rows[3]}'")
    page.wait_for_function(f"document.getElementById('number').value === '{rows[3]}'")
    assert row_of(look(mixed_html, "#row=99999999")) == rows[-1]
    look(mixed_html, "#row=x<b>")


@pytest.mark.long
def test_filter_by_task(page, mixed_html):
    data = data_of(mixed_html)
    for task in ("bd3", "x-long", "mlm"):
        own = [row["row"] for row in data["rows"] if task in row["tasks"]]
        page.locator("#task").select_option(task)
        assert (
            row_of(page) in own and f"of the {len(own)} row" in page.locator("#status").inner_text()
        )
        seen = {row_of(page)}
        while not page.locator("#previous").is_disabled():
            page.locator("#previous").click()
        while not page.locator("#next").is_disabled():
            seen.add(row_of(page))
            page.locator("#next").click()
        assert seen | {row_of(page)} == set(own)
    assert page.locator("#task option").count() == 1 + len(
        {t for row in data["rows"] for t in row["tasks"]}
    )


@pytest.mark.long
def test_the_header_is_shown_by_focus_by_pointer_and_by_strip(page, mixed, mixed_html):
    row = open_dataset(mixed).row(row_of(page))
    buttons = page.locator("#segments article > h3 button")
    for i in range(row.n_segments):
        buttons.nth(i).focus()
        text = page.locator("#panel").inner_text()
        assert (
            f"Segment {i + 1}" in text
            and f"{int(row.segments['key'][i]):016x}" in text
            and "identical" in text
        )
    page.locator("#segments article").nth(0).locator(".tok").first.hover()
    assert "Segment 1" in page.locator("#panel").inner_text()
    assert f"token {row.tokens[0]}, slot 0" in page.locator("#panel .token").inner_text()
    page.locator("#strip button").nth(1).click()
    assert "Segment 2" in page.locator("#panel").inner_text()
    page.keyboard.press("Tab")  # from segment 2's button on, everything is reached by Tab
    assert page.evaluate("document.activeElement !== document.body")


@pytest.mark.long
def test_the_header_follows_what_is_read(look, mixed_html):
    row = max(data_of(mixed_html)["rows"], key=lambda row: len(row["segments"]))
    page = look(mixed_html, f"#row={row['row']}")
    articles, card = page.locator("#segments article"), page.locator("#panel h4")
    assert articles.count() > 3 and card.inner_text() == "Segment 1"
    seen = [card.inner_text()]
    page.mouse.move(5, 400)
    end = page.evaluate(
        "document.getElementById('segments').getBoundingClientRect().bottom - innerHeight"
    )
    for _ in range(60):
        page.mouse.wheel(0, end / 60)
        page.wait_for_timeout(40)  # a frame
        seen.append(card.inner_text())
        chosen = page.locator("#segments article.chosen").bounding_box()
        assert chosen["y"] < 900 and chosen["y"] + chosen["height"] > 112  # it is in view
    assert list(dict.fromkeys(seen)) == [f"Segment {i + 1}" for i in range(articles.count())]
    articles.nth(1).locator("h3 button").focus()  # scrolls back to it, and it stays chosen
    page.wait_for_timeout(100)
    assert card.inner_text() == "Segment 2"


@pytest.mark.long
def test_code_keeps_its_lines_and_every_character_has_a_glyph(look, tmp_path):
    code = (
        "def f(x):\n\tif x:  # "
        + "long " * 60
        + "\r\n        return [x,\n                x]\n\x1b\n"
    )
    made.write_lines(tmp_path / "a.jsonl", [code])
    table = {
        "tokenizer": "bytes",
        "seq_length": 1024,
        "sources": [{"paths": ["*.jsonl"]}],
        "tasks": [{"preset": "causal"}],
    }
    made.build(table, tmp_path, tmp_path / "out")
    report(tmp_path / "out", tmp_path / "a.html")
    lines = code.translate({9: "⇥", 10: "↵\n", 13: "⇤", 27: "\\u{1b}"}).split("\n")
    for options in ({}, PHONE):
        page = look(tmp_path / "a.html", **options)
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert page.locator("#segments .line").all_text_contents() == [*lines[:-1], "<eos>"]
        heights = [
            page.locator("#segments .line").nth(i).bounding_box()["height"]
            for i in range(len(lines))
        ]
        assert heights[1] >= 4 * heights[0] and max(heights[2:]) < 2 * heights[0]
        assert page.evaluate(
            "[...document.querySelectorAll('.text')].every((t) => t.scrollWidth <= t.clientWidth)"
        )
        glyphs = page.evaluate(MISSING)
        assert glyphs["found"] == [] and set("↵⇥⇤↳✓…←→·×") <= set(glyphs["seen"])


@pytest.mark.long
def test_masks_have_the_ink_that_the_rule_allows(look, mixed, mixed_html):
    """As much of a segment's square as dense_mask and block_mask allow."""
    dataset, data = open_dataset(mixed), data_of(mixed_html)
    page, seen = look(mixed_html), set()
    for row in data["rows"]:
        for i, segment in enumerate(row["segments"]):
            if segment["task"] in seen or segment["slots"] < 20:
                continue
            seen.add(segment["task"])
            page.evaluate(f"location.hash = '#row={row['row']}'")
            page.wait_for_function(f"document.getElementById('number').value === '{row['row']}'")
            page.locator("#segments article > h3 button").nth(i).focus()
            ids = [1] * segment["slots"]
            if segment["rule"] == "block_diffusion":
                half = segment["slots"] // 2
                length = next(t for t in dataset.tasks if t["name"] == segment["task"])[
                    "parameters"
                ]["block_length"]
                mask = block_mask(ids, [*range(half)] * 2, [0] * half + [1] * half, length)
            else:
                mask = dense_mask(ids, [segment["prefix"]] * segment["slots"])
            assert page.evaluate(INKED, "segment-mask") == pytest.approx(mask.mean(), abs=0.03), (
                segment["task"]
            )
            assert 0 < page.evaluate(INKED, "row-mask") < 1
    assert len(seen) >= 12


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(look, mixed_html, scheme):
    page = look(mixed_html, color_scheme=scheme)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 18, 20)"
    assert dark == (scheme == "dark")
    for _ in range(3):
        assert page.evaluate(CONTRAST) == []
        page.locator("#next").click()


@pytest.mark.long
@pytest.mark.parametrize(("width", "columns"), [(1280, 4), (1000, 2), (390, 1)])
def test_charts_stand_in_even_columns_and_say_their_values(look, mixed_html, width, columns):
    page = look(mixed_html, viewport={"width": width, "height": 900})
    charts = page.locator(".charts svg.chart")
    boxes = [charts.nth(i).bounding_box() for i in range(charts.count())]
    assert (
        len({round(box["x"]) for box in boxes}) == columns
        and len({round(box["width"]) for box in boxes}) == 1
    )
    assert len({round(box["y"]) for box in boxes[:columns]}) == 1
    figure = page.locator(".charts figure").first
    figure.locator(".bin").nth(2).hover()
    cells = figure.locator("tbody tr").nth(2).locator("td").all_text_contents()
    assert (
        figure.locator("figcaption span").inner_text()
        == f"{cells[0]}: count {cells[1]}, share {cells[2]}"
    )
    page.mouse.move(1, 1)
    assert figure.locator("figcaption span").inner_text().startswith("tokens per document and pass")


@pytest.mark.long
def test_a_phone_shows_the_mix_whole(look, mixed_html):
    page = look(mixed_html, **PHONE)
    for table in page.locator("#mix .scroll").all():
        assert table.evaluate("(e) => e.scrollWidth <= e.clientWidth")
        assert table.get_by_role("row").count() == table.locator("tbody tr").count() > 2
    cells = page.locator("#mix tbody tr").first.get_by_role("cell")
    assert cells.nth(1).evaluate("(e) => getComputedStyle(e, '::before').content") == '"wanted"'


@pytest.mark.long
def test_a_phone_scrolls_no_page_sideways(look, mixed_html):
    page = look(mixed_html, **PHONE)
    for _ in range(4):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(SMALL) == []
        page.locator("#next").tap()
    page.locator("#segments article > h3 button").nth(0).tap()
    assert page.locator("#segments article #panel").count() == 1
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_hostile_text_stays_text(look, hostile, tmp_path):
    report(hostile, tmp_path / "a.html")
    page = look(tmp_path / "a.html", **PHONE)
    for _ in range(len(data_of(tmp_path / "a.html")["rows"])):
        assert page.locator("#segments img, #segments script, #panel script").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if not page.locator("#next").is_disabled():
            page.locator("#next").click()
    assert page.title() == "<b>out< · packprep"
    assert "<script>alert(1)</script>" in page.locator("#mix").inner_text()


def test_a_fault_is_at_the_top(look, mixed, tmp_path):
    own = shutil.copytree(mixed, tmp_path / "own")
    (own / "shards/000/000002.safetensors").write_bytes(b"short")
    report(own, tmp_path / "a.html")
    page = look(tmp_path / "a.html")
    box = page.locator("#verdict .verdict.bad").bounding_box()
    assert box and box["y"] < 500
    assert "shards/000/000002.safetensors" in page.locator("#verdict table").inner_text()
    rows = [row["row"] for row in data_of(tmp_path / "a.html")["rows"] if "unreadable" in row]
    page.evaluate(f"location.hash = '#row={rows[0]}'")
    page.wait_for_function("document.querySelector('#segments .unreadable') !== null")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#segments .unreadable").count() == 0


def test_landmarks_headings_and_names(page):
    assert page.locator("main, nav, header, footer").count() == 4
    levels = [
        int(name[1])
        for name in page.evaluate(
            "[...document.querySelectorAll('h1,h2,h3,h4')].map((h) => h.tagName)"
        )
    ]
    assert (
        levels[0] == 1
        and levels.count(1) == 1
        and all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
    )
    assert page.evaluate(UNNAMED) == 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_print_shows_all_of_the_text(page):
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible() and page.locator("#segments").is_visible()
    assert page.evaluate(
        "[...document.querySelectorAll('.text')].every((t) => t.scrollHeight <= t.clientHeight + 2)"
    )
