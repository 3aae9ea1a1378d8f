"""Fill a JSON file of examples in with the arrays that seqio makes of them; run where seqio is installed:

python tests/dataset/seqio_arrays.py tests/dataset/seqio.json

rows: the examples of each, [inputs, targets], which its packing puts into one. given: arrays of such rows by name, of which
prepacked becomes what PrePackedEncDecFeatureConverter makes.
"""

import importlib.metadata
import json
import sys

import numpy as np
import seqio
import tensorflow as tf


def converted(converter, examples, lengths):
    spec = {name: tf.TensorSpec((None,), tf.int32) for name in examples[0]}
    dataset = tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=spec)
    return [{n: v.tolist() for n, v in row.items()} for row in converter(dataset, lengths).as_numpy_iterator()]


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
        rows = [{name: np.int32(given[own][r]) for name, own in names.items()} for r in range(len(value["rows"]))]
        of_columns = {name: lengths[name.split("_")[0]] for name in names}
        made = converted(seqio.PrePackedEncDecFeatureConverter(pack=False), rows, of_columns)
        value["prepacked"] = {name: [row[name] for row in made] for name in made[0]}
    value["made_with"] = f"seqio-nightly {importlib.metadata.version('seqio-nightly')}"
    with open(path, "w") as file:
        json.dump(value, file, sort_keys=True)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
