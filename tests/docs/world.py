"""What the pages find when their blocks run, each by the word of its `<!-- needs: … -->`.

clone               examples/, docs/ and packprep/ as in a clone of the repository
corpus              data/web/*.jsonl.zst, data/code/*.parquet, data/books/*.txt, data/chat/*.jsonl (messages), and tokenizer/, a
                    Llama-3-style tokenizer of 128,256 tokens with the ids of Llama 3.1's special
                    ones and a chat template
conversations       conversations/*.jsonl: four layouts, calls of tools among them; completions.jsonl, two texts; brings corpus
recipe              recipe.toml: UL2R over data/web in several shards; brings corpus
packed              packed/: a dataset as examples/quickstart.toml makes it
mixture             packed_web/ and packed_code/: two datasets of corpus with rows of 2048 slots
processor           processor/, a processor of LLaVA-NeXT that AutoProcessor loads, and two pictures in images/
torch, jax, transformers, trl, megatron a library, without which the blocks of Python that import it
are left out
ray                 ray.py, which does at once and in one process what Ray does
slurm               a private cluster; a block's jobs have ended well before the next block begins
s3                  an S3 server in the environment, with the bucket `bucket`: web/… of corpus, and packed/

Text is that of the standard library, and what is chosen of it depends on names alone.
"""

import ast
import importlib.util
import json
import pydoc_data.topics
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import zstandard

from tests import made
from tests.slurm.cluster import quiet_environment
from tests.tokenizer import tokenizers_made

# library → (what to install, the modules that cannot be imported without it)
LIBRARIES = {
    "torch": ("packprep[torch]", r"torch\w*|packprep\.adapters\.(torch\w*|huggingface)"),
    "jax": ("packprep[jax]", r"jax|packprep\.adapters\.jax"),
    "grain": ("packprep[trainers]", r"grain|packprep\.adapters\.jax\.grain_source"),
    "transformers": ("packprep[trainers]", r"transformers|packprep\.adapters\.huggingface"),
    "trl": ("packprep[trainers]", "trl|datasets"),
    "megatron": ("megatron-core", "megatron"),
}
FOLDERS = ("clone", "corpus", "conversations", "recipe", "packed", "mixture", "processor", "ray")
SERVICES = ("slurm", "s3")
WORDS = (*FOLDERS, *LIBRARIES, *SERVICES)

