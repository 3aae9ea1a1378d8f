"""Forgeries of a token store, signed again so that no digest tells: what finds each of them, and
what nothing finds.

`python -m pytest -m campaign -s tests/verification/test_forged_stores.py` makes all, and prints
those that are not found.
"""

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from packprep.building.commit import make_manifest
from packprep.building.ledger import add_ledgers
from packprep.building.plan import open_plan
from packprep.documents import store as stores
from packprep.documents.store import open_arrays
from packprep.errors import PackprepError
from packprep.format.digests import digest_of, own_digest
from packprep.format.json_files import encode, receipt_name, rejects_name, shard_name
from packprep.recipe import fingerprint
from packprep.verification import verify_dataset
from tests import made, media_made
from tests.verification.damage import read_json

SHARDS = 4
NOT_FOUND = {"plan engine.version", "plan beside_tokenizer", "plan recipe.documents.append_eos"}
"""The forgeries that change no document of a dataset that is built from the store; docs/promises.md
says why."""


class Store:
    """The parts of a store in memory, to be forged; `write` puts them into its folder and signs
    everything again."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.plan, self.manifest = (
            read_json(folder / name) for name in ("plan.json", "dataset.json")
        )
        shards = range(len(self.manifest["shards"]))
        self.receipts = [read_json(folder / receipt_name(b)) for b in shards]
        self.arrays = [
            {
                name: array.copy()
                for name, array in open_arrays((folder / shard_name(b)).read_bytes(), "").items()
            }
            for b in shards
        ]
        self.rejects = [
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            for path in (folder / rejects_name(b) for b in shards)
        ]
        self.edit_manifest: Callable[[dict[str, Any]], None] = lambda manifest: None

    def write(self) -> None:
        plan = encode({**self.plan, "digest": own_digest(self.plan)})
        (self.folder / "plan.json").write_bytes(plan)
        entries = []
        for b, receipt in enumerate(self.receipts):
            data = b"".join(bytes(buffer) for buffer in stores.encode(self.arrays[b]))
            (self.folder / shard_name(b)).write_bytes(data)
            receipt.update(
                bytes=len(data), digest=digest_of(data), plan_digest=digest_of(plan), rejects=None
            )
            path = self.folder / rejects_name(b)
            path.unlink(missing_ok=True)
            if self.rejects[b]:
                lines = b"".join(map(encode, self.rejects[b]))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(lines)
                about = {
                    "bytes": len(lines),
                    "digest": digest_of(lines),
                    "documents": len(self.rejects[b]),
                }
                receipt["rejects"] = {"file": rejects_name(b), **about}
            (self.folder / receipt_name(b)).write_bytes(encode(receipt))
            entry = {key: receipt[key] for key in ("rows", "segments", "tokens", "bytes", "digest")}
            entries.append(
                {"file": shard_name(b), **entry, "receipt_digest": digest_of(encode(receipt))}
            )
        try:
            self.manifest = make_manifest(open_plan(self.folder), entries, self._total())
        except PackprepError:  # nobody reads such a plan; the manifest names it anyway
            self.manifest.update(
                shards=entries, plan={"file": "plan.json", "digest": digest_of(plan)}
            )
        self.edit_manifest(self.manifest)
        signed = encode({**self.manifest, "digest": own_digest(self.manifest)})
        (self.folder / "dataset.json").write_bytes(signed)

    def _total(self) -> dict[str, Any]:
        try:
            return add_ledgers([receipt["ledger"] for receipt in self.receipts])
        except (LookupError, TypeError, AttributeError):
            return self.manifest["ledger"]

    def sign_recipe(self) -> None:
        """Have the plan's fingerprint follow from its recipe and files."""
        (self.folder / "plan.json").write_bytes(
            encode({**self.plan, "digest": own_digest(self.plan)})
        )
        try:
            plan = open_plan(self.folder)
        except PackprepError:
            return
        files = [[(file.name, file.size) for file in source.files] for source in plan.sources]
        digest, template = self.plan["tokenizer"]["digest"], self.plan["chat_template"]
        self.plan["fingerprint"] = fingerprint(
            plan.recipe, files, digest, template, plan.removed_digest
        )


Forgery = tuple[str, Callable[[Store], None]]


