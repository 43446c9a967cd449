"""Check that no source file of the product exceeds 350 lines and no C++ function 60.

A comment "longer because: ..." in the first lines of a file, or above or inside a function, is an exception.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("csrc", "memsaver_core", "server")
SOURCES = {".py", ".pyi", ".cpp", ".hpp", ".js", ".css", ".html"}
FILE_LINES = 350
FUNCTION_LINES = 60
HEAD_LINES = 30
EXCEPTION = "longer because:"

# What may hold braces without being code; a raw string first, as it may hold quotes.
NOT_CODE = re.compile(r'R"(\w*)\(.*?\)\1"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
SCOPE = re.compile(r"(template\s*<.*>\s*)?(inline\s+)?(namespace|class|struct|union|enum)\b|extern\s*$", re.DOTALL)


def functions(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the first line, the last line and the head of each function that has a body."""
    code = NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    code = re.sub(r"^[ \t]*#.*(?:\\\n.*)*", lambda found: re.sub(r"[^\n]", " ", found[0]), code, flags=re.MULTILINE)
    depth = 0  # of braces inside the current function
    start = 0  # of the declaration that is being read
    body = ""  # the head of the current function
    for at, sign in enumerate(code):
        if depth:
            depth += {"{": 1, "}": -1}.get(sign, 0)
            if depth == 0:
                if ")" in body:
                    yield code.count("\n", 0, start) + 1, code.count("\n", 0, at) + 1, " ".join(body.split())
                start = at + 1
        elif sign == "{":
            start += len(code[start:at]) - len(code[start:at].lstrip())
            body = code[start:at]
            if SCOPE.match(body):
                start = at + 1
            else:
                depth = 1
        elif sign in ";}":
            start = at + 1


def complaints(path: Path) -> Iterator[str]:
    text = path.read_text()
    lines = text.splitlines()
    name = path.relative_to(ROOT)
    if len(lines) > FILE_LINES and EXCEPTION not in "\n".join(lines[:HEAD_LINES]):
        yield f"{name}: {len(lines)} lines, at most {FILE_LINES}"
    if path.suffix not in {".cpp", ".hpp"}:
        return
    for first, last, head in functions(text):
        above = first - 1
        while above and lines[above - 1].lstrip().startswith("//"):
            above -= 1
        if last - first + 1 > FUNCTION_LINES and EXCEPTION not in "\n".join(lines[above:last]):
            yield f"{name}:{first}: {last - first + 1} lines, at most {FUNCTION_LINES}: {head[:80]}"


def main() -> None:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*")) if path.suffix in SOURCES]
    found = [line for path in paths for line in complaints(path)]
    for line in found:
        print(line, file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
