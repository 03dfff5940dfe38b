"""Text whose every sign can be seen: the one escaper for terminals, tables, pages and pictures' words."""

from __future__ import annotations

import json
import re
import unicodedata


def visible(text: str, *, keep: str = "\n\t") -> str:
    """Text with every character visible: control, direction-changing and invisible ones are escaped (\\x07)."""
    return _NOT_PLAIN.sub(lambda sign: sign[0] if sign[0] in keep or not _unseen(sign[0]) else _escape(sign[0]), text)


def visible_json(text: str) -> str:
    """JSON with every character visible, and the same content: what cannot be seen is written as JSON escapes it."""
    return _NOT_PLAIN.sub(lambda sign: json.dumps(sign[0])[1:-1] if _unseen(sign[0]) else sign[0], text)


_NOT_PLAIN = re.compile(r"[^\x20-\x7e]")


def _unseen(sign: str) -> bool:
    # Cc control, Cf format (direction overrides, zero width), Cs lone surrogates, Zl and Zp line separators;
    # Co and Cn have no agreed sign
    return unicodedata.category(sign) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def _escape(sign: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    code = ord(sign)
    return named.get(sign) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )
