"""An engine that produces KV: ``python -m shoal_prefill``."""

from shoal_prefill.service import PrefillService
from shoal_prefill.settings import PrefillSettings
from shoal_runtime.process import run

if __name__ == "__main__":
    run(PrefillService, PrefillSettings.load("prefill"))
