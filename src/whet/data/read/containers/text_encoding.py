"""The encoding of a table that is not UTF-8: spreadsheets save CSV in the code page of their country."""

from __future__ import annotations

import codecs
import functools
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from whet.data.read.containers.container import marked_encoding, open_bytes

_LABELS = {
    "cp1252": "Windows-1252", "cp1250": "Windows-1250", "cp1254": "Windows-1254", "cp1257": "Windows-1257",
    "cp1251": "Windows-1251", "cp1253": "Windows-1253", "cp1255": "Windows-1255", "cp1256": "Windows-1256",
    "koi8_u": "KOI8", "iso8859_2": "ISO 8859-2", "mac_roman": "Mac Roman", "cp850": "DOS code page 850",
    "cp852": "DOS code page 852", "cp866": "DOS code page 866", "gb18030": "GB 18030", "cp932": "Shift JIS",
    "euc_jp": "EUC-JP", "cp949": "Korean (CP949)", "big5": "Big5",
}  # fmt: skip
"""What spreadsheets and databases save besides UTF-8 and UTF-16, by Python's name."""
_ALPHABET_PAGES = (
    "cp1252", "cp1250", "cp1254", "cp1257", "cp1251", "cp1253", "koi8_u", "iso8859_2", "mac_roman", "cp850", "cp852",
    "cp866",
)  # fmt: skip
"""Code pages of one byte a letter, the most common first: it wins where several read a file as well."""
_WESTERN = [
    "äöüß", "àâæçéèêëîïôœùûüÿ", "áéíóúñüªº", "àáèéìíîòóùú", "ãáâàçéêíóôõúªº", "àçèéíïòóúü", "áéëèïíóöúü", "åäöé",
    "æøåé", "åäöšž", "áðéíóúýþæö", "äöüõšž",
]  # fmt: skip
_OTHERS = [
    "ąćęłńóśźż", "áčďéěíňóřšťúůýž", "áäčďéíĺľňóôŕšťúýž", "áéíóöőúüű", "ăâîșțşţ", "čćđšž", "çğıİöşüâî", "ąčęėįšųūž",
    "āčēģīķļņšūžõ", "абвгдеёжзийклмнопрстуфхцчшщъыьэюя", "абвгґдеєжзиіїйклмнопрстуфхцчшщьюя",
    "абвгдђежзијклљмнњопрстћуфхцчџшѓќѕ", "αβγδεζηθικλμνξοπρσςτυφχψωάέήίόύώϊϋΐΰ",
]  # fmt: skip
"""The letters beyond ASCII of languages."""
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
    about = path.stat()
    return _detect_encoding(path, name, about.st_size, about.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _detect_encoding(path: Path, name: str, _size: int, _modified: int) -> TextEncoding:
    """Once for each file, which a command opens several times."""
    with open_bytes(path, name) as stream:
        block = stream.read(_BLOCK_BYTES)
        has_mark = block.startswith(codecs.BOM_UTF8) and marked_encoding(path) is None
        while block.isascii() and (more := stream.read(_BLOCK_BYTES)):
            block = more
    if utf16 := unmarked_utf16(block):
        return TextEncoding(utf16, "read as UTF-16 without a byte order mark")
    if _is_utf8(block):
        return TextEncoding(UTF8, "UTF-8 with BOM" if has_mark else "")
    codec = "cp1252" if _has_marks_only(block) else None
    codec = codec or _read_as_language(block) or _read_by_statistics(block, list(_LABELS))
    if codec is None:
        return TextEncoding(UTF8, "")
    word = next(iter(_WORD.findall(block.decode(codec, "replace"))), "")
    example = f', such as "{word[:20]}"' if word else ""
    return TextEncoding(codec, f"read as {_LABELS.get(codec, codec)}{example} (if that is wrong, set encoding)")


def unmarked_utf16(block: bytes) -> str | None:
    """Python's name of UTF-16 without a byte order mark, in which every other byte of ASCII letters is zero."""
    even, odd = block[: len(block) // 2 * 2][::2].count(0), block[1::2].count(0)
    if 4 * max(even, odd) <= len(block) // 2 or min(even, odd) > max(even, odd) // 8:
        return None
    return "utf-16-le" if odd > even else "utf-16-be"


def _read_as_language(block: bytes) -> str | None:
    """The code page in which all but a few letters are those of one language, else of Western or of other languages;
    None if there is no such page. Statistics of frequent letters alone take `è` for `č` in a short Italian file."""
    languages = [*_WESTERN, *_OTHERS]
    for alphabets in (languages, ["".join(_WESTERN)], ["".join(languages)]):
        shares = {codec: _share_of_letters(block, codec, alphabets) for codec in _ALPHABET_PAGES}
        best = [codec for codec in shares if shares[codec] == max(shares.values()) > _FEW_EXCEPTIONS]
        if len({block.decode(codec) for codec in best}) > 1:  # Hungarian and Portuguese: Gyõr
            return _read_by_statistics(block, best)
        if best:
            return best[0]
    return None


_FEW_EXCEPTIONS = 0.98


def _share_of_letters(block: bytes, codec: str, alphabets: list[str]) -> float:
    """Of the characters beyond ASCII, but for marks that are not inside a word, those in the best alphabet. Neither
    a capital after a small letter counts (KOI8 and Windows-1251 have the same letters, capitals in place of small ones)
    nor a Greek or Cyrillic letter beside a Latin one."""
    try:
        text = block.decode(codec)
    except UnicodeDecodeError:
        return 0.0
    found: Counter[str] = Counter()
    for match in _IN_WORD.finditer(text):
        before, character, after = match.group(1), match.group(2), match.group(3)
        is_inside = before.isalpha() and after.isalpha()
        if character not in _MARKS or (is_inside and character != "’"):
            is_beside_latin = any(each.isascii() and each.isalpha() for each in (before, after))
            is_odd = (before.islower() and character.isupper()) or (character > "\u0370" and is_beside_latin)
            found["" if is_odd else character.lower()] += 1
    total = found.total()
    return max(sum(found[letter] for letter in set(alphabet)) for alphabet in alphabets) / total if total else 0.0


def _has_marks_only(block: bytes) -> bool:
    """Whether a file has no letters beyond ASCII, but marks where marks are, read as Windows-1252: English of Excel,
    with its apostrophes, quotes and dashes. In other code pages these bytes are letters: `donĺt`."""
    try:
        text = block.decode("cp1252")
    except UnicodeDecodeError:
        return False
    beyond = [character for character in text if character > "\x7f"]
    is_rare = len(beyond) * _RARE <= len(text)
    return is_rare and all(character in _MARKS for character in beyond) and not _MISPLACED.search(text)


_RARE = 5
_MISPLACED = re.compile(r"(?<=\w)[“„‚‘«‹¿¡]|[”»›€£¥¢§](?=[^\W\d_])|(?<=[^\W\d_])[•†‡©®™°²³¹¼½¾×÷±](?=[^\W\d_])")
"""Marks that open, after a letter; that close, or stand before numbers, before a letter; others between letters."""
_MARKS = "’·“”„‘‚«»‹›–—…¿¡°§¶•†©®™€£¥¢²³¹¼½¾×÷±µ´¨№\xa0\xad"
_IN_WORD = re.compile(r"(?<=(.))([^\x00-\x7f])(?=(.))", re.DOTALL)


def _read_by_statistics(block: bytes, candidates: list[str]) -> str | None:
    from charset_normalizer import from_bytes

    found = from_bytes(block, cp_isolation=candidates).best()
    return None if found is None else codecs.lookup(found.encoding).name.replace("-", "_")


def _is_utf8(block: bytes) -> bool:
    """Whether at most half of the characters beyond ASCII are broken. A broken one in a UTF-8 file is a bad record."""
    text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(block)  # its last character may be cut
    beyond = [character for character in text if character > "\x7f"]
    broken = sum("\udc80" <= character <= "\udcff" for character in beyond)
    return 2 * broken <= len(beyond)
