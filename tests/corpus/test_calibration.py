import numpy as np
import pytest

from packprep.building.plan import look_up
from packprep.corpus.calibration import calibrate
from packprep.corpus.engines.registry import candidates, engine_facts, load_engine
from packprep.corpus.planning import PlannedSource
from packprep.recipe import Documents, read_recipe
from tests import made


def estimate(folder, pattern, seed=0):
    inputs = look_up(read_recipe(made.table(pattern, seed=seed), folder), {})
    engine = load_engine(engine_facts(candidates("auto", inputs.vocabulary)[0]), inputs.vocabulary, "text")
    unresolved = {"ratios": {}, "repeat": 1.0, "step_bytes": 1 << 14}
    source = PlannedSource(inputs.recipe.sources[0], 0, inputs.prefixes[0], inputs.files[0], 0, unresolved, seed)
    return calibrate(source, engine, inputs.vocabulary, Documents())


def text_bytes(texts):
    return sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("ending, kind", [("jsonl", "jsonl"), ("jsonl.gz", "jsonl.gzip"), ("jsonl.zst", "jsonl.zstd")])
def test_a_small_source_is_measured_whole(tmp_path, ending, kind):
    texts = made.texts(300)
    path = made.write_lines(tmp_path / f"a.{ending}", texts)
    found = estimate(tmp_path, f"a.{ending}")
    assert found.ratios == {kind: round(1024 * text_bytes(texts) / path.stat().st_size)}
    assert found.tokens_per_byte == 1.0 and found.document_bytes == text_bytes(texts) / 300


def test_parquet_and_text_files_have_ratios_of_their_own(tmp_path):
    texts = made.texts(200)
    made.write_parquet(tmp_path / "a.parquet", texts)
    made.write_texts(tmp_path, texts[:20])
    made.write_lines(tmp_path / "b.jsonl", texts[:50])
    found = estimate(tmp_path, "*")
    assert set(found.ratios) == {"parquet", "text", "jsonl"} and found.ratios["text"] == 1024
    assert found.ratios["jsonl"] < 1024


def test_a_large_source_is_estimated_from_a_part_of_it(tmp_path):
    texts = made.texts(4000, mean_bytes=4000)
    path = made.write_lines(tmp_path / "a.jsonl", texts)
    assert path.stat().st_size > 8 << 20
    found = estimate(tmp_path, "a.jsonl")
    exact = 1024 * text_bytes(texts) / path.stat().st_size
    assert abs(found.ratios["jsonl"] / exact - 1) < 0.02
    assert 0 <= found.relative_error < 0.2
    assert found == estimate(tmp_path, "a.jsonl")


@pytest.mark.parametrize("ending, within", [("jsonl", 0.05), ("jsonl.zst", 0.15), ("jsonl.gz", 0.15)])
@pytest.mark.parametrize("seed", range(3))
def test_few_very_long_documents_are_estimated_by_their_own_bytes(tmp_path, ending, within, seed):
    texts = made.texts(40, seed, mean_bytes=300_000)
    path = made.write_lines(tmp_path / f"a.{ending}", texts)
    (ratio,) = estimate(tmp_path, f"a.{ending}", seed).ratios.values()
    assert abs(ratio / 1024 * path.stat().st_size / text_bytes(texts) - 1) < within


def test_a_source_without_text_has_harmless_figures(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", [])
    made.write_lines(tmp_path / "b.jsonl", [""])
    found = estimate(tmp_path, "*.jsonl")
    assert found.ratios == {"jsonl": 1024} and found.tokens_per_byte == 1.0
    assert found.relative_error == 0.0


@pytest.mark.parametrize("kept, repeat", [(1.0, 0.4), (1.0, 2.5), (0.3, 1.0), (0.6, 0.7)])
def test_the_error_counts_in_that_chance_decides_which_documents_are_used(tmp_path, kept, repeat):
    texts = made.texts(400, mean_bytes=1500)
    made.write_lines(tmp_path / "a.jsonl", texts)
    found = estimate(tmp_path, "a.jsonl")
    sizes = np.array([len(text.encode()) for text in texts], np.float64)
    assert found.spread == pytest.approx(np.mean(sizes**2) / np.mean(sizes) ** 2, rel=0.2)
    draws = np.random.default_rng(0).random((2, 4000, len(sizes)))
    uses = (draws[0] < kept) * (repeat // 1 + (draws[1] < repeat % 1))
    used = uses @ sizes
    assert found.error_of(kept, repeat, kept * len(sizes)) == pytest.approx(used.std() / used.mean(), rel=0.15)


def test_all_documents_once_have_the_error_of_the_estimate_alone(tmp_path):
    made.write_lines(tmp_path / "a.jsonl", made.texts(50))
    found = estimate(tmp_path, "a.jsonl")
    assert found.error_of(1.0, 2.0, 50) == found.relative_error
