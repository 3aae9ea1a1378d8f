"""What holds across the datasets of several row lengths: one recipe, one mixture, each document in
one of them."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from packprep.building import segments
from packprep.building.plan import datasets_in
from packprep.dataset.loader import open_dataset
from packprep.format.json_files import encode
from packprep.removing import remove_documents
from packprep.verification import verify_dataset
from packprep.verification.lengths import verify_lengths
from tests import made
from tests.command_line import inside

LENGTHS = [64, 128, 256]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two sources, one of them with bad lines, and two builds of them: all, with documents whole,
    and cut, decomposed."""
    folder = tmp_path_factory.mktemp("lengths")
    made.write_lines(folder / "web/a.jsonl", made.texts(150, 1))
    made.write(folder / "web/b.jsonl", b'{"text": "short"}\n{"text": ""}\n{"no": 1}\n')
    made.write_parquet(folder / "books.parquet", made.texts(60, 2))
    made.build_lengths(table(), folder, folder / "all")
    made.build_lengths(table("decompose"), folder, folder / "cut")
    return folder


def table(long="split", lengths=LENGTHS, **changes):
    sources = [
        {"name": "web", "paths": ["web/*.jsonl"]},
        {"name": "books", "paths": ["books.parquet"], "repeat": 1.5},
    ]
    output = {"shard_text_bytes": 25_000}
    documents = {"long": long, "max_bad_fraction": 1}
    made_of = made.table(
        sources, documents=documents, seq_lengths=lengths, output=output, **changes
    )
    return {key: value for key, value in made_of.items() if key != "seq_length"}


def faults_across(place, replay=None, workers=0, array=(0, 1)):
    """What `verify` finds across the datasets, each of which has to be sound alone."""
    reports = [
        verify_dataset(one, replay, {}, array, 0, made.Silent()) for one in datasets_in(place)
    ]
    assert len(reports) == 3 and not any(report["faults"] for report in reports), reports
    report = verify_lengths(str(place), reports, array, workers)
    assert report["faults"] == len(report["listed"])
    return report["listed"]


@pytest.mark.parametrize("name", ["all", "cut"])
def test_a_build_has_no_fault_across_its_lengths(folder, name):
    out = folder / name
    said = inside("verify", out, "--replay", "all", "--json")
    assert said.status == 0, said
    assert [report["faults"] for report in said.json] == [0, 0, 0, 0]
    across = said.json[-1]
    assert (across["kind"], across["datasets"], across["directory"]) == ("lengths", 3, str(out))
    assert across["documents"] == 150 + 3 + 60 + 30 and across["shards"] >= 6
    assert (
        "across its row lengths every invariant holds (3 datasets, 243 documents"
        in inside("verify", out).out
    )
    reports = [verify_dataset(one, None, {}, (0, 1), 0, made.Silent()) for one in datasets_in(out)]
    parts = [verify_lengths(str(out), reports, (i, 2), workers=2) for i in range(2)]
    assert sum(part["documents"] for part in parts) == 243 and not any(
        part["faults"] for part in parts
    )


def test_the_dataset_of_another_build_is_found(folder, tmp_path):
    out = shutil.copytree(folder / "all", tmp_path / "out")
    made.build_lengths(table(lengths=[64, 256]), folder, tmp_path / "other")
    shutil.rmtree(out / "seq_256")
    shutil.copytree(tmp_path / "other/seq_256", out / "seq_256")
    faults = faults_across(out)
    assert {(fault["promise"], fault["file"]) for fault in faults} >= {("P2", "seq_256/plan.json")}
    assert any("recipe.seq_lengths is [64, 256] here" in fault["message"] for fault in faults)
    assert inside("verify", out).status == 1


MIXTURES = {
    "left out": lambda value: {
        **value,
        "datasets": value["datasets"][::2],
        "shares": [[0, value["shares"][0][1][::2]]],
    },
    "other shares": lambda value: {**value, "shares": [[0, [1, 1, 1]]]},
    "another folder": lambda value: {**value, "datasets": ["seq_64", "../other", "seq_256"]},
    "another order": lambda value: {**value, "datasets": value["datasets"][::-1]},
    "shares that change": lambda value: {**value, "interpolate": "linear"},
    "epochs": lambda value: {**value, "max_epochs": [1, 1, 1]},
    "a later version": lambda value: {**value, "version": 2},
}


@pytest.mark.parametrize("change", MIXTURES)
def test_a_mixture_that_is_not_of_the_datasets_is_found(folder, tmp_path, change):
    shutil.copytree(folder / "all", tmp_path / "out")
    shutil.copytree(folder / "all/seq_128", tmp_path / "other")
    path = tmp_path / "out/mixture.json"
    path.write_bytes(encode(MIXTURES[change](json.loads(path.read_bytes()))))
    faults = faults_across(tmp_path / "out")
    expected = "P1" if change == "a later version" else "P2"
    assert {(fault["promise"], fault["file"]) for fault in faults} == {(expected, "mixture.json")}
    path.unlink()
    (missing,) = faults_across(tmp_path / "out")
    assert (
        missing["promise"] == "P1" and "is missing; run the build's command" in missing["message"]
    )


