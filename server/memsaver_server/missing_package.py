"""What to say if a package of an extra is not installed."""

from __future__ import annotations


def missing_package(error: ImportError, extra: str) -> str:
    """Return why an import failed; names ``extra`` as the remedy unless a module of memsaver itself is missing, or the
    error has no name, as one whose message is that of this function already."""
    name = (error.name or "").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not name or name.startswith("memsaver"):
        return str(error)
    return (
        f"the package {name!r} of the extra {extra!r} is not installed: pip install 'memsaver[{extra}]', "
        f"or in a checkout pip install '.[{extra}]'"
    )
