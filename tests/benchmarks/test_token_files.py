"""Token files of other projects' own writers: TOKEN_FILE_CHECKOUTS names a folder with their
checkouts llm.c, nanoGPT and OLMo-core, each of which may be missing."""

import os
from pathlib import Path

import pytest

CHECKOUTS = "TOKEN_FILE_CHECKOUTS"


@pytest.mark.campaign
def test_files_of_datatrove_dolma_and_other_writers_have_the_ids_of_their_texts():
    for package in ("datatrove", "dolma"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    token_files = pytest.importorskip("token_files")
    arguments = []
    if CHECKOUTS in os.environ:
        for option, name in (
            ("llm-c", "llm.c"),
            ("nanogpt", "nanoGPT"),
            ("olmo-core", "OLMo-core"),
        ):
            if (folder := Path(os.environ[CHECKOUTS], name)).is_dir():
                arguments += [f"--{option}", str(folder)]
    assert token_files.main(arguments) == 0
