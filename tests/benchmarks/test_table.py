"""The table's own parts: taking turns, medians, ratios, promises, pages; and packprep's lines at a
tiny size."""

import json
import sys
from pathlib import Path

import corpus
import inputs
import measuring
import pytest
import results
import table
from measuring import Line
from peers import builds, collators, loaders, packers
from peers.contender import Contender, Work, has

pytestmark = pytest.mark.long

DOCS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
GROUPS = {"builds": builds, "packers": packers, "collators": collators, "loaders": loaders}


def line(
    name: str, seconds: list[float], kind: str = "", tokens: int = 1000, status: str = "measured"
) -> Line:
    """A measured line of builds."""
    work = Work(10, tokens, None, None, 4000)
    return Line("builds", name, "what", kind, 5000, status, "", seconds, [], work)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A corpus of a few documents, with a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b" the": 258}
    (folder / "tokenizer.json").write_text(json.dumps(corpus.tokenizer_json(ranks)))
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for i in range(60):
            file.write(json.dumps({"id": str(i), "text": f"{i}: the other öne. " * (i + 1)}) + "\n")
    return folder


def test_rates_and_ratios_are_of_medians():
    lines = [line("packprep ul2r", [2.0, 1.0, 9.0]), line("slow", [8.0, 4.0, 5.0], "tokenizers")]
    assert results.rate(lines[0]) == 500.0 and results.rate(lines[1]) == 200.0
    assert results.ratio(lines[1], lines) == 2.5 and results.ratio(lines[0], lines) == 1.0
    assert results.rate(line("absent", [], status="not installed")) is None


def test_a_promise_takes_the_fastest_of_its_kind():
    lines = [
        line("packprep ul2r", [1.0]),
        line("a", [40.0], "tokenizers"),
        line("b", [20.0], "tokenizers"),
        line("bare loop", [], status="failed"),
        Line(
            "collators",
            "packprep ul2r",
            "another group's",
            "",
            5000,
            seconds=[1e-6],
            work=Work(10, 1000),
        ),
    ]
    judged = {entry["what"]: entry for entry in results.judged(lines)}
    first, bare = judged[results.PROMISES[0].what], judged["ul2r to the bare loop"]
    assert first["against"] == "b" and first["measured"] == 20.0 and first["least"] == 25.0
    assert bare["measured"] is None
    rows = results.promise_cells({"promises": list(judged.values())})
    assert rows[1][-1] == "does not hold" and rows[3][-1] == "not measured"


def test_every_promise_names_a_line_or_a_kind():
    names = {one.name for one in builds.CONTENDERS}
    kinds = {f"kind:{one.kind}" for one in builds.CONTENDERS}
    assert {
        name for promise in results.PROMISES for name in (promise.rate, promise.of)
    } <= names | kinds


@pytest.mark.parametrize("group", results.GROUPS)
def test_groups_have_the_line_that_they_are_compared_with_and_names_once(group):
    contenders = GROUPS[group].CONTENDERS
    names = [one.name for one in contenders]
    assert len(names) == len(set(names)) and results.GROUPS[group][2] in names
    assert all((one.run is None) != (one.command is None) for one in contenders)


def test_other_tokens_of_the_same_input_are_noticed():
    assert results.disagreements([line("a", [1.0]), line("b", [1.0])]) == []
    assert results.disagreements([line("a", [1.0]), line("b", [1.0], tokens=999)]) == [
        "b has 999 tokens, a 1,000"
    ]


def result_of(lines: list[Line]) -> dict:
    settings = {
        "size": 5000,
        "slow_size": 5000,
        "repeats": 1,
        "slow_repeats": 1,
        "workers": 1,
        "seq_length": 64,
    }
    return results.as_json(
        lines, {"machine": "M", "made_with": {"packprep": "0"}, "settings": settings}
    )


def test_a_result_survives_its_file_and_fills_a_page_whose_prose_stays():
    lines = [line("packprep ul2r", [1.0]), line("none", [], status="not installed")]
    result = json.loads(json.dumps(result_of(lines)))
    assert results.from_json(result) == lines
    page = DOCS.read_text("utf-8")
    made = results.rendered(page, result)
    assert results.rendered(made, result) == made and "| packprep ul2r | what |" in made
    assert "not installed" in made and "not installed" in results.as_text(result)

    def prose(text: str) -> str:
        return results._PART.sub(lambda part: part["begin"] + part["end"], text)

    def part(text: str, name: str) -> str:
        return next(found[0] for found in results._PART.finditer(text) if found["name"] == name)

    assert prose(made) == prose(page)
    assert part(made, "loaders") == part(page, "loaders")  # the result has no such group
    assert {found["name"] for found in results._PART.finditer(page)} == {
        "run",
        "promises",
        *results.GROUPS,
    }


