"""Check that names, comments, docstrings, messages and pages are in words that a stranger to this project knows.

The words below were in use here with a meaning that a reader had to guess; there are plainer ones instead. A word is
found inside a name, too (``owed_bytes``, ``StoreDoor``), and a phrase across the end of a line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    "csrc/**/*.[ch]pp",
    "memsaver_core/**/*.py",
    "memsaver_core/**/*.pyi",
    "server/**/*.py",
    "docs/**/*.py",
    "docs/*.md",
    "benchmarks/*.py",
    "examples/**/*.py",
    "deploy/**/*.py",
    "*.md",
)
PAGES = ("deploy/README.md", "benchmarks/README.md", "tests/README.md", "tests/reliability/README.md")

WORDS = {
    "tell tells telling told": "say, report, return, notify",
    "guest guests": "member, process, client",
    "door doors": "route, endpoint, entry point",
    "seat seats seated": "schedule, slot",
    "bury buries buried": "drop, free",
    "hasten hastens hastened": "expedite",
    "owe owes owed owing": "must, needs, is due; what a resume must restore",
    "whoever whomever": "the caller, the thread, the process",
}
PHRASES = {
    r"of (its|their|his|her|our) own": "its own, a separate",
    r"as of": "see, as for, since",
    r"in vain": "without success, without effect",
    r"proof of life": "liveness",
}
INSTEAD = {word: instead for words, instead in WORDS.items() for word in words.split()}

#: Made from docstrings, which are checked in the code; and what was published.
SKIPPED = ("docs/api.md", "CHANGELOG.md")
#: Parts of pages that are made from the code.
GENERATED = re.compile(r"<!-- ([\w ]+) -->\n.*?<!-- end of \1 -->", re.DOTALL)

#: The words in a name: each begins at an underscore or a capital.
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
#: Between the words of a phrase: space, also the end of a line and the sign of a comment.
GAP = r"(?:\s|//|#)+"


def complaints(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the word and what to say instead."""
    for found in WORD.finditer(text):
        instead = INSTEAD.get(found[0].lower())
        if instead:
            yield text.count("\n", 0, found.start()) + 1, found[0], instead
    for phrase, instead in PHRASES.items():
        for found in re.finditer(rf"\b{phrase.replace(' ', GAP)}\b", text, re.IGNORECASE):
            yield text.count("\n", 0, found.start()) + 1, re.sub(GAP, " ", found[0]), instead


def main() -> None:
    paths = {path for pattern in (*SOURCES, *PAGES) for path in ROOT.glob(pattern)}
    found = 0
    for path in sorted(paths):
        name = str(path.relative_to(ROOT))
        if name in SKIPPED:
            continue
        # What is left out becomes spaces, so that lines keep their numbers.
        text = GENERATED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), path.read_text())
        for line, word, instead in sorted(complaints(text)):
            print(f'{name}:{line}: "{word}"; say instead: {instead}', file=sys.stderr)
            found += 1
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
