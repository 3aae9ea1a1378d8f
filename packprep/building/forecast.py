"""What a build would make, from its plan: shards, tokens, bytes, memory, shares, spans."""

import math
from typing import Any

import numpy as np

from packprep.building.inputs import Inputs, ids_of
from packprep.objectives.tasks import TOO_SHORT, capacity, resolve, unequal_weights

FAR = 0.1
"""A realised figure this far from the wanted one, relatively, is worth a warning."""
PROCESS_BYTES = 220 << 20
"""What a worker holds before it reads anything: the interpreter, numpy, numba, pyarrow, tokenizers."""


def forecast(plan: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
    """The figures, as plain values; estimates come from the plan's calibration sample."""
    recipe = inputs.recipe
    tasks = [
        t for t in resolve(recipe, ids_of(inputs.vocabulary), inputs.vocabulary.mode_tokens) if t.name != TOO_SHORT
    ]
    item = np.dtype(plan["token_dtype"]).itemsize
    in_place = any(task.in_place for task in tasks)
    slot_bytes = item * (1 + in_place) + 3
    left_out = 0 if recipe.output.columns == "full" else 2 if in_place else 3  # segment_ids, loss_mask
    stored_bytes = slot_bytes - left_out
    tokens = sum(source["tokens"] for source in plan["sources"])
    documents = sum(source["documents"] for source in plan["sources"])
    weights = sum(task.weight for task in tasks)
    mean = max(3, min(tokens // max(1, documents), recipe.seq_length // 2))
    expansion = sum(task.weight / weights * task.objective.copies * task.most_body_slots(mean) / mean for task in tasks)
    slots = round(tokens * expansion) + documents * int(recipe.documents.append_eos)
    per_shard = tokens // plan["shards"] + 1
    total = tokens or 1
    task_rows, warnings = [], unequal_weights(tasks)
    for task in tasks:
        longest = capacity(recipe, task, 0, 0)
        figures = task.objective.forecast(task, longest) if task.objective.forecast else {}
        task_rows.append(
            {
                "name": task.name,
                "objective": task.objective.name,
                "weight": task.weight / weights,
                "longest_tokens": longest,
                "figures": {name: {"wanted": wanted, "realised": real} for name, (wanted, real) in figures.items()},
            }
        )
        for name, (wanted, real) in figures.items():
            if abs(real - wanted) > FAR * wanted:
                few = task.objective.sentinels and task.objective.sentinels(task.parameters, longest) > len(
                    task.ids.sentinels
                )
                warnings.append(
                    f"task {task.name}: {name} will be {real:.3g} at full length, not {wanted:g}; "
                    f"{'more sentinels' if few else 'longer rows'} bring it nearer"
                )
        if task.objective.most_tokens and task.objective.most_tokens(task) < task.capacity(recipe.seq_length, 0, 0) + 1:
            fill = task.most_body_slots(longest) / recipe.seq_length
            if fill < 1 - FAR:
                warnings.append(
                    f"task {task.name}: {len(task.ids.sentinels)} sentinels end its segments at {longest} tokens, "
                    f"{fill:.0%} of a row; "
                    "more sentinels make longer ones"
                )
    sources = []
    errors = [source["tokens"] * source["relative_error"] for source in plan["sources"]]  # in tokens
    all_errors = sum(error**2 for error in errors)
    for source, error in zip(plan["sources"], errors, strict=True):
        share = source["tokens"] / total
        # Of a / (a + b), with independent a and b, to first order.
        others = math.sqrt(max(all_errors - error**2, 0.0))
        if source["repeat"] > 4:
            warnings.append(f"source {source['name']}: each document is used {source['repeat']:g} times")
        sources.append(
            {
                "name": source["name"],
                "repeat": source["repeat"],
                "text_bytes": source["text_bytes"],
                "tokens": source["tokens"],
                "documents": source["documents"],
                "share": share,
                "share_error": math.hypot((1 - share) * error, share * others) / total,
            }
        )
    shares = [source.share for source in recipe.sources if source.share is not None]
    if shares and abs(sum(shares) - 1) > 1e-6:
        parts = ", ".join(f"{source.name} {(source.share or 0) / sum(shares):.1%}" for source in recipe.sources)
        warnings.append(f"the shares of the sources sum to {sum(shares):g}, not 1, and are taken as {parts}")
    return {
        "shards": plan["shards"],
        "shard_text_bytes": plan["shard_text_bytes"],
        "files": len(plan["files"]),
        "documents": documents,
        "text_bytes": sum(source["text_bytes"] for source in plan["sources"]),
        "tokens": tokens,
        "slots": slots,
        "rows": -(-slots // recipe.seq_length),
        "seq_length": recipe.seq_length,
        "output_bytes": slots * stored_bytes,
        "worker_bytes": PROCESS_BYTES + round(per_shard * (3 * item + expansion * slot_bytes * 2)),
        "engine": plan["engine"],
        "fingerprint": plan["fingerprint"],
        "sources": sources,
        "tasks": task_rows,
        "warnings": warnings,
    }


def print_forecast(f: dict[str, Any]) -> None:
    """The figures as text."""
    shards, files = (f"{f[name]:,} {name if f[name] != 1 else name[:-1]}" for name in ("shards", "files"))
    print(f"{shards} of about {f['shard_text_bytes'] / 2**20:.3g} MiB of text, {files}")
    print(
        f"about {f['documents']:,} documents, {f['text_bytes']:,} bytes of text, {f['tokens']:,} tokens "
        f"({f['engine']['name']} engine)"
    )
    print(
        f"about {f['rows']:,} rows of {f['seq_length']}, {f['output_bytes']:,} bytes on disk, "
        f"{f['worker_bytes'] / 2**20:.0f} MiB a worker"
    )
    print()
    print(f"{'source':<16} {'repeat':>7} {'tokens':>15} {'share':>8} {'± s.e.':>7}")
    for s in f["sources"]:
        print(f"{s['name']:<16} {s['repeat']:>7g} {s['tokens']:>15,} {s['share']:>8.2%} {s['share_error']:>7.2%}")
    print()
    print(f"{'task':<16} {'objective':<18} {'weight':>7} {'longest segment':>16}  at that length")
    for t in f["tasks"]:
        figures = ", ".join(f"{name} {v['realised']:.3g} (wanted {v['wanted']:g})" for name, v in t["figures"].items())
        print(
            f"{t['name']:<16} {t['objective']:<18} {t['weight']:>7.2%} {t['longest_tokens']:>9,} tokens  {figures}".rstrip()
        )
    for warning in f["warnings"]:
        print(f"warning: {warning}")
