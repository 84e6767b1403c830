"""Text as token ids: a word vocabulary, and GPT-2's byte-pair encoding.

Byte-pair encoding splits text into words, each with the space before it, writes a word's bytes as
printable characters, and then merges the adjacent pair that ranks first in the merge list, again
and again, until no pair is in the list.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray


def build_vocabulary(words: Iterable[str], size: int, special: Sequence[str]) -> dict[str, int]:
    """Return numbers for the special words and then for the commonest, `size` at most.

    Of equally common words the one that came first is first.

    >>> build_vocabulary("b a b c".split(), 3, ["<unk>"])
    {'<unk>': 0, 'b': 1, 'a': 2}
    """
    counts = Counter(words)
    for word in special:
        counts.pop(word, None)
    common = (word for word, _ in counts.most_common(size - len(special)))
    return {word: number for number, word in enumerate(chain(special, common))}


def token_ids(words: Iterable[str], known: dict[str, int], unknown: int) -> NDArray[np.int64]:
    """Return the number of each word.

    >>> token_ids("b z".split(), {"<unk>": 0, "b": 1}, 0).tolist()
    [1, 0]
    """
    return np.fromiter((known.get(word, unknown) for word in words), np.int64)


@dataclass(frozen=True)
class BytePairEncoder:
    r"""A vocabulary, its merges in order, and the words that were met so far.

    >>> pairs = BytePairEncoder.parse('{"h": 0, "i": 1, "hi": 2, "!": 3}', "#version: 0.2\nh i\n")
    >>> pairs.encode("hi!ih")
    [2, 3, 1, 0]
    """

    tokens: dict[str, int]
    ranks: dict[tuple[str, str], int]
    _met: dict[str, list[int]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, encoder: str, merges: str) -> "BytePairEncoder":
        """Build it from the texts of encoder.json and vocab.bpe.

        Raises:
            ValueError: They are not what they should be.
        """
        try:
            tokens = json.loads(encoder)
        except RecursionError:
            raise ValueError("the vocabulary is nested too deeply") from None
        if not isinstance(tokens, dict) or not all(type(n) is int for n in tokens.values()):
            raise ValueError("the vocabulary must be an object of token numbers")
        lines = [line for line in merges.split("\n") if line and not line.startswith("#version")]
        pairs = [tuple(line.split(" ")) for line in lines]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError("each line of the merges must hold two tokens")
        return cls(tokens, {(pair[0], pair[1]): rank for rank, pair in enumerate(pairs)})

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [token for line in self.encode_lines([text]) for token in line]

    def encode_lines(self, lines: Iterable[str]) -> Iterator[list[int]]:
        """Return the tokens of each line, cut for itself."""
        letters: set[str] = set()
        cut = _word_pattern(letters)
        for line in lines:
            if not letters.issuperset(line):
                letters.update(line)
                cut = _word_pattern(letters)
            yield [token for word in cut.findall(line) for token in self._word(word)]

    def _word(self, word: str) -> list[int]:
        found = self._met.get(word)
        if found is None:
            parts = merge_pairs([_BYTE_CHARACTERS[byte] for byte in word.encode()], self.ranks)
            lack = [part for part in parts if part not in self.tokens]
            if lack:
                raise ValueError(f"the vocabulary has no token {lack[0]!r}")
            found = self._met[word] = [self.tokens[part] for part in parts]
        return found


def merge_pairs(parts: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Join neighbours as long as there is a merge for them, the first in rank first.

    >>> merge_pairs(list("abab"), {("a", "b"): 0, ("ab", "ab"): 1})
    ['abab']
    """
    while len(parts) > 1:
        known = [pair for pair in pairwise(parts) if pair in ranks]
        if not known:
            break
        first, second = min(known, key=ranks.__getitem__)
        joined, at = [], 0
        while at < len(parts):
            both = parts[at : at + 2] == [first, second]
            joined.append(first + second if both else parts[at])
            at += 2 if both else 1
        parts = joined
    return parts


def _word_pattern(characters: set[str]) -> re.Pattern[str]:
    """Return GPT-2's rule for words, exact for texts of these characters.

    Python's `re` has no classes for letters and numbers of all scripts, so they are spelled out.
    """
    classes = {"L": "a", "N": "0"}
    for character in sorted(characters):
        kind = unicodedata.category(character)[0]
        if kind in classes:
            classes[kind] += re.escape(character)
    letter, number = classes["L"], classes["N"]
    return re.compile(
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{letter}]+| ?[{number}]+| ?[^\s{letter}{number}]+"
        r"|\s+(?!\S)|\s+"
    )


def _byte_characters() -> list[str]:
    """Return a printable character for every byte: itself, or one from beyond the first 256."""
    kept = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


_BYTE_CHARACTERS = _byte_characters()
