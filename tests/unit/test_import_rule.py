"""The direction of imports, walked over the whole package.

Lower levels never import higher ones, and packages of one level do not import each other. Why `testing` sits above the
parts it fakes: docs/decisions/0001-import-order.md.
"""

import subprocess
import sys

import grimp
import pytest

LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "clock", "cores", "exposition", "file_lock", "priority", "types"}),
    frozenset({"config", "ledger"}),
    frozenset({"algorithms", "scheduling", "buffer", "weights"}),
    frozenset({"generator", "environments", "sandboxes", "trainer", "telemetry"}),
    frozenset({"testing"}),
    frozenset({"controller"}),
    frozenset({"runtime"}),
    frozenset({"cli"}),
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}

# The lowest level holds single modules, not packages: records may use errors.
LOWEST = 0

TORCH_FREE = (
    "rollmill",
    "rollmill.config",
    "rollmill.scheduling",
    "rollmill.ledger",
    "rollmill.buffer",
    "rollmill.telemetry",
    "rollmill.algorithms.advantages",
    "rollmill.config.plan",
    "rollmill.cli",
    "rollmill.cli.training",
    "rollmill.cli.sandbox",
    "rollmill.sandboxes",
    "rollmill.generator.engines.embedded.settings",
)

OPTIONAL = ("torch", "transformers", "grpc", "reasoning_gym", "gguf", "safetensors")


def part_of(module: str) -> str | None:
    """Return `scheduling` for `rollmill.scheduling.core`, `None` for `rollmill` itself."""
    names = module.split(".")
    return names[1] if len(names) > 1 else None


def offence(importer: str, imported: str) -> str | None:
    """Return why this import breaks the rule, or `None`."""
    upper, lower = part_of(importer), part_of(imported)
    if upper is None or lower is None or upper == lower:
        return None
    levels = LEVEL_OF[upper], LEVEL_OF[lower]
    if levels[1] > levels[0]:
        return f"{importer} (level {levels[0]}) imports {imported} (level {levels[1]}) above it"
    if levels[0] == levels[1] != LOWEST:
        return f"{importer} imports {imported} of the same level {levels[0]}"
    return None


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("rollmill", cache_dir=None)


def test_every_part_of_the_package_has_a_level(graph):
    parts = {part for module in graph.modules if (part := part_of(module)) is not None}
    assert parts - set(LEVEL_OF) == set()


def test_no_part_imports_what_is_above_or_beside_it(graph):
    pairs = [(importer, one) for importer in graph.modules for one in graph.find_modules_directly_imported_by(importer)]
    assert len(pairs) > 20
    assert [found for importer, imported in sorted(pairs) if (found := offence(importer, imported))] == []


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("rollmill.scheduling.core", "rollmill.controller.shell"),
        ("rollmill.scheduling.core", "rollmill.buffer.sqlite"),
        ("rollmill.types", "rollmill.config.schema"),
        ("rollmill.generator.engines.fake", "rollmill.testing.faults"),
    ],
)
def test_the_rule_refuses_imports_upwards_and_sideways(importer, imported):
    assert offence(importer, imported) is not None


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("rollmill.controller.shell", "rollmill.scheduling.core"),
        ("rollmill.scheduling.core", "rollmill.scheduling.events"),
        ("rollmill.types", "rollmill.errors"),
        ("rollmill.testing.engine", "rollmill.generator.engines.fake"),
    ],
)
def test_the_rule_allows_imports_downwards_and_within_a_part(importer, imported):
    assert offence(importer, imported) is None


BLOCKER = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {optional!r}:
            raise ImportError(f"{{name}} is an optional package")
        return None

sys.meta_path.insert(0, Blocker())
{statements}
"""


def import_without_extras(*modules: str) -> subprocess.CompletedProcess[str]:
    code = BLOCKER.format(optional=set(OPTIONAL), statements="\n".join(f"import {module}" for module in modules))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_the_pure_parts_and_the_command_line_import_without_torch_and_other_extras():
    result = import_without_extras(*TORCH_FREE)
    assert result.returncode == 0, result.stderr


def test_the_blocker_would_catch_an_import_of_torch():
    result = import_without_extras("torch")
    assert result.returncode != 0
    assert "optional package" in result.stderr
