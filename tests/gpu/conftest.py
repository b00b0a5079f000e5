"""A GPU or a failure, and lines of figures at the end of the run."""

from __future__ import annotations

import pytest

from jax_twoshot import _launch

_FIGURES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = []


@pytest.fixture(scope="session")
def gpu() -> None:
    """Whoever asks for these tests has a GPU: without one they fail, they are not skipped."""
    if _launch.gpu_count() == 0:
        pytest.fail("no NVIDIA GPU: the tests marked gpu need one, -m 'not gpu' leaves them out", False)


@pytest.fixture
def figure(request: pytest.FixtureRequest):
    """Adds a line to the figures at the end of the run."""
    return lambda text: request.config.stash[_FIGURES].append(f"{request.node.name}: {text}")


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if lines := config.stash[_FIGURES]:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.line(line)
