"""README and docs/: every code block runs or is checked, the pages build, and no error text is without an answer."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import logging
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from sphinx.application import Sphinx
from sphinx.util.inventory import InventoryFile

import jax_twoshot
from jax_twoshot import cutedsl
from jax_twoshot.cli import _parser
from jax_twoshot.workspace import _open

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def tokens(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text())


def blocks(page: Path, language: str) -> list[tuple[str, str, int]]:
    """Info string, text and first line of the page's fenced blocks in a language."""
    found = [(t.info.strip(), t.content, t.map[0] + 2) for t in tokens(page) if t.type == "fence"]
    return [block for block in found if block[0].split()[:1] == [language]]


# ---- Code blocks -------------------------------------------------------------------------------------------


@each_page
def test_every_block_is_of_a_kind_that_is_checked(page: Path) -> None:
    for token in tokens(page):
        if token.type == "fence":
            assert re.fullmatch(r"python( gpu)?|sh|text|\{(toctree|eval-rst)\}", token.info), (
                f"{page.name}:{token.map[0] + 1}: {token.info!r}"
            )
        elif token.type == "code_block":  # indented: a drawing
            assert not re.search(r"^\s*(import|from|pip|python|jax)\b", token.content, re.MULTILINE), token.content


@pytest.fixture
def log_level() -> Iterator[None]:
    """A page may change it, for itself."""
    logger = logging.getLogger("jax_twoshot")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture
def no_workspace_left() -> Iterator[None]:
    """What a page leaves open would serve the calls of the next one."""
    before = set(_open)
    yield
    for workspace in [workspace for number, workspace in _open.items() if number not in before]:
        workspace.close()


@each_page
@pytest.mark.usefixtures("log_level", "no_workspace_left")
def test_python(page: Path) -> None:
    """The blocks of a page, one after another, as a reader types them. What needs GPUs is checked, not run."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for info, text, line in blocks(page, "python"):
        tree = ast.parse("\n" * (line - 1) + text, str(page))
        if info == "python gpu":
            check_names(tree)
        else:
            exec(compile(tree, str(page), "exec"), names)


def check_names(tree: ast.AST) -> None:
    """Every ``jax...`` and ``jax_twoshot...`` in the code exists, and our functions take these arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"jax(_twoshot)?(\.\w+)+", ast.unparse(node)):
            eval(ast.unparse(node), {"jax": jax, "jax_twoshot": jax_twoshot})
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("jax_twoshot."):
            taken = inspect.signature(eval(ast.unparse(node.func), {"jax_twoshot": jax_twoshot})).parameters
            assert {keyword.arg for keyword in node.keywords} <= set(taken), ast.unparse(node)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=f"{page.name}: {line}")
        for page in PAGES
        for _, text, _ in blocks(page, "sh")
        for line in text.splitlines()
        if line.strip() and not line.startswith("#")
    ],
)
def test_shell(line: str) -> None:
    """Commands exist and take these arguments; those of other programs are named here."""
    words = shlex.split(line, comments=True)
    while words:
        end = words.index("&&") if "&&" in words else len(words)
        command, words = words[:end], words[end + 1 :]
        while re.match(r"\w+=", command[0]):
            command = command[1:]
        check_command(command)


def check_command(command: list[str]) -> None:
    match command:
        case ["python", "-m", "jax_twoshot", *arguments]:
            _parser()[0].parse_args(arguments)
        case ["python", "-m", module, *_]:
            assert module in ("build", "sphinx")
        case ["python", script, *arguments] if script.startswith("examples/"):
            source = (ROOT / script).read_text()
            for option in (argument for argument in arguments if argument.startswith("--")):
                assert f'"{option}"' in source, f"{script} has no {option}"
        case ["pip", "install", *arguments]:
            for extras in re.findall(r"^(?:\.|jax_twoshot)\[(.*)\]$", "\n".join(arguments), re.MULTILINE):
                assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
        case [program, *_]:
            assert program in ("cibuildwheel", "git", "cd", "export", "nvidia-smi", "pytest", "unset")


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    """In the README, which Sphinx does not read, too; and beside the pages, what Sphinx leaves alone."""
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_tests_that_the_faults_page_names_exist() -> None:
    """Each row's files with what it names of them, and the checks of ``tests/gpu``."""
    here, rows = Path(__file__).parent, (ROOT / "docs" / "faults.md").read_text().split("## Reports about others")[1]
    checks, found = (here / "gpu" / "checks.py").read_text(), 0
    for row in re.findall(r"^\| .* \((?:.*#\d+)+\) \| (.*) \|$", rows, re.MULTILINE):
        for part in re.split(r"; ", row):
            place, *names = re.findall(r"`([\w./]+)`", part) or [""]
            if place.startswith("test_") and place.endswith(".py"):
                source = (here / place).read_text()
                assert names, f"{place}: which of its tests?"
                assert [n for n in names if not re.search(rf"(def|class) {n}\b", source)] == [], place
                found += len(names)
            elif place == "tests/gpu":
                assert [n for n in names if not re.search(rf"(def {n}|\"{n}\")", checks)] == []
                found += len(names)
    assert found > 40


