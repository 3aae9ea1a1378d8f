"""The command: where it writes, what it refuses, and what is left when it is stopped, killed or out
of room."""

import errno
import os
import re
import resource
import shutil
import signal
import sys
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from packprep import open_dataset
from packprep.building.processes import one_by_one
from packprep.errors import DatasetError, PlanError, RecipeError, Stopped
from packprep.exporting import EXPORTS, Export
from packprep.exporting.export import each_shard, export_dataset, sound_shard
from packprep.format.digests import digest_of
from packprep.format.json_files import decode, encode, shard_name
from packprep.storage import Remote
from tests import made, weights_made
from tests.command_line import inside, packprep, refused
from tests.crash import disturbed
from tests.exporting.plain import documents_of

FORMS = [
    ("megatron", "--what", "documents"),
    ("megatron", "--what", "rows"),
    ("parquet", "--columns", "nemo"),
]
FORMS += [
    ("parquet", "--columns", "full"),
    ("jsonl", "--what", "documents"),
    ("jsonl", "--what", "rows"),
]


def command(known, out, form, *more):
    return ["export", known.out, "--to", form[0], *form[1:], "--out", out, "--workers", 1, *more]


@pytest.fixture
def own(known, tmp_path):
    """A dataset that may be damaged."""
    return shutil.copytree(known("repeated").out, tmp_path / "dataset")


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_the_command_as_a_user_types_it(known, tmp_path, form):
    said = packprep(*command(known("repeated"), tmp_path / "out", form))
    assert said.status == 0 and ".export.json" in said.out
    before = made.contents(tmp_path / "out")
    again = packprep(*command(known("repeated"), tmp_path / "out", form, "--json"))
    assert again.status == 0 and "nothing to make" in again.err and again.json["to"] == form[0]
    assert made.contents(tmp_path / "out") == before and ".export-begun.json" not in before


@pytest.mark.parametrize("form", [form for form in FORMS if form[0] in ("parquet", "jsonl")])
def test_a_folder_of_data_is_read_whole_by_the_libraries_of_its_format(known, tmp_path, form):
    """They take each file of a folder for data, but for those whose names begin with a dot."""
    datasets = pytest.importorskip("datasets")
    assert inside(*command(known("repeated"), tmp_path / "out", form)).status == 0
    files = [path for path in (tmp_path / "out").iterdir() if path.suffix == f".{form[0]}"]
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))[
        "train"
    ]
    if form[0] == "jsonl":
        assert len(loaded) == sum(path.read_bytes().count(b"\n") for path in files)
    else:
        assert (
            len(loaded)
            == pq.read_table(tmp_path / "out").num_rows
            == len(known("repeated").dataset)
        )


@pytest.mark.parametrize("form", FORMS)
def test_the_receipt_names_all_files_and_what_they_were_made_of(known, tmp_path, form):
    assert inside(*command(known("repeated"), tmp_path / "out", form)).status == 0
    files = made.contents(tmp_path / "out")
    receipt, manifest = (
        decode(files.pop(".export.json"), ".export.json"),
        known("repeated").dataset.manifest,
    )
    assert receipt["dataset"] == {
        "digest": manifest["digest"],
        "fingerprint": manifest["fingerprint"],
    }
    assert receipt["to"] == form[0] and receipt[form[1][2:]] == form[2]
    named = {file["file"]: (file["bytes"], file["digest"]) for file in receipt["files"]}
    assert named == {name: (len(data), digest_of(data)) for name, data in files.items()}


def test_rows_are_the_packed_rows(known, tmp_path):
    receipt = known("repeated").export(tmp_path / "out", "megatron", what="rows")
    dataset = open_dataset(known("repeated").out)
    assert documents_of(tmp_path / "out/rows") == [
        dataset.row(i).tokens.tolist() for i in range(len(dataset))
    ]
    assert receipt["data_path"] == [str(len(dataset) * 256), str(tmp_path / "out/rows")]