RECIPE = """\
seq_length = 2048
tokenizer = "bytes"

[[sources]]
name = "web"
paths = ["data/web/*.jsonl.zst"]

[[tasks]]
preset = "ul2r"

[output]
shard_text_bytes = 60_000
"""
_RAY = '''\
"""A ray that does everything at once, in this process."""

import types

init, get = lambda: None, list


def remote(**options):
    return lambda kind: types.SimpleNamespace(remote=lambda: _Handle(kind()))


class _Handle:
    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, name):
        return types.SimpleNamespace(remote=getattr(self._actor, name))
'''
_CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nYou may call:\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}{{- '<|python_tag|>' + call.function | tojson }}{% endfor %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

_IMAGE_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.content is string %}{{- message.content + '</s>' }}{% else %}
        {%- for part in message.content %}{{- '<image>' if part.type == 'image' else part.text }}{% endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""


class World:
    """Makes each thing once, when a page first needs it, under `root`; pages get copies."""

    def __init__(self, root: Path):
        self.root = root

    def lay(self, words: Iterable[str], folder: Path) -> None:
        """What `words` stand for, into a page's folder."""
        for word in words:
            getattr(self, f"_{word}", lambda folder: None)(folder)

    def missing(self, words: Iterable[str]) -> dict[str, str]:
        """Pattern of modules → why they are missing, of the libraries among `words`."""
        needed = {word: LIBRARIES[word] for word in words if word in LIBRARIES}
        return {
            modules: f"{library} is not installed: pip install '{package}'"
            for library, (package, modules) in needed.items()
            if importlib.util.find_spec(library) is None
        }

    def _clone(self, folder: Path) -> None:
        for name in ("examples", "packprep", "docs"):
            (folder / name).symlink_to(made.ROOT / name)

    def _corpus(self, folder: Path) -> None:
        if not (folder / "data").exists():
            shutil.copytree(self.corpus, folder, dirs_exist_ok=True)

    def _conversations(self, folder: Path) -> None:
        self._corpus(folder)
        write_conversations(folder)

    def _recipe(self, folder: Path) -> None:
        self._corpus(folder)
        (folder / "recipe.toml").write_text(RECIPE)

    def _packed(self, folder: Path) -> None:
        shutil.copytree(self.packed, folder / "packed")

    def _mixture(self, folder: Path) -> None:
        for name in ("packed_web", "packed_code"):
            shutil.copytree(self.mixture / name, folder / name)

    def _processor(self, folder: Path) -> None:
        if not self.missing(["transformers"]):
            write_processor(folder)

    def _ray(self, folder: Path) -> None:
        (folder / "ray.py").write_text(_RAY)

    @cached_property
    def corpus(self) -> Path:
        """A folder with data/ and tokenizer/; read only."""
        folder = self.root / "corpus"
        write_corpus(folder)
        return folder

    @cached_property
    def packed(self) -> Path:
        return self._build(self.root / "packed", made.ROOT / "examples" / "quickstart.toml")

    @cached_property
    def mixture(self) -> Path:
        """A folder with packed_web/ and packed_code/."""
        folder = self.root / "mixture"
        for name in ("web", "code"):
            pattern = {"web": "*.jsonl.zst", "code": "*.parquet"}[name]
            self._build(
                folder / f"packed_{name}",
                self.corpus / "data" / name / pattern,
                "--seq-length",
                "2048",
                "--tasks",
                "ul2r",
            )
        return folder

    def _build(self, out: Path, *arguments: object) -> Path:
        command = [
            sys.executable,
            "-m",
            "packprep",
            "build",
            *map(str, arguments),
            "--out",
            str(out),
        ]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return out


def environment() -> dict[str, str]:
    """In which packprep is found, nothing is fetched from a hub, and no job of a Slurm is to be
    seen."""
    return quiet_environment(
        made.environment(
            HF_HUB_OFFLINE="1",
            JAX_PLATFORMS="cpu",
            TOKENIZERS_PARALLELISM="false",
            OMP_NUM_THREADS="1",
        )
    )


def write_corpus(folder: Path) -> None:
    """data/ and tokenizer/: some 2 MB of text."""
    sources = _standard_library()
    documented = [found for name, text in sources for found in _documented(name, text)]
    web = [f"{name}\n\n{words}" for name, words in documented]
    for i in range(2):
        made.write(
            folder / f"data/web/{i:03d}.jsonl.zst",
            zstandard.compress(_lines({"text": text} for text in web[i::2])),
        )
        made.write_parquet(
            folder / f"data/code/{i:03d}.parquet", [text for _, text in sources][i::2], 8
        )
    topics = sorted(pydoc_data.topics.topics.items())
    for i in range(8):
        text = "\n\n".join(text for _, text in topics[i::8])[:60_000]
        made.write(folder / f"data/books/{i:03d}.txt", text.encode())
    chat = ({"messages": _conversation(name, words)} for name, words in documented[:300])
    made.write(folder / "data/chat/000.jsonl", _lines(chat))
    tokenizers_made.write(
        folder / "tokenizer",
        tokenizers_made.llama3_sized(web),
        tokenizer_config={
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|end_of_text|>",
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def write_processor(folder: Path) -> None:
    """processor/ and images/: LLaVA-NeXT's own processor with a small tokenizer, and two pictures
    of different sizes."""
    import transformers
    from PIL import Image

    names = {"eos_token": "</s>", "pad_token": "</s>"}
    template = _IMAGE_TEMPLATE
    tokenizers_made.write(
        folder / "small",
        tokenizers_made.byte_level("</s>", "<|user|>", "<|assistant|>", "<image>"),
        tokenizer_config=names,
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "small" / "tokenizer.json"), chat_template=template, **names
    )
    transformers.LlavaNextProcessor(
        image_processor=transformers.LlavaNextImageProcessorPil(),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder / "processor")
    for name, size in (("cat", (40, 40)), ("tree", (640, 480))):
        made.write(folder / f"images/{name}.png", b"")
        Image.new("RGB", size).save(folder / f"images/{name}.png")


def write_conversations(folder: Path) -> None:
    """conversations/ and completions.jsonl: questions about the standard library, and what its
    docstrings answer."""
    documented = [found for name, text in _standard_library() for found in _documented(name, text)][
        :300
    ]
    asked = [
        (f"What is {name}?", words.split("\n\n")[0], name, words) for name, words in documented
    ]
    parameters = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
    }
    docs = {"name": "docs", "description": "The docstring of a name.", "parameters": parameters}

    def user(question: str) -> dict[str, str]:
        return {"role": "user", "content": question}

    def assistant(answer: str) -> dict[str, str]:
        return {"role": "assistant", "content": answer}

    def calling(question: str, answer: str, name: str, words: str) -> list[dict]:
        call = {"type": "function", "function": {"name": "docs", "arguments": {"name": name}}}
        asks = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [user(question), asks, {"role": "tool", "content": words}, assistant(answer)]

    layouts = {
        "conversations/messages": lambda *given: {
            "messages": calling(*given),
            "tools": [{"type": "function", "function": docs}],
        },
        "conversations/sharegpt": lambda question, answer, *_: {
            "conversations": [
                {"from": "human", "value": question},
                {"from": "gpt", "value": answer},
            ]
        },
        "conversations/answers": lambda question, answer, *_: {
            "prompt": [user(question)],
            "completion": [assistant(answer)],
        },
        "conversations/alpaca": lambda _, answer, name, words: {
            "instruction": "Give the first paragraph.",
            "input": words,
            "output": answer,
        },
        "completions": lambda question, answer, *_: {
            "prompt": f"Q: {question}\nA:",
            "completion": f" {answer}",
        },
    }
    for i, (path, record) in enumerate(layouts.items()):
        made.write(
            folder / f"{path}.jsonl", _lines(record(*given) for given in asked[i :: len(layouts)])
        )


def _standard_library() -> list[tuple[str, str]]:
    """(name, source) of modules of the standard library, smallest names first, to about a
    megabyte."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        text = path.read_text("utf-8", errors="ignore")
        if 1000 < len(text) < 100_000 and size < 1_000_000:
            found.append((path.stem, text))
            size += len(text)
    return found


def _documented(module: str, source: str) -> list[tuple[str, str]]:
    """(name, docstring) of a module and what it defines."""
    tree = ast.parse(source)
    kinds = (ast.ClassDef, ast.FunctionDef)
    named = [
        (module, tree),
        *((f"{module}.{node.name}", node) for node in ast.walk(tree) if isinstance(node, kinds)),
    ]
    return [
        (name, words) for name, node in named if len(words := ast.get_docstring(node) or "") > 40
    ]


def _conversation(name: str, words: str) -> list[dict[str, str]]:
    first, *rest = re.split(r"\n\s*\n", words)
    turns = [
        ("system", "You explain Python's standard library."),
        ("user", f"What is {name}?"),
        ("assistant", first),
    ]
    if rest:
        turns += [("user", "Tell me more."), ("assistant", rest[0])]
    return [{"role": role, "content": content} for role, content in turns]


def _lines(records: Iterable[dict]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def fill_bucket(world: World, environment: dict[str, str]) -> None:
    """The bucket `bucket` of the S3 server: web/ of the corpus and packed/."""
    from pyarrow.fs import S3FileSystem

    files = S3FileSystem(
        access_key=environment["AWS_ACCESS_KEY_ID"],
        secret_key=environment["AWS_SECRET_ACCESS_KEY"],
        scheme="http",
        endpoint_override=environment["AWS_ENDPOINT_URL"].partition("://")[2],
        region=environment["AWS_REGION"],
        allow_bucket_creation=True,
    )
    files.create_dir("bucket")
    for folder, under in ((world.corpus / "data" / "web", "web"), (world.packed, "packed")):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                with files.open_output_stream(
                    f"bucket/{under}/{path.relative_to(folder).as_posix()}"
                ) as stream:
                    stream.write(path.read_bytes())


def waiting(cluster) -> Callable[[str], None]:
    """Waits for the jobs that a block says it submitted, and holds that each completed."""

    def wait(said: str) -> None:
        jobs = [
            "".join(plan)
            for plan in re.findall(r"\.sh: job (\d+),|Submitted batch job (\d+)", said)
        ]
        if jobs:
            cluster.wait(*jobs)
            assert {state for plan in jobs for state in cluster.states(plan)} == {"COMPLETED"}, said

    return wait
