"""The rules of the public APIs, in both directions: ``python -m shoal_tokenizer``."""

from shoal_runtime.process import run
from shoal_tokenizer.service import TokenizerService
from shoal_tokenizer.settings import Settings

if __name__ == "__main__":
    run(TokenizerService, Settings.load("tokenizer"))