def test_a_path_with_spaces_can_be_pasted(known, tmp_path):
    said = inside(*command(known("repeated"), tmp_path / "my out", FORMS[0]))
    assert f"'{tmp_path}/my out/my_books_document'" in said.out


def test_an_out_that_holds_something_else_is_refused(known, tmp_path):
    out = tmp_path / "out"
    made.write(out / "precious.txt", b"mine")
    assert "is not empty and contains no export (it contains 'precious.txt')" in refused(
        *command(known("repeated"), out, FORMS[0])
    )
    assert made.contents(out) == {"precious.txt": b"mine"}
    made.write(tmp_path / "file", b"mine")
    assert "is not a folder" in refused(*command(known("repeated"), tmp_path / "file", FORMS[0]))
    known("repeated").export(tmp_path / "export", "megatron")
    before = made.contents(tmp_path / "export")
    for other, form, key in (
        ("repeated", FORMS[1], "what"),
        ("repeated", FORMS[2], "to"),
        ("bos", FORMS[0], "dataset"),
    ):
        assert f"contains another export: {key} is" in refused(
            *command(known(other), tmp_path / "export", form)
        )
    assert made.contents(tmp_path / "export") == before
    assert "contains no export" in refused(*command(known("repeated"), known("bos").out, FORMS[0]))


@pytest.mark.parametrize(
    "to, form", [(to, form) for to, own in EXPORTS.items() for form in own.choices or ("",)]
)
def test_weights_that_documents_give_are_exported_refused_or_ignored_as_asked(tmp_path, to, form):
    weights_made.build(
        tmp_path, weights_made.records(1, 60), [weights_made.TASKS["causal"]], seq_length=64
    )
    options = {EXPORTS[to].option: form} if form else {}
    out = tmp_path / "exported"
    if form in EXPORTS[to].weighted:
        receipt = export_dataset(tmp_path / "out", to, out, made.Silent(), **options)
        assert "loss_weights" not in receipt
        with pytest.raises(
            RecipeError, match="this export has the column loss_weights\nhint: leave the option out"
        ):
            export_dataset(
                tmp_path / "out", to, out, made.Silent(), loss_weights="ignore", **options
            )
        return
    with pytest.raises(
        RecipeError,
        match="documents of source0 have weights other than 1\nhint: .* --loss-weights ignore",
    ):
        export_dataset(tmp_path / "out", to, out, made.Silent(), **options)
    assert not out.exists()
    receipt = export_dataset(
        tmp_path / "out", to, out, made.Silent(), loss_weights="ignore", **options
    )
    assert receipt["loss_weights"] == "ignore" and receipt["files"]


def test_loss_weights_is_refuse_or_ignore(known, tmp_path):
    with pytest.raises(RecipeError, match="--loss-weights all: expected refuse or ignore"):
        export_dataset(
            known("repeated").out, "mds", tmp_path / "out", made.Silent(), loss_weights="all"
        )
    # none give weights
    receipt = known("repeated").export(tmp_path / "out", "megatron", loss_weights="ignore")
    assert "loss_weights" not in receipt


@pytest.mark.parametrize("place", ["", "export", "shards/000", "../out/shards"])
def test_an_out_inside_the_dataset_is_refused(known, place):
    before = made.contents(known("repeated").out)
    assert "is inside the dataset" in refused(
        *command(known("repeated"), known("repeated").out / place, FORMS[0])
    )
    assert made.contents(known("repeated").out) == before


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_shard_is_refused_before_anything_is_exported_from_it(own, tmp_path, form):
    path = own / shard_name(1)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        DatasetError,
        match=r"000001\.safetensors: its digest is .* The file is damaged\nhint: `packprep verify`",
    ):
        export_dataset(own, form[0], tmp_path / "out", made.Silent(), **{form[1][2:]: form[2]})
    assert ".export.json" not in made.contents(tmp_path / "out") and not made.temporaries(
        tmp_path / "out"
    )
    data[-3] ^= 1
    path.write_bytes(data)
    export_dataset(own, form[0], tmp_path / "out", made.Silent(), **{form[1][2:]: form[2]})
    export_dataset(own, form[0], tmp_path / "again", made.Silent(), **{form[1][2:]: form[2]})
    assert made.contents(tmp_path / "out") == made.contents(tmp_path / "again")


