"""What an expression's text may be, and what its fields' types may be."""

import math
from datetime import date

import pyarrow as pa
import pytest

from packprep.errors import RecipeError, SourceError
from packprep.sources.expressions import Expression

KEY = ("sources", 2, "where")
WHERE = "sources[2].where"


def condition(text: str, **columns) -> list[bool]:
    arrays = {
        name.replace("__", "."): values if isinstance(values, pa.Array) else pa.array(values)
        for name, values in columns.items()
    }
    return Expression.parse_condition(text, KEY).condition(arrays).tolist()


def number(text: str, **columns) -> list[float | None]:
    arrays = {name: pa.array(values) for name, values in columns.items()}
    values = Expression.parse_number(text, ("sources", 0, "repeat")).number(arrays).tolist()
    return [None if math.isnan(value) else value for value in values]


COUNTED = ("abs", "ceil", "floor", "coalesce", "max", "min")
REFUSED = (
    ("", "the expression is empty\nhint: write a comparison, or leave the key out"),
    ("score >", "character 8: this is not an expression"),
    ("  score > > 3", "character 11: this is not an expression"),
    ("  score = 3", "character 9: unknown operator =\nhint: write =="),
    ("  score => 3", "character 9: unknown operator =>\nhint: write >="),
    ("score =< 3", "character 7: unknown operator =<\nhint: write <="),
    ("score && ok", "character 7: unknown operator &&\nhint: write and"),
    ("score > 3 AND ok", "character 11: AND is not an operator\nhint: write and"),
    ("score > 3 # ok", "character 11: the expression has a comment\nhint: remove it"),
    ("score\n> 3", "the expression has a line break\nhint: write it in one line"),
    ("lang == 'de", "character 9: this is not an expression|not closed"),
    ("lang == '\ud800'", "the expression has a lone surrogate"),
    ("lang == '\udfff'", "the expression has a lone surrogate"),
    ("lang == '\ud7ff\ue000'", None),
    ("(lang == 'de'", "a bracket or a quotation mark is not closed"),
    ("lang in ('de' 'fr')", "character 15: a comma is missing between two texts"),
    ("name == 'it''s'", 'two texts\nhint: write "it\'s" for a text with a quotation mark'),
    ("lang in 'de'", "character 9: in needs a list\nhint: write x in ('a', 'b')"),
    ("lang in ()", "the list after in is empty"),
    ("lang in ('de', other)", "character 16: a list holds only numbers and texts"),
    ("lang == ('de', 'fr')", "character 9: a list stands only after in\nhint: write x in ('a'"),
    ("lang == null", "a comparison with null is never true\nhint: write x is null"),
    ("null == lang", "character 1: null is not a value\nhint: write x is null, or x is not null"),
    ("lang == None", "character 9: None is unknown\nhint: write x is null"),
    ("lang is 'de'", "is compares only with null\nhint: write == or !="),
    ("score is not None", "is compares only with null\nhint: write null for None"),
    ("score <> 3", "this is not an expression\nhint: write !=|unknown operator <>\nhint: write !="),
    ("score between 1 and 3", "this is not an expression\nhint: write low <= x <= high"),
    ("lang LIKE 'd%'", "this is not an expression\nhint: write x == 'text', or x in"),
    ("a == b in (1, 2)", "in, is and != are not part of a chain"),
    ("1 < 2", "no field of the record is in the expression"),
    ("score", None),
    ("score + 1", "the result is a number, not true or false"),
    ("+(score > 1) or -(0) > score", None),
    ("  'de'", "character 3: the result is a text, not true or false"),
    ("lang > 'a' and score + 'a' > 2", "character 24: + takes a number, but 'a' is a text"),
    ("score > 3 and 5", "and takes true or false, but 5 is a number"),
    ("score > 3 and score * 2", "but score * ... is a number"),
    ("1 + (score > 3) > 2", "+ takes a number, but score > ... is true or false"),
    ("ok or abs(score)", "or takes true or false, but abs(...) is a number"),
    ("not -score", "not takes true or false, but -(...) is a number"),
    ("-true < score", "- takes a number, but true is true or false"),
    (f"not '{'a' * 37}üü'", f"but '{'a' * 37}\\x is a text"),
    ("'ä' < lang and (1 if 5 else score) > 2", "character 22: if takes true or false, but 5 is"),
    ("(1 if ok else 'a') == score", "if takes values of one kind, but 1 is a number and 'a' is a"),
    ("ok < true", "< has no order for true and false"),
    ("score > 18446744073709551615 or -9223372036854775808 > score", None),
    ("score > 18446744073709551616", "character 9: a number is too large"),
    ("score > -9223372036854775809", "character 9: a number is too small\nhint: write a number of"),
    ("score > 1e999", "character 9: a number is too large"),
    ("score > 3j", "a literal of type complex is unknown"),
    ("name == b'x'", "a literal of type bytes is unknown"),
    ("name == f'{x}'", "character 9: an expression has no such part"),
    ("name == '\\d'", "this is not an expression"),
    ("name == '\\ud800'", "a text has a lone surrogate"),
    ("score ** 2 > 3", "character 1: this operator is unknown\nhint: use one of + - * / %"),
    ("~ok", "character 1: ~ is unknown\nhint: write not"),
    ("__import__('os')", "__import__ is not a function"),
    ("(lambda: score)() > 1", "this is not a function"),
    ("[x for x in score]", "an expression has no such part"),
    ("score[0] > 1", "an expression has no such part"),
    ("(score := 3) > 1", "an expression has no such part"),
    ("a.b().c > 1", "only a field has fields"),
    ("field(3) > 1", "character 1: field takes one text\nhint: write field('a name')"),
    ("field('a', 'b') > 1", "field takes one text"),
    ("mni(score, 3) > 1", "mni is not a function\nhint: write min"),
    ("sqrt(score) > 1", "hint: use one of abs, ceil, clip, coalesce, floor, max, min"),
    *((f"score > {name}()", f"{name} takes 1 arguments, not 0") for name in COUNTED[:3]),
    *((f"score > {name}()", f"{name} takes 1 to 99 arguments, not 0") for name in COUNTED[3:]),
    ("clip(score) > 1", "clip takes 3 arguments, not 1"),
    ("ﬁeld > 2", "a field's name has characters of another form\nhint: write field('…')"),
    ("(" * 240 + "score > 1" + ")" * 240, "this is not an expression|not closed"),
    ("not " * 118 + "ok", None),
    ("not " * 119 + "ok", "the expression is nested too deeply"),
    ("not " + "ok or " * 249 + "ok", None),  # 500 names and operators
    ("ok or " * 250 + "ok", "has 501 names and operators; at most 500 are read"),
    ("a" + ".b" * 200 + " > 1", "the expression is nested too deeply"),
    ("a" * 65536, None),
    ("a" * 65537, "at most 65536 are read"),
    ("ok\0", "this is not an expression|not closed"),
)
"""Expressions, and a part of the message that refuses each. A \"|\" separates parts of versions of
Python. None: the expression is good."""


