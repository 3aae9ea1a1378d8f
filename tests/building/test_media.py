"""Places of media from records to rows: whole, in order, untrained, by replay and twin alike."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packprep.building.plan import open_plan
from packprep.building.work import make_shard
from packprep.dataset.loader import open_dataset
from packprep.errors import PackprepError, RecipeError, SourceError
from packprep.verification import ALL, verify_dataset
from tests import made, media_made
from tests.twin.check import verify_with_twin


def built(folder, out="out", **changes):
    made.build(media_made.table(**changes), folder, folder / out)
    return folder / out


def verified(out, replay=ALL, epoch=0):
    report = verify_with_twin(out, replay, epoch=epoch)
    assert report["faults"] == 0, report["listed"]
    return report


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    media_made.corpus(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("changes", [
    {},
    {"tokenizer": "bpe", "packing": {"pad_seq_to_mult": 8, "algorithm": "next_fit"}, "output": {"columns": "compact"}},
])  # fmt: skip
def test_replay_twin_and_later_epochs_give_the_same_rows(corpus, changes):
    out = built(corpus, f"out{len(changes)}", **changes)
    assert verified(out)["twin"] > 80
    verified(out, 40, epoch=2)


@pytest.mark.long
def test_a_token_store_gives_the_bytes_of_the_text(corpus):
    out = built(corpus, "text", tokenizer="bpe")
    made.build(media_made.table(tokenizer="bpe"), corpus, corpus / "store", is_store=True)
    assert verify_dataset(corpus / "store", ALL, {}, (0, 1), 0, made.Silent())["faults"] == 0
    sources = [
        {"name": name, "paths": [str(corpus / "store")], "format": "store"}
        for name in ("texts", "chats")
    ]
    sources[1]["tasks"] = ["causal", "prefix_lm", "masked_diffusion"]
    of_store = built(corpus, "of_store", tokenizer="bpe", sources=sources)
    assert made.contents(out, "shards") == made.contents(of_store, "shards")
    others = {"missing": "add", "media": {"image": "<|image|>", "film": "<|film|>"}}
    with pytest.raises(RecipeError, match=r"specials\.media is .* here, but .* in the token store"):
        built(corpus, "other", tokenizer="bpe", sources=sources, specials=others)


def test_each_place_is_found_once_whole_and_in_order(corpus):
    """Of texts, whose records say all: the places of a document's pieces, one after the other, are
    the record's."""
    out = built(
        corpus,
        "causal",
        sources=[{"name": "texts", "paths": ["a.jsonl"]}],
        tasks=[{"objective": "causal"}],
    )
    dataset, wanted, position = open_dataset(out), {}, 0
    slots = {name: ids[1] for name, ids in open_plan(out).vocabulary.media.items()}
    for record in media_made.texts(60):
        wanted[position] = [(e["tokens"], e["ref"], e["kind"]) for e in record["media"]]
        position += len(json.dumps(record, ensure_ascii=False).encode()) + 1
    found = {}
    for i in range(len(dataset)):
        row = dataset.row(i)
        media, inside = row.media, np.zeros(len(row.tokens), bool)
        for slot, tokens, ref, kind in zip(
            media.slot, media.tokens, media.refs, media.kinds, strict=True
        ):
            segment = int(row.segment_ids[slot]) - 1
            assert (row.segment_ids[slot : slot + tokens] == segment + 1).all()
            assert (row.tokens[slot : slot + tokens] == slots[kind]).all() and not row.loss_mask[
                slot - 1 : slot + tokens - 1
            ].any()
            inside[slot : slot + tokens] = True
            place = (
                int(row.segments["doc"][segment]),
                int(row.segments["start"][segment]),
                int(slot),
            )
            found.setdefault(place[0], []).append((place[1:], (int(tokens), ref, kind)))
        assert not np.isin(row.tokens[~inside], list(slots.values())).any()
    used = {int(doc) for i in range(len(dataset)) for doc in dataset.row(i).segments["doc"]}
    kept = 0
    for position in used:
        own = [what for _, what in sorted(found.get(position, []))]
        # pieces of nothing but places are left out
        assert own == [what for what in wanted[position] if what in own]
        kept += len(own)
    assert kept > 60 and kept == sum(len(dataset.row(i).media.slot) for i in range(len(dataset)))
    ledger = dataset.manifest["ledger"]["sources"]["texts"]
    assert ledger["slots"]["media"] == sum(
        int(dataset.row(i).media.tokens.sum()) for i in range(len(dataset))
    )