def test_datasets_that_lack_a_file_are_refused(own, tmp_path):
    for name, error, words in (
        (shard_name(0), DatasetError, "hint: restore the file"),
        ("plan.json", PlanError, "no plan.json"),
        ("tokenizer.json", PlanError, "hint: restore it"),
        ("dataset.json", DatasetError, "is not finished\nhint: run its command again"),
    ):
        (own / name).rename(tmp_path / "kept")
        with pytest.raises(error, match=words):
            export_dataset(own, "megatron", tmp_path / "out", made.Silent())
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "kept").rename(own / name)
    manifest = (own / "dataset.json").read_bytes()
    (own / "dataset.json").write_bytes(manifest.replace(b'"pad_id":256', b'"pad_id":255'))
    with pytest.raises(DatasetError, match="changed or damaged after it was written"):
        export_dataset(own, "parquet", tmp_path / "out", made.Silent())


def test_options_of_the_other_target_are_refused(known, tmp_path):
    for more, words in (
        (["--columns", "full"], "--columns is an option of --to parquet"),
        (["--columns", "nemo"], "--columns is an option of --to parquet"),
    ):
        assert words in refused(*command(known("repeated"), tmp_path / "out", FORMS[0], *more))
    assert "--what is an option of --to megatron or --to jsonl" in refused(
        *command(known("repeated"), tmp_path / "out", FORMS[2], "--what", "rows")
    )
    assert (
        inside("export", known("repeated").out, "--to", "arrow", "--out", tmp_path / "out").status
        == 2
    )
    with pytest.raises(RecipeError, match="--to arrow: expected megatron or parquet"):
        export_dataset(known("repeated").out, "arrow", tmp_path / "out", made.Silent())
    assert not (tmp_path / "out").exists()


def test_an_export_is_a_line_and_a_file(own, tmp_path, monkeypatch):
    def write(exporting):
        return {
            "files": [],
            "rows": [rows for _, rows in each_shard(exporting, counted)],
            "form": exporting.form,
        }

    def counted(dataset, manifest):
        def count(item, report):
            with sound_shard(dataset, manifest, item.number) as shard:
                return shard.rows

        return one_by_one(count)

    module = SimpleNamespace(
        check=lambda exporting: None, write=write, located=lambda receipt, out: receipt
    )
    monkeypatch.setitem(EXPORTS, "toy", Export("nothing"))
    monkeypatch.setitem(sys.modules, "packprep.exporting.toy", module)
    found = export_dataset(own, "toy", tmp_path / "out", made.Silent())
    assert (
        found["to"] == "toy"
        and found["form"] == ""
        and sum(found["rows"]) == len(open_dataset(own))
    )
    with pytest.raises(
        RecipeError,
        match="--what is an option of --to megatron or --to jsonl or --to array_record, not of --to toy",
    ):
        export_dataset(own, "toy", tmp_path / "out", made.Silent(), what="rows")


