"""An extension of griffe, which mkdocs.yml names: show the examples of docstrings as code."""

import re

import griffe

_EXAMPLE = re.compile(r"^Example:\n((?:    .*\n?|\n(?=    ))+)", re.M)


class Examples(griffe.Extension):
    """Fences the `Example:` sections of docstrings."""

    def on_object(self, *, obj: griffe.Object, **rest) -> None:
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(fenced, obj.docstring.value)


def fenced(match: re.Match[str]) -> str:
    """Return an example with its code in a fence; one that begins with a sentence stays as it is."""
    body = match[1].rstrip("\n")
    if body.split("\n", 1)[0].endswith(":"):
        return match[0]
    return f"Example:\n    ```python\n{body}\n    ```\n"
