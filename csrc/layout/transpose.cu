/* Transposes matrices, which takes NCHW to channels_last (rows are channels, columns pixels) and back.
 *
 *   source [matrices, rows, columns] -> target [matrices, columns, rows]
 *
 * A block has a tile of TILE_ROWS x TILE_COLUMNS elements. Its threads read units of it, ROW_UNIT rows of COLUMN_UNIT neighbours,
 * and write their columns, which are ROW_UNIT neighbours then: values change registers, and are not computed with.
 *
 *   row 0:  a b    column 0:  a c
 *   row 1:  c d    column 1:  b d
 *
 * Large units, of 8 or 16 bytes on each side, go to the target at once, one of each thread. A warp has ROW_LANES of them along the
 * rows and the others along the columns, so that its reads are contiguous, and its writes too.
 *
 *   16 bits, ROW_UNIT = COLUMN_UNIT = 8, ROW_LANES = 8: 64 rows of 32 columns, read by 64 bytes and written by 128
 *
 * Small ones (STAGED), of an element or of pairs, go by way of shared memory, so that a warp reads whole lines of the tile and
 * writes whole lines, and where the tile has all channels, across lines too. They are for any extents, by single elements where
 * units do not divide them, and take 16 times as many instructions.
 *
 * Macros: ELEMENT_BYTES (2, 4 or 8); TILE_ROWS, TILE_COLUMNS (multiples of units); ROW_UNIT, COLUMN_UNIT; STAGED; ROW_LANES;
 * INDEX_64. Chosen by gemmconv/kernels/layout/transpose.py.
 */
#include "numeric/index.cuh"
#include "numeric/types.cuh"
#include "geometry/plane.cuh"

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

constexpr int kThreads = 256, kTileElements = STAGED ? TILE_COLUMNS * (TILE_ROWS + ROW_UNIT) : 1;

/* Addresses within a unit are of index_t: with 64 bits the compiler stores units word by word, and 16-bit transposes take 1.5
 * times as long.
 */
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void transpose_tile(const transpose_params& p, element_t* tile) {
    using column_t = vector_of<element_t, ROWS>;
    constexpr int kDown = TILE_ROWS / ROWS, kAcross = TILE_COLUMNS / COLUMNS;  // units of the tile
    // Those of neighbouring threads: ROW_LANES lines of kLanes, as many of these patches beside each other.
    constexpr int kLanes = STAGED ? kAcross : 32 / ROW_LANES, kPatch = ROW_LANES * kLanes, kPatches = kAcross / kLanes;
    constexpr int kPitch = (kDown | 1) * ROWS;  // columns of the tile start in different banks
    const int first_row = static_cast<int>(blockIdx.x) / p.tiles_columns * TILE_ROWS;
    const int first_column = static_cast<int>(blockIdx.x) % p.tiles_columns * TILE_COLUMNS;
    const long long first = static_cast<long long>(plane_of_thread()) * p.rows * p.columns;
    const element_t* __restrict__ source = p.source + first;
    element_t* __restrict__ target = p.target + first;
    #pragma unroll (ELEMENT_BYTES == 8 ? 4 : 8)
    for (int i = threadIdx.x % kThreads; i < kDown * kAcross; i += kThreads) {  // so that one turn is seen to be one
        const int row = first_row + (i / kPatch / kPatches * ROW_LANES + i % kPatch / kLanes) * ROWS;
        const int column = first_column + (i / kPatch % kPatches * kLanes + i % kLanes) * COLUMNS;
        if (row >= p.rows || column >= p.columns) continue;
        vector_of<element_t, COLUMNS> rows[ROWS];
        const element_t* from = source + (static_cast<index_t>(row) * p.columns + column);
        #pragma unroll
        for (int r = 0; r < ROWS; ++r)
            rows[r] = *reinterpret_cast<const vector_of<element_t, COLUMNS>*>(from + static_cast<index_t>(r) * p.columns);
        element_t* to = STAGED ? tile + ((column - first_column) * kPitch + (row - first_row))
                               : target + (static_cast<index_t>(column) * p.rows + row);
        const int pitch = STAGED ? kPitch : p.rows;
        #pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            column_t values;
            #pragma unroll
            for (int r = 0; r < ROWS; ++r) values.value[r] = rows[r].value[c];
            *reinterpret_cast<column_t*>(to + static_cast<index_t>(c) * pitch) = values;
        }
    }
    if constexpr (STAGED) {
        __syncthreads();
        #pragma unroll (ELEMENT_BYTES == 8 ? 4 : 8)
        for (int i = threadIdx.x; i < TILE_COLUMNS * kDown; i += kThreads) {
            const int row = i % kDown * ROWS, column = i / kDown;
            if (first_row + row >= p.rows || first_column + column >= p.columns) continue;
            const index_t to = static_cast<index_t>(first_column + column) * p.rows + (first_row + row);
            *reinterpret_cast<column_t*>(target + to) =
                *reinterpret_cast<const column_t*>(tile + (column * kPitch + row));
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, STAGED ? 6 : 4)
layout_transpose_kernel(const __grid_constant__ transpose_params p) {
    __shared__ __align__(8) element_t tile[kTileElements];
    if (plane_of_thread() >= p.matrices) return;
    if (!STAGED || (p.rows % ROW_UNIT == 0 && p.columns % COLUMN_UNIT == 0)) transpose_tile<ROW_UNIT, COLUMN_UNIT>(p, tile);
    else transpose_tile<1, 1>(p, tile);
}
