"""The table of mistakes: each with its message's words for what is wrong, where, and what to do."""

from tests import made
from tests.mistakes_made import (
    BAD,
    BUILD,
    CAUSAL,
    GZIP,
    LLAMA,
    LLAMA_RECIPE,
    MESSAGES,
    RECIPE,
    TEMPLATE,
    Mistake,
    begins,
    both,
    builds,
    lines,
    moves,
    pastes,
    writes,
)

SHARE = {"paths =": "share = 0.5\npaths ="}
SPANS = {'preset = "ul2r"': 'objective = "span_corruption"'}

COMMAND_LINE = [
    Mistake("no such command", "'biuld'", "packprep", "Did you mean 'build'?", typed=("biuld", "recipe.toml")),
    Mistake("no such option", "No such option: --ouput", "packprep build", "--out", typed=("build", "recipe.toml", "--ouput", "out")),
    Mistake("no --out", "Missing option '--out'", "packprep build", "give --out DIR", typed=("build", "recipe.toml")),
    Mistake("--out without a folder", "requires an argument", "'--out'", "give --out DIR", typed=("build", "recipe.toml", "--out")),
    Mistake("no recipe", "Missing argument", "packprep build", "name a RECIPE.toml, or files", typed=("build", "--out", "out")),
    Mistake("a number with a unit", "valid integer", "--seq-length", "'4k'", typed=(*BUILD, "--seq-length", "4k")),
    Mistake("no workers", "greater than or equal to 1", "--workers", "'0'", typed=(*BUILD, "--workers", "0")),
    Mistake("a recipe of another name", "No such file", "recipie.toml", "recipes beside it: recipe.toml", typed=("build", "recipie.toml", "--out", "out")),
    Mistake("a recipe without its ending", "no such file", "'source0': recipe", "did you mean recipe.toml?", typed=("build", "recipe", "--out", "out")),
    Mistake("two recipes", "2 recipes", "other.toml, recipe.toml", "give one recipe", before=writes("other.toml", RECIPE), typed=("build", "other.toml", "recipe.toml", "--out", "out")),
    Mistake("a recipe and inputs", "one recipe, or inputs, not both", "data/a.jsonl", "the paths in its [[sources]]", typed=("build", "recipe.toml", "data/a.jsonl", "--out", "out")),
    Mistake("--set with spaces", "expected KEY=VALUE", "--set seed", "without spaces around =", typed=(*BUILD, "--set", "seed", "=", "3"), then=(*BUILD, "--set", "seed=3")),
    Mistake("--set of an unknown key", "unknown key 'seqlength'", "--set seqlength=512", "did you mean 'seq_length'?", typed=(*BUILD, "--set", "seqlength=512"), then=(*BUILD, "--set", "seq_length=512")),
    Mistake("--set of a key without its table", "'min_tokens'", "--set min_tokens=3", "a key of [documents]", typed=(*BUILD, "--set", "min_tokens=3"), then=(*BUILD, "--set", "documents.min_tokens=3")),
    Mistake("--set of another type", "expected true or false", "--set documents.append_eos=False", "write false", typed=(*BUILD, "--set", "documents.append_eos=False"), then=(*BUILD, "--set", "documents.append_eos=false")),
    Mistake("--set of a source that is none", "there is no 'web'", "--set sources.web.repeat=2", "0 … 0, or by name", typed=(*BUILD, "--set", "sources.web.repeat=2"), then=(*BUILD, "--set", "sources.0.repeat=2")),
    Mistake("a preset misspelt on the command line", "unknown preset 'casual'", "--tasks casual", "did you mean 'causal'?", typed=(*BUILD, "--tasks", "casual"), then=(*BUILD, "--tasks", "causal")),
    Mistake("--array-index alone", "go together", "--array-index and --array-count", "give both", typed=(*BUILD, "--array-index", "1"), then=(*BUILD, "--array-index", "0", "--array-count", "2")),
    Mistake("an array index that is the count", "is not below", "--array-index 4", "indices are 0 … 3", typed=(*BUILD, "--array-index", "4", "--array-count", "4"), then=(*BUILD, "--array-index", "3", "--array-count", "4")),
    Mistake(
        "a redo list in Slurm", "it is not whole", "2 tasks numbered 3 … 7", "add --array-index I --array-count N",
        environment={"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_MAX": "7", "SLURM_ARRAY_TASK_COUNT": "2"},
        then=(*BUILD, "--array-index", "7", "--array-count", "8"),
    ),
    Mistake("slurm without --array", "Missing option '--array'", "packprep slurm", "give --array N", typed=("slurm", "recipe.toml", "--out", "out"), then=("slurm", "recipe.toml", "--out", "out", "--array", "2")),
    Mistake("a source that is none", "no source of that name", "--source web=", "it has source0", typed=(*BUILD, "--source", "web=/data")),
]  # fmt: skip

