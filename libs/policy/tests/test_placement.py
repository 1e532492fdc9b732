"""Where requests are offered: by count for short ones, by cached length for long ones."""

from hypothesis import given
from hypothesis import strategies as st

from shoal_policy import DecodeWorkerView, PlacementPolicy

POLICY = PlacementPolicy(long_from_tokens=1000)


def a_worker(name: str, running: int | None, cached: int | None, **limits: int) -> DecodeWorkerView:
    return DecodeWorkerView(name, running_requests=running, cached_tokens=cached, **limits)


FEW_LONG = a_worker("few-long", 1, 90_000)
MANY_SHORT = a_worker("many-short", 9, 2_000)


def test_short_request_goes_where_few_requests_run() -> None:
    assert POLICY.rank(100, "r", [MANY_SHORT, FEW_LONG]) == ["few-long", "many-short"]


def test_long_request_goes_where_little_is_cached() -> None:
    assert POLICY.rank(5_000, "r", [FEW_LONG, MANY_SHORT]) == ["many-short", "few-long"]


def test_unknown_load_is_not_taken_for_idle() -> None:
    assert POLICY.rank(100, "r", [a_worker("unknown", None, None), MANY_SHORT]) == ["many-short", "unknown"]


def test_full_workers_are_not_offered_anything() -> None:
    full = a_worker("full", 4, 10, max_running_requests=4)
    no_memory = a_worker("no-memory", 1, 950, max_cached_tokens=1_000)
    assert POLICY.rank(100, "r", [full, no_memory]) == []


def test_idle_worker_is_offered_even_what_seems_too_long() -> None:
    assert POLICY.rank(5_000, "r", [a_worker("idle", 0, 0, max_cached_tokens=1_000)]) == ["idle"]


def test_idle_fleet_is_shared_between_requests() -> None:
    workers = [a_worker(f"w{i}", 0, 0) for i in range(4)]
    assert {POLICY.rank(100, f"r{i}", workers)[0] for i in range(64)} == {"w0", "w1", "w2", "w3"}


workers_strategy = st.lists(
    st.builds(
        DecodeWorkerView,
        instance_id=st.uuids().map(str),
        running_requests=st.none() | st.integers(0, 64),
        max_running_requests=st.none() | st.integers(1, 64),
        cached_tokens=st.none() | st.integers(0, 10**6),
        max_cached_tokens=st.none() | st.integers(1, 10**6),
    ),
    unique_by=lambda worker: worker.instance_id,
    max_size=12,
)


@given(workers_strategy, st.integers(1, 10**6), st.text(max_size=8))
def test_order_is_stable_and_names_each_worker_at_most_once(
    workers: list[DecodeWorkerView], tokens: int, request_id: str
) -> None:
    ranked = POLICY.rank(tokens, request_id, workers)
    assert len(set(ranked)) == len(ranked)
    assert set(ranked) <= {worker.instance_id for worker in workers}
    assert POLICY.rank(tokens, request_id, list(reversed(workers))) == ranked


@given(st.lists(st.integers(100, 900), min_size=64, max_size=200))
def test_busiest_worker_stays_near_the_mean(lengths: list[int]) -> None:
    running, cached = [0] * 4, [0] * 4
    for number, tokens in enumerate(lengths):
        views = [a_worker(str(i), running[i], cached[i]) for i in range(4)]
        chosen = int(POLICY.rank(tokens, str(number), views)[0])
        running[chosen] += 1
        cached[chosen] += tokens
    assert max(running) <= 1.25 * sum(running) / 4
