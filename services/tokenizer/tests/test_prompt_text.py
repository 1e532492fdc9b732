import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal_tokenizer.codec.api import Segment
from shoal_tokenizer.codec.chat_template.markers import Markers
from shoal_tokenizer.codec.chat_template.prompt_text import ChatTemplateEnvironment, PromptText, concat
from shoal_tokenizer.codec.chat_template.renderer import ChatTemplate
from shoal_tokenizer.codec.conversation import Conversation

MARKERS = ("<|a|>", "<|b|>", "<s>", "</s>", "[INST]", "[/INST]", "<think>", "</think>")
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "plus": "{% for m in messages %}{{ '<|a|>' + m['role'] + '\n' + m['content'] + '<|b|>\n' }}{% endfor %}",
    "tilde": "{% for m in messages %}{{ '<|a|>' ~ m.role ~ '\n' ~ m.content | trim ~ '<|b|>' }}{% endfor %}",
    "set_then_trim": (
        "{% for m in messages %}{% set content = '<|a|>' + m.role + '\n\n' + m.content | trim + '<|b|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content | trim }}{% endfor %}"
    ),
    "upper_and_slice": (
        "{% for m in messages %}<|a|>{{ m.content | upper }}<|b|>{{ m.content[1:] }}{{ ('<s>' + m.content)[:5] }}"
        "{% endfor %}"
    ),
    "split_on_marker": (
        "{% for m in messages %}{% if '</think>' in m.content %}<think>"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
    ),
    "macro_and_blocks": (
        "{% macro turn(m) %}<|a|>{{ m.content }}<|b|>{% endmacro %}{% set head %}{{ bos_token }}head{% endset %}"
        "{{ head }}{% for m in messages %}{{ turn(m) }}{% filter trim %} [INST] {{ m.content }} [/INST] {% endfilter %}"
        "{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}"
    ),
    "namespace_and_join": (
        "{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = ns.text + '[INST]' + m.content %}"
        "{% endfor %}{{ ns.text }}{{ '<|b|>'.join(['x', ns.text, 'y']) }}"
    ),
    "tojson": "{% for m in messages %}<|a|>{{ m.content | tojson }}{{ m | tojson(indent=2) }}<|b|>{% endfor %}",
    "format_and_replace": (
        "{% for m in messages %}{{ '%s [INST]' | format(m.content) }}{{ '{}</s>'.format(m.content) }}"
        "{{ m.content | replace('a', '<|a|>') }}{% endfor %}"
    ),
    "role_inside_marker": "{% for m in messages %}{{ '<|' + m.content + '|>' }}{% endfor %}",
}
# Operations that lose what the author wrote: their control tokens become text, which the probes at load refuse.
LOSSY = {"format_and_replace"}

texts = st.lists(st.one_of(st.sampled_from([*MARKERS, "<|", "|>", "a", "b", " ", "\n", "{{ 1 }}"]), st.text())).map(
    "".join
)
conversations = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), texts), min_size=1, max_size=4
).map(lambda turns: [{"role": role, "content": content} for role, content in turns])


def renderer(name: str) -> ChatTemplate:
    markers = Markers([{"content": text, "special": True} for text in MARKERS])
    return ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS, markers)


RENDERERS = {name: renderer(name) for name in TEMPLATES}
few = settings(max_examples=25, deadline=None)


def cut(name: str, messages: list[dict[str, str]]) -> list[Segment]:
    markers = Markers([{"content": text, "special": True} for text in MARKERS])
    return markers.cut(RENDERERS[name].render_text(Conversation(messages), 0))


def as_reference(template: str, messages: list[dict[str, str]]) -> str:
    """The rendering of an environment that knows nothing of ranges (tests/integration compares with transformers)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    plain = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return environment.from_string(plain).render(messages=messages, add_generation_prompt=True, **SPECIAL_TOKENS)


@few
@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations)
def test_text_equals_the_reference(name: str, messages: list[dict[str, str]]) -> None:
    segments = cut(name, messages)
    assert "".join(text for text, _ in segments) == as_reference(TEMPLATES[name], messages)


@few
@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations)
def test_control_tokens_do_not_depend_on_what_was_typed(name: str, messages: list[dict[str, str]]) -> None:
    """Letters put in for everything typed leave the same control tokens, unless the template asks what was typed."""
    if name == "split_on_marker":
        messages = [{**m, "content": m["content"].replace("</think>", "")} for m in messages]
    harmless = [{**m, "content": "x" * len(m["content"])} for m in messages]
    typed = [text for text, is_marker in cut(name, messages) if is_marker]
    expected = [text for text, is_marker in cut(name, harmless) if is_marker]
    assert typed == expected


@pytest.mark.parametrize("name", TEMPLATES.keys() - LOSSY)
def test_every_control_token_of_the_author_is_one(name: str) -> None:
    messages = [{"role": "user", "content": "plain"}, {"role": "assistant", "content": "words"}]
    text = as_reference(TEMPLATES[name], messages)
    markers = Markers([{"content": marker, "special": True} for marker in MARKERS])
    assert cut(name, messages) == markers.cut(PromptText.of_author(text))


@pytest.mark.parametrize(
    "operation",
    ["x.format('<s>')", "x % ()", "x.replace('p', '<s>')", "x.upper()", "x.split('p')", "x | replace('p', '<s>')"],
)
def test_an_operation_that_is_not_followed_yields_typed_text(operation: str) -> None:
    environment = ChatTemplateEnvironment()
    template = environment.from_string("{% set r = " + operation + " %}{{ r if r is string else r | join }}")
    assert template.render(x=PromptText("plain")).ranges == ()


def test_ranges_follow_parts() -> None:
    text = PromptText.of_author("ab") + "cd" + PromptText.of_author("ef")
    assert (text, text.ranges) == ("abcdef", ((0, 2), (4, 6)))
    assert ("x" + text).ranges == ((1, 3), (5, 7))
    assert text[1:5].ranges == ((0, 1), (3, 4))  # type: ignore[attr-defined]
    assert concat([PromptText.of_author("a"), "", PromptText.of_author("b")]).ranges == ((0, 2),)
    padded = "  " + text + " "
    assert (padded.strip(), padded.strip().ranges) == (text, text.ranges)


def test_template_cannot_reach_python() -> None:
    environment = ChatTemplateEnvironment()
    with pytest.raises(Exception, match="unsafe"):
        environment.from_string("{{ x.__class__.__mro__ }}").render(x=PromptText("a"))
