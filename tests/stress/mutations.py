"""Ways to spoil a file, each from a seeded source of chance."""

import gzip
import io
import json
import lzma
import math
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Mutation = Callable[[bytes, random.Random], bytes]
EVIL = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "\"'><svg onload=alert(3)>",
    "%{meta[0]} {{ 7 * 7 }} {% raw %} ${alert(5)}",
    "\u202e \ud800 \x1b[31m \x00 \n gradherd: done \r",
]
NAMES = ["a\nb", "\x1b[31mred", "<script>", "%s {0}", os.fsdecode(b"\xff\xfe"), "\u202e", "n" * 250]

UNPACKABLE = (zipfile.BadZipFile, lzma.LZMAError, zlib.error, struct.error, OSError, TypeError,
              AttributeError, RuntimeError)  # fmt: skip
"""What unpacking a file raises that was spoilt before."""


class Marker:
    """What leaves a folder behind if a pickle is run."""

    where = "was-here"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.where,)


# Any bytes.


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def flip(data: bytes, chance: random.Random) -> bytes:
    spoilt = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8, 64])):
        if spoilt:
            spoilt[_place(data, chance)] ^= 1 << chance.randrange(8)
    return bytes(spoilt)


def insert(data: bytes, chance: random.Random) -> bytes:
    at, size = _place(data, chance), chance.choice([1, 3, 64, 5000])
    span = chance.choice([chance.randbytes(size), bytes(size), data[:size], b"\xff" * size])
    return data[:at] + span + data[at:]


def remove(data: bytes, chance: random.Random) -> bytes:
    at = _place(data, chance)
    return data[:at] + data[at + chance.choice([1, 2, 16, 512]) :]


def swap(data: bytes, chance: random.Random) -> bytes:
    a, b, c = sorted(chance.randrange(len(data) + 1) for _ in range(3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def size_field(data: bytes, chance: random.Random) -> bytes:
    """Put a number that a size should not have somewhere near the beginning or the end."""
    number = chance.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1])
    size = chance.choice([s for s in (2, 4, 8) if number < 256**s] or [8])
    field = number.to_bytes(size, chance.choice(["little", "big"]))
    at = chance.choice([chance.randrange(min(len(data), 128) + 1), _place(data, chance)])
    return data[:at] + field + data[at + size :]


def other(data: bytes, chance: random.Random) -> bytes:
    packed = [gzip.compress(data), lzma.compress(data), pickle.dumps(Marker())]
    return chance.choice([b"", b"\0", b"{}", chance.randbytes(3000), data * 2, *packed])


def _place(data: bytes, chance: random.Random) -> int:
    near = min(len(data), 200)
    return chance.randrange(chance.choice([near, len(data)]) or 1)


BYTES: list[Mutation] = [cut, flip, insert, remove, swap, size_field, other]


# Text.


def no_text(data: bytes, chance: random.Random) -> bytes:
    at = _place(data, chance)
    odd = [
        b"\xff",
        b"\xed\xa0\x80",
        b"\0",
        b"\xef\xbb\xbf",
        b"\r",
        b"\x1b[31m",
        b"\xe2\x80\xa8",
        b'"',
    ]
    return data[:at] + chance.choice(odd) + data[at:]


def other_numbers(data: bytes, chance: random.Random) -> bytes:
    words = data.split(b",")
    odd = [b"NaN", b"-inf", b"1e400", b"1e308", b"9" * 5000, b"", b"x" * 200_000, b"1_0", b"-0"]
    words[chance.randrange(len(words))] = chance.choice(odd)
    return b",".join(words)


TEXT: list[Mutation] = [*BYTES, no_text, other_numbers]


# JSON.


def other_value(data: bytes, chance: random.Random) -> bytes:
    """Replace, remove or rename something at a random place of a JSON document."""
    document = json.loads(data)
    spot, key = _spot(document, chance)
    if spot is None:
        return json.dumps(_odd(chance)).encode()
    how = chance.choice(["replace", "replace", "replace", "remove", "rename", "text"])
    if how == "remove":
        del spot[key]
    elif how == "rename" and isinstance(spot, dict):
        spot[chance.choice(EVIL)] = spot.pop(key)
    elif how == "text":
        spot[key] = chance.choice(EVIL)
    else:
        spot[key] = _odd(chance)
    text = json.dumps(document)
    for long in ("1e400", "9" * 400, "9" * 5000):  # as no writer would write them
        text = text.replace(f'"@{long[:6]}{len(long)}"', long)
    return text.encode()


