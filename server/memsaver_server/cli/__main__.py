"""``python -m memsaver_server.cli`` is the ``memsaver`` command."""

from memsaver_server.cli import main

main()