RECIPES = [
    Mistake("no TOML: no quotes", "not TOML: Invalid value", "recipe.toml: not TOML: Invalid value (at line 2, column 13)", 'quotes: "bytes"', {'"bytes"': "bytes"}),
    Mistake("no TOML: True", "not TOML", "at line 10, column 14", "TOML writes true", more="[documents]\nappend_eos = True\n"),
    Mistake("no TOML: twice", "Cannot overwrite", "at line 3", "take one out", {'"bytes"\n': '"bytes"\nseq_length = 8\n'}),
    Mistake("a key misspelt", "unknown key 'seq_len'", "recipe.toml, line 1", "did you mean 'seq_length'?", {"seq_length": "seq_len"}),
    Mistake("a key of a table at the top", "unknown key 'append_eos'", "recipe.toml, line 3", "put it under that header", {'"bytes"\n': '"bytes"\nappend_eos = false\n'}),
    Mistake("a key of the top behind a table", "seq_length is a key of the recipe itself", "recipe.toml, line 8", "put it above the first [header]", {"seq_length = 512\n": ""}, "seq_length = 512\n"),
    Mistake("a key of the top in [documents]", "unknown key 'seed'", "recipe.toml, line 10", "put it above the first [header]", more="[documents]\nseed = 3\n"),
    Mistake("tasks in a [[tasks]]", "tasks is a table of its own", "recipe.toml, line 9", "write [[tasks]]", more='tasks = ["r"]\n'),
    Mistake("a source's key in a task", "unknown key of causal 'text_key'", "recipe.toml, line 9", "put it under that header", CAUSAL, 'text_key = "text"\n'),
    Mistake("one bracket", "expected [[tasks]] tables", "recipe.toml, line 7", "two brackets", {"[[tasks]]": "[tasks]"}),
    Mistake("a table of another name", "unknown key 'source'", "recipe.toml, line 4", "did you mean 'sources'?", {"[[sources]]": "[[source]]"}),
    Mistake("two brackets too many", "expected a table of keys", "recipe.toml, line 9", "write [documents]", more="[[documents]]\nmin_tokens = 3\n"),
    Mistake("a number in quotes", "seq_length = '512'", "recipe.toml, line 1", "write 512, without quotes", {"512": '"512"'}),
    Mistake("true for a number", "seq_length = true", "recipe.toml, line 1", "a whole number, 8 …", {"512": "true"}),
    Mistake("a number with a point", "seq_length = 512.0", "recipe.toml, line 1", "write 512", {"512": "512.0"}),
    Mistake("a choice misspelt", "'bestfit'", "recipe.toml, line 10: packing.algorithm", "did you mean 'best_fit'?", more='[packing]\nalgorithm = "bestfit"\n'),
    Mistake("no tokenizer", "tokenizer is missing", "recipe.toml: ", "add a line tokenizer =", {'tokenizer = "bytes"\n': ""}),
    Mistake("no paths", "paths is missing", "recipe.toml, line 4", "add a line paths =", {'paths = ["data/*.jsonl"]\n': ""}),
    Mistake("a length that is no multiple of 8", "seq_length = 500", "recipe.toml, line 1", "as 496 and 504 are", {"512": "500"}),
    Mistake("a length too small for a task", "seq_length = 8 holds 4", "task 'r'", "raise seq_length", {"512": "8"}),
    Mistake("a preset misspelt", "unknown preset 'ul2rr'", "recipe.toml, line 8", "did you mean 'ul2r'?", {"ul2r": "ul2rr"}),
    Mistake("a preset with parameters", "only a weight, not noise_density", "recipe.toml, line 9", "write its tasks out", more="noise_density = 0.3\n"),
    Mistake("a task without objective", "tasks[0].objective is missing", "recipe.toml, line 8", "did you mean 'preset'?", {"preset": "presets"}),
    Mistake("an objective misspelt", "unknown objective 'span_coruption'", "recipe.toml, line 8", "did you mean 'span_corruption'?", {'preset = "ul2r"': 'objective = "span_coruption"'}),
    Mistake("a parameter misspelt", "noise_densty", "recipe.toml, line 9", "did you mean 'noise_density'?", SPANS, "noise_densty = 0.3\n"),
    Mistake("per cent for a share", "noise_density = 15", "recipe.toml, line 9", "must be in (0, 1)", SPANS, "noise_density = 15\n"),
    Mistake("a weight of 0", "weight = 0", "recipe.toml, line 9", "expected a number above 0", more="weight = 0\n"),
    Mistake("a weight below 0", "weight = -1", "recipe.toml, line 9", "expected a number above 0", more="weight = -1\n"),
    Mistake("a weight that is no number", "weight = nan", "recipe.toml, line 9", "expected a number above 0", more="weight = nan\n"),
    Mistake("an endless weight", "weight = inf", "recipe.toml, line 9", "expected a number above 0", more="weight = inf\n"),
    Mistake("two tasks of one name", "'causal': taken already", "recipe.toml, line 9", "its own name", CAUSAL, '[[tasks]]\nobjective = "causal"\n'),
    Mistake("a task that no task is", "unknown task 'z'", "recipe.toml, line 5", "known: r, s, x-dense", {"paths =": 'tasks = ["z"]\npaths ='}),
    Mistake("repeat with share", "both repeat and share", "recipe.toml, line 5", "take one out", {"paths =": "repeat = 2\nshare = 0.5\npaths ="}),
    Mistake("a share in one source", "not for source1", "recipe.toml, line 11", "in every source or in none", SHARE, '\n[[sources]]\npaths = ["data/a.jsonl"]\n'),
    Mistake("a share in per cent", "share = 70", "recipe.toml, line 5", "above 0, at most 1", {"paths =": "share = 70\npaths ="}),
    Mistake("an interval the wrong way round", "sample = [0.9, 0.1]", "recipe.toml, line 5", "low < high", {"paths =": "sample = [0.9, 0.1]\npaths ="}),
    Mistake("a multiple that does not divide", "does not divide seq_length = 512", "recipe.toml, line 10", "seq_length = 504", more="[packing]\npad_seq_to_mult = 24\n"),
    Mistake("concat with span corruption", "concat cuts at row ends", "task 'r'", 'use packing.algorithm = "best_fit"', more='[packing]\nalgorithm = "concat"\n'),
    Mistake("a size in words", "'64 megabytes'", "recipe.toml, line 10: output.shard_text_bytes", 'such as "64MiB"', more='[output]\nshard_text_bytes = "64 megabytes"\n'),
    Mistake("an engine that is none", "is not known", "engine = 'tiktoken'", "the engines are auto,", {"seq_length": 'engine = "tiktoken"\nseq_length'}),
]  # fmt: skip

