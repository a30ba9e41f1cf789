"""The encoding of a table that is not UTF-8: spreadsheets save CSV in the code page of their country."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import NamedTuple

from whet.data.read.container import marked_encoding, open_bytes

_CODE_PAGES = {
    "cp1252": "Windows-1252", "cp1250": "Windows-1250", "cp1251": "Windows-1251", "cp1253": "Windows-1253",
    "cp1254": "Windows-1254", "cp1255": "Windows-1255", "cp1256": "Windows-1256", "gb18030": "GB 18030",
    "cp932": "Shift JIS", "cp949": "Korean (CP949)", "big5": "Big5",
}  # fmt: skip
"""What spreadsheets save besides UTF-8 and UTF-16, by Python's name."""
UTF8 = "utf-8-sig"
"""A byte order mark is not part of the text."""
_BLOCK_BYTES = 2**18
_WORD = re.compile(r"\w*[^\W\x00-\x7f]+\w*")


class TextEncoding(NamedTuple):
    """The encoding of a file."""

    codec: str
    """Python's name."""
    note: str
    """What to tell the user; empty for UTF-8."""


def detect_encoding(path: Path, name: str) -> TextEncoding:
    """UTF-8 unless most of the file's first bytes beyond ASCII are not; then the most plausible code page, with a word
    by which a reader sees whether that is right."""
    with open_bytes(path, name) as stream:
        block = stream.read(_BLOCK_BYTES)
        has_mark = block.startswith(codecs.BOM_UTF8) and marked_encoding(path) is None
        while block.isascii() and (more := stream.read(_BLOCK_BYTES)):
            block = more
    if _is_utf8(block):
        return TextEncoding(UTF8, "UTF-8 with BOM" if has_mark else "")
    from charset_normalizer import from_bytes

    found = from_bytes(block, cp_isolation=list(_CODE_PAGES)).best()
    if found is None:
        return TextEncoding(UTF8, "")
    codec, text = found.encoding, str(found)
    if block.decode("cp1252", "replace") == text:  # the most common of those that read this file alike
        codec = "cp1252"
    word = next(iter(_WORD.findall(text)), "")
    example = f', such as "{word[:20]}"' if word else ""
    label = _CODE_PAGES.get(codec, codec)
    return TextEncoding(codec, f"read as {label}{example} (if that is wrong, set encoding)")


def _is_utf8(block: bytes) -> bool:
    """Whether at most half of the characters beyond ASCII are broken. A broken one in a UTF-8 file is a bad record."""
    text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(block)  # its last character may be cut
    beyond = [character for character in text if character > "\x7f"]
    broken = sum("\udc80" <= character <= "\udcff" for character in beyond)
    return 2 * broken <= len(beyond)
