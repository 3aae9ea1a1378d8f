"""The rendering of messages with chat templates, as in Hugging Face's tokenizers.

The reference is `utils/chat_template_utils.py` of transformers.

```
{% for m in messages %}<|im_start|>{{ m.role }}    <|im_start|>user
{{ m.content }}<|im_end|>                     ──►  2+2?<|im_end|>
{% endfor %}                                       <|im_start|>assistant
                                                   4<|im_end|>
```
A template is foreign code. It runs in Jinja's sandbox with limits (template_limits.py). The bytes
of a dataset must not depend on time or randomness. Therefore `random` and `lipsum` are removed, and
the recipe gives the date.
"""

import datetime
import json
import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from packprep.errors import RecipeError
from packprep.storage import expanded
from packprep.tokenizer.file import BYTES_ROLES, HINT_FILES, hints_in, read_beside

T = TypeVar("T")
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_TOKEN_NAME = re.compile(r"\b(\w+_token)\b")
_ROLE_NAMES = {f"{role}_token" for role in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")}


MOST_TEMPLATE_BYTES = 1 << 20
_OF_PROCESSOR = "chat_template.json"
_NAMED_FOLDER = "additional_chat_templates"
_MOST_INDENT = 64


class NoTemplate(RecipeError):
    """An error for a document with messages if no chat template was found."""


class TemplateRefusal(Exception):
    """An error for messages that a template cannot render.

    The error's message is usually the text that the template passes to raise_exception("…").
    """


class LeftOut(TemplateRefusal):
    """An error for a template that does not write a part of a record."""


def find_template(path_key: str, base: Path, tokenizer: str, date: str = "") -> str | None:
    """Return the text of the recipe's chat template, or None if there is no template.

    If the template names special tokens, such as bos_token, the returned text begins with lines
    that set them. A template next to a tokenizer is checked only when a document needs it.

    Args:
        path_key: `documents.chat_template`, a Jinja file relative to base. "" takes the template
            next to the tokenizer: chat_template.jinja, or chat_template in tokenizer_config.json or
            in a processor's chat_template.json. If there are several named templates, "default" is
            used.
        base: The recipe's folder.
        tokenizer: The recipe's tokenizer.
        date: As in `compile_template`.

    Raises:
        RecipeError: If the file that `documents.chat_template` names is not a usable template.
    """
    files = {name: read_beside(tokenizer, base, name) for name in HINT_FILES}
    configs = [hints_in(name, data) for name, data in files.items() if data is not None]
    if not path_key:
        source = _template_beside(tokenizer, base, configs)
        return (
            None
            if source is None
            else _with_tokens(source, _token_texts(source, tokenizer, configs))
        )
    path = base / expanded(path_key)
    where = f"documents.chat_template = {path_key!r}"
    hint = "hint: give a Jinja file, relative to the recipe"
    if path.exists() and not path.is_file():
        raise RecipeError(f"{where}: {path} is not a regular file\n{hint}")
    try:
        if path.stat().st_size > MOST_TEMPLATE_BYTES:
            size = f"more than {MOST_TEMPLATE_BYTES} bytes"
            raise RecipeError(f"{where}: {path} has {size}\nhint: give a Jinja file")
        source = path.read_text("utf-8")
    except OSError as error:
        raise RecipeError(f"{where}: {path}: {error.strerror}\n{hint}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{where}: {path} is not UTF-8 at byte {error.start}\nhint: give a Jinja file in UTF-8"
        ) from None
    except ValueError as error:
        raise RecipeError(
            f"{where}: invalid file name ({error})\nhint: give a Jinja file"
        ) from None
    if _is_object(source):
        raise RecipeError(
            f"{where}: {path} is JSON, so the template would write its braces and keys into every"
            " conversation\nhint: name a file that contains only the text of its chat_template"
        )
    compile_template(source, date)
    texts = _token_texts(source, tokenizer, configs)
    # A token without a text would be rendered as an empty text.
    unknown = sorted(_ROLE_NAMES & set(_TOKEN_NAME.findall(source)) - texts.keys())
    if unknown and not configs and tokenizer != "bytes":
        raise RecipeError(
            f"{where} uses {', '.join(unknown)}, and no {' or '.join(HINT_FILES)} next to"
            f" tokenizer = {tokenizer!r} names this token\nhint: write the token's text into the"
            " template"
        )
    return _with_tokens(source, texts)


def _is_object(source: str) -> bool:
    """Return whether a text is a JSON object, such as a tokenizer_config.json with a template."""
    try:
        return isinstance(json.loads(source), dict)
    except (ValueError, RecursionError):
        return False


def _template_beside(
    tokenizer: str, base: Path, configs: Sequence[Mapping[str, Any]]
) -> str | None:
    data = read_beside(tokenizer, base, "chat_template.jinja")
    if data is not None:
        of_tools = read_beside(tokenizer, base, f"{_NAMED_FOLDER}/tool_use.jinja")
        tool_use = None if of_tools is None else of_tools.decode("utf-8", "replace")
        return _with_tool_use(data.decode("utf-8", "replace"), tool_use)
    for config in (*configs, *_of_processor(tokenizer, base)):
        config_value: Any = config.get("chat_template")
        if isinstance(config_value, str):
            return config_value
        named = _by_name(config_value)
        if "default" in named:
            return _with_tool_use(named["default"], named.get("tool_use"))
    return None


def _by_name(templates: Any) -> dict[str, str]:
    """Return name → template for a `chat_template` that lists or maps several templates."""
    if isinstance(templates, Mapping):
        pairs = list(templates.items())
    else:
        entries = templates if isinstance(templates, list) else []
        pairs = [(e.get("name"), e.get("template")) for e in entries if isinstance(e, dict)]
    return {
        name: template
        for name, template in pairs
        if isinstance(name, str) and isinstance(template, str)
    }


def _with_tool_use(default: str, tool_use: str | None) -> str:
    """Return a template that uses `tool_use` for conversations with tools and `default` for others.

    Transformers chooses in the same way.
    """
    if tool_use is None or tool_use == default:
        return default
    if bool(_GENERATION.search(default)) != bool(_GENERATION.search(tool_use)):
        raise RecipeError(
            "only one of the tokenizer's chat templates default and tool_use has"
            " {% generation %} blocks, which mark the trained text\nhint: write one of them into a"
            " file, and name it in documents.chat_template"
        )
    # Jinja removes a newline at the end of a template. Inside {% if %}, it would stay.
    tool_use, default = (text.removesuffix("\n") for text in (tool_use, default))
    return f"{{% if tools is not none %}}{tool_use}{{%+ else %}}{default}{{%+ endif %}}"


def _of_processor(tokenizer: str, base: Path) -> list[Mapping[str, Any]]:
    """Return a list with the content of a processor's chat_template.json next to a tokenizer.

    The list is empty if the file does not exist.
    """
    data = read_beside(tokenizer, base, _OF_PROCESSOR)
    return [] if data is None else [hints_in(_OF_PROCESSOR, data)]


def unused_templates(tokenizer: str, base: Path) -> str:
    """Return an error message that lists the named chat templates next to a tokenizer.

    The message says that none of them is used. Return "" if no template has a name.
    """
    files = {name: read_beside(tokenizer, base, name) for name in HINT_FILES}
    configs = [hints_in(name, data) for name, data in files.items() if data is not None]
    values = [config.get("chat_template") for config in (*configs, *_of_processor(tokenizer, base))]
    if names := [
        name for value in values if not isinstance(value, str) for name in _by_name(value)
    ]:
        return (
            "a document has messages, and none of the tokenizer's chat templates is named default:"
            f" they are named {', '.join(names)}\nhint: write the text of one of them into a Jinja"
            " file, and set documents.chat_template to that file"
        )
    path = base / expanded(tokenizer)
    folder = (path if path.is_dir() else path.parent) / _NAMED_FOLDER
    if files_there := sorted(folder.glob("*.jinja")):
        names = [file.stem for file in files_there]
        return (
            "a document has messages, and the tokenizer has only the chat templates of"
            f" {_NAMED_FOLDER}, named {', '.join(names)}\nhint: choose one of them, for example"
            f" documents.chat_template = {str(files_there[0])!r}"
        )
    return ""


def _token_texts(
    source: str, tokenizer: str, configs: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Return name → text of the special tokens that a template names, such as eos_token.

    Tokens without a known text are left out.
    """
    texts: dict[str, str | None] = {}
    if tokenizer == "bytes":
        texts |= {f"{role}_token": text for role, text in BYTES_ROLES.items()}
    for config in configs:
        for name, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if text is None or isinstance(text, str):
                # A null means that the token does not exist, even if a later file names it.
                texts.setdefault(name, text)
    named = {name: texts.get(name) for name in sorted(set(_TOKEN_NAME.findall(source)))}
    return {name: text for name, text in named.items() if text is not None}


def _with_tokens(source: str, texts: Mapping[str, str]) -> str:
    # Jinja removes the newline after each block (trim_blocks). The template's text must start a
    # line for lstrip_blocks.
    sets = (
        f"{{% set {name} = {json.dumps(text, ensure_ascii=False)} %}}\n"
        for name, text in texts.items()
    )
    return "".join(sets) + source


class ChatTemplate:
    """A compiled template.

    Attributes:
        marks_generation: Whether the template marks an assistant's text with {% generation %}.
        knows_turns: Whether the template has {% generation %} or reads add_generation_prompt. Such
            a template separates the opening of a turn from the turn.
        words: All names, attributes and texts in the template. If the name of a field is not in
            `words`, the template can read the field only by looping over all fields.
    """

    def __init__(self, template: Any, source: str, names: Set[str], words: Set[str]):
        self.words = words
        self.marks_generation = bool(_GENERATION.search(source))
        self.knows_turns = self.marks_generation or "add_generation_prompt" in names
        self.source = source
        self._template = template
        self._globals = dict(template.globals)
        self._known: dict[Hashable, tuple[Any, int, int]] = {}

    def begin(self) -> None:
        """Reset the counters of the template's limits."""
        self._template.environment.begin()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        prompt: bool = False,
        around: tuple[str, str] = ("", ""),
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        go_on: bool = False,
    ) -> str:
        """Return the text of messages.

        Args:
            messages: The messages.
            prompt: Whether to add the generation prompt.
            around: Texts before and after each {% generation %} block.
            tools: The tools that the assistant may call.
            variables: Other variables of the template by name.
            go_on: Whether the counters of the template's limits continue from the last rendering.
                Otherwise they start at 0.

        Raises:
            TemplateRefusal: If the template refuses the messages. A fault in the template raises
                another error, such as TypeError.
        """

        def generation(caller: Callable[[], str]) -> str:
            return f"{around[0]}{caller()}{around[1]}"

        if not go_on:
            self.begin()
        own_variables = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": prompt,
            "packprep_generation": generation,
        }
        # `Template.render` copies the globals slowly, and rewrites the traceback of each refusal.
        template, environment = self._template, self._template.environment
        context_variables = {**self._globals, "documents": None, **variables, **own_variables}
        context = environment.context_class(
            environment, context_variables, template.name, template.blocks
        )
        return str(environment.concat(template.root_render_func(context)))

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, from the cache if an earlier call had the same key.

        A cached result adds the steps and characters of its renderings to the counters again.
        Whether a limit is exceeded therefore does not depend on the cache.

        Args:
            key: Everything that the result depends on.
            make: Computes the result.
        """
        environment = self._template.environment
        if key in self._known:
            result, steps, characters = self._known[key]
            environment.count_again(steps, characters)
            return cast(T, result)
        steps, characters = environment.counts()
        result = make()
        counts_now = environment.counts()
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[key] = result, counts_now[0] - steps, counts_now[1] - characters
        return result


MOST_KNOWN = 1 << 12
"""Maximum number of results that a template caches."""


@lru_cache(maxsize=4)
def compile_template(source: str, date: str = "") -> ChatTemplate:
    """Compile the text of a chat template.

    Args:
        source: The text.
        date: Today's date for the template, as YYYY-MM-DD.

    Raises:
        RecipeError: If the text is invalid Jinja, or if it asks for the date although `date` is
            empty.
    """
    import jinja2
    import jinja2.meta

    from packprep.conversations.template_limits import LimitedEnvironment, with_counters

    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = jinja2.pass_environment(_refuse)
    if date:
        environment.globals["strftime_now"] = partial(
            _written_day, datetime.date.fromisoformat(date)
        )
    del environment.filters["random"], environment.globals["lipsum"]
    # Jinja does not know {% generation %}, so blocks become calls.
    as_calls = _GENERATION.sub(
        lambda m: m[1] + ("endcall" if m[2] else "call packprep_generation()") + m[3], source
    )
    try:
        tree = environment.parse(as_calls)
        names = jinja2.meta.find_undeclared_variables(tree)
        words = _words_of(tree)
        template = environment.from_string(with_counters(tree))
    except jinja2.TemplateSyntaxError as error:
        raise RecipeError(
            f"the chat template cannot be used: line {error.lineno}: {error.message}\n"
            "hint: correct it, or give another in documents.chat_template"
        ) from None
    except (RecursionError, SyntaxError, MemoryError):  # Python cannot compile the template's code.
        raise RecipeError(
            "the chat template cannot be used: it is nested too deeply; give another in"
            " documents.chat_template"
        ) from None
    except ValueError:  # Python limits the digits of a number.
        raise RecipeError(
            "the chat template cannot be used: it has a number of more than"
            f" {sys.get_int_max_str_digits()} digits; give another in documents.chat_template"
        ) from None
    if "strftime_now" in names and not date:
        raise RecipeError(
            "the chat template asks for today's date (strftime_now), and a dataset may not depend"
            " on the day of its build; say which day it is to be: documents.template_date ="
            ' "2026-01-01"'
        )
    return ChatTemplate(template, source, names, words)


def _words_of(tree: Any) -> frozenset[str]:
    """Return the names, attributes and texts in a template."""
    from jinja2 import nodes

    words = {node.name for node in tree.find_all(nodes.Name)}
    words |= {node.attr for node in tree.find_all(nodes.Getattr)}
    words |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(words)


def _refuse(environment: Any, message: object) -> None:
    from packprep.conversations.template_limits import check_printable

    check_printable(message)
    raise TemplateRefusal(str(message))


_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _written_day(day: datetime.date, form: str) -> str:
    """Return a day as an English text, in a format of C's strftime. The time is 00:00.

    Raises:
        ValueError: If the format depends on more than the day.
    """
    # The names are fixed, because strftime depends on the locale.
    month, name = _MONTHS[day.month - 1], _DAYS[day.weekday()]
    parts = {
        "Y": f"{day.year:04}",
        "y": f"{day.year % 100:02}",
        "m": f"{day.month:02}",
        "d": f"{day.day:02}",
        "e": f"{day.day:2}",
        "j": f"{day.timetuple().tm_yday:03}",
        "B": month,
        "b": month[:3],
        "h": month[:3],
        "A": name,
        "a": name[:3],
        "F": day.isoformat(),
        "H": "00",
        "I": "12",
        "M": "00",
        "S": "00",
        "p": "AM",
        "T": "00:00:00",
        "R": "00:00",
        "%": "%",
    }

    def written(match: re.Match[str]) -> str:
        if match[2] not in parts:
            raise ValueError(f"no part of a day: {match[0]}")
        part = parts[match[2]]
        return (part.lstrip("0 ") or "0") if match[1] else part

    return re.sub("%(-?)(.?)", written, form, flags=re.DOTALL)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Transformers' `tojson` does. Jinja's own `tojson` would escape < and >."""
    if isinstance(indent, int) and indent > _MOST_INDENT:
        raise ValueError(f"tojson: indent is {indent}, and at most {_MOST_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
