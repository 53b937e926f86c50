"""What may be printed? Text from models, files and errors, without the characters that drive a terminal."""

from __future__ import annotations

import json
import re
from typing import Any

# C0 but tab and newline, DEL, C1, and half surrogate pairs, which stdout cannot encode.
_UNPRINTABLE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")


def printable(text: str) -> str:
    """Return text in which each character that a terminal would obey is replaced by U+FFFD."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def printable_json(value: Any) -> str:
    """Return JSON in which such characters are escaped, so that nothing is lost."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
