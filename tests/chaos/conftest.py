"""One whole system for all fault scripts: healed before each of them, and searched for logged errors after it.

A script that provokes errors in services names their events: ``@pytest.mark.logs_error("process.failed")``.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shoal_testkit.answers import ChatApi
from shoal_testkit.cluster import MODEL, Cluster, cluster_running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_cluster() -> AsyncIterator[Cluster]:
    async with cluster_running() as cluster:
        yield cluster


@pytest_asyncio.fixture
async def cluster(shared_cluster: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    await shared_cluster.heal()
    mark = shared_cluster.count_errors()
    yield shared_cluster
    expected = [event for marker in request.node.iter_markers("logs_error") for event in marker.args]
    errors = shared_cluster.errors_since(mark, expected=expected)
    assert not errors, "\n".join(str(line) for line in errors)


@pytest.fixture
def chat(cluster: Cluster) -> ChatApi:
    return ChatApi(cluster.url, MODEL)