def made_store(folder: Path) -> dict[str, Any]:
    """Make a store of media, conversations, spans, a compressed file and a table, with rejects;
    gives its recipe's table."""
    media_made.corpus(folder)
    lines = [json.dumps({"text": text}) for text in made.texts(60, 3)]
    lines[7:7] = ['{"text": 5}', "{bad", '{"text": ""}']
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(("\n".join(lines) + "\n").encode()))
    made.write_parquet(folder / "d.parquet", made.texts(40, 4), 15)
    sources = [
        {"name": "texts", "paths": ["a.jsonl"]},
        {
            "name": "chats",
            "paths": ["b.jsonl"],
            "tasks": ["causal", "prefix_lm", "masked_diffusion"],
        },
        {"name": "zipped", "paths": ["*.zst"]},
        {"name": "table", "paths": ["d.parquet"]},
    ]
    table = media_made.table(sources=sources, tokenizer="bpe", output={"shard_text_bytes": 13_000})
    made.build(table, folder, folder / "store", is_store=True)
    return table


def element(array: np.ndarray, chance: random.Random, how: str) -> None:
    """Change one element a little, or swap two that differ."""
    flat = array.reshape(-1)
    i = chance.randrange(len(flat))
    if how == "+1":
        flat[i] += flat.dtype.type(1)
        return
    others = np.flatnonzero(flat != flat[i])
    if len(others):
        j = chance.choice(others.tolist())
        flat[i], flat[j] = flat[j].copy(), flat[i].copy()
    else:
        flat[i] += flat.dtype.type(1)


def of_arrays(store: Store, chance: random.Random) -> Iterator[Forgery]:
    """One element of each array."""
    for name in sorted({name for arrays in store.arrays for name in arrays}):
        there = [b for b, arrays in enumerate(store.arrays) if name in arrays and arrays[name].size]
        for how in ("+1", "swap") if there else ():
            b, seed = chance.choice(there), chance.random()

            def change(
                store: Store, name: str = name, how: str = how, b: int = b, seed: float = seed
            ) -> None:
                element(store.arrays[b][name], random.Random(seed), how)

            yield f"array {name} {how}", change


