"""Token stores: a dataset of a store is the one that is built from the text, byte for byte, and
nothing else is taken for one."""

import errno
import json
import os
import shutil
from types import SimpleNamespace

import pytest

from packprep.building.plan import _opened_store, open_plan
from packprep.building.stores import KEYS_OF_FILES, _source_in
from packprep.building.work import make_shard
from packprep.dataset.loader import open_dataset
from packprep.documents import store as stores
from packprep.documents.store import open_arrays
from packprep.errors import DatasetError, PackprepError, PlanError, RecipeError, SourceError
from packprep.exporting.export import export_dataset
from packprep.format.digests import digest_of, own_digest
from packprep.format.json_files import encode
from packprep.objectives.tasks import complete
from packprep.recipe import Source, read_recipe
from packprep.storage import Remote
from packprep.verification import verify_dataset
from tests import made, media_made
from tests.conversations.chats_made import CHATML
from tests.tokenizer.tokenizers_made import gpt2_like, write
from tests.twin.check import verify_with_twin

TASKS = {
    "causal": {"tasks": [{"objective": "causal"}]},
    "ul2r": {"tasks": [{"preset": "ul2r"}], "seq_length": 256, "seed": 5},
    "roll": {
        "tasks": [{"objective": "span_corruption", "random_roll": True, "noise_density": 0.2}]
    },
    "llada": {
        "tasks": [{"objective": "masked_diffusion", "stratified": True}],
        "output": {"shard_text_bytes": 20_000},
    },
    "concat": {"tasks": [{"objective": "causal"}], "packing": {"algorithm": "concat"}},
    "short": {
        "documents": {
            "min_tokens": 150,
            "long": "truncate",
            "append_eos": False,
            "prepend_bos": True,
        }
    },
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with files of all formats of texts, and in store/ the tokens of them; the sources,
    as a recipe has them."""
    folder = tmp_path_factory.mktemp("stores")
    sources = made.mixed_corpus(folder)
    with (folder / "web" / "a.jsonl").open("ab") as file:
        file.write(b'{"text": 5}\n\n{bad\n{"text": ""}\n')
    made.build(recipe(sources), folder, folder / "store", is_store=True)
    return folder, sources


def recipe(sources, **changes):
    changes = {"seed": 5, **changes}
    changes["documents"] = {"max_bad_fraction": 1, **changes.get("documents", {})}
    return made.table(sources, **changes)


def of_store(table, store="store"):
    """The recipe with its sources in a store."""
    use = ("name", "repeat", "share", "sample", "tasks", "where")
    sources = [{key: source[key] for key in use if key in source} for source in table["sources"]]
    return {
        **table,
        "sources": [{**source, "paths": [store], "format": "store"} for source in sources],
    }


def same(folder, table, store="store", at="out"):
    """Build of the store and of the text, and compare; gives the outcome of the former."""
    outcome = made.build(of_store(table, store), folder, folder / at / "of-store", workers=0)
    text = made.build(table, folder, folder / at / "text")
    for under in ("shards", "rejects"):
        found, wanted = (made.contents(folder / at / name, under) for name in ("of-store", "text"))
        assert found == wanted
    for key in ("ledger", "fingerprint", "tasks", "tokenizer", "recipe"):
        assert outcome.manifest[key] == text.manifest[key], key
    return outcome


@pytest.mark.parametrize(
    "name", ["roll", *(pytest.param(n, marks=pytest.mark.long) for n in TASKS if n != "roll")]
)
def test_a_dataset_of_a_store_has_the_bytes_of_one_of_the_text(corpus, tmp_path, name):
    folder, sources = corpus
    outcome = same(folder, recipe(sources, **{**TASKS[name], "seed": 5}), at=tmp_path)
    assert outcome.manifest["ledger"]["rows"] > 10


@pytest.mark.long
@pytest.mark.parametrize(
    "uses",
    [
        [{"repeat": 2.4}, {"repeat": 0.3}, {"repeat": 1.7}],
        pytest.param([{"sample": [0.2, 0.7]}, {"sample": [0, 0.5], "repeat": 1.5}, {}], marks=pytest.mark.long),
        pytest.param([{"share": 0.5}, {"share": 0.4}, {"share": 0.1}], marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_fractions_samples_and_shares_choose_the_same_documents(corpus, tmp_path, uses):
    folder, sources = corpus
    own = [
        {**{k: v for k, v in source.items() if k != "repeat"}, **use}
        for source, use in zip(sources, uses, strict=True)
    ]
    same(folder, recipe(own), at=tmp_path)


def test_a_part_of_a_pass_counts_filtered_documents_of_a_divided_split_once(tmp_path):
    rows = [{"text": f"document {i} " + "word " * (i % 30), "score": i % 5} for i in range(150)]
    made.write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    for store_bytes, shard_bytes in ((4000, 4000), (3000, 7000), (4000, 1500)):
        store, at = f"store{store_bytes}", f"{store_bytes}-{shard_bytes}"
        own = {"name": "w", "paths": ["a.jsonl"]}
        kept = made.table([{**own, "keep": ["score"]}], output={"shard_text_bytes": store_bytes})
        if not (tmp_path / store).exists():
            made.build(kept, tmp_path, tmp_path / store, is_store=True)
        own |= {"where": "score > 1", "repeat": 0.5}
        table = made.table([own], seq_length=128, output={"shard_text_bytes": shard_bytes})
        same(tmp_path, table, store, at)
    # The ledger of the last dataset is also equal to the one that the text gives again.
    assert verified(tmp_path / at / "of-store", -1, {"w": str(tmp_path)})["faults"] == 0


def test_documents_that_an_expression_cannot_judge_add_no_text(tmp_path):
    rows = [
        {"text": f"document {i} " + "word " * i, "score": i if i % 3 else "x"} for i in range(9)
    ]
    made.write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    own = {"name": "w", "paths": ["a.jsonl"]}
    made.build(
        made.table([{**own, "keep": ["score"]}]), tmp_path, tmp_path / "store", is_store=True
    )
    table = recipe([{**own, "where": "score > 1"}], seq_length=128)
    same(tmp_path, table)
    counts = {"of-store": [], "text": []}
    for name, numbers in counts.items():
        plan = open_plan(tmp_path / "out" / name)
        make_shard(plan, 0, progress=lambda *own, numbers=numbers: numbers.append(own))
    text_bytes = sum(len(row["text"]) for row in rows if row["score"] != "x" and row["score"] > 1)
    assert [numbers[1] for numbers in counts["of-store"]] == [text_bytes]
    assert counts["of-store"] == counts["text"]


def test_one_source_of_a_store_beside_files_and_without_a_name(corpus, tmp_path):
    folder, sources = corpus
    made.write_lines(tmp_path / "more.jsonl", made.texts(60, seed=9))
    own = [sources[0], {"name": "more", "paths": [str(tmp_path / "more.jsonl")]}]
    table = recipe(own)
    mixed = {**table, "sources": [of_store(table)["sources"][0], own[1]]}
    made.build(mixed, folder, tmp_path / "mixed")
    made.build(table, folder, tmp_path / "text")
    assert made.contents(tmp_path / "mixed", "shards") == made.contents(tmp_path / "text", "shards")
    made.build(made.table("more.jsonl"), tmp_path, tmp_path / "one", is_store=True)
    nameless = made.table([{"paths": ["one"], "format": "store"}])
    assert (
        made.build(nameless, tmp_path, tmp_path / "again").manifest["sources"][0]["name"]
        == "source0"
    )


@pytest.mark.long
def test_conversations_and_spans_are_trained_alike(tmp_path):
    with (tmp_path / "chats.jsonl").open("w") as file:
        for i, text in enumerate(made.texts(60, seed=2)):
            turns = [
                {"role": "user", "content": text[:80]},
                {"role": "assistant", "content": text[80:]},
            ]
            records = [
                {"messages": turns * (1 + i % 4)},
                {"text": text, "loss_spans": [[3, 20, 0.5], [25, 30]]},
            ]
            file.write(json.dumps([*records, {"text": text}][i % 3]) + "\n")
    (tmp_path / "chat.jinja").write_text(CHATML)
    documents = {"chat_template": "chat.jinja", "max_bad_fraction": 1, "long_answers": "untrained"}
    sources = [{"name": "chat", "paths": ["chats.jsonl"], "repeat": 1.5}]
    table = made.table(
        sources, tasks=[{"objective": "causal"}], seq_length=128, documents=documents
    )
    made.build(table, tmp_path, tmp_path / "store", is_store=True)
    outcome = same(tmp_path, {**table, "seq_length": 256})
    assert outcome.manifest["ledger"]["sources"]["chat"]["slots"]["weighted"] > 0
    for key, value in (
        ("trained_turns", "last"),
        ("loss_spans", "ignore"),
        ("trained_roles", ["user"]),
        ("train_reasoning", False),
        ("train_empty_reasoning", False),
    ):
        with pytest.raises(
            RecipeError, match=f"documents.{key} is .* here, but .* in the token store"
        ):
            made.build(
                of_store({**table, "documents": {**documents, key: value}}),
                tmp_path,
                tmp_path / "x",
            )
    with pytest.raises(RecipeError, match="they determine which of its conversations are rejected"):
        holes = {"missing": "add", "mask": "<hole>"}
        made.build(
            of_store({**table, "specials": holes, "tasks": [{"objective": "masked_diffusion"}]}),
            tmp_path,
            tmp_path / "x",
        )
    (tmp_path / "chat.jinja").write_text(CHATML + "\n")
    with pytest.raises(
        RecipeError, match="the chat template differs from the one in the token store"
    ):
        made.build(of_store(table), tmp_path, tmp_path / "x")


@pytest.mark.long
def test_sources_of_tokens_are_stored_too(corpus, tmp_path):
    folder, sources = corpus
    made.build(recipe(sources[:1], tasks=[{"objective": "causal"}]), folder, tmp_path / "d")
    export_dataset(tmp_path / "d", "megatron", tmp_path / "mega", made.Silent())
    table = made.table(
        [{"name": "ids", "paths": ["mega/*.bin"], "format": "megatron", "repeat": 1.5}]
    )
    made.build(table, tmp_path, tmp_path / "store", is_store=True)
    same(tmp_path, table)
    with pytest.raises(
        RecipeError, match="documents.append_eos is False here, but True in the token store"
    ):
        made.build(
            of_store({**table, "documents": {"append_eos": False}}), tmp_path, tmp_path / "x"
        )
    same(tmp_path, {**table, "documents": {"append_eos": "segment"}}, at="segments")


def test_a_wide_vocabulary_is_stored_in_four_bytes_and_a_narrow_one_in_two(corpus, tmp_path):
    folder, sources = corpus
    shards = (folder / "store/shards").rglob("*.safetensors")
    tokens = open_plan(folder / "store")
    assert tokens.token_dtype == "uint16"
    size = sum(path.stat().st_size for path in shards)
    count = json.loads((folder / "store/dataset.json").read_text())["ledger"]["row_slots"]
    assert 2 * count < size < 2.7 * count + 4096 * tokens.shards


@pytest.mark.long
def test_a_store_is_made_of_any_number_of_workers_and_tasks_and_gone_on_with(corpus, tmp_path):
    folder, sources = corpus
    table = recipe(sources)
    made.build(table, folder, tmp_path / "two", workers=2, is_store=True)
    for index in (1, 0, 1):
        made.build(table, folder, tmp_path / "array", array=(index, 2), is_store=True)
    whole = made.contents(folder / "store")
    assert made.contents(tmp_path / "two") == made.contents(tmp_path / "array") == whole
    partly = shutil.copytree(folder / "store", tmp_path / "partly")
    for name in ("dataset.json", "receipts/000/000001.json", "shards/000/000002.safetensors"):
        (partly / name).unlink()
    with pytest.raises(PlanError, match="the token store is not finished"):
        made.build(of_store(table, str(partly)), folder, tmp_path / "x")
    assert made.build(table, folder, partly, is_store=True).made == 2
    assert made.contents(partly) == whole


def verified(folder, replay=None, moved=None):
    return verify_dataset(folder, replay, moved or {}, (0, 1), 0, made.Silent())


def test_replay_goes_through_to_the_text_where_it_is_at_hand(tmp_path):
    sources = made.mixed_corpus(tmp_path)
    table = recipe(sources)
    made.build(table, tmp_path, tmp_path / "store", is_store=True)
    made.build(of_store(table), tmp_path, tmp_path / "out")
    assert verify_with_twin(tmp_path / "out", 5)["faults"] == 0
    said = made.Silent()
    verify_dataset(tmp_path / "out", 5, {}, (0, 1), 0, said)
    assert f"web at {tmp_path / 'web'}" in said.said[0]
    (tmp_path / "web").rename(tmp_path / "away")
    said = made.Silent()
    report = verify_dataset(tmp_path / "out", -1, {}, (0, 1), 0, said)
    assert report["faults"] == 0 and report["replayed"] == report["segments"] > 0
    assert f"web at store:{tmp_path / 'store'}, books at {tmp_path / 'books'}" in said.said[0]
    moved = {"web": str(tmp_path / "away")}
    assert verify_with_twin(tmp_path / "out", 5, moved)["faults"] == 0
    (tmp_path / "store").rename(tmp_path / "moved")
    assert verified(tmp_path / "out")["faults"] == 0, (
        "no store is needed but to make segments again"
    )
    with pytest.raises(PlanError, match="is not a token store"):
        verified(tmp_path / "out", 5)
    everywhere = {source["name"]: f"store:{tmp_path / 'moved'}" for source in sources}
    assert verified(tmp_path / "out", -1, everywhere)["faults"] == 0


@pytest.mark.long
def test_a_store_at_a_url_is_read_in_ranges(corpus, tmp_path):
    folder, sources = corpus
    remote = Remote("memory://stores/one")
    made.build(recipe(sources), folder, remote, is_store=True)
    assert verified(remote, -1)["faults"] == 0
    table = of_store(recipe(sources, tasks=[{"objective": "causal"}]), remote.url)
    made.build(table, folder, tmp_path / "out")
    made.build({**table, "sources": of_store(table)["sources"]}, folder, tmp_path / "local")
    assert made.contents(tmp_path / "out", "shards") == made.contents(tmp_path / "local", "shards")


@pytest.mark.long
def test_every_changed_byte_of_a_shard_is_found(corpus, tmp_path):
    folder, _ = corpus
    store = shutil.copytree(folder / "store", tmp_path / "store")
    path = store / "shards/000/000001.safetensors"
    whole = path.read_bytes()
    assert verified(store, -1)["faults"] == 0
    for at in range(0, len(whole), len(whole) // 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        assert any(fault["promise"] == "P1" for fault in verified(store)["listed"]), at
    path.write_bytes(whole[:-1])
    assert {"P1", "P3"} <= {fault["promise"] for fault in verified(store)["listed"]}
    path.write_bytes(whole)
    with pytest.raises(RecipeError, match="a token store, which supports only --replay all"):
        verified(store, 5)


@pytest.mark.long
def test_what_a_store_says_wrongly_is_found_where_its_digests_are_right(corpus, tmp_path):
    folder, _ = corpus
    for name, wanted in (
        ("tokens", "P17"),
        ("position", "P21"),
        ("document_offsets", "P16"),
        ("text_bytes", "P17"),
        ("unit", "P17"),
    ):
        store = shutil.copytree(folder / "store", tmp_path / name)
        path, receipt = store / "shards/000/000000.safetensors", store / "receipts/000/000000.json"
        arrays = {key: array.copy() for key, array in open_arrays(path.read_bytes(), "").items()}
        own = arrays[name]
        if name == "position":
            own[[1, 2]] = own[[2, 1]]
        elif name == "document_offsets":
            arrays["tokens"], own[-1] = arrays["tokens"][:-1], own[-1] - 1
        else:
            own[3] += 1
        data = b"".join(bytes(buffer) for buffer in stores.encode(arrays))
        path.write_bytes(data)
        manifest, told = (
            json.loads(file.read_text()) for file in (store / "dataset.json", receipt)
        )
        for entry in (manifest["shards"][0], told):
            entry.update(bytes=len(data), digest=digest_of(data))
        receipt.write_bytes(encode(told))
        manifest["shards"][0]["receipt_digest"] = digest_of(receipt.read_bytes())
        (store / "dataset.json").write_bytes(encode({**manifest, "digest": own_digest(manifest)}))
        assert wanted in {fault["promise"] for fault in verified(store, -1)["listed"]}, name


def test_what_is_no_dataset_and_what_is_no_store_say_so(corpus, tmp_path):
    folder, sources = corpus
    for use in (
        open_dataset,
        lambda path: export_dataset(path, "megatron", tmp_path / "x", made.Silent()),
    ):
        with pytest.raises(
            DatasetError,
            match=r'is a token store, which has no rows\nhint: build a dataset from it.*format = "store"',
        ):
            use(folder / "store")
    table = recipe(sources)
    made.build(table, folder, tmp_path / "dataset")
    made.write_lines(tmp_path / "a.jsonl", made.texts(5))
    for changes, wanted in (
        (
            {"paths": [str(tmp_path / "dataset")]},
            "is not a token store\nhint: make one with `packprep tokenize RECIPE --out",
        ),
        ({"paths": ["nowhere"]}, "is not a token store"),
        (
            {"format": "auto"},
            'store is a packprep dataset or token store, and .*\nhint: for a token store, set format = "store"',
        ),
        (
            {"paths": ["store", "store"]},
            r"sources\[0\].paths must be one token store with format = \"store\"",
        ),
        ({"name": "wep"}, "name one of its sources: web, books, notes"),
        (
            {"text_key": "body"},
            r"sources\[0\].text_key comes from the store with format = \"store\"\nhint: leave it out",
        ),
    ):
        first, *others = of_store(table)["sources"]
        with pytest.raises(PackprepError, match=wanted):
            made.build(
                {**table, "sources": [{**first, **changes}, *others]}, folder, tmp_path / "x"
            )
    rejects = {"max_bad_fraction": 1, "special_text": "reject"}
    for changes, wanted in (
        (
            {"documents": rejects},
            "documents.special_text is 'reject' here, but 'text' in the token",
        ),
        ({"specials": media_made.SPECIALS}, "specials.media is {.*} here, but None in the token"),
    ):
        with pytest.raises(RecipeError, match=wanted):
            made.build(of_store({**table, **changes}), folder, tmp_path / "x")
    assert "text_key" in KEYS_OF_FILES and "repeat" not in KEYS_OF_FILES
    with pytest.raises(
        RecipeError, match="a token store is made from files, not from another store"
    ):
        made.build(of_store(table), folder, tmp_path / "x", is_store=True)
    with pytest.raises(PlanError, match="is a token store\nhint: give --out another folder"):
        made.build(of_store(table), folder, folder / "store")
    with pytest.raises(PlanError, match="is a dataset\nhint: give --out another folder"):
        made.build(table, folder, tmp_path / "dataset", is_store=True)
    with pytest.raises(
        RecipeError,
        match=r"--source web=/away: the source is in a token store\nhint: give store:/away",
    ):
        made.build(of_store(table), folder, tmp_path / "x", moved={"web": "/away"})
    write(tmp_path / "t", gpt2_like())
    with pytest.raises(RecipeError, match="tokenizer = .* is not the tokenizer of the token store"):
        other = {**table, "tokenizer": str(tmp_path / "t"), "tasks": [{"objective": "causal"}]}
        made.build(of_store(other), folder, tmp_path / "x")


@pytest.mark.long
def test_a_document_of_whose_text_a_role_makes_something_else_is_refused(tmp_path):
    """A token of the model's own that plays a role in one of the two recipes alone."""
    write(tmp_path / "t", gpt2_like())
    made.write_lines(tmp_path / "a.jsonl", made.texts(30))
    table = made.table(
        [{"name": "a", "paths": ["a.jsonl"]}], tokenizer="t", tasks=[{"objective": "causal"}]
    )
    made.build(table, tmp_path, tmp_path / "store", is_store=True)
    shard = (tmp_path / "store/shards/000/000000.safetensors").read_bytes()
    id = int(open_arrays(shard, "")["tokens"][0])
    role = {**table, "specials": {"mask": id}, "tasks": [{"objective": "masked_diffusion"}]}
    with pytest.raises(
        SourceError,
        match=f"has token {id}, which is special only in the store or only in the recipe",
    ):
        made.build(of_store(role), tmp_path, tmp_path / "x")
    role["documents"] = {"max_bad_fraction": 1}
    made.write_lines(tmp_path / "a.jsonl", ["zz", *made.texts(30)])
    made.build(role, tmp_path, tmp_path / "masked", is_store=True)
    with pytest.raises(RecipeError, match=r"ids \[.*\] are special in it, but not here"):
        made.build(of_store(table, "masked"), tmp_path, tmp_path / "y")


def test_bad_documents_and_files_beyond_measure_end_a_store_too(tmp_path, monkeypatch):
    made.write(tmp_path / "a.jsonl", b'{"text": "a"}\n{bad\n')
    table = made.table([{"name": "a", "paths": ["a.jsonl"]}], documents={"bad_documents": "fail"})
    with pytest.raises(SourceError, match="a.jsonl: document at 14: malformed_json"):
        made.build(table, tmp_path, tmp_path / "store", is_store=True)
    monkeypatch.setattr("packprep.building.work.LEAST_BOUND", 10)
    monkeypatch.setattr("packprep.building.work.BEYOND_PLAN", 0)
    made.write_lines(tmp_path / "a.jsonl", made.texts(5))
    with pytest.raises(
        SourceError, match="has more than 10 bytes of text, many times the estimate"
    ):
        made.build(table, tmp_path, tmp_path / "other", is_store=True)


def flipped(path, array="tokens", at=500):
    """Change one bit of an array of a store's shard, in place."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    place = begin + json.loads(data[8:begin])[array]["data_offsets"][0] + at
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([data[place] ^ 1]))


def few_shards(folder, word="aaaa", n=80):
    """Write a text, a recipe's table of several shards for it, and its store; gives the table of a
    dataset from the store."""
    made.write_lines(
        folder / "a.jsonl", [f"document {i:04d} {word}" + " word" * 20 for i in range(n)]
    )
    table = made.table(
        [{"name": "w", "paths": ["a.jsonl"]}], seq_length=128, output={"shard_text_bytes": 4000}
    )
    shutil.rmtree(folder / "store", ignore_errors=True)
    made.build(table, folder, folder / "store", is_store=True)
    return table, of_store(table)


@pytest.mark.alike(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_changed_byte_of_a_store_ends_a_build_and_is_a_fault_of_the_replay(tmp_path, workers):
    table, from_store = few_shards(tmp_path)
    made.build(from_store, tmp_path, tmp_path / "sound")
    (tmp_path / "a.jsonl").rename(tmp_path / "away.jsonl")
    path = tmp_path / "store/shards/000/000002.safetensors"
    good = path.read_bytes()
    flipped(path)
    with pytest.raises(
        SourceError,
        match=r"000002.safetensors: its digest is .* It was changed or damaged\nhint: restore the file",
    ):
        made.build(from_store, tmp_path, tmp_path / "out", workers)
    assert not (tmp_path / "out/dataset.json").exists()
    report = verified(tmp_path / "sound", -1)
    assert {fault["promise"] for fault in report["listed"]} == {"P17"} and report["faults"] > 0
    assert all("its digest is" in fault["message"] for fault in report["listed"])
    path.write_bytes(good)
    assert verified(tmp_path / "sound", -1)["faults"] == 0
    path.unlink()
    with pytest.raises(
        SourceError, match="000002.safetensors is missing\nhint: restore the token store"
    ):
        made.build(from_store, tmp_path, tmp_path / "out", workers)
    (tmp_path / "away.jsonl").rename(tmp_path / "a.jsonl")
    # as the message of a damaged shard says
    made.build(table, tmp_path, tmp_path / "store", is_store=True)
    assert path.read_bytes() == good
    made.build(from_store, tmp_path, tmp_path / "out", workers)
    assert made.contents(tmp_path / "out") == made.contents(tmp_path / "sound")


def test_the_manifest_and_plan_of_a_store_are_held_to_their_digests(tmp_path):
    _, from_store = few_shards(tmp_path, n=20)
    path = tmp_path / "store/dataset.json"
    manifest = json.loads(path.read_text())
    manifest["shards"][0]["digest"] = "0" * 32
    for changed in (encode(manifest), encode({**manifest, "digest": own_digest(manifest)})):
        path.write_bytes(changed)
        with pytest.raises(
            PackprepError, match="dataset.json: this file or the plan .* was changed|its digest is"
        ):
            made.build(from_store, tmp_path, tmp_path / "out")


def test_a_store_at_a_url_is_checked_whole_and_read_again_where_it_changed(tmp_path, monkeypatch):
    table, _ = few_shards(tmp_path)
    remote = Remote("memory://stores/checked")
    made.build(table, tmp_path, remote, is_store=True)
    from_store = of_store(table, remote.url)
    monkeypatch.setattr(stores, "MOST_IN_MEMORY", 1)
    made.build(from_store, tmp_path, tmp_path / "sound")
    name = "shards/000/000001.safetensors"
    data = bytearray(remote.read(name))
    first = 8 + int.from_bytes(data[:8], "little")
    for at in (first, len(data) - 1):  # in an array that is compared each time, and in tokens
        changed = bytearray(data)
        changed[at] ^= 1
        remote.write(name, [changed])
        if at > first:
            open_store_again()
        with pytest.raises(SourceError, match="000001.safetensors: its digest is"):
            made.build(from_store, tmp_path, tmp_path / f"out{at}")
        remote.write(name, [data])
    made.build(from_store, tmp_path, tmp_path / "out")
    assert made.contents(tmp_path / "out") == made.contents(tmp_path / "sound")


def open_store_again():
    """Have the next build check the shards of its stores, as a new process does."""
    _opened_store.cache_clear()


def test_a_store_that_was_made_again_ends_what_was_begun_with_the_other(tmp_path):
    _, from_store = few_shards(tmp_path)
    out = tmp_path / "out"
    made.build(from_store, tmp_path, out, array=(0, 2))
    plan = json.loads((out / "plan.json").read_text())
    assert (
        plan["sources"][0]["store"]
        == json.loads((tmp_path / "store/dataset.json").read_text())["digest"]
    )
    before = made.contents(out)
    shutil.copytree(tmp_path / "store", tmp_path / "kept")
    table, _ = few_shards(tmp_path, "bbbb")
    for options in ({}, {"array": (1, 2)}, {"workers": 2}):
        with pytest.raises(PlanError, match="source 'w': the token store .* but the plan names"):
            made.build(from_store, tmp_path, out, **options)
    with pytest.raises(
        PlanError, match="source 'w' is in files here, but in a token store in the plan"
    ):
        made.build(table, tmp_path, out)
    assert made.contents(out) == before
    made.build(from_store, tmp_path, out, moved={"w": f"store:{tmp_path}/kept"})
    made.build(from_store, tmp_path, out)  # nothing is made any more
    faults = verified(out, -1, {"w": f"store:{tmp_path}/store"})["listed"]
    assert {fault["promise"] for fault in faults} == {"P17", "P22"}  # its text, and its estimates
    assert any("but the plan names" in fault["message"] for fault in faults)
    assert verified(out, 3, {"w": f"store:{tmp_path}/kept"})["faults"] == 0


def test_a_dataset_that_was_begun_from_the_text_is_not_gone_on_with_from_a_store(tmp_path):
    table, from_store = few_shards(tmp_path)
    made.build(table, tmp_path, tmp_path / "out", array=(0, 2))
    with pytest.raises(
        PlanError, match="source 'w' is in a token store here, but in files in the plan"
    ):
        made.build(from_store, tmp_path, tmp_path / "out")


def test_workers_find_a_store_that_is_made_again_while_they_build(tmp_path):
    """One that opens it later than the plan was made, and one that has a shard of it open."""
    _, from_store = few_shards(tmp_path)
    plan = made.build(from_store, tmp_path, tmp_path / "out", array=(0, 2)).plan
    early = open_plan(tmp_path / "out")
    make_shard(early, 1)
    few_shards(tmp_path, "bbbb")
    late = open_plan(tmp_path / "out")
    with pytest.raises(
        SourceError,
        match="the token store .* but the plan names .*\nhint: restore the store",
    ):
        make_shard(late, 1)
    for used in (plan, early):
        with pytest.raises(SourceError, match="its digest is"):
            make_shard(used, 1)


def test_a_plan_without_the_digest_of_its_store_takes_any(tmp_path):
    _, from_store = few_shards(tmp_path, n=40)
    out = tmp_path / "out"
    made.build(from_store, tmp_path, out)
    for name in ("dataset.json", "receipts", "shards"):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    plan = json.loads((out / "plan.json").read_text())
    del plan["sources"][0]["store"]
    (out / "plan.json").write_bytes(encode({**plan, "digest": own_digest(plan)}))
    few_shards(tmp_path, "bbbb", n=40)
    assert made.build(from_store, tmp_path, out).manifest is not None
    assert verified(out, -1)["faults"] == 0


def test_all_stores_of_a_process_share_one_bound_on_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "default_max_open", lambda: 3)
    sources, most = [], 0
    for name in ("x", "y", "z"):
        records = [
            {"text": f"document {i} of {name}" + " word" * 9, "loss_spans": [[3, 20]]}
            for i in range(90)
        ]
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
        sources.append({"name": name, "paths": [f"{name}.jsonl"]})
        one = made.table(
            sources[-1:], output={"shard_text_bytes": 500}, tasks=[{"preset": "causal"}]
        )
        made.build(one, tmp_path, tmp_path / f"store-{name}", is_store=True)
    table = made.table(sources, tasks=[{"preset": "causal"}])
    from_stores = [
        {"name": s["name"], "paths": [f"store-{s['name']}"], "format": "store"} for s in sources
    ]

    class Counting(made.Silent):
        def add(self, *counts):
            nonlocal most
            paths = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
            most = max(most, sum("store-" in path for path in paths))

    made.build({**table, "sources": from_stores}, tmp_path, tmp_path / "out", progress=Counting())
    assert 0 < most <= 3
    made.build(table, tmp_path, tmp_path / "text")
    assert made.contents(tmp_path / "out", "shards") == made.contents(tmp_path / "text", "shards")


def test_too_many_open_files_are_called_that(tmp_path, monkeypatch):
    _, from_store = few_shards(tmp_path, n=20)

    def refuse(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(stores, "open_file", refuse)
    with pytest.raises(
        SourceError,
        match=r"cannot be read: Too many open files\nhint: raise the limit of open files \(ulimit -n\)",
    ):
        made.build(from_store, tmp_path, tmp_path / "out")


def test_a_recipe_of_stores_is_the_one_that_its_dataset_was_built_of(tmp_path):
    """`verify --recipe` by the recipe of the store, of the text, of the other store, and of another
    use."""
    few_shards(tmp_path, n=20)
    made.write_lines(tmp_path / "b.jsonl", made.texts(20, mean_bytes=150))
    source = {"name": "w", "paths": ["b.jsonl"], "repeat": 1.5}
    table = made.table([source], seq_lengths=[64, 128])
    del table["seq_length"]
    made.build(table, tmp_path, tmp_path / "store2", is_store=True)
    from_store = of_store(table, "store2")
    made.build_lengths(from_store, tmp_path, tmp_path / "out")

    def faults_by(folder, table, moved=None):
        given = complete(read_recipe(table, tmp_path))
        report = verify_dataset(
            tmp_path / folder, None, moved or {}, (0, 1), 0, made.Silent(), recipe=given
        )
        assert {fault["promise"] for fault in report["listed"]} <= {"P22"}
        return " ".join(fault["message"] for fault in report["listed"])

    for name in ("seq_64", "seq_128"):
        for given in (from_store, table):
            assert not faults_by(f"out/{name}", given)
    assert not faults_by("store2", table)
    assert not faults_by("out/seq_64", from_store, {"w": str(tmp_path)})
    changed = {**from_store, "sources": [{**from_store["sources"][0], "repeat": 2.5}]}
    assert "repeat is 2.5 in the given recipe, but 1.5" in faults_by("out/seq_64", changed)
    assert "the token store" in faults_by("out/seq_64", of_store(table, "store"))
    (tmp_path / "store2").rename(tmp_path / "moved")
    assert not faults_by("out/seq_64", from_store, {"w": f"store:{tmp_path}/moved"})
    with pytest.raises(PlanError, match="store2 is not a token store"):
        faults_by("out/seq_64", from_store)


def test_a_source_without_a_name_means_the_only_source_of_a_store():
    def store_of(*names):
        sources = tuple(Source(name=name, paths=("a.jsonl",), text_key="body") for name in names)
        return SimpleNamespace(plan=SimpleNamespace(recipe=SimpleNamespace(sources=sources)))

    asked = Source(name="source2", paths=("store",), format="store", repeat=3.0, sample=(0.0, 0.5))
    found = _source_in(store_of("web"), asked, 2)
    assert (found.name, found.text_key, found.format) == ("web", "body", "auto")
    assert (found.repeat, found.sample, found.paths) == (3.0, (0.0, 0.5), ())
    assert _source_in(store_of("web", "source2"), asked, 2).name == "source2"
    for store, i in ((store_of("web"), 1), (store_of("web", "code"), 2)):
        with pytest.raises(RecipeError, match=r"name = 'source2' is not in the token store"):
            _source_in(store, asked, i)


@pytest.mark.parametrize(
    "record, optional",
    [
        ({"weight": 0.5}, {"limited", "document_weight"}),
        ({"loss_spans": [[0, 2]]}, set()),
        ({}, set()),
    ],
)
def test_a_store_has_the_columns_that_a_document_needs_and_no_others(tmp_path, record, optional):
    """A document with only a weight does not limit what is trained."""
    lines = [json.dumps({"text": "abcd", **record}) for _ in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    table = made.table("a.jsonl", tasks=[{"preset": "causal"}])
    made.build(table, tmp_path, tmp_path / "store", is_store=True)
    data = (tmp_path / "store/shards/000/000000.safetensors").read_bytes()
    found = open_arrays(data, "").keys()
    assert found & {"limited", "document_weight", "place_first"} == optional
    same(tmp_path, table)
