"""Pages name files, parts and levels that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_import_rule import LEVELS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = re.compile(r"`((?:src|tests|benchmarks|docs|examples)/[\w./*-]+)`")
MODULE = re.compile(r"`(rollmill(?:\.\w+)+)`")
ARCHITECTURE = ROOT / "docs" / "internals" / "architecture.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_module_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [name for name in NAMED.findall(text) if not list(ROOT.glob(name.rstrip("/")))] == []
    assert [name for name in MODULE.findall(text) if not exists(name)] == []


def exists(name: str) -> bool:
    """Return whether a module of that name is there, or one that has its last part as a name in it."""
    path = (ROOT / "src").joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    home = path.parent / "__init__.py" if path.parent.is_dir() else path.parent.with_suffix(".py")
    return home.exists() and re.search(rf"\b{path.name}\b", home.read_text(encoding="utf-8")) is not None


def test_the_pages_name_files_and_modules_at_all() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(NAMED.findall(text)) > 10
    assert len(MODULE.findall(text)) > 2


def test_the_levels_of_the_architecture_page_are_those_that_the_imports_are_checked_against() -> None:
    page = ARCHITECTURE.read_text(encoding="utf-8")
    block = page.partition("## Parts and levels")[2].partition("A part imports")[0]
    assert [frozenset(line.split()) for line in block.strip().splitlines()] == list(LEVELS)


def test_every_part_has_a_level_on_the_architecture_page() -> None:
    parts = {path.name for path in (ROOT / "src" / "rollmill").iterdir() if (path / "__init__.py").exists()}
    assert parts <= frozenset.union(*LEVELS)
