"""What the checks of trainers share: small datasets of real text, the losses that are right, and a
child process to kill.

    causal, conversations, prefixes, blocks
                                        folder of a dataset, built by packprep's own commands and
                                        verified; tokenizer/ beside it
    exported, exported_with_model       an export of it; and beside it a model for a trainer that reads folders
    documents, reference                each document of a row by itself, and 20 losses of a model that sees them one at a time
    SaysLosses, saying_callback         a Trainer that says its losses, and what makes one of another's
    trained_by_hand                     20 steps in a loop of torch over batches from elsewhere
    main, losses_of, killed_and_resumed what a check is: its outcome is printed, and parts of it run
    in processes of their own

A check is a module with a function `check(folder) -> outcome`, and, to be killed, one
`train(folder, *words)` that calls `say_loss` after each step. numpy, tokenizers and packprep are
there in every environment; torch and Transformers are imported where a function needs them.
"""

import ast
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    CUDA_VISIBLE_DEVICES="",
    JAX_PLATFORMS="cpu",
    OMP_NUM_THREADS="1",  # the models are small, and sums keep their order
)

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from packprep.dataset.loader import Dataset, open_dataset
from packprep.errors import ArgumentError

SEQ_LENGTH, VOCAB_SIZE = 256, 2048
STEPS, BATCH, LEARNING_RATE = 20, 2, 1e-3
TOLERANCE = 1e-5
TRAINED, READ = f"trained {STEPS} steps", "read by its own loader and collator"
PAD, EOS, USER, ASSISTANT = SPECIALS = ("<|pad|>", "<|eos|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    f"{{%- for message in messages %}}{{%- if message.role == 'assistant' %}}{{{{- '{ASSISTANT}'"
    f" }}}}{{%- generation %}}{{{{- message.content + '{EOS}' }}}}{{%- endgeneration %}}{{%- else"
    f" %}}{{{{- '{USER}' + message.content + '{EOS}' }}}}{{%- endif %}}{{%- endfor %}}{{%- if"
    f" add_generation_prompt %}}{{{{- '{ASSISTANT}' }}}}{{%- endif %}}"
)


# ── datasets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def causal(folder: Path, *options: str) -> Path:
    """A dataset of the standard library's docstrings, some to a row, for causal training. options:
    of the build."""
    records = ({"text": f"{name}\n\n{words}"} for name, words in _docstrings())
    return _built(folder, "causal", records, "causal", *options)


def conversations(folder: Path) -> Path:
    """A dataset of questions about the standard library and what its docstrings answer, of which
    answers are trained."""
    records = (
        {
            "messages": [
                {"role": "user", "content": f"What is {name}?"},
                {"role": "assistant", "content": words.partition("\n\n")[0]},
                {"role": "user", "content": "Where does it lie?"},
                {"role": "assistant", "content": f"In {name.partition('.')[0]}."},
            ]
        }
        for name, words in _docstrings()
    )
    return _built(folder, "conversations", records, "causal")


def prefixes(folder: Path) -> Path:
    """A dataset of the docstrings, of which each has a part that sees itself in both directions and
    is not trained."""
    return _built(folder, "prefixes", ({"text": words} for _, words in _docstrings()), "prefix_lm")


def blocks(folder: Path) -> Path:
    """A dataset of the docstrings for block diffusion, whose segments begin with a block of x_t
    where x_0 is left out."""
    length = 16
    records = ({"text": words} for _, words in _docstrings())
    task = f'tasks=[{{name="bd3",objective="block_diffusion",block_length={length}}}]'
    options = (task, f"packing.pad_seq_to_mult={2 * length}", f'specials.mask="{USER}"')
    return _built(
        folder,
        "blocks",
        records,
        "bd3",
        *(word for option in options for word in ("--set", option)),
    )


def exported(dataset: Path, form: str, out: Path, *options: str) -> Path:
    """`packprep export dataset --to form`, its folder."""
    _packprep("export", dataset, "--to", form, "--out", out, *options)
    return out


def exported_with_model(folder: Path, trainer: str) -> tuple[Dataset, Any]:
    """(the conversations, the model) of which export/ and model/, with the tokenizer, are made for
    a trainer."""
    dataset = open_dataset(conversations(folder))
    exported(folder / "conversations", "hf", folder / "export", "--trainer", trainer)
    model = llama(dataset.vocab_size)
    model.save_pretrained(folder / "model")
    shutil.copytree(folder / "tokenizer", folder / "model", dirs_exist_ok=True)
    return dataset, model


def _built(
    folder: Path, name: str, records: Iterator[dict[str, Any]], task: str, *options: str
) -> Path:
    _write_tokenizer(folder / "tokenizer")
    lines = folder / f"{name}.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    out = folder / name
    common = ("--tokenizer", folder / "tokenizer", "--seq-length", SEQ_LENGTH, "--workers", 1)
    _packprep("build", lines, "--tasks", task, *common, *options, "--out", out)
    _packprep("verify", out, "--replay", "all")
    return out


def _write_tokenizer(folder: Path) -> None:
    """A byte-level BPE that is learnt from the docstrings, with a chat template; once."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((words for _, words in _docstrings()), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**named, "chat_template": CHAT_TEMPLATE}), "utf-8"
    )


def _docstrings(most: int = 400_000) -> Iterator[tuple[str, str]]:
    """(name, docstring) of what the standard library's modules define, in the order of their names,
    to `most` characters."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        kinds = (ast.ClassDef, ast.FunctionDef)
        for node in ast.walk(ast.parse(path.read_text("utf-8", errors="ignore"))):
            words = ast.get_docstring(node) if isinstance(node, kinds) else None
            if words and 60 < len(words) < 1200:
                most -= len(words)
                if most < 0:
                    return
                yield f"{path.stem}.{node.name}", words


def _packprep(*words: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "packprep", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, f"packprep {' '.join(map(str, words))}: {done.stderr}"


# ── what is right ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Document(NamedTuple):
    """A segment of a row, as if it had never been packed. labels[t] is predicted at slot t where
    trained[t]."""

    tokens: np.ndarray  # int64[n]
    labels: np.ndarray  # int64[n]
    trained: np.ndarray  # bool[n]
    prefix: int  # slots before it see each other in both directions


def documents(dataset: Dataset, row: int) -> list[Document]:
    """The documents of a row, in their order."""
    of, found = dataset.row(row), []
    lengths, segments = np.diff(of.cu_seqlens), of.segments
    for begin, length, prefix in zip(segments["begin"], lengths, segments["prefix"], strict=True):
        at = slice(begin, begin + length)
        tokens, labels = (np.array(column[at], np.int64) for column in (of.tokens, of.labels))
        found.append(Document(tokens, labels, np.array(of.loss_mask[at], bool), int(prefix)))
    return found


def numbers_of(dataset: Dataset) -> dict[bytes, int]:
    """Row number by the key that `key_of` gives for its tokens, with or without the padding behind
    them."""
    return {key_of(dataset.row(row).tokens, dataset.pad_id): row for row in range(len(dataset))}


def key_of(tokens: Any, pad_id: int) -> bytes:
    """A row's tokens without padding behind them, as what a dict can look up."""
    ids = np.asarray(tokens, np.int32)
    return ids[: np.flatnonzero(ids != pad_id)[-1] + 1].tobytes()


class Noted:
    """A collator that does what another does, and notes in `steps` which rows of the dataset each
    batch was made of."""

    def __init__(self, collate: Callable[[Any], Any], dataset: Dataset):
        self.steps: list[list[int]] = []
        self._collate, self._pad_id, self._numbers = collate, dataset.pad_id, numbers_of(dataset)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        tokens = [row["tokens" if "tokens" in row else "input_ids"] for row in rows]
        self.steps.append([self._numbers[key_of(ids, self._pad_id)] for ids in tokens])
        return self._collate(rows)


def llama(vocab_size: int, attention: str = "sdpa") -> Any:
    """Transformers' Llama, small, of the same random weights each time, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LENGTH,
        initializer_range=0.1,
        attn_implementation=attention,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).float()


def llama_logits(model: Any, document: Document) -> Any:
    """float32[n, vocab_size] of a document alone: position from 0, causal attention, or two-way
    below its prefix."""
    import torch

    n = len(document.tokens)
    options = {}
    if document.prefix:
        q, k = torch.arange(n)[:, None], torch.arange(n)
        options = {"attention_mask": ((k <= q) | (k < document.prefix))[None, None]}
    return model(
        input_ids=torch.from_numpy(document.tokens)[None], use_cache=False, **options
    ).logits[0]


def in_order() -> list[list[int]]:
    """The rows of each step, of a trainer that takes them as they are stored."""
    return [[step * BATCH + row for row in range(BATCH)] for step in range(STEPS)]


def optimizer(model: Any) -> Any:
    """AdamW as every check has it: a constant rate, no decay of weights, and nothing is clipped."""
    import torch

    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )


def reference(
    dataset: Dataset,
    steps: Sequence[Sequence[int]],
    model: Any,
    logits: Callable[[Any, Document], Any] = llama_logits,
) -> list[float]:
    """The loss of each step of a plain loop of torch over these rows, every document alone: a mean
    over trained slots."""
    import torch
    from torch.nn.functional import cross_entropy

    adam, losses = optimizer(model.train()), []
    for rows in steps:
        total, trained = torch.zeros(()), 0
        for document in (document for row in rows for document in documents(dataset, row)):
            on = torch.from_numpy(document.trained)
            labels = torch.from_numpy(document.labels)
            total = total + cross_entropy(logits(model, document)[on], labels[on], reduction="sum")
            trained += int(on.sum())
        adam.zero_grad()
        (total / trained).backward()
        adam.step()
        losses.append((total / trained).item())
    return losses


# ── checks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def checkout(variable: str, source: str = ".") -> str:
    """The commit of the checkout that an environment variable names; its folder `source` is then
    imported from.

    Without one the check is not run, which its last line says.
    """
    path = os.environ.get(variable)
    if not path:
        print(f"{_module().rpartition('.')[2]} -: not run: {variable} names no checkout")
        sys.exit()
    sys.path.insert(0, str(Path(path, source).resolve()))
    asked = subprocess.run(
        ["git", "-C", path, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    assert asked.returncode == 0, f"{variable}={path}: {asked.stderr}"
    return asked.stdout.strip()


def main(
    package: str,
    check: Callable[[Path], str],
    train: Callable[..., None] | None = None,
    commit: str | None = None,
) -> None:
    """Run a check in a folder of its own and print what came of it: the last line of `python -m
    trainers.NAME`.

    package: that of whose version is printed, if not the commit of a checkout. With arguments this
    is a child process, which trains.
    """
    name = _module().rpartition(".")[2]
    if sys.argv[1:]:
        assert train is not None
        folder, *words = sys.argv[1:]
        train(Path(folder), *words)
        return
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as own:
        outcome = check(Path(own))
    print(f"{name} {commit or importlib.metadata.version(package)}: {outcome}")


def _module() -> str:
    """The name by which this process' module can be run again."""
    return sys.modules["__main__"].__spec__.name


def say(what: str, figure: object) -> None:
    """A line of a check: what was held, and the figure that was seen."""
    print(f"{what}: {figure}", flush=True)


class SaysLosses:
    """A base that stands before a Trainer of Transformers or TRL, which then says and keeps the
    loss of each step."""

    def training_step(self, *given: Any, **named: Any) -> Any:
        loss = super().training_step(*given, **named)
        vars(self).setdefault("losses", []).append(loss.item())
        say_loss(self.state.global_step + 1, loss.item())
        return loss


def saying_callback() -> Any:
    """A TrainerCallback of Transformers that says the loss of each step, for a trainer that is made
    by its own run."""
    from transformers import TrainerCallback

    class Saying(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "loss" in logs:
                say_loss(state.global_step, logs["loss"])

    return Saying()


ARGUMENTS = {
    "max_steps": STEPS,
    "save_steps": 5,
    "per_device_train_batch_size": BATCH,
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "report_to": "none",
}
"""Of TrainingArguments, and of what is made of them: 20 steps by `optimizer`, with a checkpoint
every 5."""


def trained_by_hand(
    folder: Path,
    dataset: Dataset,
    batches: Iterator[Mapping[str, Any]],
    save: Callable[[int], Any],
    restore: Callable[[Any], Iterator[Mapping[str, Any]]],
) -> tuple[list[float], list[list[int]]]:
    """(losses, rows of each step) of the steps that are left of 20 in a loop of torch over another
    library's batches of tensors.

    Model and optimizer are saved every 5 steps, and with them what `save(step)` gives of the
    library's own state; `restore` of that gives the batches that follow.
    """
    import torch

    from packprep.adapters.torch_attention import sdpa_mask
    from packprep.adapters.torch_loss import masked_loss

    saved, numbers, model = folder / "saved.pt", numbers_of(dataset), llama(dataset.vocab_size)
    adam, done, losses, steps = optimizer(model), 0, [], []
    folder.mkdir(exist_ok=True)
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        batches, done = restore(state["batches"]), state["done"]
    for step, batch in zip(range(done + 1, STEPS + 1), batches, strict=False):
        steps.append([numbers[key_of(row, dataset.pad_id)] for row in batch["tokens"]])
        given = {
            "position_ids": batch["position_ids"],
            "attention_mask": sdpa_mask(batch),
            "use_cache": False,
        }
        loss = masked_loss(model(input_ids=batch["tokens"], **given).logits, batch)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
        if step % 5 == 0:
            states = {"model": model.state_dict(), "adam": adam.state_dict(), "batches": save(step)}
            torch.save({"done": step, **states}, saved)
        say_loss(step, losses[-1])
    return losses, steps


def assert_refused(what: str, make: Callable[[], Any]) -> None:
    """Hold that packprep refuses to make something; print why."""
    try:
        make()
    except ArgumentError as error:
        say(what, f"refused: {error}")
    else:
        raise AssertionError(f"{what}: not refused")


def assert_equal(
    what: str, losses: Sequence[float], expected: Sequence[float], tolerance: float = TOLERANCE
) -> None:
    """Hold that losses are those expected, step by step, and that the model learnt; print the
    largest difference."""
    assert len(losses) == len(expected) > 0, (
        f"{what}: {len(losses)} losses, where {len(expected)} are expected"
    )
    apart = np.abs(np.subtract(losses, expected))
    say(
        what,
        f"{losses[0]:.6f} to {losses[-1]:.6f} in {len(losses)} steps, {apart.max():.1e} apart at"
        " most",
    )
    assert apart.max() <= tolerance, f"{what}: {apart.max():.3g} apart at step {apart.argmax() + 1}"


def assert_apart(what: str, loss: float, right: float) -> None:
    """Hold that a loss is wrong, as is said of a setting; print by how much."""
    apart = abs(loss - right)
    say(what, f"its loss is {apart:.3f} apart")
    assert apart > 1e-3, f"{what}: {apart:.3g} apart"


def say_loss(step: int, loss: float) -> None:
    """What a child process says after step 1, 2, …, and its parent reads."""
    print(f"\nloss {step} {loss!r}", flush=True)


def losses_of(folder: Path, *words: str, kill_at: int | None = None) -> dict[int, float]:
    """Loss by step of this module's `train(folder, *words)` in a process of its own; SIGKILL ends
    it after step `kill_at`."""
    command = [sys.executable, "-m", _module(), str(folder), *words]
    said, losses, killed = [], {}, False
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as child:
        for line in child.stdout:
            said.append(line)
            if line.startswith("loss "):
                _, step, loss = line.split()
                losses[int(step)] = float(loss)
                if int(step) == kill_at:
                    os.killpg(child.pid, signal.SIGKILL)
                    killed = True
                    break
    assert killed or (kill_at is None and child.returncode == 0), "".join(said[-60:])
    return losses


def killed_and_resumed(
    undisturbed: Path, disturbed: Path, *words: str, kill_at: int = 13
) -> list[float]:
    """Hold that a run that is killed and started again has the losses of one that is not; gives
    these, all steps.

    Both folders may hold what `train` needs; it saves at least once in `kill_at` steps, and goes on
    from what it finds saved.
    """
    whole = losses_of(undisturbed, *words)
    assert sorted(whole) == list(range(1, STEPS + 1)), (
        f"{sorted(whole)} are the steps of the undisturbed run"
    )
    before = losses_of(disturbed, *words, kill_at=kill_at)
    after = losses_of(disturbed, *words)
    assert 1 < min(after) <= kill_at + 1 and max(after) == STEPS, (
        f"resumed at step {min(after)}, ended at {max(after)}"
    )
    apart = max(abs(loss - whole[step]) for run in (before, after) for step, loss in run.items())
    say(
        "killed and resumed",
        f"after step {kill_at}, from step {min(after)}; {apart:.1e} apart from undisturbed at most",
    )
    assert apart <= TOLERANCE, f"killed and resumed: {apart:.3g} apart"
    return [whole[step] for step in sorted(whole)]
