"""Gives a chat template without tools the tools of Hermes, so that the packaged model can be asked to call some.

Without tools and tool messages the model's own template renders, unchanged. With them a short part of the system
message lists the tools, calls stand in ``<tool_call>`` tags, and results come back as a user's ``<tool_response>``.
"""

_BEGIN = """\
{%- set ns = namespace(has_tools=tools is defined and tools) %}
{%- for message in messages %}
{%- if message.role == 'tool' or message.tool_calls %}{%- set ns.has_tools = true %}{%- endif %}
{%- endfor %}
{%- if ns.has_tools %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}
{%- else %}{%- set system = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' %}{%- endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
{{- '\\n\\nYou may call these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nTo call a function, answer with its name and arguments as JSON:\\n' }}
{{- '<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
{%- else %}"""
_END = "{% endif %}"


def with_tools(template: str) -> str:
    """``template`` for a model whose turns are those of ChatML."""
    return _BEGIN + template.removesuffix("\n") + _END