class StopsAt(made.Silent):
    """A progress in which the user ends the command after so many reports."""

    def __init__(self, left):
        super().__init__()
        self.left = left

    def add(self, *counts):
        super().add(*counts)
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("form", FORMS)
def test_an_export_that_a_signal_stops_leaves_no_temporary_and_goes_on(known, tmp_path, form):
    options = {form[1][2:]: form[2]}
    known("repeated").export(tmp_path / "whole", form[0], **options)
    progress = StopsAt(2)

    def stop(*_):
        raise Stopped("as the command line does")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(Stopped):
            export_dataset(
                known("repeated").out, form[0], tmp_path / "out", progress, workers=1, **options
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert progress.ended == 1
    left = made.contents(tmp_path / "out")
    assert not made.temporaries(tmp_path / "out") and ".export.json" not in left
    # a worker may end a file while the signal is heard
    assert len(left) in ((1,) if form[0] == "megatron" else (2, 3))
    known("repeated").export(tmp_path / "out", form[0], **options)
    assert made.contents(tmp_path / "out") == made.contents(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("form", FORMS)
def test_an_export_killed_at_any_call_goes_on_to_the_same_bytes(known, tmp_path, form, every):
    calls = disturbed.run(
        command(known("repeated"), tmp_path / "whole", form), tmp_path / "whole"
    ).calls
    expected = made.contents(tmp_path / "whole")
    assert any(call.startswith("rename") for call in calls)
    for at in disturbed.different([re.sub(r"[0-9]{6}", "N", call) for call in calls])[::every]:
        out = tmp_path / f"out{at}"
        killed = disturbed.run(command(known("repeated"), out, form), out, at)
        assert killed.status == -signal.SIGKILL, killed
        if out.exists():
            there = {
                name: data for name, data in made.contents(out).items() if not name.endswith(".tmp")
            }
            there.pop(".export-begun.json", None)
            assert there.items() <= expected.items()
        again = inside(*command(known("repeated"), out, form))
        assert again.status == 0, again.err
        assert made.contents(out) == expected, calls[at - 1]
        shutil.rmtree(out)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2]])
