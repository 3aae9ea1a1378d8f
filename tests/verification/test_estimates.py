"""P22: honest builds of many forms hold it, and estimates that are not those of the keyed sample
are found."""

import json
import random
import shutil

import pytest

from packprep.documents import sample
from packprep.format.json_files import encode
from tests import made, tokens_made
from tests.verification.damage import faults_of, read_json
from tests.verification.test_plan import consistent, forged

ALL = -1
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


def unequal(count, seed=0):
    """Documents whose second half is much longer and compresses much better."""
    chance = random.Random(f"unequal {seed}")
    first = [f"{chance.getrandbits(8 * 90):x}" for _ in range(count // 2)]
    return first + [
        "the same words again " * chance.randint(20, 60) for _ in range(count - count // 2)
    ]


def write_forms(folder, seed=0, count=60):
    """Files of each form, in which a part tells little of the rest; gives the keys of a source of
    each."""
    texts = unequal(count, seed)
    for ending in ("jsonl", "jsonl.gz", "jsonl.zst"):
        made.write_lines(folder / f"one.{ending}", texts)
        for k in range(3):
            made.write_lines(
                folder / f"many/{k}.{ending}", unequal(count // (k + 2), f"{seed} {k}")
            )
    made.write_parquet(folder / "one.parquet", texts, max(3, count // 7))
    made.write_arrow(folder / "one.arrow", texts, max(3, count // 5))
    made.write_texts(folder / "notes", texts[:: count // 12])
    ids = tokens_made.ids_of(texts)
    tokens_made.write_megatron(folder / "ids.bin", ids, "<u2")
    tokens_made.write_parquet(folder / "ids.parquet", ids, max(3, count // 7))
    turns = [
        [{"role": "user", "content": text[:90]}, {"role": "assistant", "content": text}]
        for text in texts
    ]
    made.write(
        folder / "chats.jsonl", "\n".join(json.dumps({"messages": own}) for own in turns).encode()
    )
    made.write(folder / "chat.jinja", CHAT.encode())
    names = [
        "one.jsonl",
        "one.jsonl.gz",
        "one.jsonl.zst",
        "many/*.jsonl",
        "many/*.jsonl.gz",
        "many/*.jsonl.*",
    ]
    names += ["one.parquet", "one.arrow", "notes/*.txt", "ids.bin", "chats.jsonl"]
    return {
        **{name: {"paths": [name]} for name in names},
        "ids.parquet": {"paths": ["ids.parquet"], "format": "tokens"},
    }


def table_of(sources, **changes):
    given = [{"name": f"s{i}", **source} for i, source in enumerate(sources)]
    documents = {"chat_template": "chat.jinja", "max_bad_fraction": 1.0}
    return made.table(
        given,
        **{"tasks": [{"preset": "causal"}], "documents": documents, "seq_length": 128, **changes},
    )


@pytest.fixture
def small_sample(monkeypatch):
    """Let the sample see of small files as little as it sees of large ones."""
    monkeypatch.setattr(sample, "WHOLE_BYTES", 2_000)
    monkeypatch.setattr(sample, "PRECISE_WHOLE_BYTES", 4_000)
    monkeypatch.setattr(sample, "PIECE_TEXT_BYTES", 1_500)
    monkeypatch.setattr(sample, "READ_BYTES", 12_000)
    monkeypatch.setattr(sample, "WINDOWS", 8)
    monkeypatch.setattr(sample, "WINDOW_BYTES", 1_000)
    monkeypatch.setattr(sample, "PIECES", 2)
    monkeypatch.setattr(sample, "_STEP_BYTES", 200)


HONEST = {
    "one.jsonl.gz": [{}],
    "one.jsonl.zst": [{}],
    "one.parquet": [{}, {"sample": [0.2, 0.9]}],
    "one.arrow": [{"repeat": 1.5}],
    "many/*.jsonl.*": [{"share": 1}],
    "one.jsonl": [{"share": 1, "sample": [0.0, 0.4]}],
    "ids.bin": [{}],
    "chats.jsonl": [{"repeat": 2}],
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_build_has_no_fault(tmp_path, small_sample, name):
    forms = write_forms(tmp_path)
    for k, keys in enumerate(HONEST[name]):
        other = {"paths": ["notes/*.txt"], **({"share": 1} if "share" in keys else {})}
        total = {"total_tokens": 20_000} if "share" in keys else {}
        made.build(
            table_of([{**forms[name], **keys}, other], **total), tmp_path, tmp_path / f"out{k}"
        )
        assert faults_of(tmp_path / f"out{k}", ALL) == []


@pytest.mark.long
@pytest.mark.alike(2)
@pytest.mark.parametrize("part", range(6))
def test_random_honest_builds_have_no_fault(tmp_path, small_sample, part):
    chance = random.Random(part)
    forms = write_forms(tmp_path / "in", part, chance.choice([30, 80]))
    for k in range(5):
        names = chance.sample(sorted(forms), chance.randint(1, 3))
        by_share = chance.random() < 0.4
        sources = []
        for name in names:
            keys = (
                {"share": chance.choice([0.3, 0.7, 1])}
                if by_share
                else {"repeat": chance.choice([0.6, 1.0, 1.5, 2])}
            )
            low, high = sorted(chance.sample(range(11), 2))
            some = chance.random() < 0.3
            sources.append(
                {**forms[name], **keys, **({"sample": [low / 10, high / 10]} if some else {})}
            )
        total = (
            {"total_tokens": chance.choice([20_000, 90_000])}
            if by_share and chance.random() < 0.5
            else {}
        )
        output = {"shard_text_bytes": chance.choice([5_000, 20_000, "auto"])}
        table = table_of(sources, seed=chance.getrandbits(40), output=output, **total)
        out = tmp_path / f"out{k}"
        how = chance.choice(["text", "text", "store", "lengths"])
        if how == "store" and not any("share" in source for source in sources):
            made.build(table, tmp_path / "in", tmp_path / f"store{k}", is_store=True)
            assert faults_of(tmp_path / f"store{k}", ALL) == [], table
            place = {"paths": [f"{tmp_path}/store{k}"], "format": "store"}
            own = [{key: s[key] for key in ("repeat", "sample") if key in s} for s in sources]
            table = {
                **table,
                "sources": [{**use, **place, "name": f"s{i}"} for i, use in enumerate(own)],
            }
        if how == "lengths":
            table.pop("seq_length")
            found = made.build_lengths({**table, "seq_lengths": [256, 2048]}, tmp_path / "in", out)
            assert all(faults_of(outcome.out, ALL) == [] for outcome in found), table
        else:
            made.build(table, tmp_path / "in", out)
            assert faults_of(out, ALL) == [], table


@pytest.mark.long
@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst"])
def test_a_compressed_file_whose_halves_differ_has_no_fault(tmp_path, ending):
    path = made.write_lines(tmp_path / f"a.{ending}", unequal(6000))
    assert path.stat().st_size > sample.PIECE_TEXT_BYTES
    made.build(
        table_of([{"paths": [path.name]}], documents={}, output={}), tmp_path, tmp_path / "out"
    )
    assert faults_of(tmp_path / "out", ALL) == []


def test_a_build_from_urls_has_no_fault_wherever_its_files_lie_now(
    tmp_path, small_sample, monkeypatch
):
    monkeypatch.setattr(sample, "REMOTE_WINDOWS", 3)
    monkeypatch.setattr(sample, "REMOTE_WINDOW_BYTES", 700)
    made.write_lines(tmp_path / "in/a.jsonl", unequal(60))
    sources = [{"paths": [f"file://{tmp_path}/in/*.jsonl"]}]
    made.build(table_of(sources, documents={}), tmp_path, tmp_path / "out")
    assert read_json(tmp_path / "out/plan.json")["sources"][0]["prefix"].startswith("file://")
    assert faults_of(tmp_path / "out", ALL) == []
    (tmp_path / "in").rename(tmp_path / "moved")
    assert faults_of(tmp_path / "out", ALL, s0=tmp_path / "moved") == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["one.jsonl.gz", "one.jsonl", "one.parquet"])
def test_a_token_store_and_its_datasets_have_no_fault(tmp_path, small_sample, name):
    forms = write_forms(tmp_path)
    made.build(table_of([forms[name]]), tmp_path, tmp_path / "store", is_store=True)
    assert faults_of(tmp_path / "store", ALL) == []
    of_store = {"paths": ["store"], "format": "store", "name": "s0"}
    for out, keys in ((tmp_path / "plain", {}), (tmp_path / "shares", {"share": 1})):
        other = {"paths": ["notes/*.txt"], **keys}
        made.build(table_of([{**of_store, **keys}, other]), tmp_path, out)
        assert faults_of(out, ALL) == []
        assert faults_of(out, ALL, s0=f"store:{tmp_path}/store") == []
    shutil.rmtree(tmp_path / "store")
    text = made.write_lines(tmp_path / "other.jsonl", ["another text"] * 9)
    made.build(table_of([{"paths": [text.name]}]), tmp_path, tmp_path / "store", is_store=True)
    assert faults_of(tmp_path / "plain", ALL, s0=tmp_path) == []
    shutil.rmtree(tmp_path / "store")
    assert faults_of(tmp_path / "shares", ALL, s0=tmp_path) == []


@pytest.mark.long
def test_each_of_several_lengths_has_no_fault(tmp_path, small_sample):
    forms = write_forms(tmp_path)
    table = table_of([{**forms["one.jsonl.zst"], "share": 1}, {**forms["one.parquet"], "share": 1}])
    del table["seq_length"]
    made.build_lengths({**table, "seq_lengths": [256, 512]}, tmp_path, tmp_path / "out")
    for name in ("seq_256", "seq_512"):
        assert faults_of(tmp_path / "out" / name, ALL) == []


def of_source(**changes):
    return lambda plan: plan["sources"][0].update(changes)


def scaled(key, by):
    def change(plan):
        plan["sources"][0][key] *= by

    return change


def less_held(plan):
    file = next(file for file in plan["files"] if "piece_bytes" in file)
    file["piece_bytes"] = [n - 100 for n in file["piece_bytes"]]


CHANGED = {
    "ratios": of_source(ratios={"jsonl.gzip": 1020}),
    "tokens_per_byte": scaled("tokens_per_byte", 1.001),
    "documents": of_source(documents=7),
    "relative_error": of_source(relative_error=0.5),
    "piece_bytes": less_held,
    "repeat": scaled("tokens_per_byte", 0.5),  # from which its repeat follows
}


@pytest.mark.parametrize("key", CHANGED)
def test_an_estimate_that_was_changed_is_found(tmp_path, small_sample, key):
    forms = write_forms(tmp_path / "in")
    sources = [{**forms["one.jsonl.gz"], "share": 1}, {**forms["one.parquet"], "share": 1}]
    made.build(
        table_of(sources, total_tokens=30_000, documents={}), tmp_path / "in", tmp_path / "out"
    )

    def change(plan):
        from packprep.building.plan import Plan
        from packprep.building.planning import repeats

        CHANGED[key](plan)
        of_bytes = [source["tokens_per_byte"] for source in plan["sources"]]
        asked = Plan(plan, change.tokenizer)
        once = [int(source.weights().sum()) for source in asked.sources]
        for source, repeat in zip(
            plan["sources"], repeats(asked.recipe, once, of_bytes), strict=True
        ):
            source["repeat"] = repeat

    change.tokenizer = consistent.tokenizer = (tmp_path / "out/tokenizer.json").read_bytes()
    signed = consistent(change)
    signed.tokenizer = change.tokenizer
    directory = forged(tmp_path / "out", tmp_path / "forged", signed)
    assert faults_of(directory) == []
    found = faults_of(directory, ALL)
    assert {(fault["promise"], fault["file"]) for fault in found} == {("P22", "plan.json")}
    shown = "tokens_per_byte" if key == "repeat" else key
    assert any(f"sources[0].{shown}" in fault["message"] for fault in found)


def test_the_sample_is_the_same_when_it_is_taken_twice(tmp_path, small_sample):
    from packprep.building.planning import look_up, make_plan
    from packprep.recipe import read_recipe

    forms = write_forms(tmp_path)
    sources = [{**forms["many/*.jsonl.gz"], "share": 1}, {**forms["one.arrow"], "share": 1}]
    inputs = look_up(read_recipe(table_of(sources), tmp_path), {})
    assert encode(make_plan(inputs)) == encode(make_plan(inputs))


def test_a_source_that_changed_is_not_blamed_on_the_plan(tmp_path, small_sample):
    path = made.write_lines(tmp_path / "a.jsonl", unequal(60))
    made.build(table_of([{"paths": ["a.jsonl"]}], documents={}), tmp_path, tmp_path / "out")
    path.write_bytes(path.read_bytes().replace(b"the same words", b"\\u0074he same"))
    found = faults_of(tmp_path / "out", ALL)
    assert found and {fault["promise"] for fault in found} == {"P17"}
