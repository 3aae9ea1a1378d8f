"""packprep.sources.formats.arrow: folders of save_to_disk."""

import json

import pytest

from packprep.errors import SourceError
from packprep.sources.formats.arrow import saved_files
from tests.tokens_made import save_dataset


def test_the_files_are_those_of_the_state_in_order_of_their_names(tmp_path):
    folder = save_dataset(tmp_path / "saved", [[1], [2], [3]], 3)
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "cache-1.arrow").write_bytes(b"not listed")
    assert saved_files(str(folder)) == [f"data-0000{i}-of-00003.arrow" for i in range(3)]


@pytest.mark.parametrize("key", ["_indices_files", "_indices_data_files"])
def test_an_indices_mapping_is_refused(tmp_path, key):
    folder = save_dataset(tmp_path / "saved", [[1]], 1, **{key: [{"filename": "indices.arrow"}]})
    with pytest.raises(
        SourceError, match="state.json: the dataset has an indices mapping .*\n.*flatten_indices"
    ):
        saved_files(str(folder))
    assert saved_files(str(save_dataset(tmp_path / "none", [[1]], 1, **{key: None})))


@pytest.mark.parametrize(
    "state, said",
    [
        ("{", "state.json: cannot be read"),
        ("[" * 100_000, "state.json: cannot be read"),
        ("[]", "it lists no _data_files"),
        ("{}", "it lists no _data_files"),
        ('{"_data_files": {"filename": "a"}}', "it lists no _data_files"),
        ('{"_data_files": ["a"]}', "None is not the name of a file in its folder"),
        ('{"_data_files": [{"filename": 5}]}', "5 is not the name of a file"),
        (
            '{"_data_files": [{"filename": "../a.arrow"}]}',
            "'../a.arrow' is not the name of a file in its folder",
        ),
        ('{"_data_files": [{"filename": ".."}]}', "'..' is not the name"),
        (
            '{"_data_files": [{"filename": "gone.arrow"}]}',
            "gone.arrow: the file is missing, but state.json lists it",
        ),
    ],
)
def test_damaged_states_are_errors(tmp_path, state, said):
    folder = save_dataset(tmp_path / "saved", [[1]], 1)
    (folder / "state.json").write_text(state)
    with pytest.raises(SourceError) as error:
        saved_files(str(folder))
    assert said in str(error.value) and str(folder) in str(error.value)


@pytest.mark.long
def test_a_state_of_more_than_64_mib_is_not_read(tmp_path):
    for size, said in (
        (64 << 20, "Expecting value"),
        ((64 << 20) + 1, "it has more than 67108864"),
    ):
        with open(tmp_path / "state.json", "wb") as file:
            file.truncate(size)
        with pytest.raises(SourceError, match=f"state.json: cannot be read: {said}"):
            saved_files(str(tmp_path))
