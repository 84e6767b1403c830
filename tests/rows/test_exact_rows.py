import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradherd.rows import Capture, DenseRows, GroupedRows
from gradherd.rows.terms import OuterTerm, gram_by_blocks, gram_by_pairs
from tests.rows.reference import check_operations, close


@given(examples=st.integers(1, 9), size=st.integers(1, 7), unit=st.integers(1, 10))
@settings(max_examples=40, deadline=None)
def test_grouped_rows_are_means_of_consecutive_rows(examples: int, size: int, unit: int) -> None:
    matrix = torch.randn(examples, size, dtype=torch.float64)
    expected = torch.stack([part.mean(0) for part in matrix.split(unit)])
    check_operations(GroupedRows(DenseRows(matrix), unit), expected)


def test_grouped_works_on_factored_rows() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    capture = Capture(model)
    model(torch.randn(5, 4, dtype=torch.float64)).pow(2).sum(1).mean().backward()
    rows = capture.pop_rows(5)
    expected = torch.stack([part.mean(0) for part in rows.dense().split(2)])
    check_operations(GroupedRows(rows, 2), expected)


def outer_term(kind: str, positions: int, generator: torch.Generator) -> OuterTerm:
    def factor(size: int) -> torch.Tensor:
        return torch.randn(4, positions, size, generator=generator, dtype=torch.float64)

    if kind == "tokens":
        return OuterTerm(torch.randint(6, (4, positions), generator=generator), factor(3), 6)
    return OuterTerm(factor(6), factor(3), 6)


@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(["tokens", "dense"]), st.integers(1, 5)), min_size=1, max_size=3
    ),
    seed=st.integers(0, 2**30),
)
@settings(max_examples=40, deadline=None)
def test_both_algorithms_for_a_gram_matrix_agree(kinds: list[tuple[str, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    terms = [outer_term(kind, positions, generator) for kind, positions in kinds]
    grads = sum(term.dense() for term in terms)
    close(gram_by_pairs(terms), grads @ grads.T)
    close(gram_by_blocks(terms), grads @ grads.T)


@pytest.mark.parametrize("limit", [1, 10, 40])
def test_a_small_memory_limit_changes_nothing(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradherd.rows.terms.MAX_TEMPORARY", limit)
    generator = torch.Generator().manual_seed(0)
    terms = [outer_term("dense", 3, generator), outer_term("tokens", 2, generator)]
    grads = sum(term.dense() for term in terms)
    close(gram_by_pairs(terms), grads @ grads.T)
    close(gram_by_blocks(terms), grads @ grads.T)


def test_wrong_shapes_are_named() -> None:
    model = nn.Linear(3, 2)
    capture = Capture(model)
    model(torch.randn(4, 3)).sum().backward()
    rows = capture.pop_rows(4, reduction="sum")
    with pytest.raises(ValueError, match=r"vectors must have shape \(K, 8\), got \(8,\)"):
        rows.dot(torch.zeros(8))
    with pytest.raises(ValueError, match=r"weights must have shape \(K, 4\), got \(1, 5\)"):
        rows.combine(torch.zeros(1, 5))
    with pytest.raises(ValueError, match=r"\(B, D\), got \(3,\)"):
        DenseRows(torch.zeros(3))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        GroupedRows(rows, 0)
