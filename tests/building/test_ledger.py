import copy
from importlib import import_module

import numpy as np
import pytest

from packprep.building.ledger import APART, add_ledgers, check, imbalances, is_ledger
from packprep.errors import BuildError, PlanError
from tests import made


def test_the_ledger_of_a_dataset_balances_and_counts_what_is_there(built):
    ledger = built.outcome.manifest["ledger"]
    assert imbalances(ledger) == []
    web, books, notes = (ledger["sources"][name] for name in ("web", "books", "notes"))
    assert web["documents"]["read"] == 250 + 200 + 120
    assert notes["documents"] == {"read": 32, "used": 30, "rejected": {"empty": 2}}
    texts = [*made.texts(250, 0), *made.texts(200, 1), *made.texts(120, 2)]
    assert (
        web["tokens"]["read"] == web["tokens"]["used"] == sum(len(text.encode()) for text in texts)
    )
    assert web["slots"]["added"]["bos"] == web["slots"]["added"]["eos"] == web["documents"]["used"]
    assert 180 < books["documents"]["read"] < 360


def test_every_identity_that_does_not_hold_is_named(built):
    ledger = built.outcome.manifest["ledger"]
    for path, said in [
        (("sources", "web", "documents", "used"), "web: documents read = used + rejected"),
        (("sources", "web", "tokens", "used"), "web: tokens read = used + truncated + dropped"),
        (
            ("sources", "web", "tokens", "truncated"),
            "web: tokens read = used + truncated + dropped",
        ),
        (("sources", "books", "slots", "added", "eos"), "books: slots = used + added + padding"),
        (("sources", "books", "slots", "total"), "rows · seq_length = Σ slots + row padding"),
        (("row_padding",), "rows · seq_length = Σ slots + row padding"),
    ]:
        wrong = copy.deepcopy(ledger)
        place = wrong
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] += 1
        assert any(said in text for text in imbalances(wrong)), path
        with pytest.raises(BuildError, match="here: the ledger does not balance"):
            check(wrong, "here")
    check(ledger, "here")


def test_a_kind_that_joins_later_is_0_where_it_is_absent_and_one_of_a_newer_version_is_refused(
    built, monkeypatch
):
    ledger = copy.deepcopy(built.outcome.manifest["ledger"])
    names = list(ledger["sources"]), list(ledger["tasks"])
    assert is_ledger(ledger, *names)
    ledger["sources"]["web"]["tokens"][APART] = 3
    assert is_ledger(ledger, *names)
    del ledger["sources"]["web"]["tokens"][APART]
    added = ledger["sources"]["web"]["slots"]["added"]
    added["extra"] = 3
    with pytest.raises(
        PlanError,
        match="key 'sources.web.slots.added.extra' is unknown to packprep .*, because a newer version",
    ):
        is_ledger(ledger, *names)
    monkeypatch.setattr("packprep.building.ledger.ADDED_LATER", ("extra",))
    assert is_ledger(ledger, *names)
    del added["extra"]
    assert is_ledger(ledger, *names)
    del added["fim"]
    assert not is_ledger(ledger, *names) and not is_ledger(
        {**ledger, "tasks": {**ledger["tasks"], "x": {}}}, *names
    )


def test_ledgers_are_summed_number_by_number():
    assert add_ledgers([{"a": 1, "b": {"c": 2}}, {"a": 3, "b": {"c": 4, "d": 5}}]) == {
        "a": 4,
        "b": {"c": 6, "d": 5},
    }
    assert add_ledgers([]) == {}


@pytest.mark.parametrize(
    "documents",
    [
        {"long": "truncate"},
        {"long": "drop"},
        {"min_tokens": 50},
        {"append_eos": False, "prepend_bos": True},
        {"max_tokens": 60},
    ],
)
def test_the_ledger_balances_whatever_is_left_out(tmp_path, documents):
    made.write_lines(tmp_path / "a.jsonl", [*made.texts(120), "", "x", "y" * 5000])
    table = made.table("a.jsonl", documents=documents, packing={"pad_seq_to_mult": 8})
    ledger = made.build(table, tmp_path, tmp_path / "out").manifest["ledger"]
    assert imbalances(ledger) == []
    source = ledger["sources"]["source0"]
    assert source["documents"]["read"] == 123 and source["tokens"]["read"] == sum(
        len(text.encode()) for text in [*made.texts(120), "x", "y" * 5000]
    )
    if documents.get("long") == "truncate":
        assert source["tokens"]["truncated"] >= 4000
    if documents.get("long") == "drop":
        assert (
            source["documents"]["rejected"]["too_long"] >= 1
            and source["tokens"]["dropped"]["too_long"] >= 5000
        )
    if documents.get("min_tokens"):
        assert source["documents"]["rejected"]["below_min_tokens"] >= 1
        assert 0 < source["tokens"]["dropped"]["below_min_tokens"] < 50 * 20
    assert source["slots"]["padding"] > 0


def test_row_padding_is_what_no_segment_holds(built):
    import packprep

    rows = packprep.open_dataset(built.out)
    padding = sum(int(np.count_nonzero(row["segment_ids"] == 0)) for row in rows)
    ledger = built.outcome.manifest["ledger"]
    assert padding == ledger["row_padding"] and len(rows) == ledger["rows"]
    assert ledger["last_rows"] == len(built.outcome.manifest["shards"])


@pytest.mark.long
@pytest.mark.parametrize(
    "function, is_store",
    [("work.shard_ledger", False), ("work.store_ledger", True), ("commit.add_ledgers", False)],
)
def test_a_ledger_that_does_not_balance_ends_a_build(tmp_path, monkeypatch, function, is_store):
    module, _, name = f"packprep.building.{function}".rpartition(".")
    own = getattr(import_module(module), name)

    def unbalanced(*arguments):
        ledger = own(*arguments)
        ledger["sources"]["source0"]["documents"]["read"] += 1
        return ledger

    made.write_lines(tmp_path / "a.jsonl", made.texts(9))
    monkeypatch.setattr(f"{module}.{name}", unbalanced)
    with pytest.raises(BuildError, match="the ledger does not balance"):
        made.build(made.table("a.jsonl"), tmp_path, tmp_path / "out", is_store=is_store)
    assert not (tmp_path / "out/dataset.json").exists()
