"""L-DAWA: averages that shrink where clients turn away."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.errors import FedStrataError
from fedstrata.functional import ldawa
from fedstrata.functional.l_dawa import cosines

GLOBAL, CLIENTS = torch.tensor([1.0, 0.0]), torch.tensor([[2.0, 0.0], [3.0, 4.0]])


def test_golden_case() -> None:
    torch.testing.assert_close(ldawa(GLOBAL, CLIENTS), torch.tensor([1.9, 1.2]))


def test_shapes_do_not_matter_but_the_whole_tensor_does() -> None:
    square = ldawa(GLOBAL.reshape(1, 2), CLIENTS.reshape(2, 1, 2))
    assert square.tolist() == [ldawa(GLOBAL, CLIENTS).tolist()]


def test_opposite_clients_count_negatively() -> None:
    assert ldawa(GLOBAL, torch.tensor([[-2.0, 0.0]])).tolist() == [2.0, 0.0]


@pytest.mark.parametrize("previous", [torch.zeros(2), torch.zeros(2, dtype=torch.float64)])
def test_a_global_tensor_of_zeros_gives_the_plain_mean(previous: torch.Tensor) -> None:
    assert ldawa(previous, CLIENTS.to(previous.dtype)).tolist() == [2.5, 2.0]


def test_single_numbers_are_averaged() -> None:
    assert ldawa(torch.tensor(-1.0), torch.tensor([3.0, 5.0])).item() == 4.0


def test_a_client_of_zeros_adds_nothing_but_counts() -> None:
    assert ldawa(GLOBAL, torch.tensor([[2.0, 0.0], [0.0, 0.0]])).tolist() == [1.0, 0.0]


def test_under_masks_the_mean_runs_over_those_who_sent_an_entry() -> None:
    """Client 1 sends its second entry only: over that, the global tensor (0) has no direction, so it counts as is."""
    mask = torch.tensor([[True, False], [False, True]])
    assert ldawa(GLOBAL, CLIENTS, mask=mask).tolist() == [2.0, 4.0]
    assert ldawa(GLOBAL, CLIENTS, mask=torch.tensor([[True], [False]])).tolist() == [2.0, 0.0]
    nobody = torch.tensor([[True, False], [True, False]])
    assert ldawa(torch.tensor([1.0, 7.0]), CLIENTS, mask=nobody).tolist() == [2.5, 7.0]


def test_equal_clients_and_global_give_the_tensor_back() -> None:
    tensor = torch.tensor([[0.3, -0.7], [1.1, 0.0]])
    torch.testing.assert_close(ldawa(tensor, torch.stack([tensor, tensor, tensor])), tensor)


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=2, max_size=5))
def test_it_is_never_longer_than_the_mean_length_and_the_order_does_not_matter(rows: list[list[float]]) -> None:
    previous, clients = torch.tensor(rows[0]), torch.tensor(rows[1:])
    new = ldawa(previous, clients)
    assert float(new.norm()) <= float(clients.norm(dim=1).mean()) * (1 + 1e-5) + 1e-6
    torch.testing.assert_close(ldawa(previous, clients.flip(0)), new)


def test_a_stack_larger_than_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    previous, clients = torch.randn(4, 2), torch.randn(5, 4, 2)
    whole = ldawa(previous, clients)
    monkeypatch.setattr("fedstrata.functional._entries.PIECE_ENTRIES", 9)
    torch.testing.assert_close(ldawa(previous, clients), whole)


@pytest.mark.parametrize(
    ("previous", "clients", "sentence"),
    [
        (GLOBAL, torch.empty(0, 2), "There are no clients"),
        (GLOBAL, torch.ones(2, 3), "The previous tensor has the shape"),
        (GLOBAL, torch.tensor(1.0), "is a single number"),
        (torch.tensor([1.0, torch.nan]), CLIENTS, "The previous tensor holds NaN"),
        (GLOBAL, torch.tensor([[1.0, 2.0], [torch.inf, 0.0]]), "The tensor of client 1 holds NaN or infinite"),
    ],
)
def test_what_has_no_answer_is_refused(previous: torch.Tensor, clients: torch.Tensor, sentence: str) -> None:
    with pytest.raises(FedStrataError, match=sentence):
        ldawa(previous, clients)


def test_lengths_below_one_have_cosines_too() -> None:
    small = cosines(torch.tensor([0.3, 0.4]), torch.tensor([[0.4, 0.3], [0.0, 0.1]]))
    assert small.tolist() == pytest.approx([0.96, 0.8], rel=1e-6)


def test_cosines_are_not_beyond_one() -> None:
    rows = torch.randn(500, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for row in rows:
        assert -1 <= float(cosines(-row, row[None])) <= float(cosines(row, row[None])) <= 1


def test_cosines_are_in_float64_and_results_in_the_clients_type() -> None:
    assert cosines(torch.tensor(1.0), torch.tensor([1.0, 2.0])).dtype == torch.float64
    mask = torch.tensor([[True, False], [True, False]])
    new = ldawa(GLOBAL, CLIENTS, mask=mask)
    assert new.dtype == torch.float32
    assert new.tolist() == [2.5, 0.0]
