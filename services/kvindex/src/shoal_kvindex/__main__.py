"""The directory of stored blocks: ``python -m shoal_kvindex``."""

from shoal_kvindex.service import KvIndexService
from shoal_kvindex.settings import KvIndexSettings
from shoal_runtime.process import run

if __name__ == "__main__":
    run(KvIndexService, KvIndexSettings.load("kvindex"))