def of_documents(store: Store, chance: random.Random) -> Iterator[Forgery]:
    """Whole documents: left out, twice, moved, of other tokens, accepted or rejected."""

    def backwards(store: Store) -> None:
        """Turn the tokens of a document round."""
        offsets = store.arrays[2]["document_offsets"]
        d = int(np.argmax(np.diff(offsets)))
        own = slice(int(offsets[d]), int(offsets[d + 1]))
        store.arrays[2]["tokens"][own] = store.arrays[2]["tokens"][own][::-1].copy()

    def shorter(store: Store) -> None:
        """Take the last token of a shard, and count it nowhere."""
        arrays = store.arrays[-1]
        last = int(np.flatnonzero(np.diff(arrays["document_offsets"]))[-1])
        arrays["tokens"] = np.delete(arrays["tokens"], arrays["document_offsets"][last + 1] - 1)
        arrays["document_offsets"][last + 1 :] -= 1
        count(store, -1, last, tokens=-1)

    def count(store: Store, b: int, document: int, tokens: int = 0) -> None:
        arrays = store.arrays[b]
        part = int(np.searchsorted(arrays["part_offsets"], document, "right")) - 1
        file = store.plan["files"][int(arrays["part_file"][part])]
        name = store.plan["sources"][file["source"]]["name"]
        receipt = store.receipts[b]
        receipt["tokens"] += tokens
        own = receipt["ledger"]["sources"][name]["tokens"]
        own["used"] += tokens
        if "read" in own:
            own["read"] += tokens

    def emptied(store: Store) -> None:
        arrays = store.arrays[0]
        offsets = arrays["document_offsets"]
        d = int(np.argmax(np.diff(offsets)))
        n = int(offsets[d + 1] - offsets[d])
        arrays["tokens"] = np.delete(arrays["tokens"], np.s_[int(offsets[d]) : int(offsets[d + 1])])
        offsets[d + 1 :] -= n
        count(store, 0, d, tokens=-n)

    def unit_of_all(store: Store) -> None:
        store.arrays[0]["unit"][:] = 0

    def untrained(store: Store) -> None:
        """Have the first supervised document be trained nowhere."""
        arrays = next(
            arrays for arrays in store.arrays if len(arrays["supervised"]) and len(arrays["spans"])
        )
        n = int(arrays["span_offsets"][1])
        for name in ("spans", "weights", "turns"):
            arrays[name] = arrays[name][n:]
        arrays["span_offsets"][1:] -= n

    def unsupervised(store: Store) -> None:
        """Have a supervised document without places be a plain one."""
        for arrays in store.arrays:
            lacks_places = (
                np.diff(arrays["place_offsets"]) == 0
                if "place_offsets" in arrays
                else arrays["system"] >= 0
            )
            if not lacks_places.any():
                continue
            s = int(np.argmax(lacks_places))
            for offsets, columns in (
                ("span_offsets", ("spans", "weights", "turns")),
                ("cut_offsets", ("cuts", "ranks")),
            ):
                begin, end = arrays[offsets][s : s + 2].tolist()
                for name in columns:
                    arrays[name] = np.delete(arrays[name], np.s_[begin:end], axis=0)
                arrays[offsets] = np.delete(arrays[offsets], s + 1)
                arrays[offsets][s + 1 :] -= end - begin
            for name in ("supervised", "system", "eos_weight"):
                arrays[name] = np.delete(arrays[name], s)
            if "place_offsets" in arrays:
                arrays["place_offsets"] = np.delete(arrays["place_offsets"], s + 1)
            return

    def accepted(store: Store) -> None:
        """Have a reject be a document without tokens that was read, and be listed nowhere."""
        b = next(b for b, rejects in enumerate(store.rejects) if rejects)
        arrays = store.arrays[b]
        end = int(arrays["reject_offsets"][1])
        arrays["reject_text"], arrays["rejected"] = (
            arrays["reject_text"][end:],
            arrays["rejected"][1:],
        )
        arrays["reject_offsets"] = arrays["reject_offsets"][1:] - end
        record = store.rejects[b].pop(0)
        documents = store.receipts[b]["ledger"]["sources"][record["source"]]["documents"]
        documents["rejected"][record["reason"]] -= 1
        if not documents["rejected"][record["reason"]]:
            del documents["rejected"][record["reason"]]
        documents["used"] += 1

    def other_reason(store: Store) -> None:
        """Have a reject's text in the shard say something else than its record."""
        b = next(b for b, rejects in enumerate(store.rejects) if rejects)
        store.arrays[b]["reject_text"][-1] ^= 1

    def other_reason_in_both(store: Store) -> None:
        b = next(b for b, rejects in enumerate(store.rejects) if rejects)
        at, end = store.arrays[b]["reject_offsets"][:2].tolist()
        text = store.arrays[b]["reject_text"][at:end].tobytes().decode()
        reason, _, detail = text.partition(" ")
        changed = detail[:-1] + ("x" if detail[-1] != "x" else "y")
        store.arrays[b]["reject_text"][at:end] = np.frombuffer(
            f"{reason} {changed}".encode(), np.uint8
        )
        for record in store.rejects[b]:
            if (record["reason"], record["detail"]) == (reason, detail):
                record["detail"] = changed

    def parts_swapped(store: Store) -> None:
        arrays = next(arrays for arrays in store.arrays if len(arrays["part_file"]) > 1)
        for name in ("part_file", "part_piece"):
            arrays[name][:2] = arrays[name][1::-1].copy()

    def part_twice(store: Store) -> None:
        """Name a part of another shard's piece."""
        store.arrays[-1]["part_file"][:], store.arrays[-1]["part_piece"][:] = (
            store.arrays[0]["part_file"][0],
            store.arrays[0]["part_piece"][0],
        )

    def special(store: Store) -> None:
        """Have a document hold eos."""
        store.arrays[0]["tokens"][int(store.arrays[0]["document_offsets"][1]) - 1] = store.plan[
            "vocabulary"
        ]["roles"]["eos"]

    def shards_swapped(store: Store) -> None:
        for parts in (store.arrays, store.rejects):
            parts[0], parts[1] = parts[1], parts[0]
        kept = ("ledger", "text_digests", "tokens")
        one, other = ({key: receipt[key] for key in kept} for receipt in store.receipts[:2])
        store.receipts[0].update(other)
        store.receipts[1].update(one)

    def other_ref(store: Store) -> None:
        arrays = next(
            arrays
            for arrays in store.arrays
            if "place_refs" in arrays and len(arrays["place_refs"])
        )
        arrays["place_refs"][0] ^= 1

    def wide(store: Store) -> None:
        for arrays in store.arrays:
            arrays["tokens"] = arrays["tokens"].astype("<u4")

    for change in (
        backwards, shorter, emptied, unit_of_all, untrained, unsupervised, accepted, other_reason,
        other_reason_in_both, parts_swapped, part_twice, special, shards_swapped, other_ref, wide,
    ):  # fmt: skip
        yield f"documents {change.__name__}", change


