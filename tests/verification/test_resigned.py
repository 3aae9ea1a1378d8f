"""One element of one array changed a little, and all digests signed again: what finds it, and what
no check can see.

`verify` alone proves from a row's stored arrays that attention and loss stay inside segments, so it
has to find every change of an array but those of OF_THE_SOURCES, which only the sources tell;
`verify --replay all` finds these.
"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.made import write_lines
from tests.verification.damage import (
    arrays_of,
    copied,
    faults_of,
    made,
    manifest_of,
    promises_of,
    resigned,
    write_corpus,
)

FILLED = {"objective": "block_diffusion", "block_length": 8, "eos_fill": "block"}
RECIPES = {
    "next token": {
        "tasks": [{"preset": "ul2r"}, {"preset": "causal"}],
        "packing": {"pad_seq_to_mult": 8},
    },
    "in place": {"tasks": [{"preset": p} for p in ("mlm", "mdlm", "duo", "bd3", "fim", "causal")]},
    "compact": {
        "output": {"columns": "compact", "shard_text_bytes": 12_000},
        "documents": {"prepend_bos": True},
    },
    "supervised": {"tasks": [{"preset": p} for p in ("mlm", "bd3", "prefix_lm", "causal")]},
    "answers": {
        "tasks": [
            {"name": origin, **FILLED, "block_origin": origin} for origin in ("answer", "segment")
        ]
    },
}
OF_THE_SOURCES = {"tokens", "labels", "trained_ranges", "trained_offsets", "trained_weights"}
"""Arrays whose elements only the sources tell, here and there: a word for a word, a range of
characters."""


def datasets():
    made_of = {}

    def dataset(kind, folders):
        if kind not in made_of:
            folder = folders.mktemp(kind.replace(" ", "_"))
            write_corpus(folder / "in")
            changes = dict(RECIPES[kind])
            if kind in ("supervised", "answers"):
                records = [
                    {
                        "text": "ask " * (3 + i % 40) + "answer " * 9,
                        "loss_spans": [[12 + i, 19 + i], [30 + i, 40 + i, 1 + i % 3]]
                        + [[60 + 4 * (i % 40), 75 + 4 * (i % 40)]] * (kind == "answers"),
                    }
                    for i in range(60)
                ]
                (folder / "in/spans.jsonl").write_text(
                    "".join(json.dumps(record) + "\n" for record in records)
                )
                sources = {"spans": "spans.jsonl", "books": "books.jsonl.zst"}
                changes["sources"] = [
                    {"name": name, "paths": [path]} for name, path in sources.items()
                ]
                changes["output"] = {"shard_text_bytes": 6000}
            directory = copied(made(folder, **changes), folder)
            made_of[kind] = directory, arrays_of(directory)
        return made_of[kind]

    return dataset


DATASET = datasets()


def change(array, place, how):
    """One element, or two neighbours; whether that changed anything."""
    flat = array.reshape(-1)
    i = place % len(flat)
    before = flat.tobytes()
    if how == "+1":
        flat[i] += flat.dtype.type(1)
    elif how == "-1":
        flat[i] -= flat.dtype.type(1)
    elif how == "swap":
        j = (i + 1) % len(flat)
        flat[i], flat[j] = flat[j].copy(), flat[i].copy()
    else:
        flat.view(np.uint8)[i * flat.itemsize + place % flat.itemsize] ^= np.uint8(
            1 << (place // 7 % 8)
        )
    return flat.tobytes() != before


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", RECIPES)
@settings(max_examples=60)
@given(data=st.data())
def test_a_small_change_of_any_element_is_found(kind, tmp_path_factory, data):
    directory, good = DATASET(kind, tmp_path_factory)
    name = data.draw(st.sampled_from([n for n in sorted(good) if good[n].size]), "array")
    place = data.draw(st.integers(0, 1 << 40), "place")
    how = data.draw(st.sampled_from(["+1", "-1", "swap", "bit"]), "how")
    changed = {key: value.copy() for key, value in good.items()}
    if not change(changed[name], place, how):
        return
    with resigned(directory) as arrays:
        arrays.update(changed)
    found = promises_of(faults_of(directory))
    if not found:
        assert name in OF_THE_SOURCES, (name, place % good[name].size, how)
        found = promises_of(faults_of(directory, replay=-1))
    assert found, (name, place % good[name].size, how)


@pytest.mark.parametrize("name", ["segment_noise", "segment_loss_weight"])
def test_a_zero_with_a_sign_is_found(name, tmp_path_factory):
    """It equals zero, and is another byte."""
    directory, good = DATASET("compact", tmp_path_factory)
    with resigned(directory) as arrays:
        arrays.update({key: value.copy() for key, value in good.items()})
        arrays[name][3] = -0.0
    assert promises_of(faults_of(directory)) == {"P13"}


def test_documents_that_sample_leaves_out_are_found_without_replay(tmp_path):
    """A segment of a document outside the sample, with the right key."""
    from packprep.building.plan import open_plan
    from packprep.documents.reading import in_sample
    from packprep.randomness import segment_key, text_key

    write_lines(tmp_path / "in/a.jsonl", [f"the text of document {i} " * 3 for i in range(300)])
    source = {"name": "web", "paths": ["a.jsonl"], "repeat": 1.5, "sample": [0.2, 0.9]}
    directory = made(
        tmp_path, sources=[source], tasks=[{"preset": "causal"}], output={"shard_text_bytes": 4000}
    )
    assert not faults_of(directory)
    (job_source,) = open_plan(directory).sources
    lines = (tmp_path / "in/a.jsonl").read_bytes().splitlines(keepends=True)
    positions = np.cumsum([0] + [len(line) for line in lines[:-1]])
    for use in (0, 1):
        left_out = positions[~in_sample(job_source, 0, positions)]
        assert len(left_out)
        own = copied(directory, tmp_path / f"use{use}")
        shards = range(len(manifest_of(own)["shards"]))
        shard = next(b for b in shards if (arrays_of(own, b)["segment_repeat"] == use).any())
        with resigned(own, shard) as arrays:
            g = int(np.flatnonzero(arrays["segment_repeat"] == use)[0])
            arrays["segment_doc"][g] = left_out[0]
            key = segment_key(
                text_key(0, "web", "a.jsonl"), left_out[:1], use, arrays["segment_start"][g]
            )
            arrays["segment_key"][g] = key[0]
        faults = faults_of(own)
        assert any("sample and repeat" in fault["message"] for fault in faults), faults
