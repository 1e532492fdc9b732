"""The engine that computes: vLLM, with LMCache as its store.

Reading order: ``engine`` (the promises), ``launch`` (how vLLM is set up), ``profile`` and ``arguments`` (what an
operator adds to that), ``translation`` (our dataclasses and vLLM's), ``fingerprint`` (the pool), then what runs inside
vLLM's own processes: ``lmcache``, ``state_groups`` and ``process``.
Nothing is imported here: importing vLLM takes ten seconds and must happen in ``VllmEngine.start``.
"""
