"""Conformance suites and a test harness, for built-in and third-party components alike.

Failed assertions show their values, as those of a test module do.
"""

try:
    import pytest
except ImportError:  # fakes and plans are used without it, too
    pass
else:
    pytest.register_assert_rewrite(f"{__name__}.suites", f"{__name__}.harness")