TOKENIZERS = [
    Mistake("a Hub name without network", "the Hugging Face Hub gave no tokenizer.json", "tokenizer = 'gpt2'", "download the file once and give its path", {'"bytes"': '"gpt2"'}, environment={"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}, shown=False),
    Mistake("a tokenizer's path misspelt", "does not exist", "/tok/tokenizer.json", "Give a tokenizer.json", {'"bytes"': '"tok/tokenizer.json"'}),
    Mistake("a folder without tokenizer.json", "holds no tokenizer.json (it holds config.json)", "/model", "save_pretrained", {'"bytes"': '"model"'}, before=writes("model/config.json", "{}")),
    Mistake("a sentencepiece model", "a sentencepiece model", "'model/tokenizer.model'", "save_pretrained", {'"bytes"': '"model/tokenizer.model"'}, before=writes("model/tokenizer.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")),
    Mistake("a configuration for a tokenizer", 'it has no "model"', "'config.json'", "Give that file", {'"bytes"': '"config.json"'}, before=writes("config.json", "{}")),
    Mistake("sentinels that a Llama tokenizer lacks", "lacks 4 of the roles", "sentinels: no tokens of the pattern <extra_id_{}>", "paste into the recipe:\n\n[specials]\n\"[NLU]\" = \"<|reserved_special_token_0|>\"", LLAMA_RECIPE, before=writes("llama.json", LLAMA), mended=pastes("sentinels"), most_lines=22),
    Mistake("a mask that a Llama tokenizer lacks", "lacks 1 of the roles", "mask: no token", 'mask = "<|reserved_special_token_0|>"', {**LLAMA_RECIPE, "ul2r": "mlm"}, before=writes("llama.json", LLAMA), mended=pastes("mask"), most_lines=14),
    Mistake("the eos of another tokenizer", "no token '</s>'", "'bytes' lacks 1", 'eos = "<eos>"', more='[specials]\neos = "</s>"\n', most_lines=14),
    Mistake("a mode token without its brackets", "unknown key 'NLU'", "recipe.toml, line 10", "quoted with its brackets", more='[specials]\nNLU = "[NLU]"\n'),
    Mistake("a ceiling below the ids", "has ids up to 521", "[specials] vocab_size = 400", "at least 522", more="[specials]\nvocab_size = 400\n"),
    Mistake("messages without a chat template", "the tokenizer has no chat template", "a document has messages", "documents.chat_template", before=writes("data/c.jsonl", MESSAGES * 20), mended=writes("chat.jinja", TEMPLATE), then=(*BUILD, "--set", "documents.chat_template=chat.jinja")),
]  # fmt: skip

INPUTS = [
    Mistake("a pattern that matches nothing", "matches no file", "looked for /project/data/*.json)", "/project/data holds a.jsonl, b.jsonl", {"*.jsonl": "*.json"}),
    Mistake("a folder misspelt", "there is no folder /project/dta", "'source0': dta/*.jsonl", "did you mean data?", {"data/": "dta/"}),
    Mistake("a file misspelt", "no such file", "/project/data/aa.jsonl", "did you mean a.jsonl?", {"*": "aa"}),
    Mistake("a folder for files", "data is a folder", "'source0'", "as in data/**/*.jsonl", {"data/*.jsonl": "data"}),
    Mistake("braces", "no such file", "data/{a,b}.jsonl", "give each by itself", {"*": "{a,b}"}),
    Mistake("a text_key that no document has", "none of its first 40 documents has the key 'text'", "'source0': /project/data/c.jsonl", 'text_key = "content"', {"*": "c"}, before=writes("data/c.jsonl", lines(*({"id": i, "content": text} for i, text in enumerate(made.texts(40))))), then=("build", "data/c.jsonl", "--out", "out", "--text-key", "content")),
    Mistake("a column that the table lacks", "no column named 'text'", "/project/c.parquet", "Set text_key", {"data/*.jsonl": "c.parquet"}, before=lambda project: table(project / "c.parquet"), then=("build", "c.parquet", "--out", "out", "--text-key", "content")),
    Mistake("a JSON array", "one JSON array", "/project/data/c.json", "jq -c '.[]'", {"*.jsonl": "c.json"}, before=writes("data/c.json", '[{"text": "one"},\n {"text": "two"}]')),
    Mistake("JSON over many lines", "take several lines", "/project/data/c.json", "jq -c .", {"*.jsonl": "c.json"}, before=writes("data/c.json", '{\n  "text": "one"\n}\n')),
    Mistake("Parquet by another name", "begins as a Parquet file", "/project/data/c.jsonl", "name it .parquet", {"*": "c"}, before=lambda project: table(project / "data/c.jsonl"), mended=lambda project: (project / "data/c.jsonl").unlink()),
    Mistake("gzip by another name", "begins as a gzip file", "/project/data/c.jsonl", "let its name end in .gz", {"*": "c"}, before=writes("data/c.jsonl", GZIP), mended=lambda project: (project / "data/c.jsonl").rename(project / "data/c.jsonl.gz"), then=("build", "data/c.jsonl.gz", "--out", "out")),
    Mistake("no gzip by a name of it", "corrupt gzip data", "/project/data/c.jsonl.gz", "a name without that ending", {"*.jsonl": "c.jsonl.gz"}, before=writes("data/c.jsonl.gz", '{"text": "one"}\n'), shown=False),
    Mistake("a table as text", "one document with all its rows", "/project/data/c.csv", "write it as JSONL or Parquet", {"*.jsonl": "c.csv"}, before=writes("data/c.csv", "text\none\n")),
    Mistake("an archive", "begins as a zip archive", "/project/data/c.zip", "unpack it", {"*.jsonl": "c.zip"}, before=writes("data/c.zip", b"PK\x03\x04" + bytes(50))),
    Mistake("too many bad documents", "150 of 155 documents are bad (malformed_json 150)", "out/rejects", "a higher documents.max_bad_fraction", {"*": "c"}, before=writes("data/c.jsonl", BAD), mended=lambda project: (project / "data/c.jsonl").unlink(), then=("build", "recipe.toml", "--out", "another")),
]  # fmt: skip

OUTPUTS = [
    Mistake("an output that is the data's folder", "holds files that are no packprep's: a.jsonl, b.jsonl", "data holds", "new or empty", typed=("build", "recipe.toml", "--out", "data")),
    Mistake("an output that is this folder", "data, recipe.toml", ". holds files", "new or empty", typed=("build", "recipe.toml", "--out", ".")),
    Mistake("an output that is a file", "is a file", "recipe.toml is", "name another", typed=("build", "recipe.toml", "--out", "recipe.toml")),
    Mistake("going on with another recipe", "seq_length is 1024 here and 512 in the plan", "out was begun with", "build into another folder", {"512": "1024"}, before=builds()),
    Mistake("going on with other tasks", "tasks is [t5] here and [r, x-long, x-dense, s] in the plan", "out was begun with", "build into another folder", {"ul2r": "t5"}, before=builds()),
    Mistake("going on with another tokenizer", "the tokenizer changed", "out was begun with", "build into another folder", {**LLAMA_RECIPE, **CAUSAL}, before=both(builds(recipe=RECIPE.replace('preset = "ul2r"', 'objective = "causal"')), writes("llama.json", LLAMA)), mended=writes("recipe.toml", RECIPE.replace('preset = "ul2r"', 'objective = "causal"'))),
    Mistake("going on with another file", "input 'c.jsonl' of source 0: no file in the plan", "out was begun with", "build into another folder", before=both(builds(), writes("data/c.jsonl", lines({"text": "one"}))), mended=lambda project: (project / "data/c.jsonl").unlink()),
    Mistake("going on with a file that changed", "input 'a.jsonl' of source 0:", "out was begun with", "build into another folder", before=both(builds(), lambda project: (project / "data/a.jsonl").write_text("")), mended=lambda project: made.write_lines(project / "data/a.jsonl", made.texts(12))),
]  # fmt: skip

DATASETS = [
    Mistake("verify of no dataset", "is no dataset", "data/dataset.json does not exist", "that `packprep build --out` wrote", typed=("verify", "data")),
    Mistake("verify of no folder", "there is no such folder", "uot/dataset.json", "that `packprep build --out` wrote", typed=("verify", "uot")),
    Mistake("verify of a file", "is a file, and a dataset is a folder", "out/dataset.json", "name the one with dataset.json", before=builds(), typed=("verify", "out/dataset.json"), then=("verify", "out")),
    Mistake("verify of a build that did not end", "the build of out is not finished", "out/dataset.json", "Run its command again", before=begins, typed=("verify", "out")),
    Mistake("inspect of a build that did not end", "is not finished", "out/dataset.json", "`packprep status out`", before=begins, typed=("inspect", "out")),
    Mistake("status of nothing", "nothing was begun here", "data: no plan.json", "`packprep build … --out data` begins", typed=("status", "data")),
    Mistake("a row beyond the last", "out has", "row 99999", "give 0 …", before=builds(), typed=("inspect", "out", "--row", "99999"), then=("inspect", "out", "--row", "0")),
    Mistake("replay of some", "expected a number of segments, or all", "--replay some", "a number", before=builds(), typed=("verify", "out", "--replay", "some"), then=("verify", "out", "--replay", "2")),
    Mistake("--twin without --replay", "--twin recomputes what --replay chooses", "--twin", "give --replay N", before=builds(), typed=("verify", "out", "--twin"), then=("verify", "out", "--twin", "--replay", "1")),
    Mistake("replay without the sources", "the file is missing", "/project/data/", "--source NAME=PREFIX", before=moves, typed=("verify", "out", "--replay", "2"), then=("verify", "out", "--replay", "2", "--source", "source0=moved"), status=1),
    Mistake("replay with a source that is none", "no source of that name", "--source web=", "it has source0", before=moves, typed=("verify", "out", "--replay", "2", "--source", "web=moved"), then=("verify", "out", "--replay", "2", "--source", "source0=moved")),
    Mistake("--source without a name", "expected NAME=PREFIX", "--source moved", "as in --source web=/data/web", before=moves, typed=("verify", "out", "--replay", "2", "--source", "moved"), then=("verify", "out", "--replay", "2", "--source", "source0=moved")),
]  # fmt: skip

MISTAKES = {
    "The command line": COMMAND_LINE,
    "The recipe": RECIPES,
    "The tokenizer": TOKENIZERS,
    "The inputs": INPUTS,
    "The output": OUTPUTS,
    "Datasets": DATASETS,
}


def table(path):
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "content": ["one", "two"]}), path)
