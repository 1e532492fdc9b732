"""An engine that consumes KV and generates: ``python -m shoal_decode``."""

from shoal_decode.service import DecodeService
from shoal_decode.settings import DecodeSettings
from shoal_runtime.process import run

if __name__ == "__main__":
    run(DecodeService, DecodeSettings.load("decode"))
