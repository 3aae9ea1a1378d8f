"""Docstrings for the pages of the API: the words on a parameter, `name: what it is`, become an item
of a list.

An extension of griffe, which mkdocs.yml names. Docstrings are prose, and their examples indented,
which Markdown shows as they are; only parameters that follow one another in a paragraph would run
together.
"""

import re

import griffe


class Parameters(griffe.Extension):
    """Works on the docstrings of functions, and of classes with the parameters of their `__init__`
    and their attributes."""

    def on_function(self, *, func: griffe.Function, **rest) -> None:
        if func.docstring:
            func.docstring.value = listed(
                func.docstring.value, [parameter.name for parameter in func.parameters]
            )

    def on_class(self, *, cls: griffe.Class, **rest) -> None:
        init = cls.members.get("__init__")
        names = (
            [parameter.name for parameter in init.parameters]
            if isinstance(init, griffe.Function)
            else []
        )
        if cls.docstring:
            cls.docstring.value = listed(cls.docstring.value, [*names, *cls.members])


def listed(text: str, names: list[str]) -> str:
    """The text of a docstring with `a: …`, and `a, b: …`, of the names as items of lists, and
    "Raises …" as a paragraph."""
    known = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    if not known:
        return text
    begin = re.compile(rf"(?:^|(?<=[.;]) )((?:{known})(?:,? (?:{known}))*): ", re.M)
    paragraphs = []
    for paragraph in re.split(r"\n\n+", text):
        if not paragraph.startswith("    ") and begin.search(paragraph):
            paragraph = begin.sub(_item, paragraph)
            paragraph = re.sub(r"(?<=[.)]) (?=Raises )|\n(?=Raises )", "\n\n", paragraph)
            before, mark, items = paragraph.partition("\n- ")
            paragraph = before.rstrip() + ("\n\n- " if before.strip() else "- ") + items
        paragraphs.append(paragraph.strip("\n"))
    return "\n\n".join(paragraphs)


def _item(match: re.Match[str]) -> str:
    return "\n- " + re.sub(r"\w+", r"`\g<0>`", match[1]) + ": "
