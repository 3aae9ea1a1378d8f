"""The file: whole, small, the same each time, and never without the faults that there are."""

import json
import os
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packprep.dataset.manifest import read_manifest
from packprep.errors import ArgumentError, DatasetError, PlanError
from packprep.format.json_files import encode
from packprep.inspection import report as module
from packprep.inspection.report import (
    FEWEST_ROWS,
    MOST_ROWS,
    check_file,
    chosen_rows,
    rows_with_tasks,
    shards_shown,
    write_report,
)
from packprep.inspection.report.page import as_data
from packprep.inspection.summary import evenly
from packprep.storage import Remote
from packprep.verification import PROMISES
from tests import made
from tests.command_line import inside, packprep, refused
from tests.inspection.report.conftest import HOSTILE, data_of, report

ALLOWED = """a abbr article aside b body button canvas dd details div dl dt figcaption figure footer h1 h2 h3 head header html
i input label li link main meta nav noscript p script section select small span style summary svg table tbody td th thead title
pre tr ul path rect circle text g line"""


class Tags(HTMLParser):
    """What tags and attributes a page has."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes = set(), []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes


def tags_of(html):
    found = Tags()
    found.feed(html.read_text("utf-8"))
    return found


@pytest.mark.long
def test_the_same_dataset_gives_the_same_bytes(mixed, tmp_path):
    first, second = report(mixed, tmp_path / "a.html"), report(mixed, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert first == {**second, "html": str(tmp_path / "a.html")}
    assert first["bytes"] == (tmp_path / "a.html").stat().st_size and first["faults"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_a_page_has_no_markup_but_its_own_and_names_no_other_place(mixed_html, hostile, tmp_path):
    report(hostile, tmp_path / "hostile.html")
    for html in (mixed_html, tmp_path / "hostile.html"):
        found = tags_of(html)
        assert found.tags <= set(ALLOWED.split())
        assert not [
            name
            for name, _ in found.attributes
            if name.startswith("on") or name in ("style", "src", "action")
        ]
        assert {value for name, value in found.attributes if name == "href"} <= {
            "data:,",
            "#verdict",
            "#ledger",
            "#mix",
            "#distributions",
            "#rows",
            "#epochs",
            "#origin",
        }
        text = html.read_text("utf-8")
        assert not re.search(r"https?:|url\(|@import|innerHTML|eval\(", text)
        assert text.count("<script") == text.count("</script>") == 2
        assert "default-src 'none'" in text and "unsafe" not in text.partition("</head>")[0]


def test_hostile_text_comes_back_as_it_was(hostile, tmp_path):
    report(hostile, tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\x85\u200b-\u200f\u2028-\u202e\ufeff]", text)
    originals = [
        s["original"]
        for row in data_of(tmp_path / "a.html")["rows"]
        for s in row["segments"]
        if s["original"]
    ]
    ids = [
        i
        for part in originals
        for run in part["runs"]
        for some in run.get("i", [])
        for i in np.atleast_1d(some).tolist()
    ]
    data = bytes(i for i in ids if i < 256)
    assert all(document.encode() in data for document in HOSTILE[:4])


@pytest.mark.parametrize(
    "value", ["</script>", "<!--", "\u2028\u2029", "\ud800", "\x00", "&amp;", "日本"]
)
def test_data_cannot_end_its_script(value):
    text = as_data({"a": value})
    assert json.loads(text) == {"a": value} and text.isascii() and not set("<>&") & set(text)


# Faults


@pytest.fixture
def own(mixed, tmp_path):
    return shutil.copytree(mixed, tmp_path / "own")


def test_a_damaged_shard_is_told_of_and_left_out(own, tmp_path):
    path = own / "shards/000/000001.safetensors"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    said = report(own, tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text("utf-8")
    assert said["faults"] >= 1 and said["looked_at"] == 3
    assert "shards/000/000001.safetensors" in text and PROMISES["P1"].split(",")[0] in text
    assert "Every invariant holds" not in text and "1 shard of the 4 examined" in text
    shown = [
        row
        for row in data_of(tmp_path / "a.html")["rows"]
        if row["shard"].endswith("1.safetensors")
    ]
    assert shown and not any(
        s["rebuilt"] == "identical" for row in shown for s in row.get("segments", [])
    )


@pytest.mark.long
@pytest.mark.alike(4)
@pytest.mark.parametrize(
    "damage, title",
    [
        (lambda own: (own / "shards/000/000000.safetensors").write_bytes(b"short"), "fault"),
        (lambda own: (own / "shards/000/000000.safetensors").unlink(), "fault"),
        (lambda own: (own / "tokenizer.json").write_bytes(b"{}"), "fault"),
        (lambda own: (own / "tokenizer.json").unlink(), "fault"),
        (lambda own: (own / "plan.json").write_bytes(b"{}\n"), "fault"),
        (lambda own: (own / "plan.json").unlink(), "Not verified"),
        (lambda own: shutil.rmtree(own / "shards"), "fault"),
        (lambda own: shutil.rmtree(own / "receipts"), "fault"),
        (lambda own: (own / "stray").write_bytes(b""), "1 fault"),
    ],
)
def test_whatever_is_damaged_there_is_a_report_of_it(own, tmp_path, damage, title):
    damage(own)
    said = inside("inspect", own, "--html", tmp_path / "a.html", "--json")
    assert said.status == 0, said
    text = (tmp_path / "a.html").read_text("utf-8")
    heading = re.search(r'<h2 id="verdict-title">.*?</span>(.*?)</h2>', text)[1]
    assert title in heading and said.json["faults"] != 0
    assert text.count("Ledger") > 0


@pytest.mark.long
def test_rows_of_a_shard_that_cannot_be_read_say_so(own, tmp_path):
    (own / "shards/000/000002.safetensors").write_bytes(b"short")
    report(own, tmp_path / "a.html")
    unreadable = [row for row in data_of(tmp_path / "a.html")["rows"] if "unreadable" in row]
    assert unreadable and all("000002" in row["shard"] for row in unreadable)


@pytest.mark.long
def test_a_damaged_ledger_hides_nothing(own, tmp_path):
    manifest = json.loads((own / "dataset.json").read_text())
    del manifest["ledger"]["row_slots"]
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    (own / "dataset.json").write_text(text + "\n")
    said = report(own, tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text("utf-8")
    assert (
        said["faults"] >= 2 and "The ledger cannot be shown" in page and 'id="ledger"' not in page
    )


def test_it_says_what_it_was_made_from(own, tmp_path):
    made.write_lines(tmp_path / "old.jsonl", ["some text"] * 9)
    made.write_lines(tmp_path / "new.jsonl", ["another"] * 9)
    for name, day in (("old", 1), ("new", 20)):
        os.utime(tmp_path / f"{name}.jsonl", (86400 * day, 86400 * day))
    table = {
        "tokenizer": "bytes",
        "seq_length": 64,
        "seed": 77,
        "sources": [{"name": "a<b", "paths": ["*.jsonl"]}],
    }
    made.build(table, tmp_path, tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    report(tmp_path / "out", tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text("utf-8").partition('<section id="origin"')[2]
    assert (
        "1970-01-21" in page
        and "<dd>77</dd>" in page
        and "name = &#34;a&lt;b&#34;\npaths = [&#34;*.jsonl&#34;]" in page
    )
    assert (
        f"bytes, digest {manifest['tokenizer']['digest']}" in page
        and f"packprep {manifest['made_with']['packprep']}, " in page
    )
    assert packprep("inspect", tmp_path / "out", "--html", tmp_path / "b.html").status == 0
    assert "unknown: not read" in (tmp_path / "b.html").read_text("utf-8")
    (tmp_path / "old.jsonl").unlink()
    report(tmp_path / "out", tmp_path / "c.html")
    assert "unknown: No such file" in (tmp_path / "c.html").read_text("utf-8")
    manifest = json.loads((own / "dataset.json").read_text())
    del manifest["recipe"]["packing"]
    (own / "dataset.json").write_bytes(encode(manifest))
    report(own, tmp_path / "d.html")
    page = (tmp_path / "d.html").read_text("utf-8")
    assert "The origin cannot be shown" in page and 'id="origin"' not in page


def test_without_a_manifest_there_is_no_report(tmp_path):
    message = refused("inspect", tmp_path, "--html", tmp_path / "a.html")
    assert "dataset.json" in message and not (tmp_path / "a.html").exists()


def test_what_could_not_be_verified_is_said(mixed, tmp_path):
    said = write_report(
        mixed, tmp_path / "a.html", {}, PlanError("of another law <version>"), PROMISES
    )
    text = (tmp_path / "a.html").read_text("utf-8")
    assert said["faults"] is None and said["looked_at"] == 0
    assert (
        "Not verified" in text
        and "of another law &lt;version&gt;" in text
        and "Distributions" not in text
    )
    assert data_of(tmp_path / "a.html")["rows"]


# Large datasets


@pytest.mark.long
def test_of_many_shards_some_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_SHARDS", 3)
    made.write_lines(tmp_path / "a.jsonl", made.texts(300, 1))
    table = made.table("a.jsonl", output={"shard_text_bytes": 3000})
    made.build(table, tmp_path, tmp_path / "out")
    shards = len(read_manifest(tmp_path / "out")["shards"])
    assert shards > 9 and list(shards_shown(tmp_path / "out")) == [0, shards // 3, 2 * shards // 3]
    said = report(tmp_path / "out", tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text("utf-8")
    assert (said["looked_at"], said["shards"], said["faults"]) == (3, shards, 0)
    assert (
        f"3 of {shards} shards recomputed" in text and "The other shards were not checked" in text
    )
    assert {row["shard"][-11:-12:-1] for row in data_of(tmp_path / "a.html")["rows"]}
    (tmp_path / "out/shards/000/000001.safetensors").write_bytes(b"")  # not one of the three
    assert report(tmp_path / "out", tmp_path / "b.html")["faults"] == 0


@pytest.mark.long
@pytest.mark.parametrize("seq_length, words", [(65536, 9), (4096, 2), (512, 40)])
def test_a_report_stays_small(tmp_path, seq_length, words):
    made.write_lines(
        tmp_path / "a.jsonl",
        [f"日本語 \u202e <&> {i} " * words for i in range(9000 // words)] + ["x" * 900_000],
    )
    table = {"tokenizer": "bytes", "seq_length": seq_length, "sources": [{"paths": ["a.jsonl"]}]}
    table["tasks"] = [{"preset": "ul2r"}, {"preset": "llada"}, {"preset": "bd3"}]
    made.build(table, tmp_path, tmp_path / "out")
    said = report(tmp_path / "out", tmp_path / "a.html")
    assert said["bytes"] < 5_000_000 and said["faults"] == 0 and said["shown_rows"] > 3


def test_a_dataset_without_rows_has_a_report(tmp_path):
    said = report(made.build_without_rows(tmp_path), tmp_path / "a.html")
    assert (said["rows"], said["shown_rows"], said["faults"]) == (0, 0, 0)
    assert "There is no row to show" in (tmp_path / "a.html").read_text("utf-8")


# The command


@pytest.mark.long
def test_the_command_says_what_it_wrote(mixed, tmp_path):
    said = packprep("inspect", mixed, "--html", tmp_path / "a.html")
    size = (tmp_path / "a.html").stat().st_size
    assert (
        said.status == 0
        and said.out
        == f"{tmp_path / 'a.html'}: {size:,} bytes, 48 of 275 rows; every invariant holds\n"
    )
    as_json = inside("inspect", mixed, "--html", tmp_path / "a.html", "--json").json
    assert as_json == {
        "html": str(tmp_path / "a.html"),
        "bytes": size,
        "directory": str(mixed),
        "rows": 275,
        "shown_rows": 48,
        "shards": 4,
        "looked_at": 4,
        "faults": 0,
    }


def test_places_that_cannot_be_written_are_refused_first(mixed, tmp_path):
    assert "is a folder" in refused("inspect", mixed, "--html", tmp_path)
    message = refused("inspect", mixed, "--html", tmp_path / "no/a.html")
    assert f"no such folder: {tmp_path / 'no'}" in message and not (tmp_path / "no").exists()
    message = refused("inspect", mixed, "--html", tmp_path / "a.html", "--row", 1)
    assert "--row and --html: inspect shows one view at a time" in message
    message = refused("inspect", mixed, "--html", tmp_path / "a.html", "--source", "none=/x")
    assert "has no source of that name" in message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    with pytest.raises(ArgumentError, match="is not writable"):
        check_file(tmp_path / "a.html")


def test_a_report_replaces_one_whole_or_not_at_all(mixed, tmp_path, monkeypatch):
    html = tmp_path / "a.html"
    html.write_text("<!doctype html>before")
    monkeypatch.setattr(module, "_page", lambda *_: (_ for _ in ()).throw(DatasetError("no")))
    with pytest.raises(DatasetError):
        report(mixed, html)
    assert html.read_text() == "<!doctype html>before" and list(tmp_path.iterdir()) == [html]


@pytest.mark.long
def test_sources_that_have_moved(mixed, tmp_path):
    """Where a source's files are not, its segments are not rebuilt; --source says where they
    are."""
    moved = shutil.copytree(mixed.parent, tmp_path / "moved", ignore=shutil.ignore_patterns("out"))
    (moved / "web.jsonl").unlink()
    html = tmp_path / "a.html"
    said = inside("inspect", mixed, "--html", html, "--source", f"web={moved}")
    assert said.status == 0, said
    verdicts = {
        s["rebuilt"][:11]
        for row in data_of(html)["rows"]
        for s in row["segments"]
        if s["source"] == "web"
    }
    assert verdicts == {"not rebuilt"}


@pytest.mark.long
def test_a_dataset_at_a_url(mixed, tmp_path):
    remote = Remote(f"memory://report{tmp_path.name}/out")
    for name, data in made.contents(mixed).items():
        remote.write(name, [data])
    said, local = report(remote, tmp_path / "a.html"), report(mixed, tmp_path / "b.html")
    assert said["directory"] == str(remote) and said["faults"] == 0
    assert (
        data_of(tmp_path / "a.html") == data_of(tmp_path / "b.html")
        and said["shown_rows"] == local["shown_rows"]
    )


@given(st.integers(0, 500), st.integers(1, 60))
def test_places_ascend_and_are_even(count, most):
    found = [*evenly(count, most)]
    assert found == sorted(set(found)) and len(found) == min(count, most)
    assert all(0 <= place < count for place in found)


@given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 30)), min_size=1),
    st.sampled_from([8, 2048, 1 << 16, 1 << 20]),
)
def test_every_task_has_a_row(segments, length):
    row, task = (np.array(column) for column in zip(*sorted(segments), strict=True))
    by_task, best, most = rows_with_tasks(row, task, 100)
    assert most == max(len({t for r, t in segments if r == one}) for one, _ in segments)
    chosen = chosen_rows([range(100, 181)], [by_task], best, length)
    assert chosen == sorted(set(chosen)) and best in chosen and set(chosen) <= set(range(100, 181))
    shown = {t for r, t in segments if r + 100 in chosen}
    assert shown == {t for _, t in segments}
    assert len(chosen) <= max(MOST_ROWS, len(shown) + 1) and len(chosen) >= FEWEST_ROWS - 1


def test_a_small_dataset_is_shown_whole():
    assert chosen_rows([range(3), range(3, 5)], [], -1, 2048) == [0, 1, 2, 3, 4]
    assert chosen_rows([], [], -1, 2048) == []
