"""Contract suites: one class for each interface, subclassed in the tests of every implementation."""

import pytest

# Suites are imported, not collected: without this a failed assertion in them would show no values.
pytest.register_assert_rewrite(f"{__name__}.engine", f"{__name__}.engine_lab", f"{__name__}.kvindex")
