"""The house's floors: a lower part never imports a higher one, and importing the package costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "lrmoe"

# From the ground up. Parts on one floor do not import each other unless ALLOWED_BESIDE says so.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset({"sizes", "statistics"}),
    frozenset({"config", "planning", "ops"}),
    frozenset({"telemetry", "distributed"}),
    frozenset({"layer", "checkpoint"}),
    frozenset({"integrations", "simulate"}),
    frozenset({"training"}),
    frozenset({"experiments", "report"}),
    frozenset({"debug", "doctor", "cli"}),
    frozenset({"__main__"}),
)
ALLOWED_BESIDE = {("experiments", "report"), ("cli", "debug"), ("cli", "doctor")}
FLOOR_OF = {part: level for level, parts in enumerate(FLOORS) for part in parts}

SOURCES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted(
    path for folder in ("tools", "benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py")
)

# Set by the launcher of a process group, and by nobody to configure this package.
LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
THREAD_VARIABLES = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}


def _module(path: Path) -> str:
    """Dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _part(module: str) -> str | None:
    """The part of the house a dotted name belongs to; None for the public `lrmoe` itself."""
    names = module.split(".")
    return names[1] if len(names) > 1 else None


def _imports(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported anywhere in a file, lazily or for type checking too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            # `from lrmoe import config` imports lrmoe.config: every name may be a module.
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and _is_import_call(node):
            yield node.lineno, node.args[0].value  # type: ignore[attr-defined]


def _is_import_call(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    first = node.args[0] if node.args else None
    return (
        name in {"import_module", "__import__"}
        and isinstance(first, ast.Constant)
        and isinstance(first.value, str)
    )


def _imports_of(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return _imports(tree, _module(path), is_package=path.name == "__init__.py")


def _violations(importer: str, imported: Iterator[tuple[int, str]]) -> list[str]:
    """Imports by part `importer` that go up, or sideways where that is not allowed."""
    found = []
    for line, name in imported:
        target = _part(name) if name.split(".")[0] == "lrmoe" else None
        if target is None or target == importer or target not in FLOOR_OF:
            continue
        up = FLOOR_OF[target] - FLOOR_OF[importer]
        if up > 0 or (up == 0 and (importer, target) not in ALLOWED_BESIDE):
            found.append(f"line {line}: {importer} imports {name}")
    return found


def _ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_sources_are_found() -> None:
    assert len(SOURCES) > 10


def test_every_part_of_the_package_has_a_floor() -> None:
    parts = {
        path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if path.suffix in {"", ".py"}
    }
    assert parts - {"__init__", "__pycache__"} <= FLOOR_OF.keys()


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.parent != PACKAGE or path.stem != "__init__"], ids=_ids
)
def test_no_import_goes_up(path: Path) -> None:
    part = _part(_module(path))
    assert part is not None
    assert _violations(part, _imports_of(path)) == []


def test_the_check_sees_lazy_relative_and_dynamic_imports() -> None:
    source = """
def lazy():
    from ..training import loop
    import importlib
    importlib.import_module("lrmoe.report.page")
if TYPE_CHECKING:
    from lrmoe import layer
"""
    imported = _imports(ast.parse(source), "lrmoe.planning.plan", is_package=False)
    found = {text.split()[-1] for text in _violations("planning", imported)}
    assert found == {"lrmoe.layer", "lrmoe.training.loop", "lrmoe.report.page"}


@pytest.mark.parametrize("path", [path for path in SOURCES if "planning" in path.parts], ids=_ids)
def test_planning_knows_neither_torch_nor_clocks(path: Path) -> None:
    roots = {name.split(".")[0] for _, name in _imports_of(path)}
    assert roots.isdisjoint({"torch", "time", "datetime", "transformers"})


@pytest.mark.parametrize("path", SOURCES + SCRIPTS, ids=_ids)
def test_sources_are_ascii(path: Path) -> None:
    text = path.read_bytes()
    assert text.isascii(), f"first at byte {next(i for i, byte in enumerate(text) if byte > 127)}"


def _environment_keys(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every environment variable read or written; a name that is not a literal is '?'."""
    for node in ast.walk(tree):
        keys: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and _is_environ(node.value):
            keys = [node.slice]
        elif isinstance(node, ast.Compare) and any(_is_environ(side) for side in node.comparators):
            keys = [node.left]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = node.func.value, node.func.attr
            if name == "getenv" or (_is_environ(owner) and name in {"get", "pop", "setdefault"}):
                keys = node.args[:1]
        for key in keys:
            literal = key.value if isinstance(key, ast.Constant) else None
            yield key.lineno, literal if isinstance(literal, str) else "?"


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or getattr(
        node, "id", ""
    ) == "environ"


@pytest.mark.parametrize("path", SOURCES, ids=_ids)
def test_nothing_is_configured_by_environment_variables(path: Path) -> None:
    keys = _environment_keys(ast.parse(path.read_text(encoding="utf-8")))
    strangers = [
        f"line {line}: {key}" for line, key in keys if key not in LAUNCHER_VARIABLES | THREAD_VARIABLES
    ]
    assert strangers == [], "only the process launcher's variables may be used"


def test_the_check_sees_every_way_to_read_a_variable() -> None:
    source = """
import os
os.environ["A"]; os.environ.get("B"); os.getenv("C", "1"); "D" in os.environ; os.environ.setdefault("E", "1")
os.environ[name]
child = dict(os.environ)
"""
    assert {key for _, key in _environment_keys(ast.parse(source))} == {"A", "B", "C", "D", "E", "?"}


def _modules_after(code: str) -> set[str]:
    """Names of top-level modules loaded by a fresh interpreter that ran `code`."""
    program = f"import sys\n{code}\nprint('MODULES', *sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.rsplit("MODULES", 1)[1].split())


HEAVY = {"torch", "transformers", "tensorboard", "plotly", "jinja2", "scipy"}


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = _modules_after("import lrmoe; lrmoe.LRMoEConfig(max_drop=0.2)")
    assert "lrmoe" in loaded
    assert loaded.isdisjoint(HEAVY | {"numpy"})


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["compare", "--help"], ["report", "--help"], ["simulate", "--help"]],
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
from lrmoe.cli import main
sys.argv = ["lrmoe", *{arguments!r}]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""
    assert _modules_after(code).isdisjoint(HEAVY)
