"""Chunks of the column workspace: they cover the work exactly once, in order, and fit the limit."""

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gemmconv.kernels.columns.chunking import backward_chunks, forward_chunks
from tests.test_geometry import problems, scattered

limits = st.integers(1, 20_000)


def row_bytes(problem, itemsize):
    """Bytes of the columns of one input row of one image."""
    return problem.column_bytes(itemsize) // max(1, problem.batch * problem.input_size[0])


def covered(chunks, rows_of):
    """Each image and row of some chunks, as often as it is in one."""
    return Counter((image, row) for one in chunks for image in range(*one.images) for row in range(*rows_of(one)))


@given(problems(), limits, st.integers(0, 3000))
def test_chunks_complete_every_row_once(problem, limit, image_extra):
    for chunks, rows_of, rows in (
        (forward_chunks(problem, 4, limit), lambda chunk: chunk.out_rows, problem.output_size[0]),
        (backward_chunks(problem, 2, limit, image_extra), lambda chunk: chunk.in_rows, problem.input_size[0]),
    ):
        assert covered(chunks, rows_of) == Counter(itertools.product(range(problem.batch), range(rows)))


@given(problems(), limits)
def test_forward_chunks_hold_every_input_row_that_they_read(problem, limit):
    relation = scattered(problem, 0)
    for chunk in forward_chunks(problem, 4, limit):
        rows = range(*chunk.out_rows)
        assert {position for output, _, position in relation if output in rows} <= set(range(*chunk.in_rows))
        begin, end = chunk.in_rows
        assert begin == end or 0 <= begin < end <= problem.input_size[0]


@given(problems(), limits, st.integers(0, 3000))
def test_chunks_fit_the_limit_or_are_the_smallest_possible(problem, limit, image_extra):
    for chunks, itemsize, extra, rows_of in (
        (forward_chunks(problem, 4, limit), 4, 0, lambda chunk: chunk.out_rows),
        (backward_chunks(problem, 2, limit, image_extra), 2, image_extra, lambda chunk: chunk.in_rows),
    ):
        for chunk in chunks:
            images, in_rows = chunk.images[1] - chunk.images[0], chunk.in_rows[1] - chunk.in_rows[0]
            if images * (in_rows * row_bytes(problem, itemsize) + extra) > limit:
                begin, end = rows_of(chunk)
                assert (images, end - begin) == (1, 1)
