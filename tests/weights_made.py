"""Documents that give weights to what is trained of them, and datasets of such."""

import json
import random
from pathlib import Path

import numpy as np

from tests import made

TASKS = {
    "causal": {"preset": "causal"},
    "prefix": {"name": "p", "objective": "prefix_lm"},
    "sentinel": {"name": "s", "objective": "prefix_lm", "sentinel": True},
    "masked": {"name": "m", "objective": "masked_diffusion"},
}
WEIGHTS = (0, 0.1, 0.5, 1, 2, 1e-3, 3.75)


def records(seed, count, weights=WEIGHTS, longest=120):
    """Documents of letters; most say what is trained, by spans that are apart or touch; some have a
    weight of their own."""
    chance, made_of = random.Random(seed), []
    for _ in range(count):
        size = chance.randint(4, longest)
        record = {"text": "".join(chance.choices("abcdefgh", k=size))}
        if chance.random() < 0.8:
            if 2 in weights:
                record |= chance.choice([{}, {}, {"weight": 2}, {"weight": 0.3}])
            edges = sorted(chance.sample(range(size + 1), chance.randint(2, 5)))
            pairs = [pair for pair in zip(edges, edges[1:], strict=False) if chance.random() < 0.8]
            record["loss_spans"] = [[*pair, chance.choice(weights)] for pair in pairs]
        made_of.append(record)
    return made_of


def build(folder: Path, lines, tasks, **more):
    folder.mkdir(exist_ok=True)
    made.write(folder / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    return made.build(made.table("a.jsonl", tasks=tasks, **more), folder, folder / "out")


def character_weights(record):
    """float32[characters + 1]: of each character and of the end; 0 where it is not trained."""
    text, spans = record["text"], record.get("loss_spans")
    weights = (
        np.ones(len(text) + 1, np.float32) if spans is None else np.zeros(len(text) + 1, np.float32)
    )
    for begin, end, weight in spans or ():
        own = float(np.float32(weight)) * float(np.float32(record.get("weight", 1)))
        weights[begin : end + (end == len(text))] = own
    return weights
