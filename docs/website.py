"""Builds the site of the docs into site/: python docs/website.py

The pages of docs/ are plain Markdown that reads well where it lies. A site holds nothing else of
the repository, so they are first copied to .site/ with what only a site needs: a page for each file
outside of docs/ that a page links to, and the pages of the API, made from docstrings. mkdocs.yml
says the rest. Zensical then builds them; warnings, such as of a link that leads nowhere, are
errors. Nothing is fetched.
"""

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAGED = ROOT / ".site"
_FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.S | re.M)
_LINK = re.compile(r"(?P<before>!?\[(?:[^\]\[]|\[[^\]]*\])*\]\()(?P<target>[^)\s]+)(?P<after>\))")
_DRAWING = re.compile(r"^!\[.*?\]\((?P<target>drawings/\w+\.svg)\)$", re.M)
_STYLE = re.compile(r"<style>.*?</style>\n")
_COMMENT = re.compile(r"^ *<!--.*?-->\n?", re.S | re.M)

# page of the API → (its title, what it is, the objects it shows). A module shows what its __all__
# or its names say.
API = {
    "datasets": (
        "Datasets",
        (
            "What a trainer opens, and what it gives. Numpy and the standard library only. In"
            " prose: [loader](../loader.md)."
        ),
        (
            "packprep.open_dataset",
            "packprep.dataset.loader.Dataset",
            "packprep.dataset.row.Row",
            "packprep.dataset.batches.Batches",
            "packprep.dataset.mixture.Mixture",
        ),
    ),
    "attention": ("Attention", "", ("packprep.dataset.attention",)),
    "torch": (
        "torch",
        "In prose: [torch](../guides/torch.md).",
        (
            "packprep.adapters.torch",
            "packprep.adapters.torch_attention",
            "packprep.adapters.torch_loss",
        ),
    ),
    "jax": (
        "JAX",
        "In prose: [JAX](../guides/jax.md).",
        ("packprep.adapters.jax", "packprep.adapters.jax.grain_source"),
    ),
    "huggingface": (
        "Transformers",
        "In prose: [Transformers](../guides/huggingface.md).",
        ("packprep.adapters.huggingface",),
    ),
    "megatron": ("Megatron-LM", "", ("packprep.adapters.megatron",)),
    "remote": (
        "Datasets at URLs",
        "In prose: [object stores](../guides/storage.md).",
        ("packprep.adapters.remote",),
    ),
    "engines": ("Builds by other engines", "", ("packprep.building.distributed",)),
    "errors": ("Errors", "", ("packprep.errors",)),
}


def main() -> int:
    stage()
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--clean",
        "--strict",
        "--config-file",
        str(ROOT / "mkdocs.yml"),
    ]
    return subprocess.run(command, cwd=ROOT).returncode


def stage() -> None:
    """Write .site/ anew."""
    shutil.rmtree(STAGED, ignore_errors=True)
    linked: set[str] = set()
    for path in sorted((ROOT / "docs").rglob("*")):
        name = path.relative_to(ROOT / "docs").as_posix()
        if path.suffix == ".md":
            _write(name, page(path.read_text("utf-8"), f"docs/{name}", name, linked))
        elif path.suffix == ".css":
            _write(name, path.read_text("utf-8"))
    done: set[str] = set()
    while missing := sorted(linked - done):
        for target in missing:
            _write(source_page(target), _source(target, linked))
        done |= set(missing)
    for name, (title, words, objects) in API.items():
        _write(
            f"api/{name}.md",
            "\n\n".join(
                (f"# {title}", *filter(None, [words]), *(f"::: {shown}" for shown in objects))
            ),
        )


def page(text: str, origin: str, name: str, linked: set[str]) -> str:
    """A page for the site: without comments, with drawings in place, and with links out of docs/
    led to pages that show what they lead to.

    origin: its path in the repository; name: its path in .site/. What it links to outside of docs/
    is added to `linked`.
    """

    def lead(match: re.Match[str]) -> str:
        path, mark, anchor = match["target"].partition("#")
        if not path or "://" in path:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if target.startswith("docs/"):
            to = target.removeprefix("docs/")
        else:
            linked.add(target)
            to = source_page(target)
        return f"{match['before']}{posixpath.relpath(to, posixpath.dirname(name) or '.')}{mark}{anchor}{match['after']}"

    parts, at = [], 0
    for fence in (*_FENCE.finditer(text), None):
        end = fence.start() if fence else len(text)
        parts.append(_LINK.sub(lead, _DRAWING.sub(_inlined, _COMMENT.sub("", text[at:end]))))
        if fence:
            parts.append(fence[0])
            at = fence.end()
    return "".join(parts)


def _inlined(match: re.Match[str]) -> str:
    """A drawing in place of its link, so that its colour is that of the page's scheme."""
    drawing = (ROOT / "docs" / match["target"]).read_text("utf-8")
    return f'<div class="drawing">{_STYLE.sub("", drawing)}</div>'


def source_page(target: str) -> str:
    """The page in .site/ that shows a file or folder of the repository."""
    return f"source/{target.removesuffix('.md')}.md"


def _source(target: str, linked: set[str]) -> str:
    path = ROOT / target
    unsearched = "---\nhide: [toc]\nsearch:\n  exclude: true\n---\n"
    if path.is_dir():
        files = sorted(
            file.name
            for file in path.iterdir()
            if file.is_file() and not file.name.startswith((".", "_"))
        )
        linked |= {f"{target}/{file}" for file in files}
        links = (
            f"- [{file}]({posixpath.basename(target)}/{file.removesuffix('.md')}.md)\n"
            for file in files
        )
        return f"{unsearched}# {target}/\n\n{''.join(links)}"
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return page(text, target, source_page(target), linked)
    fence = "`" * (3 + max(map(len, re.findall("`+", text)), default=0))
    language = {".py": "python", ".toml": "toml", ".sh": "sh"}.get(path.suffix, "text")
    return f"{unsearched}# {target}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _write(name: str, text: str) -> None:
    path = STAGED / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


if __name__ == "__main__":
    sys.exit(main())
