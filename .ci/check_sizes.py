"""Check that no C++ function of the product exceeds 60 lines."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FUNCTION_LINES = 60

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


def main() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{first}: {last - first + 1} lines, at most {FUNCTION_LINES}: {head[:80]}"
        for path in sorted((ROOT / "csrc").rglob("*.[ch]pp"))
        for first, last, head in functions(path.read_text())
        if last - first + 1 > FUNCTION_LINES
    ]
    for line in found:
        print(line, file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
