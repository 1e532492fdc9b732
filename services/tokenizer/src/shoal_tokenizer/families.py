"""Which family a model belongs to, and what the family brings for it.

A family's parts are verified against a reference when they are made, so that a model that we would encode differently
does not start.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

import tokenizers

from shoal_tokenizer.codec.api import AnswerShape, OutputParser, PromptRenderer, Sampling
from shoal_tokenizer.codec.chat_template.answer_parser import new_parser as new_answer_parser
from shoal_tokenizer.codec.chat_template.markers import Markers
from shoal_tokenizer.codec.chat_template.renderer import ChatTemplate
from shoal_tokenizer.codec.chat_template.renderer import verify as verify_template
from shoal_tokenizer.codec.deepseek.dialects import V4, V41, Dialect
from shoal_tokenizer.codec.deepseek.loading import ModelMismatch, load_model, verify
from shoal_tokenizer.codec.deepseek.parser import DeepseekParser
from shoal_tokenizer.codec.deepseek.renderer import DeepseekRenderer
from shoal_tokenizer.model_folder import ModelFilesInvalid, ModelFolder


class CodecName(enum.StrEnum):
    """The setting."""

    AUTO = "auto"
    CHAT_TEMPLATE = "chat_template"
    DEEPSEEK_V4 = "deepseek_v4"
    DEEPSEEK_V41 = "deepseek_v41"


@dataclass(frozen=True, slots=True)
class Family:
    """What a model family brings to a codec. ``defaults``: the model's own sampling and the tokens that end a turn."""

    renderer: PromptRenderer
    new_parser: Callable[[AnswerShape], OutputParser]
    defaults: Sampling


_DIALECTS = {CodecName.DEEPSEEK_V4: V4, CodecName.DEEPSEEK_V41: V41}
_ARCHITECTURES = {
    "DeepseekV4ForCausalLM": CodecName.DEEPSEEK_V4,
    "DeepseekV4ForConditionalGeneration": CodecName.DEEPSEEK_V4,
    "DeepseekV41ForCausalLM": CodecName.DEEPSEEK_V41,
}


def load_family(folder: ModelFolder, name: CodecName) -> Family:
    """Raises ModelFilesInvalid where the files do not fit the family, and what its verification raises."""
    if name is CodecName.AUTO:
        name = _recognise(folder)
    dialect = _DIALECTS.get(name)
    return _chat_template(folder) if dialect is None else _deepseek(folder, dialect)


def _recognise(folder: ModelFolder) -> CodecName:
    config = folder.read("config.json")
    model_type = config.get("model_type")
    if model_type in (CodecName.DEEPSEEK_V4, CodecName.DEEPSEEK_V41):
        return CodecName(model_type)
    architectures = config.get("architectures") or []
    return next((_ARCHITECTURES[name] for name in architectures if name in _ARCHITECTURES), CodecName.CHAT_TEMPLATE)


def _chat_template(folder: ModelFolder) -> Family:
    markers = Markers(folder.tokenizer.get("added_tokens") or [])
    template = ChatTemplate(_template_source(folder), folder.special_tokens(), markers)
    reference = tokenizers.Tokenizer.from_str(folder.source)
    verify_template(template, folder.encoder, lambda text: reference.encode(text, add_special_tokens=False).ids)
    generation = folder.read("generation_config.json")
    stop_ids = folder.stop_token_ids()
    eos_id = reference.token_to_id(folder.special_tokens().get("eos_token", ""))
    stop_ids |= {eos_id} if eos_id is not None else set()
    return Family(
        template,
        lambda shape: new_answer_parser(folder.vocabulary, template.abilities.formats, shape),
        Sampling(
            temperature=generation.get("temperature"),
            top_p=generation.get("top_p"),
            top_k=generation.get("top_k") or None,
            min_p=generation.get("min_p"),
            repetition_penalty=generation.get("repetition_penalty"),
            stop_token_ids=sorted(stop_ids),
        ),
    )


def _template_source(folder: ModelFolder) -> str:
    """``chat_template.jinja`` wins over ``chat_template`` in tokenizer_config.json, as in transformers."""
    path = folder.path / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = folder.config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    if not isinstance(template, str):
        raise ModelFilesInvalid(f"{folder.path} has no chat template (chat_template.jinja or tokenizer_config.json)")
    return template


def _deepseek(folder: ModelFolder, dialect: Dialect) -> Family:
    """Sampling is what recipe says, whatever generation_config.json has: the mode dictates most of it."""
    try:
        model = load_model(dialect, folder.source, folder.vocabulary)
        renderer = DeepseekRenderer(dialect, model.tokens)
        verify(renderer, folder.encoder, model.tokenizer)
    except ModelMismatch as error:
        raise ModelFilesInvalid(f"{folder.path / 'tokenizer.json'} does not fit {dialect.name}: {error}") from error
    stop_ids = sorted(folder.stop_token_ids() | {model.tokens.end_of_turn})
    return Family(renderer, lambda shape: DeepseekParser(model, shape), Sampling(stop_token_ids=stop_ids))
