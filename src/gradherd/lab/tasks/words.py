"""Words as numbers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray


def vocabulary(words: Iterable[str], size: int, special: Sequence[str]) -> dict[str, int]:
    """Return numbers for the special words and then for the commonest, `size` at most.

    Of equally common words the one that came first is first.

    >>> vocabulary("b a b c".split(), 3, ["<unk>"])
    {'<unk>': 0, 'b': 1, 'a': 2}
    """
    counts = Counter(words)
    for word in special:
        counts.pop(word, None)
    common = (word for word, _ in counts.most_common(size - len(special)))
    return {word: number for number, word in enumerate(chain(special, common))}


def numbers(words: Iterable[str], known: dict[str, int], unknown: int) -> NDArray[np.int64]:
    """Return the number of each word.

    >>> numbers("b z".split(), {"<unk>": 0, "b": 1}, 0).tolist()
    [1, 0]
    """
    return np.fromiter((known.get(word, unknown) for word in words), np.int64)
