import numpy as np
import pytest

from packprep.building.inputs import look_up
from packprep.corpus.calibration import FIRST_CHARACTERS, calibrate, first_texts
from packprep.corpus.engines.registry import candidates, engine_facts, load_engine
from packprep.corpus.planning import PlannedSource
from packprep.recipe import Documents, read_recipe
from tests import made, tokens_made


def looked_up(folder, pattern, seed=0, **of_source):
    table = made.table(pattern, seed=seed)
    table["sources"][0].update(of_source)
    inputs = look_up(read_recipe(table, folder), {})
    unresolved = {"ratios": {}, "repeat": 1.0, "step_bytes": 1 << 14}
    return inputs, PlannedSource(inputs.recipe.sources[0], 0, inputs.prefixes[0], inputs.files[0], 0, unresolved, seed)


def estimate(folder, pattern, seed=0):
    inputs, source = looked_up(folder, pattern, seed)
    engine = load_engine(engine_facts(candidates("auto", inputs.vocabulary)[0]), inputs.vocabulary, "text")
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


def test_the_first_texts_are_documents_cut_to_some_characters_together(tmp_path):
    texts = made.texts(600, mean_bytes=900)
    made.write_lines(tmp_path / "a.jsonl", texts[:300])
    made.write_parquet(tmp_path / "b.parquet", texts[300:])
    made.write(tmp_path / "c.jsonl.zst", b"")
    *whole, last = first_texts(looked_up(tmp_path, "*")[1])
    assert sum(map(len, whole)) + len(last) == FIRST_CHARACTERS
    assert len(whole) > 100 and set(whole) <= set(texts) and any(text.startswith(last) for text in texts)


def test_all_texts_of_a_small_source_are_its_first_and_a_source_of_tokens_has_none(tmp_path):
    texts = made.texts(20, mean_bytes=300)
    made.write_lines(tmp_path / "a.jsonl", texts)
    assert sorted(first_texts(looked_up(tmp_path, "a.jsonl")[1])) == sorted(texts)
    tokens_made.write_parquet(tmp_path / "t.parquet", [[1, 2], [3]])
    source = looked_up(tmp_path, "t.parquet", format="tokens")[1]
    assert not list(first_texts(source))