def _odd(chance: random.Random) -> Any:
    long = chance.choice(["1e400", "9" * 400, "9" * 5000])
    deep: Any = 0
    for _ in range(chance.choice([20, 900])):
        deep = [deep] if chance.random() < 0.5 else {"a": deep}
    return chance.choice(
        [None, True, -1, 0, 1.5, 1e308, -1e308, 1e-320, 2**63, 2**64, 10**200, math.nan, math.inf]
        + [-math.inf, "", "text", "x" * 100_000, [], {}, [[]], {"a": None}, deep, [1, "2", None]]
        + [f"@{long[:6]}{len(long)}"] * 3
    )


def _spot(document: Any, chance: random.Random) -> tuple[Any, Any]:
    spot, key = None, None
    inner = document
    while isinstance(inner, dict | list) and inner and (spot is None or chance.random() < 0.7):
        spot = inner
        key = chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        inner = spot[key]
    return spot, key


def deep(data: bytes, chance: random.Random) -> bytes:
    count = chance.choice([900, 5000, 200_000])
    return chance.choice([b"[" * count, b'{"a":' * count, b"[" * count + b"]" * count])


JSON: list[Mutation] = [*TEXT, other_value, other_value, other_value, other_value, deep]


# Arrays and archives.


def npy(data: bytes, chance: random.Random) -> bytes:
    """Write another header before the content, or an array of another kind."""
    if chance.random() < 0.3:
        return _array(chance)
    size = struct.unpack("<H", data[8:10])[0]
    head = data[10 : 10 + size].decode("latin1").rstrip()
    shapes = ["()", "(0,)", "(-1, 2, 3)", "(-2, -2, 3)", "(1000000, 1000000, 1000000)", "3", "None"]
    shapes += [
        "(99999999999999999999, 2, 2)",
        "(4294967296, 4294967296, 1)",
        "(True, 2, 3)",
        "(2.0, 3)",
    ]
    shapes += ["(10000000000,)", "(1, 1, 10000000000)", "(" + "1, " * 70 + ")", "(2, [3], 4)"]
    kinds = [
        "'|O'",
        "'<f2'",
        "'>f8'",
        "'<f16'",
        "'<c16'",
        "'<U9'",
        "'|V0'",
        "'|S0'",
        "'<m8[s]'",
        "'<M8'",
    ]
    kinds += [
        "'|b1'",
        "[('a', '<f8')]",
        "[('a', '|O')]",
        "('<f8', (2,))",
        "'f8,O'",
        "'<u8'",
        "'@'",
        "{}",
    ]
    kinds += [
        "'" + "f8," * 500 + "f8'",
        "'<f99'",
        "''",
        "None",
        "[]",
        "'<i8'",
        "'|i1'",
        "'(9,9)f8'",
    ]
    what = chance.choice(["shape", "descr", "order", "deep", "junk"])
    if what == "shape":
        head = head[: head.index("'shape': ")] + f"'shape': {chance.choice(shapes)}, }}"
    elif what == "descr":
        head = f"{{'descr': {chance.choice(kinds)}, " + head[head.index("'fortran") :]
    elif what == "order":
        head = head.replace("False", chance.choice(["True", "None", "'x'", "False, 'more': 1"]))
    elif what == "deep":
        head = chance.choice(
            ["-" * 9000 + "1", "(" * 5000, "[" * 90 + "]" * 90, "{[]: 1}", "~" * 9999]
        )
    else:
        head = chance.choice(
            ["{}", "{'a': 1}", "__import__('os')", "\0", "1L", head + "x", head * 9]
        )
    raw = head.encode("latin1") + b"\n"
    version = chance.choice([b"\1\0", b"\1\0", b"\1\0", b"\2\0", b"\3\0", b"\4\0"])
    size_of = struct.pack("<H" if version == b"\1\0" else "<I", len(raw))
    return b"\x93NUMPY" + version + size_of + raw + data[10 + size :]


