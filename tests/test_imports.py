"""Imports among Python packages: no circles, and arrows between packages point down."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvweave

SOURCE = Path(kvweave.__file__).parents[1]

# From bottom to top. A package may import those before it, and nothing behind it.
ORDER = (
    "errors",
    "version",
    "plugins",
    "config",
    "kernels",
    "kv",
    "prefix",
    "reorder",
    "fuzzy",
    "store",
    "paraphrase",
    "models",
    "events",
    "engine",
    "server",
    "explorer",
    "cluster",
    "integrations",
    "kvweave",  # the package itself, which re-exports `LLM`
    "kvweave_bench",
    "cli",
)


def modules() -> dict[str, Path]:
    found = {}
    for package in ("kvweave", "kvweave_bench"):
        for path in (SOURCE / package).rglob("*.py"):
            name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Every module of ours that `name` imports, wherever in the file, types included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{name} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def graph() -> dict[str, set[str]]:
    known = modules()
    return {
        name: {other for other in imports(name, path, known) if other in known and other != name}
        for name, path in known.items()
    }


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "kvweave" and len(parts) > 1 else parts[0]


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Some modules each of which imports the next, the last of them the first; or none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        path.append(module)
        for other in sorted(edges[module]):
            if found := visit(other):
                return found
        path.pop()
        done.add(module)
        return []

    for module in sorted(edges):
        if found := visit(module):
            return found
    return []


def test_no_module_imports_itself_over_others():
    edges = graph()
    assert len(edges) > 100, "the sources were not found"
    assert circle(edges) == []


def test_arrows_between_packages_point_down():
    rank = {package: at for at, package in enumerate(ORDER)}
    upward = []
    for module, others in graph().items():
        own = package_of(module)
        assert own in rank, f"{own} has no place in the order"
        upward += [
            f"{module} -> {other}" for other in others if rank[package_of(other)] > rank[own]
        ]
    assert sorted(upward) == []


def test_prefix_imports_no_torch():
    for name, path in modules().items():
        if package_of(name) == "prefix":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            named = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
            named += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
            assert not [each for each in named if each.split(".")[0] == "torch"], name


@pytest.mark.parametrize(
    ("edges", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c"]),
    ],
)
def test_a_circle_is_found(edges: dict[str, set[str]], found: list[str]):
    assert circle(edges) == found