# ---- The pages ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")  # between its parts
def test_pages_build_without_a_warning_and_hold_every_public_name(tmp_path: Path) -> None:
    warnings, docs = io.StringIO(), ROOT / "docs"
    app = Sphinx(
        docs, docs, tmp_path / "site", tmp_path / "trees", "html", status=None, warning=warnings, freshenv=True
    )
    app.build()
    assert warnings.getvalue() == ""
    inventory = InventoryFile.loads((tmp_path / "site" / "objects.inv").read_bytes(), uri="")
    named = {name for objects in inventory.data.values() for name in objects}
    assert {f"jax_twoshot.{name}" for name in jax_twoshot.__all__} <= named
    assert {f"jax_twoshot.cutedsl.{name}" for name in cutedsl.__all__ if name != "Chunk"} <= named  # an alias
    assert {page.stem for page in docs.glob("*.md")} <= named


@pytest.mark.parametrize("name", jax_twoshot.__all__)
def test_public_names_are_described(name: str) -> None:
    text = inspect.getdoc(getattr(jax_twoshot, name))
    assert text and re.search("^(Args|Attributes):$", text, re.MULTILINE)


def test_the_changelog_starts_with_this_version() -> None:
    first = re.search(r"^## (\S+)", (ROOT / "docs" / "changelog.md").read_text(), re.MULTILINE)
    assert first and first[1] == jax_twoshot.__version__


# ---- Troubleshooting: error texts --------------------------------------------------------------------------

VALUE = "…"
"""Stands for a value in an error text, in the page and here."""


def answered() -> list[str]:
    """The error texts of the page: what is quoted in the first column of its tables."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


def template(node: ast.AST) -> str:
    """The text that an expression makes, as far as it is fixed."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(template, values))
        case ast.BinOp(op=ast.Add()):
            return template(node.left) + template(node.right)
    return VALUE


def python_texts(raised: bool) -> Iterator[tuple[str, str]]:
    """Where and what: every string in the library, or those that a ``raise`` outside the command line makes."""
    for path in sorted((ROOT / "jax_twoshot").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if raised and isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                if "cli" not in path.parts:  # wrong arguments: argparse shows the usage with them
                    yield where, template(node.exc.args[0])
            elif not raised and isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                yield where, template(node)


def cpp_texts() -> Iterator[tuple[str, str]]:
    """Where and what: the string literals of the extension, joined where ``+``, ``<<`` or ``a ? b : c`` joins them."""
    literal = r'"((?:[^"\\\n]|\\.)*)"'
    for path in sorted((ROOT / "ffi").glob("*.cc")):
        text, end, start = "", 0, 0
        source = re.sub(r"//.*|#include.*", "", path.read_text())
        for match in re.finditer(literal, source):
            between = source[end : match.start()]
            if text and not between.strip():
                text += match[1]
            elif text and re.fullmatch(r"\s*\)?\s*(\+|<<|:)[^;{}]*", between):
                text += VALUE + match[1]
            else:
                if text:
                    yield f"ffi/{path.name}:{source.count(chr(10), 0, start) + 1}", text
                text, start = match[1], match.start()
            end = match.end()
        if text:
            yield f"ffi/{path.name}:{source.count(chr(10), 0, start) + 1}", text


@functools.cache
def pattern(fragment: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, fragment.split(VALUE))), re.DOTALL)


def holds(text: str, fragment: str) -> bool:
    """Whether the fixed parts of ``fragment`` follow each other in ``text``."""
    return pattern(fragment).search(text) is not None


def test_every_error_text_has_an_answer() -> None:
    """Of more than five words: less is a name or the start of what another library said."""
    fragments = answered()
    texts = [*python_texts(raised=True), *cpp_texts()]
    assert len(texts) > 60
    missing = [
        f"{where}: {text}"
        for where, text in texts
        if len(text.replace(VALUE, " ").split()) > 5 and not any(holds(text, fragment) for fragment in fragments)
    ]
    assert not missing, "docs/troubleshooting.md has no row for\n" + "\n".join(missing)


def test_every_answer_is_to_an_error_text() -> None:
    texts = {text for _, text in (*python_texts(raised=False), *cpp_texts()) if " " in text}
    gone = [fragment for fragment in answered() if not any(holds(text, fragment) for text in texts)]
    assert not gone, f"docs/troubleshooting.md quotes what the library does not say: {gone}"


def test_answers_quote_enough_to_be_told_apart() -> None:
    fragments = answered()
    assert len(set(fragments)) == len(fragments) > 40
    assert all(len(fragment.replace(VALUE, " ").split()) >= 3 for fragment in fragments)