def test_a_mixture_that_people_wrote_is_as_it_was(folder, tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(20, 3))
    for name in ("one", "two"):
        made.build(
            made.table([{"paths": ["a.jsonl"]}], tasks=[{"preset": "causal"}]),
            tmp_path,
            tmp_path / name,
        )
    mixture = {
        "format": "packprep mixture",
        "version": 1,
        "datasets": ["one", "two"],
        "shares": [3, 1],
    }
    (tmp_path / "mixture.json").write_text(json.dumps(mixture, indent=1))
    said = inside("verify", tmp_path, "--json")
    assert said.status == 0 and [report["kind"] for report in said.json] == ["dataset", "dataset"]


def test_a_document_in_two_datasets_or_in_none_is_found_without_the_sources(folder, tmp_path):
    """Each dataset is sound, and of the same recipe; but one build chose other documents for its
    row length."""
    lengths_of = segments._lengths_of

    def chosen(length):
        def choose(*arguments):
            lengths_of(*arguments)
            arguments[-1][:9] = length

        return choose

    for length, where in ((1, "2 of 3"), (0, "0 of 3")):
        out = shutil.copytree(folder / "all", tmp_path / f"out{length}")
        shutil.rmtree(out / "seq_128")
        with mock.patch.object(segments, "_lengths_of", chosen(length)):
            made.build({**table(), "seq_length": 128}, folder, out / "seq_128")
        mixed_again(out)
        faults = faults_across(out)
        assert faults and {fault["promise"] for fault in faults} == {"P21"}
        assert any(f"is in segments of {where} datasets" in fault["message"] for fault in faults), (
            faults
        )


def mixed_again(out: Path) -> None:
    """Write the mixture.json that belongs to the datasets as they are now."""
    (out / "mixture.json").unlink()
    slots = [
        json.loads(Path(one, "dataset.json").read_bytes())["ledger"]["row_slots"]
        for one in datasets_in(out)
    ]
    names = [f"seq_{length}" for length in LENGTHS]
    value = {"format": "packprep mixture", "version": 1, "datasets": names, "shares": [[0, slots]]}
    (out / "mixture.json").write_bytes(encode(value))


def test_pieces_that_two_datasets_have_are_found_without_the_sources(folder, tmp_path):
    """The dataset of rows of 256 has the pieces that those of 128 have."""
    cut = segments._cut

    def of_others(*arguments):
        columns, limits, policy, *written = arguments
        return cut(columns, limits, policy._replace(length=1), *written)

    out = shutil.copytree(folder / "cut", tmp_path / "out")
    shutil.rmtree(out / "seq_256")
    with mock.patch.object(segments, "_cut", of_others):
        made.build({**table("decompose"), "seq_length": 256}, folder, out / "seq_256")
    mixed_again(out)
    faults = faults_across(out)
    assert {fault["promise"] for fault in faults} == {"P21"}
    assert any("but the previous chunk ends at" in fault["message"] for fault in faults)
    assert any("are left to other row lengths" in fault["message"] for fault in faults)


@pytest.mark.long
def test_sources_that_changed_between_two_lengths_are_found(folder, tmp_path):
    shutil.copytree(folder / "web", tmp_path / "in/web")
    shutil.copy(folder / "books.parquet", tmp_path / "in")
    out = tmp_path / "out"
    made.build_lengths(table(), tmp_path / "in", out)
    shutil.rmtree(out / "seq_256")
    path = tmp_path / "in/web/a.jsonl"
    path.write_bytes(path.read_bytes().replace(b"corpus", b"sorpus"))
    made.build_lengths(table(), tmp_path / "in", out)
    faults = faults_across(out)
    assert {fault["promise"] for fault in faults} == {"P2"}
    assert all("the sources changed between the builds" in fault["message"] for fault in faults)


def test_a_dataset_that_lost_documents_is_compared_with_the_others(folder, tmp_path):
    out = shutil.copytree(folder / "all", tmp_path / "out")
    shutil.rmtree(out / "seq_64")
    (tmp_path / "list").write_text(
        '{"source": "web", "file": "web/b.jsonl", "doc": 0}\n'.replace("web/b", "b")
    )
    result = remove_documents(
        folder / "all/seq_64", tmp_path / "list", out / "seq_64", made.Silent()
    )
    assert result["removed"] == 1
    assert faults_across(out) == []
    (out / "mixture.json").unlink()  # `remove` writes none
    assert faults_across(out) == []


def test_chunks_of_a_decomposed_document_are_removed_from_one_dataset(folder, tmp_path):
    out = shutil.copytree(folder / "cut", tmp_path / "out")
    shutil.rmtree(out / "seq_128")
    dataset = open_dataset(folder / "cut/seq_128")
    headers = [dataset.row(i).segments for i in range(len(dataset))]
    docs = {int(d) for h in headers for d in h["doc"][(h["source"] == 0) & (h["file"] == 0)]}
    lines = [json.dumps({"source": "web", "file": "a.jsonl", "doc": doc}) for doc in docs]
    (tmp_path / "list").write_text("\n".join(lines))
    result = remove_documents(
        folder / "cut/seq_128", tmp_path / "list", out / "seq_128", made.Silent()
    )
    assert result["removed"] == len(docs) > 20
    assert faults_across(out) == []
