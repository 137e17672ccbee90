"""Strings of strangers, made fit for one line of a terminal, log or document."""

import unicodedata

_TEXT_MAX = 2000


def one_line(value: str) -> str:
    r"""``value`` with everything invisible made visible, as ``\x1b`` or ``\u202e``; at most 2,000
    characters.

    Escaped are the Unicode categories of controls, line and paragraph separators, formats (which
    turn the direction of text), surrogates (which UTF-8 cannot hold) and code points that no
    character has.
    """
    shown = "".join(_visible(c) for c in value[:_TEXT_MAX])
    return shown if len(value) <= _TEXT_MAX else shown + "…"


def _visible(c: str) -> str:
    if unicodedata.category(c) not in {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}:
        return c
    code = ord(c)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