def test_an_expression_that_cannot_be_used_is_refused_by_key_and_place():
    for text, message in REFUSED:
        if message is None:
            Expression.parse_condition(text, KEY)
            continue
        with pytest.raises(RecipeError) as caught:
            Expression.parse_condition(text, KEY)
        shown = str(caught.value)
        assert shown.startswith(f"{WHERE} = {text!r:.500}: ") and caught.value.key == KEY
        assert any(part in shown for part in message.split("|")), shown


def test_a_list_of_thousands_of_texts_is_read():
    names = [f"repository-{i}" for i in range(3000)]
    text = f"repo in ({', '.join(map(repr, names))})"
    assert condition(text, repo=["x", names[2999], None]) == [False, True, False]


WRONG_TYPES = (
    ({}, "there is no field 'meta.lang'"),
    (
        {"meta.lang": pa.int64()},
        "== takes values of one kind, but meta.lang is a number and 'de'",
    ),
    ({"meta.lang": pa.list_(pa.string())}, "meta.lang is a list; only 'is null' reads it"),
    ({"meta.lang": pa.duration("s")}, "a value of the type duration[s]; only 'is null'"),
    ({"meta.lang": pa.timestamp("s")}, "'de' is not a timestamp[s], such as '2026-01-31'"),
)


def test_a_table_with_a_wrong_field_is_refused_with_the_fields_there_are():
    expression = Expression.parse_condition("meta.lang == 'de'", KEY)
    there = {"text": pa.string(), "score": pa.float32()}
    for types, message in WRONG_TYPES:
        with pytest.raises(SourceError) as caught:
            expression.check("a.parquet", types, there)
        given = "the fields are 'text' (string), 'score' (float)"
        assert str(caught.value).startswith(f"a.parquet: {WHERE} = \"meta.lang == 'de'\": ")
        assert message in str(caught.value) and given in str(caught.value)
    expression.check("a.parquet", {"meta.lang": pa.dictionary(pa.int8(), pa.string())}, there)
    many = {f"f{i}": pa.int8() for i in range(51)}
    with pytest.raises(SourceError, match=r"'f48' \(int8\), 'f49' \(int8\)\n"):
        expression.check("a.parquet", {}, many)


