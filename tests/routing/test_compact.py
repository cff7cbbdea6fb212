"""compact: block lists against a loop over rows, and overflow that is heard."""

import pytest
import torch

from crisp_flex.routing.reference import compact


@pytest.mark.parametrize(("P", "C"), [(7, 7), (7, 9), (3, 7)])
def test_lists_equal_a_loop_over_rows(P, C):
    keep = torch.rand(2, 3, 5, 7) > 0.4
    partial = torch.rand(2, 1, 5, 7) > 0.7
    keep &= ~partial | ((keep & partial).cumsum(-1) <= P)
    num, buffer, full_num = compact(keep, partial, P, C)
    assert buffer.shape == (2, 3, 5, P + C)
    assert buffer.is_contiguous()
    assert {x.dtype for x in (num, buffer, full_num)} == {torch.int32}
    for b in range(2):
        for h in range(3):
            for i in range(5):
                want = [j for j in range(7) if keep[b, h, i, j] and partial[b, 0, i, j]]
                want_full = [j for j in range(7) if keep[b, h, i, j] and not partial[b, 0, i, j]]
                assert num[b, h, i] == len(want)
                assert full_num[b, h, i] == len(want_full)
                row = want + [0] * (P - len(want)) + want_full + [0] * (C - len(want_full))
                assert buffer[b, h, i].tolist() == row


def test_empty_rows_have_no_blocks():
    num, buffer, full_num = compact(torch.zeros(1, 1, 2, 4).bool(), torch.ones(4).bool(), 1, 4)
    assert num.sum() == full_num.sum() == buffer.sum() == 0


@pytest.mark.parametrize(("P", "C", "partial"), [(2, 4, True), (1, 4, True), (4, 3, False)])
def test_a_row_that_does_not_fit_is_an_error(P, C, partial):
    keep = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="out of bounds"):
        compact(keep, torch.full((4,), partial), P, C)