def test_the_first_table_has_the_ratios_of_the_measured_ones():
    page = DOCS.read_text("utf-8")
    measured = {
        cell.strip() for part in results._PART.finditer(page) for cell in part[0].split("|")
    }
    lines = [line for line in page[: page.index("\n## ")].splitlines() if line.startswith("|")]
    first = [line.split("|")[-2].strip() for line in lines[2:]]
    assert len(first) == 7 and measured.issuperset(first)


def test_contenders_take_turns_and_what_fails_says_why(tmp_path):
    log = tmp_path / "log"

    def contender(name: str, code: str, slow: bool = False) -> Contender:
        def command(config):
            return [sys.executable, "-c", code]

        return Contender(
            name, "", (), (), command=command, read=lambda config: Work(1, 2), slow=slow
        )

    write = f"open({str(log)!r}, 'a').write('%s')"
    contenders = [contender("a", write % "a"), contender("b", write % "b", slow=True)]
    contenders.append(contender("c", write % "c" + "; raise SystemExit('the reason')"))
    lines = [(Line("builds", one.name, "", "", 0), one, {}, sys.executable) for one in contenders]
    measuring.in_turn(lines, lambda one: 1 if one.slow else 3, tmp_path, lambda message: None)
    assert log.read_text() == "abcaa"
    a, b, c = (made for made, _, _, _ in lines)
    assert len(a.seconds) == 3 and len(b.seconds) == 1 and a.work.tokens == 2
    assert c.status == "failed" and "the reason" in c.why and c.seconds == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]


def test_a_missing_module_is_absent():
    assert (
        has(("json", "numpy"))
        and not has(("no_such_package_here",))
        and not has(("no_such_package_here.part",))
    )


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_parts_of_a_file_are_the_file(small, count, tmp_path):
    lines = small / "corpus.jsonl"
    ranges = builds.byte_ranges(str(lines), count)
    texts = [
        text
        for begin, end in ranges
        for batch in builds.texts_of(str(lines), begin, end, 500)
        for text in batch
    ]
    assert texts == [json.loads(line)["text"] for line in lines.read_text("utf-8").splitlines()]
    inputs.split_lines(lines, count, tmp_path / "parts")
    parts = sorted((tmp_path / "parts").iterdir())
    assert (
        len(parts) == count and b"".join(part.read_bytes() for part in parts) == lines.read_bytes()
    )


@pytest.mark.long
def test_packpreps_own_lines_run_and_what_is_missing_is_a_line(small, tmp_path, monkeypatch):
    own = {
        "builds": ("packprep ul2r", "dolma"),
        "packers": ("packprep best_fit",),
        "collators": ("packprep t5", "numpy, spans"),
        "loaders": ("packprep, tokens", "numpy memmap"),
    }
    for group, names in own.items():
        kept = [one for one in GROUPS[group].CONTENDERS if one.name in names]
        monkeypatch.setattr(GROUPS[group], "CONTENDERS", kept)
    target = tmp_path / "result.json"
    folder = tmp_path / "inputs"
    command = [
        "--corpus",
        str(small),
        "--repeats",
        "1",
        "--seq-length",
        "64",
        "--workers",
        "1",
        "--json",
        str(target),
    ]
    table.main([*command, "--folder", str(folder)])
    result = json.loads(target.read_text())
    lines = {line.name: line for line in results.from_json(result)}
    assert list(lines) == [name for names in own.values() for name in names]
    assert lines["dolma"].status == "not installed" and "dolma" in lines["dolma"].why
    measured = [line for line in lines.values() if line.name != "dolma"]
    assert [line.why for line in measured if line.status != "measured"] == []
    tokens = lines["packprep ul2r"].work.tokens
    assert tokens == lines["packprep t5"].work.tokens > 5000
    # without segments of one or two tokens
    assert tokens - 100 < lines["numpy, spans"].work.tokens <= tokens
    assert lines["packprep ul2r"].work.documents == 60 and result["disagreements"] == []
    assert all(results.rate(line) > 0 for line in measured)
    assert not list(folder.glob("run-*"))
