"""Which versions of jaxlib the package accepts, and what it says of others."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

import jaxlib
import pytest
from helpers import run_ok

import jax_twoshot
from jax_twoshot import _compat, _ffi


@pytest.mark.parametrize("running", ["0.10.2", "0.11.0", "0.12.0", "0.12.0.1", "0.12.3", "0.11.0.dev20260101"])
def test_accepts_without_a_word(running: str, caplog: pytest.LogCaptureFixture) -> None:
    _compat.check_jaxlib(running)
    assert caplog.records == []


@pytest.mark.parametrize("running", ["0.4.38", "0.9.10", "0.10.1"])
def test_refuses_older(running: str) -> None:
    text = rf"jax_twoshot {jax_twoshot.__version__} needs jaxlib 0.10.2 or newer, this is jaxlib {running}: pip install"
    with pytest.raises(ImportError, match=text):
        _compat.check_jaxlib(running)


def test_refuses_an_extension_built_with_newer_headers() -> None:
    with pytest.raises(ImportError, match=r"built with jaxlib 0.12.0.1 and .* this is jaxlib 0.12.0: pip install"):
        _compat.check_jaxlib("0.12.0", "0.12.0.1")
    _compat.check_jaxlib("0.12.0.1", "0.12.0")


@pytest.mark.parametrize("running", ["0.13.0", "1.0.0", "0.13.0.dev20270101"])
def test_warns_of_newer(running: str, caplog: pytest.LogCaptureFixture) -> None:
    _compat.check_jaxlib(running)
    ((logger, level, text),) = caplog.record_tuples
    assert (logger, level) == ("jax_twoshot", logging.WARNING)
    assert f"tried with jaxlib 0.10.2 to 0.12, this is jaxlib {running}: `python -m jax_twoshot selftest`" in text


def test_installed_one_is_what_was_tried() -> None:
    """The newest of CI's two Pythons tells when `NEWEST_JAXLIB` has to move."""
    assert _compat._numbers(jaxlib.__version__)[:2] <= _compat._numbers(_compat.NEWEST_JAXLIB)
    assert _compat._numbers(_ffi._extension.built_with_jaxlib) <= _compat._numbers(jaxlib.__version__)


def test_project_file_says_the_same() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert f"jaxlib>={_compat.OLDEST_JAXLIB}" in project["project"]["dependencies"]
    assert f"jax>={_compat.OLDEST_JAXLIB}" in project["project"]["dependencies"]
    assert f"jaxlib=={_compat.OLDEST_JAXLIB}" in project["build-system"]["requires"]


def test_import_says_so_when_used_and_leaves_jax_alone() -> None:
    said = run_ok(
        """
        import jax_twoshot
        try:
            jax_twoshot.all_reduce
        except ImportError as error:
            print(error)
        print(jax.numpy.ones(3).sum())
        """,
        prelude="import jax, jaxlib\njaxlib.__version__ = '0.9.2'\n",
    )
    refusal, three = said.splitlines()
    assert refusal.endswith(" needs jaxlib 0.10.2 or newer, this is jaxlib 0.9.2: pip install -U jax jaxlib")
    assert three == "3.0"
