"""Writes server/memsaver_server/client/sync.py from aio.py.

python .ci/generate_sync_client.py           writes it
python .ci/generate_sync_client.py --check   exits with 1 if it is not current
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "server" / "memsaver_server" / "client"
HEADER = '"""The sync client. Generated from aio.py by .ci/generate_sync_client.py; do not edit."""'
DOCSTRING = re.compile(r'\A""".*?"""', re.DOTALL)

#: In order. Each applies to whole words.
REPLACEMENTS = {
    r"Not bound to an event loop or thread\.": "Safe to use from several threads.",
    r"import asyncio": "import time",
    r"asyncio\.sleep": "time.sleep",
    r"async def": "def",
    r"async with": "with",
    r"async for": "for",
    r"await ": "",
    r"AsyncClient": "Client",
    r"AsyncIterator": "Iterator",
    r"AsyncHTTPTransport": "HTTPTransport",
    r"AsyncBaseTransport": "BaseTransport",
    r"__aenter__": "__enter__",
    r"__aexit__": "__exit__",
    r"aclose": "close",
    r"aread": "read",
    r"aiter_lines": "iter_lines",
}


def generate() -> str:
    """Return the source of the sync client."""
    text = DOCSTRING.sub(HEADER, (CLIENT / "aio.py").read_text(), count=1)
    for pattern, replacement in REPLACEMENTS.items():
        text = re.sub(rf"(?<!\w){pattern}", replacement, text)
    return _ruff(_ruff(text, "check", "--select", "I", "--fix"), "format")


def _ruff(text: str, *command: str) -> str:
    arguments = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(CLIENT / "sync.py"), "-"]
    return subprocess.run(arguments, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> int:
    target = CLIENT / "sync.py"
    text = generate()
    if "--check" not in sys.argv[1:]:
        target.write_text(text)
    elif target.read_text() != text:
        print(f"{target} is not current: run python .ci/generate_sync_client.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