def test_null_and_nan_follow_three_valued_logic():
    x = [1.0, None, math.nan, 5.0]
    assert condition("x > 3", x=x) == [False, False, False, True]
    assert condition("not x > 3", x=x) == [True, False, False, False]
    assert condition("x is null", x=x) == [False, True, True, False]
    assert condition("x > 3 or true", x=x) == [True] * 4
    assert condition("x != 1 and x is not null", x=x) == [False, False, False, True]
    assert condition("ok or x > 3", x=x, ok=[None, None, True, None]) == [False, False, True, True]
    assert number("2 if x > 3 else 1", x=x) == [1, 1, 1, 2]
    assert number("min(x, 4)", x=x) == [1, None, None, 4]
    assert number("coalesce(x, 0)", x=x) == [1, 0, 0, 5]
    assert number("coalesce(n, i, 0.5)", n=[None, None], i=[None, 3]) == [0.5, 3]


def test_integers_are_exact_and_what_is_no_number_is_null():
    assert condition("i == 9007199254740993", i=[2**53, 2**53 + 1]) == [False, True]
    assert condition("i + 1 == 9007199254740994", i=[2**53, 2**53 + 1]) == [False, True]
    large = pa.array([2**64 - 1, 2**63, 3], pa.uint64())
    assert condition("h % 100 == 15", h=large) == [True, False, False]
    assert condition("h - 9223372036854775808 >= 0", h=large) == [True, True, False]
    assert number("i * 2", i=[2**62, 2**62 - 1, -(2**62)]) == [None, 2.0**63 - 2, -(2.0**63)]
    assert number("-i", i=[-(2**63), 5]) == [None, -5]
    assert number("abs(i) % 3", i=[-(2**63), -5]) == [None, 2]
    assert number("i / 0", i=[1, 0]) == [None, None]
    assert number("i % -1", i=[-(2**63), 7]) == [0, 0]
    assert number("i % u", i=[-7, 7], u=pa.array([4, 4], pa.uint64())) == [-3, 3]
    assert number("u % i", u=pa.array([7, 7], pa.uint64()), i=[-4, 0]) == [3, None]
    assert condition("min(i, 9223372036854775807) == 9007199254740993", i=[2**53 + 1]) == [True]
    assert condition("floor(i) == 9007199254740993", i=[2**53, 2**53 + 1]) == [False, True]
    assert condition("i >= 4611686018427387904 + 1", i=[2**62, 2**62 + 1]) == [False, True]
    for least in (
        0,
        3,
        -1,
    ):  # A number of uint64 stays exact next to a literal that is not negative.
        kept = condition(f"max(h, {least}) == 18446744073709551615", h=large)
        assert kept == [True, False, False] or least < 0
        assert number(f"max(h, {least})", h=large) == [2.0**64, 2.0**63, 3]
    assert number("i if ok else u", i=[1], u=pa.array([2**64 - 1], pa.uint64()), ok=[True]) == [1]
    # The float64 product of these is below 2**63.
    assert number("i * j", i=[103], j=[89547301328687144]) == [None]
    encoded = pa.DictionaryArray.from_arrays([0, 1, None], pa.array([None, 5]))
    assert condition("i == 5", i=encoded) == [False, True, False]
    assert condition("i is null", i=encoded) == [True, False, True]
    assert number("x - x", x=[math.inf, 1.0]) == [None, 0]


