"""Check what import-linter cannot see, as it knows modules but not the names that are taken from them.

A module whose name starts with an underscore is imported only inside its own package. A module takes no names from the
root of its own distribution, which gathers them from above; _native is the exception, as it is a module.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"memsaver_core": ROOT / "memsaver_core", "memsaver_server": ROOT / "server/memsaver_server"}
# On top of their distribution's public names, as any program is; so is each integration's plugin.
USERS = ("memsaver_server.fleet.ray", "memsaver_core.compat", "memsaver_core.ranks", "memsaver_server.cli")


def is_module(name: str) -> bool:
    package, *parts = name.split(".")
    path = PACKAGES[package].joinpath(*parts)
    return path.is_dir() or any(path.with_suffix(suffix).is_file() for suffix in (".py", ".pyi"))


def imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the module and the name (or nothing) of each absolute import of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)


def complaints(path: Path, package: str) -> Iterator[str]:
    for line, module, name in imports(ast.parse(path.read_text())):
        root = module.split(".")[0]
        if root not in PACKAGES:
            continue
        where = f"{path.relative_to(ROOT)}:{line}"
        full = f"{module}.{name}" if name and is_module(f"{module}.{name}") else module
        private = next((part for part in full.split(".") if part.startswith("_")), None)
        if private and full[: full.index(private) - 1] != package[: full.index(private) - 1]:
            yield f"{where}: {full} is private to its package"
        if root == full == package.split(".")[0] and not package.startswith(USERS) and path.stem != "plugin":
            yield f"{where}: takes {name or 'the package'} from its own package's root; name the module that has it"


def main() -> None:
    found = []
    for name, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).parts[:-1]
            found += complaints(path, ".".join((name, *parts)))
    for line in found:
        print(line, file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
