"""The leak check of every test: no ERROR in the log, no task left on the loop.

A test that provokes an error names its events: ``@pytest.mark.logs_error("task.crashed")``. A library's ERROR has
the event ``log``. Tests that share a loop with others (class or module scope) are not searched for tasks, because
the fixtures they share may own some.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

ENDING_S = 1.0  # what a test has just cancelled may need some turns of the loop


class _Errors(logging.Handler):
    """Collects (event, line) of every ERROR of the process."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "shoal_fields", None)
        event = "log" if fields is None else str(record.msg)
        self.seen.append((event, f"{record.name}: {record.getMessage()} {fields or ''} {record.exc_info or ''}"))


@pytest_asyncio.fixture
async def no_task_is_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=ENDING_S)
    assert not left, f"tasks left on the loop: {sorted(task.get_name() for task in left)}"


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    marker = request.node.get_closest_marker("asyncio")
    shares_loop = marker is not None and marker.kwargs.get("loop_scope", "function") != "function"
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)) and not shares_loop:
        request.getfixturevalue("no_task_is_left")
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    yield
    logging.getLogger().removeHandler(errors)
    expected = {event for marker in request.node.iter_markers("logs_error") for event in marker.args}
    assert [line for event, line in errors.seen if event not in expected] == []
