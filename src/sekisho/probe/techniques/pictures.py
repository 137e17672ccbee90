"""Pictures of numbers, as PNG of the standard library alone: black digits on white."""

import base64
import struct
import zlib

_DIGITS = {
    "0": "01110 10001 10011 10101 11001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00110 01000 10000 11111",
    "3": "01110 10001 00001 00110 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
    " ": "00000 00000 00000 00000 00000 00000 00000",
}
"""Rows from the top, five dots each."""
_ROWS = 7
_EDGE = 2  # dots around


def rows(text: str, scale: int = 8) -> list[bytes]:
    """The picture of digits and spaces, row by row; a byte is a point, 0 black and 255 white."""
    lines = ["0".join(_DIGITS[one].split()[row] for one in text) for row in range(_ROWS)]
    blank = "0" * len(lines[0])
    dots = [blank] * _EDGE + lines + [blank] * _EDGE
    edge = "0" * _EDGE
    return [
        b"".join((b"\0" if dot == "1" else b"\xff") * scale for dot in edge + line + edge)
        for line in dots
        for _ in range(scale)
    ]


def png(text: str, scale: int = 8) -> bytes:
    """The same as a PNG (RFC 2083): greyscale, eight bits."""
    points = rows(text, scale)
    header = struct.pack(">IIBBBBB", len(points[0]), len(points), 8, 0, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in points), 9)
    parts = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in parts)


def data_url(text: str) -> str:
    """The same, as chat messages take it."""
    return "data:image/png;base64," + base64.b64encode(png(text)).decode()


def _chunk(kind: bytes, body: bytes) -> bytes:
    check = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)
