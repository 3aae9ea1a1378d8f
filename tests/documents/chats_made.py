"""Chat templates and conversations, for the tests of supervised documents."""

from packprep.sources.formats.batch import Supervision

CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Llama 3's own, without its tools
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim "
    "+ '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

GENERATION = """\
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}
        {{- '<|assistant|>' -}}
        {%- generation -%}
            {{- m.content + '<|end|>' -}}
        {%- endgeneration -%}
        {{- '\\n' -}}
    {%- else -%}
        {{- '<|' + m.role + '|>' + m.content + '<|end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

# As Llama 2 and Mistral: the system message stands inside the user's first; roles have to alternate.
HOISTED = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}{% set turns = messages %}
{%- endif %}
{%- for m in turns %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if m.role == 'user' %}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + m.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# As Qwen 3: what an assistant thought is dropped from all turns but the last.
FORGETTING = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' and not loop.last %}
        {{- '<' + m.role + '>' + m.content.split('</think>')[-1] + '</>' }}
    {%- else %}
        {{- '<' + m.role + '>' + m.content + '</>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{% endif %}
"""


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation that the user begins."""
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return first + [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def said(messages, text: str | None = None, loss_spans=None, **fields) -> Supervision:
    """A record with these messages, unless they are None, and other fields of a layout."""
    if messages is None:
        return Supervision(text, loss_spans, fields)
    return Supervision(text, loss_spans, {"messages": messages, **fields}, "messages")
