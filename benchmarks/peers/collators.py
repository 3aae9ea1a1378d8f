"""Tokens in memory to corrupted ones: packprep's cutting, packing and rendering beside the usual
collators.

packprep's lines make whole rows with segment ids, loss mask and headers; the others make inputs and
targets of one segment or batch at a time. Tokens are those of the text.
"""

import os
import subprocess
import sys
import time
from typing import Any

from peers.contender import Config, Contender, Work, main, running, second_of_two

DENSITY, MEAN_LENGTH = 0.15, 3.0


def packprep(preset: str) -> Any:
    """The stages between tokenization and writing, of one shard."""

    def run(config: Config) -> Work:
        from pathlib import Path

        from packprep.building.packing import place
        from packprep.building.plan import open_plan
        from packprep.building.render import render
        from packprep.building.segments import cut
        from packprep.building.work import read_shard
        from peers.builds import recipe

        path = recipe(config, preset, config["jsonl"])
        with open(path, "a", encoding="utf-8") as file:
            file.write('[output]\nshard_text_bytes = "100GB"\n')
        out = Path(running(config, "dataset"))
        # a task of an array without a shard of its own writes the plan and no more
        plan = [sys.executable, "-m", "packprep", "build", path, "--out", str(out)]
        subprocess.run(
            [*plan, "--array-index", "1", "--array-count", "2"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        plan = open_plan(out, [os.path.dirname(config["jsonl"])])
        documents = read_shard(plan, 0)
        width = plan.recipe.seq_length

        def corrupt() -> Any:
            segments, _ = cut(plan.recipe, plan.tasks, documents)
            placed, _ = place(segments, plan.recipe, plan.tasks)
            arrays = render(plan.tasks, documents, placed, width, 1)
            return placed.slots, int(placed.row[-1]) + 1, arrays

        seconds, (slots, rows, _) = second_of_two(corrupt)
        return Work(
            len(documents.position),
            len(documents.ids),
            rows,
            int(slots.sum()) / (rows * width),
            seconds=seconds,
        )

    return run


def segments_of(config: Config) -> list[Any]:
    """The documents' tokens, cut to at most seq_length, int32 each."""
    import numpy as np

    offsets, tokens, width = (
        np.load(config["offsets"]),
        np.load(config["tokens"]),
        config["seq_length"],
    )
    segments = []
    for begin, end in zip(offsets, offsets[1:], strict=False):
        segments += [tokens[at : min(at + width, end)] for at in range(begin, end, width)]
    return [segment for segment in segments if len(segment) >= 3]


def timed(config: Config, segments: list[Any], corrupt: Any, rows: int | None = None) -> Work:
    """The work of a function over segments, one at a time."""
    for segment in segments[:16]:
        corrupt(segment)
    begin = time.perf_counter()
    for segment in segments:
        corrupt(segment)
    seconds = time.perf_counter() - begin
    return Work(len(segments), sum(map(len, segments)), rows, seconds=seconds)


def numpy_spans(config: Config) -> Work:
    """Span corruption as T5 collators in numpy do it, a segment at a time: lengths of noise and
    other spans by shuffled boundaries, a mask, sentinels where spans begin, and two masked
    copies."""
    import numpy as np

    chance, first = np.random.default_rng(0), config["vocab_size"] + 1000

    def partition(total: int, parts: int) -> Any:
        boundary = np.arange(total - 1) < parts - 1
        chance.shuffle(boundary)
        return np.bincount(np.concatenate([[0], np.cumsum(boundary)]), minlength=parts)

    def with_sentinels(tokens: Any, masked: Any) -> Any:
        begins = masked & ~np.concatenate([[False], masked[:-1]])
        sentinels = first - np.cumsum(begins)
        return np.where(begins, sentinels, tokens)[~masked | begins]

    def corrupt(tokens: Any) -> Any:
        n = len(tokens)
        noise = min(max(round(n * DENSITY), 1), n - 1)
        spans = min(max(round(noise / MEAN_LENGTH), 1), n - noise)
        lengths = np.stack([partition(n - noise, spans), partition(noise, spans)], 1).reshape(-1)
        masked = np.repeat(np.arange(2 * spans) % 2 == 1, lengths)
        return with_sentinels(tokens, masked), with_sentinels(tokens, ~masked)

    return timed(config, segments_of(config), corrupt)


def t5(config: Config) -> Work:
    """t5.data.preprocessors.denoise, as its pre-training tasks use it, in a tf.data pipeline."""
    import functools

    import seqio
    import tensorflow as tf
    from t5.data import preprocessors

    segments = segments_of(config)
    vocabulary = seqio.ByteVocabulary(extra_ids=config["vocab_size"] + 1000)
    feature = seqio.Feature(vocabulary, add_eos=False)
    ragged = tf.ragged.stack([tf.constant(segment) for segment in segments])
    dataset = tf.data.Dataset.from_tensor_slices(ragged).map(lambda tokens: {"targets": tokens})
    made = preprocessors.denoise(
        dataset,
        {"inputs": feature, "targets": feature},
        noise_density=DENSITY,
        noise_mask_fn=functools.partial(
            preprocessors.random_spans_noise_mask, mean_noise_span_length=MEAN_LENGTH
        ),
        inputs_fn=preprocessors.noise_span_to_unique_sentinel,
        targets_fn=preprocessors.nonnoise_span_to_unique_sentinel,
    )
    for _ in made.take(16):
        pass
    begin = time.perf_counter()
    count = sum(1 for _ in made)
    return Work(count, sum(map(len, segments)), seconds=time.perf_counter() - begin)


def transformers_mlm(config: Config) -> Work:
    """DataCollatorForLanguageModeling over batches of 32 full rows, 15 %."""
    import numpy as np
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=config["tokenizer"], mask_token="<mask>", pad_token="<pad>"
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=DENSITY)
    rows = np.load(config["rows"]).astype(np.int64)
    batches = [[{"input_ids": row} for row in rows[i : i + 32]] for i in range(0, len(rows), 32)]
    collator(batches[0])
    begin = time.perf_counter()
    for batch in batches:
        collator(batch)
    return Work(None, rows.size, len(rows), 1.0, seconds=time.perf_counter() - begin)


def torch_masking(config: Config) -> Work:
    """Masked diffusion as trainers do it: one level a row, a uniform a token, over batches of 32
    full rows."""
    import numpy as np
    import torch

    rows = torch.from_numpy(np.load(config["rows"]).astype(np.int64))
    mask_id = config["vocab_size"]

    def corrupt(batch: Any) -> Any:
        p = (1 - 1e-3) * torch.rand(len(batch), 1) + 1e-3
        masked = torch.rand(batch.shape) < p
        return torch.where(masked, mask_id, batch), masked, p.expand_as(batch)

    corrupt(rows[:32])
    begin = time.perf_counter()
    for i in range(0, len(rows), 32):
        corrupt(rows[i : i + 32])
    return Work(None, rows.numel(), len(rows), 1.0, seconds=time.perf_counter() - begin)


OWN = (("packprep",), ("packprep",))
CONTENDERS = [
    Contender("packprep t5", "spans of 3, 15 %; cut, packed, rendered", *OWN, packprep("t5")),
    Contender("packprep ul2r", "seven denoisers; cut, packed, rendered", *OWN, packprep("ul2r")),
    Contender("packprep mlm", "15 % masked; cut, packed, rendered", *OWN, packprep("mlm")),
    Contender("packprep llada", "masked diffusion; cut, packed, rendered", *OWN, packprep("llada")),
    Contender(
        "numpy, spans",
        "spans of 3, 15 %; a segment at a time",
        ("numpy",),
        ("numpy",),
        numpy_spans,
        slow=True,
    ),
    Contender(
        "T5, seqio",
        "denoise: spans of 3, 15 %",
        ("t5", "seqio", "tensorflow"),
        ("t5", "seqio"),
        t5,
        slow=True,
    ),
    Contender(
        "transformers, MLM",
        "15 % masked; batches of 32 full rows",
        ("transformers", "torch"),
        ("transformers", "torch"),
        transformers_mlm,
        slow=True,
    ),
    Contender(
        "torch, masked diffusion", "batches of 32 full rows", ("torch",), ("torch",), torch_masking
    ),
]

if __name__ == "__main__":
    main(CONTENDERS, sys.argv[1:])
