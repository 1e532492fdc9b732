import pytest

from shoal_engine.scripted import Timing


def test_nothing_takes_time_by_default() -> None:
    assert Timing().step_s(1000, 8, 100_000) == 0
    assert Timing().load_s(1 << 30) == 0


def test_each_part_of_load_adds_its_share() -> None:
    timing = Timing(prefill_tokens_per_s=1000, base_step_s=0.01, step_s_per_request=0.001, step_s_per_cached_token=1e-6)
    assert timing.step_s(500, 4, 10_000) == pytest.approx(0.5 + 0.01 + 0.004 + 0.01)


def test_noise_is_a_factor_on_everything() -> None:
    timing = Timing(base_step_s=2, load_bytes_per_s=10, noise=lambda: 1.5)
    assert timing.step_s(0, 0, 0) == 3
    assert timing.load_s(20) == 3
