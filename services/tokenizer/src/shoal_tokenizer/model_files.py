"""An edge: a model's files, read once at start, and the codec that they make.

A name that is no folder is fetched from the hub, tokenizer files only.
"""

from pathlib import Path

from shoal_tokenizer.codec.api import AnswerShape, Api, Codec, OutputParser
from shoal_tokenizer.codec.events.chat_completions import write_chat_completion
from shoal_tokenizer.codec.events.completions import write_completion
from shoal_tokenizer.codec.events.messages import write_message
from shoal_tokenizer.codec.events.responses import write_response
from shoal_tokenizer.codec.requests.chat_completions import ChatCompletionsConverter
from shoal_tokenizer.codec.requests.completions import CompletionsConverter
from shoal_tokenizer.codec.requests.messages import MessagesConverter
from shoal_tokenizer.codec.requests.responses import ResponsesConverter
from shoal_tokenizer.codec.requests.served_model import ServedModel
from shoal_tokenizer.codec.text_parser import TextParser
from shoal_tokenizer.families import CodecName, load_family
from shoal_tokenizer.model_folder import ModelFilesInvalid, read_folder

_HUB_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json"]


def locate(model: str) -> Path:
    """The folder of ``model``; fetches from the hub when there is none of that name."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.startswith((".", "/", "~")):
        raise ModelFilesInvalid(f"{model} is not a folder")
    from huggingface_hub import snapshot_download  # heavy, and not needed for a folder

    return Path(snapshot_download(model, allow_patterns=_HUB_FILES))


def load_codec(
    folder: Path,
    served_name: str,
    segment_cache_mib: int,
    name: CodecName = CodecName.AUTO,
    *,
    drops_billing_line: bool = True,
) -> Codec:
    """Read, build and verify; takes seconds for large vocabularies."""
    files = read_folder(folder, segment_cache_mib)
    family = load_family(files, name)
    served = ServedModel(served_name, family.defaults, len(files.vocabulary))

    def new_parser(shape: AnswerShape) -> OutputParser:
        if shape.api is Api.COMPLETIONS:  # a text without a conversation has neither reasoning nor calls
            return TextParser(files.vocabulary, shape.stop_strings, shape.has_logprobs)
        return family.new_parser(shape)

    return Codec(
        model=served_name,
        converters={
            Api.CHAT_COMPLETIONS: ChatCompletionsConverter(served),
            Api.RESPONSES: ResponsesConverter(served),
            Api.MESSAGES: MessagesConverter(served, drops_billing_line=drops_billing_line),
            Api.COMPLETIONS: CompletionsConverter(served),
        },
        renderer=family.renderer,
        encoder=files.encoder,
        new_parser=new_parser,
        writers={
            Api.CHAT_COMPLETIONS: write_chat_completion,
            Api.RESPONSES: write_response,
            Api.MESSAGES: write_message,
            Api.COMPLETIONS: write_completion,
        },
    )
