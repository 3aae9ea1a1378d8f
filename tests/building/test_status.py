import shutil

import pytest

from packprep.building.array import ranges, share_of
from packprep.building.status import print_status, status_of
from packprep.dataset.json_files import MANIFEST_NAME, receipt_name
from packprep.errors import PlanError


@pytest.fixture
def out(built, tmp_path):
    shutil.copytree(built.out, tmp_path / "out")
    return tmp_path / "out"


def test_a_published_dataset_misses_nothing(out):
    status = status_of(out, 4)
    assert status == {**status, "missing": [], "published": True, "array": "", "done": status["shards"]}


def test_missing_shards_and_the_array_that_would_make_them_are_listed(out):
    shards = status_of(out)["shards"]
    for shard in (0, 3):
        (out / receipt_name(shard)).unlink()
    status = status_of(out, 3)
    assert status["missing"] == [0, 3] and status["done"] == shards - 2 and not status["published"]
    lacking = [i for i in range(3) if {0, 3} & set(share_of(i, 3, shards))]
    assert status["array"] == ranges(lacking)
    assert "array" not in status_of(out)


def test_a_complete_build_without_a_manifest_is_a_state_of_its_own(out, capsys):
    (out / MANIFEST_NAME).unlink()
    status = status_of(out)
    assert status["missing"] == [] and not status["published"]
    print_status(status)
    assert "complete, but without a manifest: run the build's command once more" in capsys.readouterr().out


def test_the_status_is_printed_in_a_few_lines(out, capsys):
    print_status(status_of(out))
    assert capsys.readouterr().out.splitlines()[1:] == ["published"]
    (out / receipt_name(1)).unlink()
    shards = status_of(out)["shards"]
    print_status(status_of(out, shards))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"{shards - 1} of {shards} shards done") and lines[1:] == ["missing: 1", "--array=1"]


def test_a_folder_where_nothing_was_begun_is_refused(tmp_path):
    with pytest.raises(PlanError, match="no plan.json: nothing was begun here; `packprep build"):
        status_of(tmp_path)
