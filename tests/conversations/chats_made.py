"""Chat templates and conversations, for the tests of supervised documents."""

from typing import Any

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
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content ="
    " '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif"
    " %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
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

# As Llama 2 and Mistral: the system message stands inside the user's first; roles have to
# alternate.
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

# As Qwen 3, with its tools: a thought stands in a tag of its own, in the turns behind the last
# user's message alone; several results are one turn of the user's.
THINKING = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') + '<tools>' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}{{- '</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content, thought = m.content, m.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '') }}
{%- endif %}
"""

# As GPT-OSS: the last message ends in another token than the others; a call's name stands again
# before its result.
CHANNELS = """\
{{- '<|start|>system<|message|>' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- set ns = namespace(name='') %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {{- '<|start|>assistant to=' + m.tool_calls[0].function.name + '<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
        {%- set ns.name = m.tool_calls[0].function.name %}
    {%- elif m.role == 'assistant' %}
        {%- if loop.last and not add_generation_prompt and m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>' + ns.name + ' to=assistant<|message|>' + m.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""

# As Mistral 0.3: the tools, and the system message, stand before the last user's message.
HOISTED_LAST = """\
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content + '\\n\\n' %}{% endif %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '[TOOLS]' + tools | tojson + '[/TOOLS]' if tools and m == users[-1] else '' }}
        {{- '[INST] ' + (ns.system if loop.last else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[CALLS] ' + m.tool_calls[0].function | tojson + '</s>' }}
    {%- elif m.role != 'system' %}
        {{- ' ' + m.content + '</s>' }}
    {%- endif %}
{%- endfor %}
"""

# As Phi 3.5: what ends the text stands in the place of the generation prompt.
ENDED = """\
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else '<|endoftext|>' }}
"""

# As DeepSeek R1: an answer is to begin with a thought, and earlier ones are without.
THOUGHT_FIRST = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {{- '<|Assistant|><|call|>' + m.tool_calls[0].function.name + '<|end|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}
    {%- else %}
        {{- '<|User|>' + m.content }}
    {%- endif %}
{%- endfor %}
{{- '<|Assistant|><think>\\n' if add_generation_prompt else '' }}
"""


# As Nemotron: an answer that says nothing is left out where it is the last message; the prompt
# begins a thought.
LAST_LEFT_OUT = """\
{%- for m in messages %}
    {%- if m.role != 'assistant' or m.content or not loop.last %}
        {{- '<' + m.role + '>' + ('<think>' if m.role == 'assistant' and loop.last else '') + m.content + '</>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant><think>' }}{% endif %}
"""


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation that the user begins."""
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return first + [
        {"role": roles[i % 2], "content": content} for i, content in enumerate(contents)
    ]


def said(messages, text: str | None = None, loss_spans=None, **fields) -> Supervision:
    """A record with these messages, unless they are None, and other fields of a layout."""
    if messages is None:
        return Supervision(text, loss_spans, fields)
    return Supervision(text, loss_spans, {"messages": messages, **fields}, "messages")


def calls(*named: tuple[str, Any], content: str | None = None, **fields: Any) -> dict[str, Any]:
    """An assistant's message that calls tools: each a name and its arguments."""
    made = [
        {"type": "function", "function": {"name": name, "arguments": given}}
        for name, given in named
    ]
    return {"role": "assistant", "content": content, "tool_calls": made, **fields}


def result(content: str) -> dict[str, str]:
    """What a tool gives."""
    return {"role": "tool", "content": content}