def test_a_cut_falls_before_a_place_or_behind_one_that_begins_its_piece(tmp_path):
    """Rows of 32 bytes and eos: "x" · 20, a place of 15 with begin and end, "y" · 3, …"""

    def pieces(*parts):
        text, media = "", []
        for part in parts:
            if isinstance(part, str):
                text += part
            else:
                media.append({"at": len(text), "tokens": part, "ref": "r", "kind": "film"})
        media_made.write(tmp_path, "a.jsonl", [{"text": text, "media": media}, {"text": "other"}])
        table = media_made.table(
            seq_length=32,
            sources=[{"paths": ["a.jsonl"]}],
            tasks=[{"objective": "causal"}],
            documents={"max_bad_fraction": 1.0},
        )
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        made.build(table, tmp_path, out)
        made_again = make_shard(open_plan(out), 0)
        segments = made_again.segments.select(made_again.segments.doc == 0)
        reasons = [record["reason"] for record in made_again.documents.rejected.records()]
        verified(out)
        return sorted(zip(segments.start.tolist(), segments.tokens.tolist(), strict=True)), reasons

    assert pieces("x" * 20, 15, "y" * 9) == ([(0, 20), (20, 24)], [])
    # of a place alone nothing is trained
    assert pieces("x" * 2, 32, "y" * 9) == ([(0, 2), (34, 9)], [])
    assert pieces("x" * 9, 26, "y" * 2, 26, "z" * 3) == ([(0, 9), (9, 28), (37, 29)], [])
    # the rest of two tokens does not fit beside it
    assert pieces("x" * 9, 30, "y" * 2) == ([(0, 9), (39, 2)], [])
    assert pieces("x" * 9, 33, "y") == ([], ["place_too_long"])
    assert pieces("x" * 9, 32) == ([], ["place_too_long"])  # with its eos it does not fit
    assert pieces(5, 7) == ([], ["untrained"])


@pytest.mark.long
def test_rows_of_two_sides_have_media_at_slots_of_the_row(corpus, tmp_path):
    """Users' pictures on the encoder's side, those behind an answer or behind text on the
    decoder's. What is too short for two sides is left out."""
    texts = [
        {
            "text": "xyyyyy",
            "media": [{"at": 1, "tokens": 5, "ref": "behind the pivot", "kind": "film"}],
        },
        {
            "text": "xx" + "y" * 40,
            "media": [{"at": 2, "tokens": 63, "ref": "behind too little", "kind": "film"}],
        },
    ]
    for name in ("b.jsonl", "t.jinja"):
        (tmp_path / name).write_bytes((corpus / name).read_bytes())
    media_made.write(tmp_path, "a.jsonl", media_made.texts(60) + 5 * texts)
    task = {
        "objective": "prefix_lm",
        "sentinel": True,
        "eos_after_inputs": True,
        "mode_token": "[S2S]",
    }
    sources = [{"name": "texts", "paths": ["a.jsonl"]}, {"name": "chats", "paths": ["b.jsonl"]}]
    table = media_made.table(
        packing={"encoder_length": 96, "decoder_length": 64}, tasks=[task], sources=sources
    )
    made.build(
        {key: value for key, value in table.items() if key != "seq_length"},
        tmp_path,
        tmp_path / "out",
    )
    assert verified(tmp_path / "out")["twin"] > 80
    verified(tmp_path / "out", 40, epoch=2)
    dataset = open_dataset(tmp_path / "out")
    slots = {name: ids[1] for name, ids in open_plan(tmp_path / "out").vocabulary.media.items()}
    batch = dataset.batch(range(len(dataset)), columns=["tokens", "prefix_ends", "media"])
    media, sides = batch["media"], [0, 0]
    for row, slot, tokens, kind in zip(
        media.row, media.slot, media.tokens, media.kinds, strict=True
    ):
        assert (batch["tokens"][row, slot : slot + tokens] == slots[kind]).all()
        side = int(slot >= batch["prefix_ends"][row, slot])
        assert side or slot + tokens <= batch["prefix_ends"][row, slot]
        sides[side] += 1
    assert (
        min(sides) > 5
        and media.refs.count("behind the pivot") == 5
        and batch["encoder_length"] == 96
    )
    dropped = dataset.manifest["ledger"]["sources"]["texts"]["tokens"]["dropped"]
    assert dropped["untrained_segment"] >= 5 * 2 and media.refs.count("behind too little") == 5
    assert min(int(dataset.row(i).segments["tokens"].min()) for i in range(len(dataset))) >= 3


