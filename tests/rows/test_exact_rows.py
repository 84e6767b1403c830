import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradherd.rows import Capture, DenseRows, FactoredRows, FlatSpec, GroupedRows
from gradherd.rows.exact_rows import DenseTerm, OuterTerm, TableTerm
from tests.rows.reference import check_operations


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


@given(
    examples=st.integers(1, 5),
    positions=st.integers(1, 4),
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    seed=st.integers(0, 2**30),
)
@settings(max_examples=40, deadline=None)
def test_terms_are_the_matrix_that_they_stand_for(
    examples: int, positions: int, rows: int, columns: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def factor(size: int) -> torch.Tensor:
        shape = (examples, positions, size)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    outer = OuterTerm(factor(rows), factor(columns))
    grads = sum(
        outer.left[:, t, :, None] * outer.right[:, t, None, :] for t in range(positions)
    ).flatten(1)
    tokens = torch.randperm(rows, generator=generator)[: max(1, rows - 1)]
    table = TableTerm(factor(len(tokens) * columns)[:, 0], tokens, (rows, columns))
    of_table = torch.zeros(examples, rows, columns, dtype=torch.float64)
    of_table[:, tokens] = table.grads.view(examples, len(tokens), columns)
    spec = FlatSpec(("weight",), ((rows, columns),))
    like = grads.new_empty(0)
    # Alone, and as two uses of one weight.
    for terms, expected in (
        ((outer,), grads),
        ((table,), of_table.flatten(1)),
        ((outer, outer), 2 * grads),
        ((outer, table, DenseTerm(grads)), 2 * grads + of_table.flatten(1)),
    ):
        check_operations(FactoredRows(spec, (terms,), examples, 1.0, like), expected)
        for term in terms:
            assert (term.norms() >= term.dense().norm(dim=1) * (1 - 1e-9)).all()


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
