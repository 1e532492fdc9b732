"""What an ``lmcache server`` loads by ``--server-module``: the parts of ours that are not the file adapter.

    --server-module '{"module_path": "shoal_kvstore.server_module", "config": {"window_age_s": 180}}'

Called once, after LMCache's storage and its own modules stand and before its queue and its HTTP side answer. What
goes wrong here stops the start: a server without these parts looks well and is not.
"""

from lmcache.v1.multiprocess.ext_server_module import ExtServerModuleBuildContext, ExtServerModuleComponents

from shoal_kvstore import l1_listing, metrics, registration, standstill
from shoal_kvstore.file_adapter import FileAdapter
from shoal_kvstore.level_policy import WindowSizes, build_level_module


def build_server_modules(builder: ExtServerModuleBuildContext) -> ExtServerModuleComponents:
    """LMCache's factory of modules."""
    if builder.mp_config.transport == "grpc":
        raise ValueError("engines that a restart forgot are cured on LMCache's zmq transport only")
    metrics.show()
    context = builder.server_context
    windows = WindowSizes(context.layout_desc_registry)
    for _, adapter in context.storage_manager.l2_adapters():
        if isinstance(adapter, FileAdapter):
            adapter.know_windows(lambda key: windows.of(key) is not None)
    l1_listing.serve(context.storage_manager)
    standstill.fence(builder.modules, context.storage_manager)
    level_module = build_level_module(builder)
    return ExtServerModuleComponents(
        modules=[level_module],
        zmq_service_registrars=[registration.cure(builder.modules)],
    )
