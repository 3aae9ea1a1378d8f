"""A key's line in a recipe file, for messages."""

import pytest

from packprep.recipe import line_of
from packprep.recipe.places import MAX_LINES, key_of

TEXT = """\
# a comment, and "seed = 2" in it
seed = 1
documents.min_tokens = 3

[[sources]]
paths = [
  "a",  # [[tasks]]
  "b",
]
[[sources]]
name = "x"
[[tasks]]
preset = "ul2r"
[[tasks]]
objective = "causal"
weight = 3
[specials]
"[NLU]" = "<x>"
eos = '''
weight = 4
'''
pad = "<pad>"
"""


@pytest.mark.parametrize(
    "key, line",
    [
        (("seed",), 2),
        (("documents", "min_tokens"), 3),
        (("sources", 0), 5),
        (("sources", 0, "paths"), 6),
        (("sources", 0, "name"), 5),  # it does not stand: the header
        (("sources", 1, "name"), 11),
        (("sources", 1, "paths"), 10),
        (("tasks", 0, "preset"), 13),
        (("tasks", "ul2r", "preset"), 13),
        (("tasks", 1, "weight"), 16),
        (("tasks", "causal", "weight"), 16),
        (("tasks",), 12),
        (("specials", "[NLU]"), 18),
        (("specials", "eos"), 19),
        (("specials", "pad"), 22),
        (("packing", "algorithm"), None),
        (("tokenizer",), None),
    ],
)
def test_a_key_has_its_line(key, line):
    assert line_of(TEXT, key) == line


def test_a_value_of_very_many_lines_ends_the_search():
    text = "seed = 1\npaths = [\n" + '"a",\n' * MAX_LINES + ']\n[documents]\nlong = "drop"\n'
    assert line_of(text, ("seed",)) == 1 and line_of(text, ("documents", "long")) is None


def test_a_key_is_read_from_how_messages_write_it():
    assert key_of("tasks[0].weight") == ("tasks", 0, "weight")
    assert key_of('specials."[NLU]"') == ("specials", "[NLU]")
    assert key_of("seq_length") == ("seq_length",) and key_of("") == ()