def of_receipts(store: Store, chance: random.Random) -> Iterator[Forgery]:
    """What receipts say, with the sums of the manifest made to follow."""

    def ledger(path: str, by: int) -> Callable[[Store], None]:
        def change(store: Store) -> None:
            found: Any = store.receipts[0]["ledger"]
            *keys, last = path.split(".")
            for key in keys:
                found = found[key]
            found[last] += by

        return change

    for path in (
        "sources.texts.documents.read",
        "sources.texts.documents.used",
        "sources.texts.tokens.used",
        "row_slots",
    ):
        yield f"receipt ledger {path}", ledger(path, 1)

    def text_digest(store: Store) -> None:
        store.receipts[0]["text_digests"]["texts"] = "0" * 32

    def no_rejects(store: Store) -> None:
        for b, receipt in enumerate(store.receipts):
            store.rejects[b] = []
            for own in receipt["ledger"]["sources"].values():
                own["documents"]["used"] += sum(own["documents"]["rejected"].values())
                own["documents"]["rejected"] = {}

    def position(store: Store) -> None:
        next(rejects for rejects in store.rejects if rejects)[0]["position"] += 1

    def other_shard(store: Store) -> None:
        store.receipts[1]["shard"] = 0

    def tokens(store: Store) -> None:
        store.receipts[0]["tokens"] += 1

    for change in (text_digest, no_rejects, position, other_shard, tokens):
        yield f"receipt {change.__name__}", change


PLAN_CHANGES: dict[str, Any] = {
    "fingerprint": "0" * 32,
    "kind": "dataset",
    "law_version": 2,
    "token_dtype": "int32",
    "chat_template": "{{ messages }}",
    "shards": 3,
    "shard_text_bytes": 14_000,
    "engine.version": "0.0",
    "tokenizer.digest": "0" * 32,
    "vocabulary.vocab_size": 400,
    "vocabulary.roles.eos": 3,
    "vocabulary.roles.pad": 5,
    "vocabulary.sentinels": [],
    "vocabulary.special_ids": [],
    "vocabulary.media.image": [1, 2, 3],
    "vocabulary.added_tokens": [{"id": 3, "text": "x", "role": None}],
    "beside_tokenizer": [],
    "recipe.documents.special_text": "special",
    "recipe.documents.append_eos": False,
    "recipe.documents.trained_roles": ["user"],
    "recipe.documents.loss_spans": "ignore",
    "recipe.sources.0.text_key": "body",
    "recipe.sources.3.repeat": 2.0,
    "sources.0.name": "other",
    "sources.0.prefix": "/nowhere",
    "sources.0.repeat": 2.0,
    "sources.0.step_bytes": 1 << 15,
    "sources.0.ratios.jsonl": 2000,
    "sources.0.text_bytes": 1,
    "sources.0.tokens": 1,
    "sources.0.documents": 1,
    "sources.0.relative_error": 0.5,
    "sources.0.tokens_per_byte": 0.9,
    "sources.0.patterns": ["*.jsonl"],
    "sources.0.store": "0" * 32,
    "sources.2.ratios": {"jsonl.zstd": 9000},
    "sources.0.estimates": None,
    "sources.0.estimates.0.tokens_per_byte": 0.9,
    "sources.0.estimates.0.chat": True,
    "sources.2.estimates.0.ratios": {"jsonl.zstd": 9000},
    "sources.3.estimates.1.lengths": [5],
    "sources.3.estimates.1.piece_bytes": {"0": [1, 2, 3]},
    "files.0.size": 17,
    "files.0.name": "z.jsonl",
    "files.0.pieces": 2,
    "files.1.source": 0,
    "files.3.piece_bytes": [1, 2, 3],
}


def of_plans(store: Store, chance: random.Random) -> Iterator[Forgery]:
    """One value of the plan, with its fingerprint and the manifest made to follow."""

    def put(path: str, value: Any) -> Callable[[Store], None]:
        def change(store: Store) -> None:
            found: Any = store.plan
            *keys, last = path.split(".")
            for key in keys:
                found = found[int(key)] if key.isdigit() and isinstance(found, list) else found[key]
            found[last] = copy.deepcopy(value)
            if path != "fingerprint":
                store.sign_recipe()

        return change

    for path, value in PLAN_CHANGES.items():
        yield f"plan {path}", put(path, value)


