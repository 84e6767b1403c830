"""Byte pairs, against a slow and obvious reference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradherd.lab.tasks.data_files import MissingData, find_dataset
from studies.tasks.gpt2 import _BYTE_CHARACTERS, BytePairEncoder, merge_pairs

merges = st.lists(
    st.tuples(st.text("ab", min_size=1, max_size=3), st.text("ab", min_size=1, max_size=3)),
    max_size=8,
    unique=True,
)


def one_by_one(word, ranked):
    """Go through the merges by rank, from the first again after each that applied."""
    parts = list(word)
    while True:
        for pair in ranked:
            at = next((i for i in range(len(parts)) if tuple(parts[i : i + 2]) == pair), None)
            if at is not None:
                break
        else:
            return parts
        joined, i = [], 0
        while i < len(parts):
            if tuple(parts[i : i + 2]) == pair:
                joined.append("".join(pair))
                i += 2
            else:
                joined.append(parts[i])
                i += 1
        parts = joined


@given(st.text("ab", max_size=12), merges)
def test_merging_follows_the_ranks(word, ranked):
    ranks = {pair: rank for rank, pair in enumerate(ranked)}
    assert merge_pairs(list(word), ranks) == one_by_one(word, ranked)


BYTES = BytePairEncoder({character: n for n, character in enumerate(_BYTE_CHARACTERS)}, {})


@given(st.text(max_size=30))
def test_any_text_comes_through_whole(text):
    assert bytes(BYTES.encode(text)).decode() == text


@given(st.lists(st.text(max_size=8), max_size=4))
def test_lines_are_cut_one_by_one(lines):
    assert list(BYTES.encode_lines(lines)) == [BYTES.encode(line) for line in lines]


GOLDEN = {
    "Hello world": [15496, 995],
    "  It's 1,234 o'clock  \n\n": [220, 632, 338, 352, 11, 24409, 267, 6, 15750, 220, 220, 628],
    " = Robert <unk> = \n": [796, 5199, 1279, 2954, 29, 796, 220, 198],
    "naïve ½ Ⅷ 数学": [2616, 38776, 25208, 2343, 227, 100, 10545, 243, 108, 27764, 99],
}


def test_the_real_vocabulary():
    """Tokens as tiktoken 0.14 gives them."""
    try:
        found = find_dataset("gpt2-bpe")
    except MissingData as error:
        pytest.skip(str(error))
    pairs = BytePairEncoder.parse(found.text("encoder.json"), found.text("vocab.bpe"))
    assert {text: pairs.encode(text) for text in GOLDEN} == GOLDEN
