"""The API key, as the server and the client read it."""

from __future__ import annotations


def parse_api_key(text: str) -> str:
    """Return the key in ``text`` without surrounding white space, such as a file's last line break. Raises ValueError,
    which does not show the key, if it has characters that an HTTP header cannot carry."""
    key = text.strip(" \t\r\n")
    if any(ord(character) < 0x20 or ord(character) == 0x7F or 0xD800 <= ord(character) < 0xE000 for character in key):
        raise ValueError("the API key contains a line break, another control character or an unpaired surrogate")
    return key
