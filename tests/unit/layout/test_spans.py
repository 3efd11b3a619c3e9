"""Byte spans of boxes, and merging them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.layout.spans import box_spans, merge_spans
from shared.layout.tensor_layout import Box


@given(st.data())
def test_spans_give_the_bytes_of_the_box_in_row_major_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(start, tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True)))
    numel = int(np.prod(shape, dtype=int))
    array = np.arange(numel, dtype=np.uint16).reshape(shape)
    raw = array.tobytes()
    spans = box_spans(shape, box, 2, base_bytes=0)
    got = b"".join(raw[offset : offset + length] for offset, length in spans.tolist())
    at = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
    assert got == array[at].tobytes()
    assert np.array_equal(box_spans(shape, box, 2, base_bytes=100)[:, 0], spans[:, 0] + 100)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_merged_spans_move_the_same_bytes(pieces: list[tuple[int, bool, bool]]) -> None:
    left, right, a, b = [], [], 0, 0
    for length, gap_left, gap_right in pieces:
        a, b = a + 3 * gap_left, b + 3 * gap_right
        left.append((a, length))
        right.append((b, length))
        a, b = a + length, b + length
    merged_left, merged_right = merge_spans(np.array(left, np.int64), np.array(right, np.int64))

    def pairs(x: np.ndarray, y: np.ndarray) -> list[tuple[int, int]]:
        return [
            (i + k, j + k) for (i, n), (j, _) in zip(x.tolist(), y.tolist(), strict=True) for k in range(n)
        ]

    assert pairs(merged_left, merged_right) == pairs(np.array(left), np.array(right))
    assert len(merged_left) == 1 + sum(gap_left or gap_right for _, gap_left, gap_right in pieces[1:])


def test_whole_rows_are_one_span() -> None:
    assert box_spans((4, 5), Box((1, 0), (2, 5)), 2).tolist() == [[10, 20]]
    assert box_spans((4, 5), Box((1, 1), (2, 3)), 2).tolist() == [[12, 6], [22, 6]]
    assert box_spans((), Box((), ()), 4).tolist() == [[0, 4]]