def test_a_full_disk_is_named_and_what_is_whole_stays(known, tmp_path, form):
    expected = tmp_path / "whole"
    inside(*command(known("repeated"), expected, form))
    limit = max(len(data) for name, data in made.contents(expected).items()) - 1
    out = tmp_path / "out"
    ended = disturbed.run(
        command(known("repeated"), out, form), out,
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert ended.status == 2 and "ulimit -f" in ended.err and not made.temporaries(out)
    ended = disturbed.run(
        command(known("repeated"), tmp_path / "full", form),
        tmp_path / "full",
        9,
        strike=errno.ENOSPC,
    )
    assert ended.status == 2 and "the disk is full" in ended.err, ended
    for folder in (out, tmp_path / "full"):
        assert inside(*command(known("repeated"), folder, form)).status == 0
        assert made.contents(folder) == made.contents(expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_is_gone_is_made_again(known, tmp_path, form):
    run = command(known("repeated"), tmp_path / "out", form)
    inside(*run)
    expected = made.contents(tmp_path / "out")
    for name in expected:
        (tmp_path / "out" / name).unlink()
        if name == ".export.json":
            assert "contains no export" in refused(*run)
            (tmp_path / "out" / name).write_bytes(expected[name])
        else:
            assert inside(*run).status == 0
        assert made.contents(tmp_path / "out") == expected


@pytest.mark.parametrize("note", [".export.json", ".export-begun.json"])
@pytest.mark.parametrize("data", [b"{}\n", b"[]\n", b"nonsense", b'{"files":1}\n'])
def test_a_damaged_note_is_refused(known, tmp_path, note, data):
    made.write(tmp_path / "out" / note, data)
    assert note in refused(*command(known("repeated"), tmp_path / "out", FORMS[0]))
    assert made.contents(tmp_path / "out") == {note: data}


def test_a_dataset_at_a_url_and_parquet_into_one(known, tmp_path):
    remote = Remote("memory://exporting/dataset")
    for name, data in made.contents(known("repeated").out).items():
        remote.write(name, [data])
    for form in FORMS:
        options = {form[1][2:]: form[2]}
        known("repeated").export(tmp_path / form[0] / form[2], form[0], **options)
        export_dataset(
            remote.url, form[0], tmp_path / "remote" / form[0] / form[2], made.Silent(), **options
        )
    assert made.contents(tmp_path / "remote/megatron") == made.contents(tmp_path / "megatron")
    assert made.contents(tmp_path / "remote/parquet") == made.contents(tmp_path / "parquet")
    to = Remote("memory://exporting/parquet")
    for _ in range(2):
        export_dataset(remote.url, "parquet", to.url, made.Silent())
    assert {name: to.read(name) for name, _ in to.list()} == made.contents(
        tmp_path / "parquet/nemo"
    )
    with pytest.raises(
        RecipeError,
        match="memory://exporting/m: Megatron's files can only be written to a local folder",
    ):
        export_dataset(remote.url, "megatron", "memory://exporting/m", made.Silent())
    with pytest.raises(RecipeError, match="is inside the dataset"):
        export_dataset(remote.url, "parquet", f"{remote.url}/more", made.Silent())


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    """Folders of two row lengths, with documents whole, or in pieces."""
    folder = tmp_path_factory.mktemp("lengths")
    made.write_lines(folder / "a.jsonl", made.texts(40))
    for long in ("split", "decompose"):
        table = made.table(
            "a.jsonl", documents={"long": long}, seq_lengths=[64, 256], tasks=[{"preset": "causal"}]
        )
        del table["seq_length"]
        made.build_lengths(table, folder, folder / long)
    return folder


def test_a_folder_of_several_lengths_is_exported_one_by_one(lengths, tmp_path):
    out = tmp_path / "out"
    command = "export", lengths / "split", "--to", "jsonl", "--workers", 1, "--json", "--out", out
    said = inside(*command)
    assert said.status == 0, said
    assert [one["out"] for one in said.json] == [f"{out}/seq_64", f"{out}/seq_256"]
    lines = [
        line
        for data in made.contents(out).values()
        for line in data.splitlines()
        if b'"text"' in line
    ]
    assert (
        len(lines) == len({decode(line, "", canonical=False)["position"] for line in lines}) == 40
    )
    alone = inside("export", lengths / "split/seq_64", *command[2:-1], tmp_path / "alone")
    assert made.contents(tmp_path / "alone") == made.contents(out / "seq_64") and alone.status == 0
    assert inside(*command).err.count("nothing to make") == 2
    assert "is inside the dataset" in refused(*command[:-1], lengths / "split/rows")


def test_documents_in_pieces_of_several_lengths_are_refused_and_their_rows_exported(
    lengths, tmp_path
):
    out = tmp_path / "out"
    for to in ("jsonl", "megatron"):
        command = "export", lengths / "decompose", "--to", to, "--workers", 1, "--out", out / to
        assert 'documents.long = "decompose" divides documents' in refused(*command)
        assert not out.exists()
    for to in (("jsonl", "--what", "rows"), ("parquet", "--columns", "full")):
        said = inside(
            "export", lengths / "decompose", "--to", *to, "--workers", 1, "--out", out / to[0]
        )
        assert said.status == 0 and said.out.count(" rows, ") == 2, said


def test_an_unfinished_folder_of_several_lengths_is_refused_before_anything_is_written(
    lengths, tmp_path
):
    unfinished = shutil.copytree(lengths / "split", tmp_path / "unfinished")
    (unfinished / "seq_256/dataset.json").unlink()
    command = "export", unfinished, "--to", "jsonl", "--workers", 1, "--out", tmp_path / "out"
    assert "seq_256 is not finished" in refused(*command) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "form, change",
    [
        (("megatron", "--what", "documents"), {"data_path": 10**400}),
        (("megatron", "--what", "documents"), {"documents": None}),
        (("parquet", "--columns", "full"), {"rows": ""}),
        (("mds",), {"columns": 7}),
        (("jsonl", "--what", "rows"), {"files": [{"file": "\0", "bytes": 1}]}),
    ],
)
def test_a_receipt_that_is_none_of_this_export_is_refused(known, tmp_path, form, change):
    assert inside(*command(known("repeated"), tmp_path / "out", form)).status == 0
    path = tmp_path / "out/.export.json"
    path.write_bytes(encode({**decode(path.read_bytes(), path.name), **change}))
    said = refused(*command(known("repeated"), tmp_path / "out", form))
    assert "not the keys and values of an export" in said
