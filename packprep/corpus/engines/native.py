"""The tokenizer of the fast engine's library, which loads in a thread of its own.

The library loads a large vocabulary for half a second, without the lock of Python: beside all that a build begins with.
"""

import contextlib
import os
import threading
from concurrent.futures import Future
from typing import Any

from packprep.corpus.remembered import recall, remember
from packprep.corpus.tokenizer_json import PlainDependsOn, panics_as_errors

NAME = "fastokens"
_ONE_THREAD = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS")


class Loading:
    """A tokenizer.json that the library loads while the caller goes on."""

    def __init__(self, tokenizer_json: bytes):
        self.tokenizer_json = tokenizer_json
        self._tokenizer: Future[Any] = Future()
        self._thread = threading.Thread(target=self._load, daemon=True)
        self._thread.start()

    def _load(self) -> None:
        try:
            with panics_as_errors():
                self._tokenizer.set_result(library().Tokenizer.from_json_str(self.tokenizer_json.decode()))
        except BaseException as error:
            self._tokenizer.set_exception(error)

    def result(self) -> Any:
        """The library's tokenizer, waited for. Raises whatever the library did."""
        self._thread.join()
        return self._tokenizer.result()


_begun: list[Loading] = []  # one at most


def library() -> Any:
    """The compiled module of `fastokens`; ImportError. It uses one thread: processes scale, its threads hardly do."""
    for variable in _ONE_THREAD:  # read when the library is first used
        os.environ.setdefault(variable, "1")
    from fastokens import _native

    return _native


def begin(tokenizer_json: bytes) -> None:
    """Load a tokenizer.json that `loading` will be asked for, or so it seems."""
    _begun[:] = [Loading(tokenizer_json)]


def begin_as_before(tokenizer: str, special_text: str) -> None:
    """`begin` with what `note` noted of a build before; nothing where there was none."""
    with contextlib.suppress(LookupError):
        begin(recall("plain", recall("begun", (tokenizer, special_text), PlainDependsOn), bytes))


def note(tokenizer: str, special_text: str, depends_on: PlainDependsOn) -> None:
    """Note what is loaded for a tokenizer, so that the next build may begin with it before it knows what it needs.

    tokenizer: its path, or its name. depends_on: by what its plain tokenizer.json is remembered.
    """
    with contextlib.suppress(LookupError):
        if recall("begun", (tokenizer, special_text), PlainDependsOn) == depends_on:
            return
    remember("begun", (tokenizer, special_text), depends_on)


def loading(tokenizer_json: bytes) -> Loading:
    """What has begun, if it is this tokenizer.json; it begins now otherwise."""
    begun = _begun.pop() if _begun else None
    return begun if begun and begun.tokenizer_json == tokenizer_json else Loading(tokenizer_json)
