"""A dataset of files at URLs has the bytes of one of the same files on disk."""

import pytest

from packprep.errors import SourceError, StorageError
from packprep.storage import Remote
from tests import made
from tests.command_line import packprep
from tests.storage.conftest import BUCKET

pytestmark = pytest.mark.xdist_group("s3")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    sources = [*made.mixed_corpus(folder), {"name": "more", "paths": ["more/*.arrow"]}]
    made.write_arrow(folder / "more" / "e.arrow", made.texts(120))
    made.write_parquet(folder / "books" / "z.parquet", made.texts(90, 7), 20)
    return folder, sources


def upload(folder, remote: Remote) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            remote.write(path.relative_to(folder).as_posix(), [path.read_bytes()])


def at(url: str, sources):
    return [
        {**source, "paths": [f"{url}/{path}" for path in source["paths"]]} for source in sources
    ]


def shards(folder):
    return made.contents(folder, "shards/")


@pytest.fixture(scope="module")
def local(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("local") / "out"
    assert made.build(made.table(corpus[1]), corpus[0], out).manifest is not None
    return out


@pytest.mark.long
def test_the_bytes_are_the_same(s3, corpus, local, tmp_path):
    remote = Remote(f"s3://{BUCKET}/{tmp_path.name}/corpus")
    upload(corpus[0], remote)
    table = made.table(at(remote.url, corpus[1]))
    outcome = made.build(table, tmp_path, tmp_path / "out", workers=2)
    assert outcome.manifest is not None
    assert shards(tmp_path / "out") == shards(local) and shards(local)
    # From the local folder on, by --source.
    moved = {
        source["name"]: f"{corpus[0]}/{source['paths'][0].split('/')[0]}" for source in corpus[1]
    }
    made.build(table, tmp_path, tmp_path / "moved", moved=moved)
    assert shards(tmp_path / "moved") == shards(local)


@pytest.mark.long
def test_a_build_goes_through_lost_connections(s3, breaking, corpus, local, tmp_path):
    remote = Remote(f"s3://{BUCKET}/{tmp_path.name}/corpus")
    upload(corpus[0], remote)
    proxy = breaking("download", 20_000, 6)
    made.build(made.table(at(remote.url, corpus[1])), tmp_path, tmp_path / "out")
    assert proxy.cut == 6 and shards(tmp_path / "out") == shards(local)


@pytest.mark.long
def test_verify_reads_urls(corpus, local):
    moved = [
        part
        for source in corpus[1]
        for part in (
            "--source",
            f"{source['name']}=file://{corpus[0]}/{source['paths'][0].split('/')[0]}",
        )
    ]
    assert packprep("verify", local, "--replay", "all", *moved).status == 0


def test_a_changed_or_missing_object_is_said(corpus, tmp_path, local):
    remote = Remote(f"memory://changed{tmp_path.name}")
    upload(corpus[0], remote)
    table = made.table(at(remote.url, corpus[1][:1]))
    from packprep.sources.formats.batch import open_source

    with (
        pytest.raises(SourceError, match="had 3 when the plan was made"),
        open_source(f"{remote.url}/web/a.jsonl", 3),
    ):
        pass
    with (
        pytest.raises(SourceError, match="the file is missing"),
        open_source(f"{remote.url}/web/no.jsonl", 3),
    ):
        pass
    remote.write("web/bad.parquet", [b"PAR1 is not all that a file needs PAR1"])
    with pytest.raises(SourceError, match="bad.parquet: not a readable Parquet file"):
        made.build(table, tmp_path, tmp_path / "out")


@pytest.mark.long
def test_wrong_credentials_end_the_command_with_one_line(server, tmp_path):
    (tmp_path / "recipe.toml").write_text(
        'seq_length = 512\ntokenizer = "bytes"\nsources = [{name = "web", paths ='
        f' ["s3://{BUCKET}/web/*"]}}]\ntasks = [{{preset = "causal"}}]\n'
    )
    for variable in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        environment = {**server.environment, variable: "wrong"}
        said = packprep("build", "recipe.toml", "--out", "out", at=tmp_path, **environment)
        assert said.status == 2 and said.err.count("The store refused the credentials") == 1, said
    said = packprep("build", "recipe.toml", "--out", "out", at=tmp_path, **server.environment)
    assert said.status == 2 and f"s3://{BUCKET}/web/* matches no file" in said.err, said
    recipe = (tmp_path / "recipe.toml").read_text().replace(BUCKET, "nobody-has-it")
    (tmp_path / "recipe.toml").write_text(recipe)
    said = packprep("build", "recipe.toml", "--out", "out", at=tmp_path, **server.environment)
    assert said.status == 2 and "bucket nobody-has-it does not exist" in said.err, said


def test_a_store_that_fails_while_arrow_reads_is_a_storage_error(corpus, tmp_path, monkeypatch):
    from packprep.storage import remote as module

    remote = Remote(f"memory://failing{tmp_path.name}")
    upload(corpus[0], remote)
    monkeypatch.setattr(module, "_TRIES", 1)
    monkeypatch.setattr("packprep.storage.stores._FsspecReader.read_at", lambda *_: b"short")
    with pytest.raises(StorageError, match="reading failed: .*received 5 of"):
        made.build(made.table(at(remote.url, corpus[1][1:2])), tmp_path, tmp_path / "out")