def test_documents_without_media_keep_their_bytes(tmp_path):
    """A recipe of kinds gives documents without places what one without gives, but for the special
    tokens that it adds."""
    made.write_lines(tmp_path / "in" / "a.jsonl", made.texts(60))
    made.build(made.table("in/a.jsonl"), tmp_path, tmp_path / "plain")
    made.build(made.table("in/a.jsonl", specials=media_made.SPECIALS), tmp_path, tmp_path / "media")
    assert made.contents(tmp_path / "plain", "shards") == made.contents(
        tmp_path / "media", "shards"
    )
    plan = json.loads((tmp_path / "plain" / "plan.json").read_text())
    assert "media" not in plan["recipe"]["specials"] and "media" not in plan["vocabulary"]
    ledger = json.loads((tmp_path / "media" / "dataset.json").read_text())["ledger"]
    assert "media" not in ledger["sources"]["source0"]["slots"]


@pytest.mark.parametrize("changes, words", [
    ({"packing": {"algorithm": "concat"}}, "concat would cut through media, because it cuts at row ends"),
    ({"documents": {"loss_spans": "ignore"}}, 'specials.media requires documents.loss_spans = "use"'),
    ({"tasks": [{"objective": "span_corruption"}]}, "loss_spans or messages, or media, but no task that supports them"),
    ({"specials": {"media": {"image": "<|image|>"}}}, "kind 'image': no token '<|image|>'"),
    ({"specials": {"missing": "add", "mask": "<|i|>", "media": {"image": "<|i|>"}}, "tasks": [{"preset": "mlm"}]},
     "would be mask and media"),
    ({"specials": {"missing": "add", "media": {"image": ["", "<|i|>", ""], "film": ["<|i|>", "<|f|>", ""]}}},
     "<|i|> is a slot token, but also begins or ends media of kind 'film'"),
    ({"specials": {}}, "its documents have media, which would be ignored\nhint: name their kinds in specials.media"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_a_message(corpus, tmp_path, changes, words):
    with pytest.raises(PackprepError) as raised:
        made.build(
            media_made.table(sources=[{"paths": ["a.jsonl"]}], **changes), corpus, tmp_path / "out"
        )
    assert words in str(raised.value)


@pytest.mark.long
def test_tables_hold_media_too(corpus):
    """Lists of structs, in Parquet texts and in Arrow chats: the tokens and places of the lines, by
    replay and twin."""
    chats = media_made.chats(25)
    for message in (message for record in chats for message in record["messages"]):
        if isinstance(message["content"], str):  # a column has one type
            message["content"] = [{"type": "text", "text": message["content"]}]
    texts, talks = (pa.Table.from_pylist(records) for records in (media_made.texts(60), chats))
    pq.write_table(texts, corpus / "a.parquet", row_group_size=20)
    with (
        pa.OSFile(str(corpus / "b.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, talks.schema) as writer,
    ):
        writer.write_table(talks, max_chunksize=10)
    sources = media_made.table()["sources"]
    sources[0]["paths"], sources[1]["paths"] = ["a.parquet"], ["b.arrow"]
    out, of_lines = built(corpus, "tables", sources=sources), built(corpus, "lines")
    verified(out)
    with pytest.raises(
        SourceError, match=r"a\.parquet: its documents have media, which would be ignored"
    ):
        built(corpus, "no_kinds", sources=sources[:1], specials={})
    ledgers = [
        json.loads((folder / "dataset.json").read_text())["ledger"]["sources"]
        for folder in (out, of_lines)
    ]
    for name in ("texts", "chats"):
        assert ledgers[0][name]["tokens"]["read"] == ledgers[1][name]["tokens"]["read"] > 1000
        assert ledgers[0][name]["documents"]["read"] == ledgers[1][name]["documents"]["read"]
