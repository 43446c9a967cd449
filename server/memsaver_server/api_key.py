"""What a key is, to those who ask for it and to those who send it."""

from __future__ import annotations


def key_of(text: str) -> str:
    """Return the key that is meant by ``text``: white space around it, such as the end of its file, is none of it.

    Raises:
        ValueError: it holds what no header can; the message does not show it.
    """
    key = text.strip(" \t\r\n")
    if any(ord(character) < 0x20 or ord(character) == 0x7F or 0xD800 <= ord(character) < 0xE000 for character in key):
        raise ValueError("the API key holds a line's end, another control character or half a character")
    return key