def _array(chance: random.Random) -> bytes:
    objects = np.empty((1, 2, 2), object)
    objects[:] = Marker()
    odd = [
        objects,
        np.full((1, 2, 2), np.nan),
        np.full((2, 2, 3), 1e300),
        np.zeros((3, 4)),
        np.zeros((1, 0, 2)),
        np.full((1, 2, 2), 1e4000, np.longdouble),
        np.full((2, 2, 2), 2**63, np.uint64),
        np.array([[["a"]]]),
        np.ones((1, 3, 2), np.float16),
        np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
        np.full((2, 3, 4), True),
        np.zeros((1, 2, 2), "m8[s]"),
    ]
    file = io.BytesIO()
    np.save(file, chance.choice(odd), allow_pickle=True)
    return file.getvalue()


def inside_zip(data: bytes, chance: random.Random, spoil: list[Mutation]) -> bytes:
    """Spoil a file of an archive, or how it is kept there, and pack it again."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(info.file_size > 1 << 24 for info in archive.infolist()):
            return data  # It is a bomb already.
        files = {name: archive.read(name) for name in archive.namelist()}
    victim = chance.choice(list(files))
    how = chance.choice(["spoil", "spoil", "spoil", "name", "bomb", "packing", "double", "lie"])
    kind = chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    if how == "spoil":
        files[victim] = chance.choice(spoil)(files[victim], chance)
    elif how == "name":
        odd = ["../outside.npy", "/tmp/outside.npy", "..\\outside.npy", "a\nb", "\x1b[2J", "C:\\x"]
        files[chance.choice(odd)] = files.pop(victim)
    elif how == "packing":
        kind = chance.choice([zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    if how == "bomb":
        return _zip_bomb(victim, files[victim])
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        if how == "double" and f"{victim}2" not in files:
            archive.writestr(f"{victim}2", files[victim])
    packed = file.getvalue()
    if how != "lie":
        return packed
    # The directory at the end says another size, packing or flag than there is.
    at = packed.index(b"PK\1\2")
    field = at + chance.choice([8, 10, 20, 24])
    return packed[:field] + chance.choice([b"\1\0\0\0", b"\xff\xff\xff\x7f"]) + packed[field + 4 :]


@cache
def _zip_bomb(name: str, head: bytes) -> bytes:
    """Return an archive of a file that begins well and goes on for a gigabyte of zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open(name, "w", force_zip64=True) as target:
            target.write(head)
            for _ in range(256):
                target.write(bytes(1 << 22))
    return file.getvalue()


# Packed files.


def inside_packed(data: bytes, chance: random.Random, end: str, spoil: list[Mutation]) -> bytes:
    """Spoil what is in a .gz or .xz file and pack it again, or make it a bomb."""
    if chance.random() < 0.03 or data == bomb(end):
        return bomb(end)
    pack, unpack = (
        (gzip.compress, gzip.decompress) if end == ".gz" else (lzma.compress, lzma.decompress)
    )
    return pack(chance.choice(spoil)(unpack(data), chance))


@cache
def bomb(end: str) -> bytes:
    """Return 16 GiB of zeros, packed: streams of one file after the other are one file."""
    pack = gzip.compress if end == ".gz" else lzma.compress
    return pack(bytes(1 << 26)) * 256


# Files that are none.


def misplace(path: Path, chance: random.Random) -> str:
    """Put something in the place of a file that is no file; return what."""
    path.unlink()
    how = chance.choice(["folder", "loop", "dangling", "zero", "pipe", "long", "elsewhere"])
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "long":
        with path.open("wb") as file:
            file.truncate(1 << 42)  # a hole: it takes no place on the disk
    else:
        target = {
            "loop": path.name,
            "dangling": "gone",
            "zero": "/dev/zero",
            "elsewhere": os.devnull,
        }
        path.symlink_to(target[how])
    return how