def test_texts_compare_by_their_characters_whatever_their_type():
    texts = ["de", "ä", None, "z\U0010ffff", ""]
    wanted = [False, True, False, True, False]
    dictionary = pa.DictionaryArray.from_arrays([0, 1, 2, 3, 4], pa.array(texts))
    for given in (
        pa.array(texts),
        pa.array(texts, pa.large_string()),
        pa.array(texts, pa.string_view()),
        pa.array(texts, pa.binary()),
        pa.array(texts).dictionary_encode(),
        dictionary,
    ):
        assert condition("t > 'e'", t=given) == wanted, given.type
        assert condition("t in ('z\U0010ffff', 'ä')", t=given) == wanted, given.type
        assert condition("t == t", t=given) == [True, True, False, True, True], given.type
        assert condition("t is null", t=given) == [False, False, True, False, False], given.type
    assert condition("t == 'a'", t=pa.array([b"a", b"\xff"])) == [True, False]
    with_null = pa.DictionaryArray.from_arrays([0, 1, None], pa.array([None, "a"]))
    assert condition("t is null", t=with_null) == [True, False, True]
    assert condition("t != 'b'", t=with_null) == [False, True, False]
    for given in (pa.array(["a", None]), pa.array([None, "a"]), pa.nulls(2, pa.string())):
        wanted = [value == "a" for value in given.to_pylist()]
        assert condition("t == 'a'", t=given.dictionary_encode()) == wanted
        assert condition("t in ('a')", t=given.dictionary_encode()) == wanted
        assert condition("coalesce(t, 'b') == 'a'", t=given.dictionary_encode()) == wanted
        assert condition("(t if ok else 'a') == 'a'", t=given, ok=[True] * 2) == wanted
        assert condition("t == ('a' if 1 < 2 else 'b')", t=given) == wanted
        assert condition("t == ('b' if 1 > 2 else 'a')", t=given) == wanted


def test_times_compare_with_texts_in_utc():
    zone = pa.array([0, 3600_000], pa.timestamp("ms", "Europe/Berlin"))
    assert condition("t > '1970-01-01 00:30:00'", t=zone) == [False, True]
    assert condition("t > '1970-01-01 01:30:00+01:00'", t=zone) == [False, True]
    days = pa.array([date(2026, 1, 31), date(2026, 2, 1), None])
    assert condition("t >= '2026-02-01'", t=days) == [False, True, False]
    assert condition("t == s", t=days, s=days) == [True, True, False]
    assert condition("coalesce(t, s) == s", t=days, s=days[::-1]) == [False, True, True]


def test_a_name_can_be_nested_quoted_or_a_word_of_the_language():
    assert condition("meta.score > 1", meta__score=[1, 2]) == [False, True]
    assert Expression.parse_condition("field('a b').c > 1", KEY).fields == ("a b.c",)
    assert Expression.parse_condition("field('true') or min > 1", KEY).fields == ("true", "min")


def test_the_values_of_a_record_with_other_types_are_named():
    expression = Expression.parse_condition("score >= 3 and tags is not null", KEY)
    fits = {"score": pa.int64(), "tags": pa.list_(pa.null())}
    assert expression.fault(fits) == "" == expression.fault(dict.fromkeys(fits, pa.null()))
    detail = ">= takes values of one kind, but score is a text and 3 is a number"
    assert expression.fault({**fits, "score": pa.string()}) == detail
    with pytest.raises(SourceError, match="score is a text and 3 is a number"):
        expression.condition({"score": pa.array(["3"]), "tags": pa.nulls(1)})
    kinds = {
        "made": pa.timestamp("s"),
        "there": pa.timestamp("s", "UTC"),
        "ok": pa.bool_(),
        "n" * 41: pa.int8(),
    }
    one_kind = "takes values of one kind, but"
    for text, detail in (
        ("'2026-01-31' < made", ""),
        ("made > 3", f"> {one_kind} made is a time and 3 is a number"),
        ("made in ('2026-01-31')", "in accepts no times, which == and or can compare"),
        (
            "coalesce(made, '2026-01-31') is null",
            f"coalesce {one_kind} made is a time and '2026-01-31' is a text",
        ),
        (
            "made == 'today'",
            "'today' is not a timestamp[s], such as '2026-01-31' or '2026-01-31 12:00:00'",
        ),
        ("made == there", "cannot compare timestamp[s] and timestamp[s, tz=UTC]"),
        ("ok >= ok", ">= has no order for true and false"),
        (f"{'n' * 41} in ('a')", f"in {one_kind} {'n' * 40} is a number and 'a' is a text"),
    ):
        assert Expression.parse_condition(text, KEY).fault(kinds) == detail
    far, near = pa.array([10**15], pa.timestamp("s")), pa.array([1], pa.timestamp("ns"))
    with pytest.raises(SourceError, match=r"cannot compare timestamp\[s\] and timestamp\[ns\]"):
        condition("far == near", far=far, near=near)
