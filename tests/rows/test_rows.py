import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradherd.rows import Capture, DenseRows, Grouped
from gradherd.rows.outer import Outer, _gram_by_blocks, _gram_by_pairs
from tests.rows.reference import check_verbs, close


@given(examples=st.integers(1, 9), size=st.integers(1, 7), unit=st.integers(1, 10))
@settings(max_examples=40, deadline=None)
def test_grouped_rows_are_means_of_consecutive_rows(examples: int, size: int, unit: int) -> None:
    matrix = torch.randn(examples, size, dtype=torch.float64)
    expected = torch.stack([part.mean(0) for part in matrix.split(unit)])
    check_verbs(Grouped(DenseRows(matrix), unit), expected)


def test_grouped_works_on_factored_rows() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    capture = Capture(model)
    model(torch.randn(5, 4, dtype=torch.float64)).pow(2).sum(1).mean().backward()
    rows = capture.take(5)
    expected = torch.stack([part.mean(0) for part in rows.dense().split(2)])
    check_verbs(Grouped(rows, 2), expected)


def use(kind: str, positions: int, chance: torch.Generator) -> Outer:
    def numbers(size: int) -> torch.Tensor:
        return torch.randn(4, positions, size, generator=chance, dtype=torch.float64)

    if kind == "tokens":
        return Outer(torch.randint(6, (4, positions), generator=chance), numbers(3), 6)
    return Outer(numbers(6), numbers(3), 6)


@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(["tokens", "dense"]), st.integers(1, 5)), min_size=1, max_size=3
    ),
    seed=st.integers(0, 2**30),
)
@settings(max_examples=40, deadline=None)
def test_both_ways_to_a_gram_matrix_agree(kinds: list[tuple[str, int]], seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    terms = [use(kind, positions, chance) for kind, positions in kinds]
    grads = sum(term.dense() for term in terms)
    close(_gram_by_pairs(terms), grads @ grads.T)
    close(_gram_by_blocks(terms), grads @ grads.T)


@pytest.mark.parametrize("budget", [1, 10, 40])
def test_cutting_to_small_pieces_changes_nothing(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradherd.rows.outer.BUDGET", budget)
    chance = torch.Generator().manual_seed(0)
    terms = [use("dense", 3, chance), use("tokens", 2, chance)]
    grads = sum(term.dense() for term in terms)
    close(_gram_by_pairs(terms), grads @ grads.T)
    close(_gram_by_blocks(terms), grads @ grads.T)


def test_wrong_shapes_are_named() -> None:
    model = nn.Linear(3, 2)
    capture = Capture(model)
    model(torch.randn(4, 3)).sum().backward()
    rows = capture.take(4, reduction="sum")
    with pytest.raises(ValueError, match=r"vectors must have shape \(K, 8\), got \(8,\)"):
        rows.dot(torch.zeros(8))
    with pytest.raises(ValueError, match=r"weights must have shape \(K, 4\), got \(1, 5\)"):
        rows.combine(torch.zeros(1, 5))
    with pytest.raises(ValueError, match=r"\(B, D\), got \(3,\)"):
        DenseRows(torch.zeros(3))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Grouped(rows, 0)
