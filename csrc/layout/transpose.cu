/* turn: matrices turned round, which takes NCHW to channels_last (rows are channels, columns pixels) and back.
 *
 *   source [matrices, rows, columns] -> target [matrices, columns, rows]
 *
 * A block turns one tile of TILE_ROWS x TILE_COLUMNS elements by way of shared memory, so that a warp reads and writes
 * neighbours: whole lines of the tile, and where the tile has all channels, across lines too. Values are moved, not
 * computed with.
 *
 * Elements of 16 bits go in pairs where both extents are even: a thread reads a word of each of two rows, and makes words
 * of the two columns of them.
 *
 *   row 0:  a b    column 0:  a c
 *   row 1:  c d    column 1:  b d
 *
 * layout/transpose_vectors.cu is faster where extents are multiples of pieces, which the file below says.
 *
 * Macros: ELEMENT_BYTES (2, 4 or 8); TILE_ROWS, TILE_COLUMNS (even where extents of elements of 16 bits are); INDEX_64.
 * Chosen by gemmconv/kernels/layout/transpose.py.
 */
#include "numeric/index.cuh"
#include "geometry/plane.cuh"
#include "numeric/bits.cuh"

using byte_t = unsigned char;
constexpr int kThreads = 256;
constexpr bool kMayPair = ELEMENT_BYTES == 2 && TILE_ROWS % 2 == 0 && TILE_COLUMNS % 2 == 0;

/* Words of a tile: PAIRS of elements, or elements. */
template <bool PAIRS> struct tile_of {
    using word_t = typename bits<PAIRS ? 4 : ELEMENT_BYTES>::type;
    static constexpr int kStep = PAIRS ? 2 : 1;  // rows of a word of the target
    static constexpr int kWords = TILE_ROWS / kStep, kAcross = TILE_COLUMNS / kStep;
    static constexpr int kPitch = kWords | 1;  // columns start in different banks
    static constexpr int kBytes = TILE_COLUMNS * kPitch * static_cast<int>(sizeof(word_t));
};

template <bool PAIRS> __device__ __forceinline__ void turn_tile(const transpose_params& p, byte_t* shared) {
    using of = tile_of<PAIRS>;
    using word_t = typename of::word_t;
    constexpr int kStep = of::kStep, kWords = of::kWords, kAcross = of::kAcross, kPitch = of::kPitch;
    word_t* tile = reinterpret_cast<word_t*>(shared);  // [columns][words of rows]
    const int matrix = plane_of_thread();
    const int first_row = static_cast<int>(blockIdx.x) / p.tiles_columns * TILE_ROWS;
    const int first_column = static_cast<int>(blockIdx.x) % p.tiles_columns * TILE_COLUMNS;
    const long long first = static_cast<long long>(matrix) * p.rows * p.columns;

    const element_t* __restrict__ source =
        p.source + first + (static_cast<long long>(first_row) * p.columns + first_column);
    #pragma unroll (ELEMENT_BYTES == 8 ? 4 : 8)
    for (int i = threadIdx.x; i < kWords * kAcross; i += kThreads) {
        const int row = i / kAcross * kStep, column = i % kAcross * kStep;
        if (first_row + row >= p.rows || first_column + column >= p.columns) continue;
        const element_t* __restrict__ from = source + (static_cast<index_t>(row) * p.columns + column);
        word_t* to = tile + (column * kPitch + row / kStep);
        if constexpr (PAIRS) {
            const unsigned upper = __ldg(reinterpret_cast<const unsigned*>(from));
            const unsigned lower = __ldg(reinterpret_cast<const unsigned*>(from + p.columns));
            to[0] = (upper & 0xffffu) | lower << 16;
            to[kPitch] = upper >> 16 | (lower & 0xffff0000u);
        } else {
            to[0] = __ldg(from);
        }
    }
    __syncthreads();

    element_t* __restrict__ target = p.target + first + (static_cast<long long>(first_column) * p.rows + first_row);
    #pragma unroll (ELEMENT_BYTES == 8 ? 4 : 8)
    for (int i = threadIdx.x; i < TILE_COLUMNS * kWords; i += kThreads) {
        const int column = i / kWords, word = i % kWords;
        if (first_row + word * kStep >= p.rows || first_column + column >= p.columns) continue;
        *reinterpret_cast<word_t*>(target + (static_cast<index_t>(column) * p.rows + word * kStep)) =
            tile[column * kPitch + word];
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) layout_transpose_kernel(const __grid_constant__ transpose_params p) {
    constexpr int kBytes = tile_of<false>::kBytes > tile_of<kMayPair>::kBytes ? tile_of<false>::kBytes
                                                                              : tile_of<kMayPair>::kBytes;
    __shared__ __align__(8) byte_t shared[kBytes];
    if (plane_of_thread() >= p.matrices) return;
    if (kMayPair && p.rows % 2 == 0 && p.columns % 2 == 0) turn_tile<kMayPair>(p, shared);
    else turn_tile<false>(p, shared);
}
