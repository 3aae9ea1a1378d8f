"""What `packprep doctor` finds: each check good, slow and failing."""

import dataclasses
import json
import os
import re
import resource
import shutil

import pytest

from packprep import cache
from packprep.building import processes
from packprep.cli import doctor
from packprep.errors import BuildError
from packprep.storage import LocalFolder
from packprep.tokenizer.engines import ENGINES
from tests import made
from tests.command_line import inside, packprep, refused
from tests.tokenizer.engines_made import prefer_fast_engines
from tests.tokenizer.tokenizers_made import gpt2_like


@pytest.fixture
def recipe(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(20))
    path = tmp_path / "r.toml"
    path.write_text(
        'seq_length = 256\ntokenizer = "bytes"\n[[sources]]\npaths = ["a.jsonl"]\n[[tasks]]\npreset'
        ' = "causal"\n'
    )
    return path


def checks(*arguments, status=0):
    """check → (result, what is said and advised)."""
    said = inside("doctor", *arguments, "--json")
    assert said.status == status, said
    found = said.json["checks"]
    assert said.json["result"] == max(
        (f["result"] for f in found), key=["ok", "slow", "fails"].index
    )
    return {f["check"]: (f["result"], f"{f['says']} ─► {f['advice']}") for f in found}


def test_a_machine_in_order_is_told_check_by_check_and_nothing_is_left(recipe, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    said = packprep("doctor", recipe, "--out", tmp_path / "new/out")
    assert said.status == 0 and sorted(tmp_path.rglob("*")) == before
    found = [line.split()[:2] for line in said.out.splitlines() if not line.startswith(" ")]
    assert [name for _, name in found] == ["versions", "kernels", "engine", "memory", "out", "room"]
    assert {result for result, _ in found} <= {"ok", "slow"}  # a disk may be slow
    for words in (
        "packprep 0.",
        "engine bytes 1, tokenizing about 600 MB/s",
        "GiB of memory free",
        "MB/s, hard links",
        "needed",
    ):
        assert words in said.out
    assert [*checks()] == ["versions", "kernels", "engines", "memory"]


def test_a_recipe_s_own_errors_are_errors_as_everywhere(recipe, tmp_path):
    assert "no-such.toml" in refused("doctor", tmp_path / "no-such.toml")
    assert "expected a RECIPE.toml" in refused("doctor", tmp_path / "a.jsonl")
    recipe.write_text(recipe.read_text().replace("a.jsonl", "b.jsonl"))
    assert "b.jsonl" in refused("doctor", recipe)


def test_without_a_place_for_kernels_it_says_what_that_costs(tmp_path, monkeypatch):
    """Of a read-only install, where every place that a cache may lie in cannot be written."""
    made.write(tmp_path / "file", b"a file is no folder")
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "file"))
    places = dict.fromkeys(("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"), str(tmp_path / "file"))
    cache.cache_folders.cache_clear()
    try:
        said = inside("doctor", **places)
    finally:
        cache.cache_folders.cache_clear()
    line = next(line for line in said.out.splitlines() if line.split()[1] == "kernels")
    assert (
        line.startswith("slow")
        and str(tmp_path / "file") in line
        and "about 10 s in every command" in line
    )
    assert "set NUMBA_CACHE_DIR to a folder that only you can write" in line and said.status == 0


def test_kernels_that_are_not_compiled_yet_or_lie_where_nothing_can_be_kept(monkeypatch):
    def kernels(to_read, own, kept):
        monkeypatch.setattr(doctor, "cache_folders", lambda: cache.CacheFolders(to_read, own))
        monkeypatch.setattr(doctor, "is_kept", lambda what: kept)
        return doctor._kernels()

    assert kernels((), "/c", True) == ("kernels", "ok", "compiled kernels are cached in /c", "")
    assert kernels((), "/c", False)[1:] == (
        "ok", "not compiled yet: the first command takes about 10 s more and caches them in /c",
        "run packprep warm to compile them now",
    )  # fmt: skip
    assert "read from /image" in kernels(("/image",), None, True).says
    assert kernels(("/image",), None, False).result == "slow"


@pytest.mark.long
def test_an_engine_that_would_be_faster_is_slow_and_says_how_to_have_it(
    recipe, tmp_path, monkeypatch
):
    made.write(tmp_path / "tok/tokenizer.json", json.dumps(gpt2_like()).encode())
    recipe.write_text(recipe.read_text().replace('"bytes"', '"tok"'))
    little = checks(recipe)["engine"]
    assert little[0] == "ok" and "longer to load and check fastokens than" in little[1]
    prefer_fast_engines(monkeypatch)
    assert checks(recipe)["engine"][0] == "ok"
    monkeypatch.setitem(
        ENGINES, "fastokens", dataclasses.replace(ENGINES["fastokens"], version=lambda: None)
    )
    result, said = checks(recipe)["engine"]
    assert result == "slow" and re.search(
        r"one core takes [\d,]+ s to .* ─► pip install fastokens", said
    )
    assert "not installed: fastokens" in checks()["engines"][1]


def test_memory_that_workers_lack_fails_with_how_many_have_it(recipe, monkeypatch):
    needs = inside("plan", recipe, "--json").json["worker_bytes"]
    for free, advice in (
        (needs, ""),
        (needs - 1, "--workers 1 and set a smaller output.shard_text_bytes"),
    ):
        monkeypatch.setattr(doctor, "free_memory", lambda free=free: free)
        result, said = checks(recipe, status=int(bool(advice)))["memory"]
        assert (result, said.partition("─► use ")[2]) == ("fails" if advice else "ok", advice)
    figures = {"text_bytes": 1 << 40, "shards": 64, "worker_bytes": 3}
    monkeypatch.setattr(doctor, "free_memory", lambda: 10)
    monkeypatch.setattr(doctor, "workers_for", lambda text_bytes: 9)
    assert (
        doctor._memory(figures).advice
        == "use --workers 3, or set a smaller output.shard_text_bytes"
    )


