/* What layout/transpose.cu and layout/transpose_vectors.cu have in common: elements by their size, which are moved and not computed with, and params. */
#pragma once

template <int BYTES> struct bits { using type = unsigned; };
template <> struct bits<2> { using type = unsigned short; };
template <> struct bits<8> { using type = unsigned long long; };
using element_t = bits<ELEMENT_BYTES>::type;

struct transpose_params {
    const element_t* __restrict__ source;
    element_t* __restrict__ target;
    int matrices, rows, columns;
    int tiles_columns;  // blockIdx.x = tile row * tiles_columns + tile column
};
