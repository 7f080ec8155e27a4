"""What the papers' functions share: which numbers are computed with, how entries are ranked, how stacks are divided."""

from __future__ import annotations

import pytest
import torch

from fedstrata.functional import _entries


def test_numbers_are_wide_enough_to_compute_with() -> None:
    kinds = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float32}
    kinds |= {torch.float64: torch.float64, torch.int8: torch.float64, torch.int64: torch.float64}
    assert {kind: _entries.real(torch.ones(2, dtype=kind)).dtype for kind in kinds} == kinds
    assert not _entries.real(torch.ones(2, requires_grad=True)).requires_grad


def test_a_piece_takes_128_mebibytes() -> None:
    assert _entries.PIECE_ENTRIES * 8 == 128 * 2**20


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((5, 2, 3), [2, 2, 1]), ((3, 20), [1, 1, 1]), ((14,), [12, 2]), ((3, 0), [3]), ((4, 3), [4])],
)
def test_a_stack_is_divided_between_clients(monkeypatch: pytest.MonkeyPatch, shape, sizes) -> None:
    """Twelve entries at once, and one client at least."""
    monkeypatch.setattr(_entries, "PIECE_ENTRIES", 12)
    assert [len(piece) for piece in _entries.client_pieces(torch.zeros(shape))] == sizes


class OnGpu(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("kind", [torch.Tensor, OnGpu])
@pytest.mark.parametrize("count", [1, 2, 3, torch.tensor([1, 3, 0])])
def test_the_lowest_entries_by_every_way_of_selecting(monkeypatch: pytest.MonkeyPatch, kind, count) -> None:
    """On a GPU kthvalue is slower than a sort, and not deterministic: it must not be called there."""
    monkeypatch.setattr(_entries, "PIECE_ENTRIES", 4)
    if kind is OnGpu:
        monkeypatch.setattr(torch.Tensor, "kthvalue", None)
    rows = torch.tensor([[3.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0], [9.0, 8.0, 7.0, 6.0]])
    marked = _entries.lowest(rows.as_subclass(kind), count)
    for row, mark, wanted in zip(rows, marked, torch.as_tensor(count).expand(3), strict=True):
        order = sorted(range(4), key=lambda place: (row[place], place))
        assert mark.nonzero().flatten().tolist() == sorted(order[: int(wanted)])


def test_elsewhere_entries_are_selected_without_a_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "sort", None)
    assert _entries.lowest(torch.tensor([[3.0, 1.0, 2.0]]), 2).tolist() == [[False, True, True]]
