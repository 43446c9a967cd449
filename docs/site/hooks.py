"""MkDocs hooks: publish pages that lie outside docs/, and the source files that pages link to.

Pages link as in the repository (``../README.md``, ``../server/memsaver_server/engine.py``). These hooks rewrite such
links to the published pages. A link to a folder without a README becomes plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")

#: Published path of each page outside docs/, by its path in the repository.
PAGES = {
    name: published
    for name, published in {
        "README.md": "index.md",
        "CONTRIBUTING.md": "contributing.md",
        "SECURITY.md": "security.md",
        "CHANGELOG.md": "changelog.md",
        "deploy/README.md": "deploy.md",
        "deploy/torch-memory-saver/README.md": "torch-memory-saver.md",
        "benchmarks/README.md": "measurements.md",
        "tests/reliability/README.md": "failures-found.md",
        **{
            str(path.relative_to(ROOT)): f"results/{path.name}"
            for path in sorted((ROOT / "benchmarks/results").glob("*.md"))
        },
    }.items()
    if (ROOT / name).exists()
}
LANGUAGES = {".py": "python", ".hpp": "cpp", ".cpp": "cpp", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def on_config(config: Any) -> Any:
    """Add the change log to the navigation if there is one."""
    if "CHANGELOG.md" in PAGES:
        config.nav.append({"Changes": "changelog.md"})
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages outside docs/ and one page for each source file that a page links to."""
    pages = {f"docs/{file.src_uri}": (ROOT / "docs" / file.src_uri).read_text() for file in files.documentation_pages()}
    pages |= {name: (ROOT / name).read_text() for name in PAGES}
    sources = set()
    for name, text in pages.items():
        for _, _, target, _ in LINK.findall(text):
            path = _in_repository(name, target)
            if path is not None and path not in pages and not path.startswith("docs/") and (ROOT / path).is_file():
                sources.add(path)
    for name, published in PAGES.items():
        files.append(File.generated(config, published, content=pages[name]))
    for name in sorted(sources):
        if name.endswith(".png"):
            files.append(File.generated(config, _published(name), abs_src_path=str(ROOT / name)))
        else:
            files.append(File.generated(config, _published(name), content=_source_page(name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Rewrite links to where their targets are published."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown
    name = next((name for name, published in PAGES.items() if published == here), f"docs/{here}")

    def rewrite(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = _in_repository(name, target)
        if path is None or not (ROOT / path).exists():
            return match.group()
        if (ROOT / path).is_dir():
            path = f"{path}/README.md"
            if path not in PAGES:
                return text
        relative = os.path.relpath(_published(path), os.path.dirname(here) or ".")
        return f"{image}[{text}]({relative}{anchor or ''})"

    return LINK.sub(rewrite, markdown)


def _in_repository(page: str, target: str) -> str | None:
    """Return the path in the repository that a relative link of ``page`` names; None for other links."""
    if ":" in target or target.startswith("/"):
        return None
    return os.path.normpath(os.path.join(os.path.dirname(page), target))


def _published(name: str) -> str:
    if name in PAGES:
        return PAGES[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"source/{name}" if name.endswith(".png") else f"source/{name}.md"


def _source_page(name: str) -> str:
    language = LANGUAGES.get(Path(name).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n`````{language}\n{(ROOT / name).read_text()}\n`````\n"
