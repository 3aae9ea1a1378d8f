"""Docs, docstrings and messages are plain English: few sentences have to be read twice.

Each pattern flags a construction that readers stumbled over. A flag asks a person to look, so a few
are allowed: at most MOST_FLAGS for each 1,000 words.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_FLAGS = {"docs": 4.0, "docstrings": 5.0, "messages": 4.0}
PATTERNS = {
    "a preposition before a relative": r"\b(?:of|by|for|from|with|in|to|on|at) (?:which|whom|whose)\b",
    "a noun left out": r"\b(?:that|those) of\b|\b(?:another|nobody|somebody|whose)'s\b",
    "what or who as a noun": r"(?<!^)\b(?:what|whoever|whatever) (?:it|they|is|are|has|a|the)\b",
    "is no": r"\b(?:is|are|be) (?:no|none)\b|\bnone is\b",
    "an old word": (
        r"\b(?:laid|lain|begun|anew|whoever|mended|beside|apart from it|so many|for want of|but for"
        r"|of its own|by itself|at hand|turned away|passed over|goes on|gone on|told of|else[,;.])"
    ),
    "an inverted start": r"^(?:Of|By|With|Without|From) [^,.]{30,}$",
}
FLAGS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in PATTERNS.items()}
API = ("dataset", "adapters", "objectives")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text without code, tables, markup and drawings."""
    text = re.sub(r"^([ \t]*)(```|~~~).*?^\1\2[ \t]*$", "\n\n", text, flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^\s*\|.*$|^#+ .*$|^.*(?: {3,}\S|[─│└├┌▁►]).*$|^ *>>>.*$", "", text, flags=re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``?[^`\n]+``?", "CODE", text)
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*] ", text):
        yield from filter(None, re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())))


def pages() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of each page of the docs."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))):
        yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


@cache
def trees() -> list[tuple[str, ast.Module]]:
    """Return (place, syntax tree) of each module of the package, parsed once."""
    return [
        (path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8")))
        for path in sorted((ROOT / "packprep").rglob("*.py"))
    ]


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of each docstring of the package."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for place, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield f"{place}:{getattr(node, 'lineno', 1)}", text


def messages() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of each message with which the package raises an error."""
    for place, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                for argument in node.exc.args:
                    if text := words_of(argument):
                        yield f"{place}:{node.lineno}", text


def words_of(node: ast.expr) -> str:
    """Return the text of a string or an f-string, with VALUE for what it inserts."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in node.values
        )
    return ""


@pytest.mark.long
@pytest.mark.parametrize("texts", [pages, docstrings, messages], ids=list(MOST_FLAGS))
def test_few_sentences_are_hard_to_read(texts, request):
    words, flagged = 0, []
    for place, text in texts():
        for sentence in sentences(text):
            words += len(sentence.split())
            flagged += [
                f"{place}: {name}: {sentence[:120]}"
                for name, pattern in FLAGS.items()
                for _ in pattern.finditer(sentence)
            ]
    most = MOST_FLAGS[request.node.callspec.id]
    assert words > 5000
    assert len(flagged) <= most * words / 1000, "\n".join(flagged[:40])


def test_a_function_s_summary_says_what_it_does():
    begins = re.compile(r"(?:The|A|An|What|Whether|Where|How|Which|None)\b|\(|[a-z]")
    wrong, count = [], 0
    for place, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                decorators = {ast.unparse(one).split("(")[0] for one in node.decorator_list}
                if any(re.search(r"command|callback|property", one) for one in decorators):
                    continue  # the help text of a command, or an attribute
                count += 1
                if begins.match(text):
                    wrong.append(f"{place}:{node.lineno}: {text.splitlines()[0]}")
    assert len(wrong) <= count / 50, "\n".join(wrong)


def test_public_functions_say_what_their_arguments_are():
    wrong = []
    for place, tree in trees():
        if place.split("/")[1] not in API:
            continue
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for node in (node for scope in (tree, *classes) for node in scope.body):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            names = {argument.arg for argument in node.args.args} - {"self", "cls"}
            text = ast.get_docstring(node) or ""
            if len(names) >= 2 and text and not re.search(r"^Args:|^Attributes:", text, re.M):
                wrong.append(f"{place}:{node.lineno}: {node.name}")
    assert not wrong, "\n".join(wrong)
