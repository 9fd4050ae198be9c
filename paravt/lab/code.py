"""Which code a result was made by: a hash of the modules that it follows from, and of nothing else."""

from __future__ import annotations

import ast
from functools import lru_cache
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_DRAWS = ("paravt.report", "paravt.terminal")
"""Modules that show things: no number follows from them."""
_DATA = (".txt", ".jinja")
_LIBRARIES = ("torch", "transformers")


@lru_cache
def code_hash(module: str) -> str:
    """Of a module and all modules of the package that it imports, directly or not, with the texts beside them.

    Comments, layout and docstrings do not count; the versions of the libraries that compute do.
    """
    digest = blake2b(digest_size=16)
    files = sorted(_closure(module))
    for path in sorted({*files, *(data for file in files for data in _texts(file))}):
        text = path.read_text(encoding="utf-8")
        digest.update(f"{path.relative_to(_PACKAGE)}\n{_meaning(text) if path.suffix == '.py' else text}\n".encode())
    for name in _LIBRARIES:
        digest.update(f"{name} {metadata.version(name)}\n".encode())
    return digest.hexdigest()


def _closure(module: str) -> set[Path]:
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if path is None or path in found or name.startswith(_DRAWS):
            continue
        found.add(path)
        waiting += _imports(ast.parse(path.read_text(encoding="utf-8")))
        if (parent := name.rpartition(".")[0]) != "paravt":  # paravt/__init__.py only re-exports
            waiting.append(parent)
    return found


def _file(module: str) -> Path | None:
    base = _PACKAGE.joinpath(*module.split(".")[1:])
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _imports(tree: ast.Module) -> list[str]:
    """Modules of the package that are imported anywhere in a file, inside of functions too."""
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("paravt."):
            out += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.ImportFrom) and node.module == "paravt":
            out += [f"paravt.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            out += [alias.name for alias in node.names if alias.name.startswith("paravt.")]
    return out


def _texts(file: Path) -> list[Path]:
    """Prompts and templates that lie beside a package's modules."""
    return [path for path in file.parent.iterdir() if path.suffix in _DATA] if file.parent != _PACKAGE else []


def _meaning(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # a text that stands alone documents what is around it
            kept = [line for line in body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)
