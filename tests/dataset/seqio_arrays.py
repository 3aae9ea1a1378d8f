"""Fill a JSON file of examples in with the arrays that seqio makes of them; run where seqio is
installed:

python tests/dataset/seqio_arrays.py tests/dataset/seqio.json

rows: the examples of each, [inputs, targets], which its packing puts into one. given: arrays of
such rows by name, of which prepacked becomes what PrePackedEncDecFeatureConverter makes. documents:
lengths in tokens, of which spans becomes what T5's span corruption makes in 512 inputs and 114
targets: [[inputs, targets, how often], …], both with their eos.
"""

import collections
import importlib.metadata
import json
import sys

import numpy as np
import seqio
import tensorflow as tf
from t5.data import preprocessors


def converted(converter, examples, lengths):
    spec = {name: tf.TensorSpec((None,), tf.int32) for name in examples[0]}
    dataset = tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=spec)
    return [
        {n: v.tolist() for n, v in row.items()}
        for row in converter(dataset, lengths).as_numpy_iterator()
    ]


def counted(documents):
    features = {
        name: seqio.Feature(seqio.PassThroughVocabulary(1000, eos_id=1))
        for name in ("inputs", "targets")
    }
    texts = ({"targets": np.full(n, 7, np.int32)} for n in documents)
    dataset = tf.data.Dataset.from_generator(
        lambda: texts, output_signature={"targets": tf.TensorSpec((None,), tf.int32)}
    )
    lengths = {"inputs": 512, "targets": 114}
    corrupted = preprocessors.span_corruption(
        dataset, lengths, features, merge_examples_to_reduce_padding=False
    )
    ended = seqio.preprocessors.append_eos(corrupted, features).as_numpy_iterator()
    found = collections.Counter(
        (len(example["inputs"]), len(example["targets"])) for example in ended
    )
    return [[*sides, many] for sides, many in sorted(found.items())]


def main(path):
    with open(path) as file:
        value = json.load(file)
    lengths = dict(zip(("inputs", "targets"), value["lengths"], strict=True))
    for row in value["rows"]:
        examples = [{"inputs": np.int32(i), "targets": np.int32(t)} for i, t in row["examples"]]
        (row["arrays"],) = converted(seqio.EncDecFeatureConverter(pack=True), examples, lengths)
    if "given" in value:
        given = value["given"]
        names = {"inputs": "encoder_input_tokens", "targets": "decoder_target_tokens"}
        for ours, theirs in (("inputs", "encoder"), ("targets", "decoder")):
            names |= {f"{ours}_{what}": f"{theirs}_{what}" for what in ("segment_ids", "positions")}
        rows = [
            {name: np.int32(given[own][r]) for name, own in names.items()}
            for r in range(len(value["rows"]))
        ]
        of_columns = {name: lengths[name.split("_")[0]] for name in names}
        made = converted(seqio.PrePackedEncDecFeatureConverter(pack=False), rows, of_columns)
        value["prepacked"] = {name: [row[name] for row in made] for name in made[0]}
    if "documents" in value:
        value["spans"] = counted(value["documents"])
    value["made_with"] = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("seqio-nightly", "t5")
    )
    with open(path, "w") as file:
        json.dump(value, file, sort_keys=True)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
