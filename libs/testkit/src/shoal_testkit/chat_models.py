"""Model folders without weights whose chat templates are in the manner of well-known models, with their added tokens.

The templates are written for tests: they put prompts together as the models' own do, as far as the grammar of a
conversation goes, and say less. Each folder has the same tiny vocabulary beside its own tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

_WORDS = "wave salt tide reef gull sand foam sail name arguments parameters function city tool call think"


@dataclass(frozen=True, slots=True)
class ChatModel:
    """``special`` tokens are not shown in answers, ``added`` ones are."""

    template: str
    special: Sequence[str]
    added: Sequence[str]
    eos: str
    bos: str | None = None

    def write(self, folder: Path) -> Path:
        """Write tokenizer.json and tokenizer_config.json; returns ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer().save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": self.eos,
            "chat_template": self.template,
        }
        if self.bos is not None:
            config["bos_token"] = self.bos
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=list(self.special),
            show_progress=False,
        )
        words = _WORDS.split()
        tokenizer.train_from_iterator([f"{a} {b}" for a in words for b in words], trainer)
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.added])
        return tokenizer


_HERMES_TOOLS = (
    "{{- '# Tools\\n\\nSignatures of the functions that you may call:\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\\n</tools>\\n\\nFor a call write a JSON object with its name and arguments:\\n<tool_call>\\n"
    '{"name": <name>, "arguments": <object>}\\n</tool_call>\' }}'
)
_HERMES_CALLS = (
    "{%- for call in message.tool_calls or [] %}"
    "{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
)
_RESPONSES = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
)

QWEN3 = ChatModel(
    template=(
        "{%- if tools %}{{- '<|im_start|>system\\n' }}"
        "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
        + _HERMES_TOOLS
        + "{{- '<|im_end|>\\n' }}"
        "{%- elif messages[0].role == 'system' %}"
        "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
        "{%- set ns = namespace(query=0) %}"
        "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}"
        "{%- endfor %}"
        "{%- for message in messages %}"
        "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{%- elif message.role == 'assistant' %}"
        "{%- set content = message.content %}{%- set thought = '' %}"
        "{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}"
        "{%- elif '</think>' in content %}"
        "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{{- '<|im_start|>assistant\\n' }}"
        "{%- if loop.index0 > ns.query and (loop.last or thought) %}"
        "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
        "{%- else %}{{- content }}{%- endif %}" + _HERMES_CALLS + "{{- '<|im_end|>\\n' }}"
        "{%- elif message.role == 'tool' %}" + _RESPONSES + "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
        "{%- endif %}{%- endif %}"
    ),
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    added=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    eos="<|im_end|>",
)

QWEN3_CODER = ChatModel(
    template=(
        "{%- if tools or messages[0].role == 'system' %}{{- '<|im_start|>system\\n' }}"
        "{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}"
        "{%- if tools %}{{- '\\n\\n# Tools\\n\\n<tools>' }}{%- for tool in tools %}{%- set f = tool.function %}"
        "{{- '\\n<function>\\n<name>' ~ f.name ~ '</name>\\n<description>' ~ (f.description or '') | trim }}"
        "{{- '</description>\\n<parameters>' }}"
        "{%- for name, fields in ((f.parameters or {}).get('properties') or {}) | items %}"
        "{{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' }}"
        "{%- if fields is mapping %}{%- for key, value in fields | items %}"
        "{{- '\\n<' ~ key ~ '>' ~ (value | tojson if value is not string else value) ~ '</' ~ key ~ '>' }}"
        "{%- endfor %}{%- endif %}{{- '\\n</parameter>' }}{%- endfor %}"
        "{{- '\\n</parameters>\\n</function>' }}{%- endfor %}"
        "{{- '\\n</tools>\\n\\nCalls look like this:\\n\\n<tool_call>\\n<function=example>\\n<parameter=one>\\n1\\n"
        "</parameter>\\n</function>\\n</tool_call>' }}{%- endif %}"
        "{{- '<|im_end|>\\n' }}{%- endif %}"
        "{%- for message in messages %}"
        "{%- if message.role == 'assistant' %}{{- '<|im_start|>assistant' }}"
        "{%- if message.content is string and message.content | trim | length > 0 or not message.tool_calls %}"
        "{{- '\\n' + message.content }}{%- if message.tool_calls %}{{- '\\n' }}{%- endif %}"
        "{%- elif message.tool_calls %}{{- '\\n' }}{%- endif %}"
        "{%- for call in message.tool_calls or [] %}{%- if not loop.first %}{{- '\\n' }}{%- endif %}"
        "{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}"
        "{%- for name, value in call.function.arguments | items %}{{- '<parameter=' + name + '>\\n' }}"
        "{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}"
        "{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
        "{%- elif message.role == 'tool' %}" + _RESPONSES + "{%- elif message.role == 'user' or not loop.first %}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    added=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    eos="<|im_end|>",
)

LLAMA3 = ChatModel(
    template=(
        "{{- bos_token }}"
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
        "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
        "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
        "{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}"
        "{{- 'Today Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}"
        "{%- if tools is not none %}{{- 'You have these functions. Answer with a call in JSON where one fits.\\n\\n' }}"
        "{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{%- endif %}"
        "{{- system }}{{- '<|eot_id|>' }}"
        "{%- for message in messages %}"
        "{%- if message.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}"
        "{{- message.content | tojson }}{{- '<|eot_id|>' }}"
        "{%- elif message.tool_calls %}"
        "{%- if message.tool_calls | length != 1 %}{{- raise_exception('Only one call at once!') }}{%- endif %}"
        "{%- set call = message.tool_calls[0].function %}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
        "{{- '{\"name\": \"' + call.name + '\", ' }}{{- '\"parameters\": ' }}{{- call.arguments | tojson }}{{- '}' }}"
        "{{- '<|eot_id|>' }}"
        "{%- else %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
        "{{- message['content'] | trim }}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
    ),
    special=(
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        *("<|eom_id|>", "<|python_tag|>"),
    ),
    added=(),
    eos="<|eot_id|>",
    bos="<|begin_of_text|>",
)

# The prompt opens the reasoning, and that of the history is cut off; there are no tools.
R1 = ChatModel(
    template=(
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content }}"
        "{% elif message.role == 'user' %}{{ '<|user|>' + message.content }}"
        "{% elif message.role == 'assistant' %}"
        "{{ '<|assistant|>' + message.content.split('</think>')[-1] + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"
    ),
    special=("<|begin|>", "<|end|>"),
    added=("<|user|>", "<|assistant|>", "<think>", "</think>"),
    eos="<|end|>",
    bos="<|begin|>",
)

# Hermes' calls with tags that are no tokens, and a switch and efforts for thinking that is spelled out, too.
SPELLED = ChatModel(
    template=(
        "{%- if tools %}{{- '<|im_start|>system\\n' }}" + _HERMES_TOOLS + "{{- '<|im_end|>\\n' }}{%- endif %}"
        "{%- if reasoning_effort %}{{- 'Effort: ' + reasoning_effort + '\\n' }}{%- endif %}"
        "{%- for message in messages %}{%- if message.role == 'tool' %}" + _RESPONSES + "{%- else %}"
        "{{- '<|im_start|>' + message.role + '\\n' }}"
        "{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}"
        "{{- message.content }}" + _HERMES_CALLS + "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if thinking %}{{- '<think>' }}{%- endif %}{%- endif %}"
    ),
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    added=(),
    eos="<|im_end|>",
)

CHAT_MODELS = {"qwen3": QWEN3, "qwen3_coder": QWEN3_CODER, "llama3": LLAMA3, "r1": R1, "spelled": SPELLED}