MANIFEST_CHANGES: dict[str, Any] = {
    "law_version": 2,
    "seq_length": 64,
    "token_dtype": "int32",
    "vocab_size": 400,
    "pad_id": 1,
    "specials": {"pad": 0},
    "added_tokens": [{"id": 3, "text": "x", "role": None}],
    "sources": [{"name": "texts"}],
    "recipe": {},
    "fingerprint": "0" * 32,
    "made_with": {"packprep": "99"},
    "engine": "other",
    "ledger": {},
    "removed": {"digest": "0" * 32, "replaces": []},
    "kind": None,
    "tokenizer": {"file": "tokenizer.json", "digest": "0" * 32},
    "plan": {"file": "plan.json", "digest": "0" * 32},
}


def of_manifests(store: Store, chance: random.Random) -> Iterator[Forgery]:
    """One value of the manifest alone."""

    def put(key: str, value: Any) -> Callable[[Store], None]:
        def edit(manifest: dict[str, Any]) -> None:
            manifest[key] = value
            if value is None:
                del manifest[key]

        def change(store: Store) -> None:
            store.edit_manifest = edit

        return change

    for key, value in MANIFEST_CHANGES.items():
        yield f"manifest {key}", put(key, value)

    def last_shard(store: Store) -> None:
        store.edit_manifest = lambda manifest: manifest["shards"].pop()

    yield "manifest without its last shard", last_shard


def forgeries(store: Store, seed: int) -> list[Forgery]:
    """All forgeries of a store. seed: which elements, of which shards."""
    chance = random.Random(seed)
    makers = (of_arrays, of_documents, of_receipts, of_plans, of_manifests)
    return [forgery for maker in makers for forgery in maker(store, chance)]


def finder_of(store: Path, table: dict[str, Any], base: Path) -> str:
    """What finds a forged store: "verify", "replay", "build"; "" where nothing does."""
    for name, replay in (("verify", None), ("replay", -1)):
        try:
            if verify_dataset(store, replay, {}, (0, 1), 0, made.Silent())["faults"]:
                return name
        except PackprepError:
            return name
    try:
        made.build(of_store(table, store), base, store.with_name("built"))
    except PackprepError:
        return "build"
    return ""


def of_store(table: dict[str, Any], store: Path) -> dict[str, Any]:
    sources = [
        {"name": s["name"], "paths": [str(store)], "format": "store"} for s in table["sources"]
    ]
    tasks = {s["name"]: s["tasks"] for s in table["sources"] if "tasks" in s}
    return {
        **table,
        "sources": [
            {**s, **({"tasks": tasks[s["name"]]} if s["name"] in tasks else {})} for s in sources
        ],
    }


def found_by(table: dict[str, Any], base: Path, name: str, change: Callable[[Store], None]) -> str:
    """Forge a copy of base/store, and say what finds that."""
    folder = base / "forged"
    for place in (folder, base / "built"):
        shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(base / "store", folder)
    store = Store(folder)
    change(store)
    store.write()
    assert name == "nothing" or made.contents(folder) != made.contents(base / "store"), (
        f"{name} changes nothing"
    )
    return finder_of(folder, table, base)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forged")
    table = made_store(folder)
    assert found_by(table, folder, "nothing", lambda store: None) == ""
    assert len(Store(folder / "store").receipts) >= SHARDS
    return folder, table


SOME = (
    "array tokens +1",
    "documents accepted",
    "receipt tokens",
    "plan sources.0.estimates",
    "plan sources.0.store",
    "plan sources.2.estimates.0.ratios",
    "manifest kind",
)


@pytest.mark.parametrize("some", [SOME[::3], SOME])
def test_some_forgeries_of_a_store_are_found(base, some):
    folder, table = base
    made_of = dict(forgeries(Store(folder / "store"), 0))
    assert len(made_of) >= 80
    for name in some:
        assert found_by(table, folder, name, made_of[name]), name


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("seed", [0, 1])
def test_all_forgeries_of_a_store_are_found_but_for_those_of_the_docs(base, seed):
    folder, table = base
    found = {
        name: found_by(table, folder, name, change)
        for name, change in forgeries(Store(folder / "store"), seed)
    }
    left = sorted(name for name, by in found.items() if not by)
    counts = {by: list(found.values()).count(by) for by in ("verify", "replay", "build", "")}
    print(
        f"\n{len(found)} forgeries of a token store, found by {counts}; not found:"
        f" {', '.join(left) or 'none'}"
    )
    assert set(left) <= NOT_FOUND, left
