"""What an import costs: a trainer needs numpy alone, and `import packprep` needs nothing."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

HEAVY = {
    "numba",
    "pyarrow",
    "tokenizers",
    "torch",
    "jax",
    "zstandard",
    "msgspec",
    "xxhash",
    "tqdm",
    "typer",
}


def imported_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `code`."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import packprep",
        "import packprep; packprep.open_dataset",
        "from packprep import open_dataset",
        "import packprep.dataset.attention",
        "import packprep.adapters",
    ],
)
def test_a_trainer_imports_nothing_heavy(code):
    assert imported_by(code) & HEAVY == set()


def test_the_command_line_imports_no_trainer_s_library():
    assert (
        imported_by("import packprep.cli.application, packprep.building.run")
        & {"torch", "jax", "transformers"}
        == set()
    )


@pytest.mark.parametrize(
    "code",
    [
        "import packprep.cli.application, packprep.building.run",
        "from packprep.objectives.span_corruption import span_counts; span_counts(100, 0.15, 3.0)",
        (
            "import pathlib, packprep.building.planning as inputs; from packprep.recipe import"
            " read_recipe; tables = {'sources': [{'paths': [__file__]}], 'tasks': [{'preset':"
            " 'ul2r'}], 'tokenizer': 'bytes', 'seq_length': 512};"
            " inputs.look_up(read_recipe(tables, pathlib.Path()), {})"
        ),
    ],
)
def test_numba_comes_with_the_first_kernel_that_is_called_and_not_before(code):
    code = f"__file__ = {__file__!r}; {code}"
    assert "numba" not in imported_by(code)
    assert "numba" in imported_by(
        f"{code}; from packprep.kernel import warm_kernels; warm_kernels()"
    )


def test_choosing_texts_of_a_table_does_not_import_pandas(tmp_path):
    pytest.importorskip("pandas", reason="only an installed pandas can be imported")
    table = pa.table({"text": ["one", "two"], "score": [1.0, 2.0]})
    pq.write_table(table, tmp_path / "a.parquet")
    code = (
        "from packprep.recipe import Source; from packprep.sources.formats import Slice, read;"
        " from packprep.sources.passes import ByFields, Passes;"
        " keep = ByFields(Passes.of(Source(paths=('a',), where='score > 1'), 0), 0, None);"
        f" part = Slice({str(tmp_path / 'a.parquet')!r}, 0,"
        f" {(tmp_path / 'a.parquet').stat().st_size}, 'parquet', '', 0, 0, 1, 1, 1);"
        " (batch,) = read(part, 'text', keep); assert batch.texts == ['two']"
    )
    assert {"pyarrow"} == imported_by(code) & {"pyarrow", "pandas"}


def test_import_packprep_does_not_even_bring_numpy():
    assert "numpy" not in imported_by("import packprep")


@pytest.mark.long
def test_this_test_can_fail():
    assert imported_by("import numba") & HEAVY >= {"numba"}


def test_the_face_of_the_package_is_one_name():
    import packprep

    assert packprep.__all__ == ["open_dataset"] and "open_dataset" in dir(packprep)
    assert packprep.open_dataset.__module__ == "packprep.dataset.loader"
    with pytest.raises(AttributeError, match="'open_datasets'"):
        packprep.open_datasets  # noqa: B018
