"""Settings of the tokenizer: SHOAL_TOKENIZER_<FIELD>."""

from pydantic import Field

from shoal_runtime.settings import ServiceSettings
from shoal_tokenizer.families import CodecName


class Settings(ServiceSettings):
    """Read once, in ``__main__``."""

    model: str = Field(description="Folder of the model (tokenizer.json and its neighbours), or a hub id to fetch.")
    served_name: str = Field("", description="The name that clients use; empty takes the last part of the model.")
    codec: CodecName = Field(
        CodecName.AUTO,
        description="How the model is spoken to; auto goes by its config.json. Set it where that does not say.",
    )
    drops_billing_line: bool = Field(
        True, description="Claude Code's first system line changes with every request; kept, no prefix is found again."
    )
    encode_threads: int = Field(2, ge=1, le=64, description="Raise on machines with many cores and long prompts.")
    max_waiting_encodes: int = Field(256, ge=0, le=10_000, description="Requests that may wait for a thread.")
    segment_cache_mib: int = Field(
        64,
        ge=0,
        le=8192,
        description="Memory for ids of text seen before; raise for long conversations, 0 turns it off.",
    )