def test_a_limit_of_a_process_that_a_worker_exceeds_fails(recipe, monkeypatch):
    """Of ulimit -v, which says nothing of the machine's memory."""
    monkeypatch.setattr(doctor, "free_addresses", lambda: 1 << 20)
    result, said = checks(recipe, status=1)["memory"]
    assert (
        result == "fails"
        and "the limit of this process leaves 0.0 GiB ─► raise the limit (ulimit -v), or" in said
    )
    for limit, least, most in (
        (1 << 60, (1 << 60) - (1 << 50), (1 << 60) - (1 << 20)),
        (1 << 20, -1, 1),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda what, limit=limit: (limit, limit))
        assert least < processes.free_addresses() < most
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    assert processes.free_addresses() is None


def test_a_small_disk_with_room_enough_is_in_order_and_a_full_one_says_how_much_is_free(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr(LocalFolder, "free_bytes", lambda self: 1 << 20)
    found = checks(recipe, "--out", tmp_path / "new")
    assert found["room"][0] == "ok" and "too little space to measure MB/s" in found["out"][1]
    monkeypatch.setattr(
        LocalFolder, "write", lambda *given: (_ for _ in ()).throw(BuildError("full"))
    )
    monkeypatch.setattr(LocalFolder, "free_bytes", lambda self: 0)
    found = checks(recipe, "--out", tmp_path / "new", status=1)
    assert found["out"][0] == found["room"][0] == "fails" and not (tmp_path / "new").exists()


def test_free_memory_is_what_the_machine_has_or_the_tightest_limit_leaves(tmp_path):
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < processes.free_memory() <= total
    for folder, limit, stat in (
        ("", "max", None),
        ("a", "900", "file 500\nanon 100\n"),
        ("a/b", "5000", "anon 100\n"),
    ):
        made.write(tmp_path / folder / "memory.max", limit.encode())
        if stat:
            made.write(tmp_path / folder / "memory.stat", stat.encode())
    assert list(processes._left_by_limits(tmp_path, "/a/b", "memory.max", "anon")) == [4900, 800]


def test_a_folder_that_cannot_be_used_fails_and_says_why(recipe, tmp_path, monkeypatch):
    made.write(tmp_path / "file", b"")
    assert "Not a directory" in checks("--out", tmp_path / "file/out", status=1)["out"][1]
    made.write(tmp_path / "full/mine.txt", b"")
    assert (
        "has files that packprep did not write: mine.txt"
        in checks(recipe, "--out", tmp_path / "full", status=1)["out"][1]
    )
    monkeypatch.setattr(LocalFolder, "free_bytes", lambda self: 10)
    assert checks(recipe, "--out", tmp_path / "new", status=1)["room"][1].endswith(
        "free some space, or choose another --out"
    )


@pytest.mark.long
def test_a_folder_of_several_lengths_is_in_order_as_long_as_the_build_takes_it(recipe, tmp_path):
    several = recipe.with_name("several.toml")
    whole = re.sub(r"(?m)^seq_length = .*$", "", recipe.read_text())
    several.write_text(f"seq_lengths = [64, 128]\n{whole}")
    out = tmp_path / "several"
    assert "needed" in checks(several, "--out", out)["room"][1]
    assert inside("build", several, "--out", out).status == 0
    found = checks(several, "--out", out)
    assert found["out"][0] == "ok" and "needed" not in found["room"][1]
    shutil.rmtree(out / "seq_128/shards")  # to be made again
    assert "needed" in checks(several, "--out", out)["room"][1]
    said = checks(several, "--out", out / "seq_64", status=1)["out"][1]
    assert "is a dataset, but seq_lengths make several" in said
    assert "is a dataset, but seq_lengths make several" in refused(
        "plan", several, "--out", out / "seq_64"
    )
    several.write_text(f"seq_lengths = [64, 256]\n{whole}")
    assert "was started with another recipe" in checks(several, "--out", out, status=1)["out"][1]
    assert inside("plan", several, "--out", tmp_path / "new").out.count("no build yet") == 2


def test_a_slow_disk_and_one_without_links_are_told(tmp_path, monkeypatch):
    def no_links(*names):
        raise PermissionError

    monkeypatch.setattr(os, "link", no_links)
    seconds = iter([0.2, 0.2, 0.2, 0.1, 0.01, 0.01, 0.01, 10.0, 0.01, 0.01, 0.01, 0.1])
    monkeypatch.setattr(doctor, "_seconds", lambda act: act() or next(seconds))
    by_file, by_rate, good = (doctor._file_system(tmp_path / "out", None) for _ in range(3))
    assert (by_file.result, by_rate.result, good.result) == ("slow", "slow", "ok")
    assert "on disk after 200.0 ms" in by_file.says and ", 3 MB/s, no hard links" in by_rate.says
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(
        LocalFolder, "write", lambda *given: (_ for _ in ()).throw(BuildError("full"))
    )
    with pytest.raises(BuildError):
        doctor._file_system(tmp_path / "out", None)
    assert not list(tmp_path.iterdir())


def test_stores_are_listed_and_written_to(recipe, tmp_path):
    result, said = checks("--out", "memory://doctor/out")["out"]
    assert result == "ok" and "creating, reading and removing" in said
    assert checks("--out", "nosuch://bucket/out", status=1)["out"][0] == "fails"
    recipe.write_text(recipe.read_text().replace("a.jsonl", "nosuch://bucket/a.jsonl"))
    found = checks(recipe, status=1)
    assert found["store"][0] == "fails" and "nosuch" in found["store"][1]
