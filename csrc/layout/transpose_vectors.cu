/* turn, where both extents are multiples of a few elements: matrices turned round in registers, by pieces of 8 or 16 bytes.
 *
 *   source [matrices, rows, columns] -> target [matrices, columns, rows]
 *
 * A thread has ROW_UNIT neighbouring rows of COLUMN_UNIT neighbouring columns. It reads a piece of each of its rows, and writes
 * one of each of its columns, for which values only change registers. A warp has ROW_LANES threads along the rows and the
 * others along the columns, so that the pieces of the source that it reads at once lie beside each other, and those of the
 * target too; the warps of a block have ROW_WARPS along the rows.
 *
 *   16 bits, ROW_UNIT = COLUMN_UNIT = 8, ROW_LANES = 8: 64 rows of 32 columns, read by 64 bytes and written by 128
 *
 * layout/transpose.cu, for other extents, takes 16 times as many instructions.
 *
 * Macros: ELEMENT_BYTES (2, 4 or 8); ROW_UNIT, COLUMN_UNIT (divide the extents); ROW_LANES, ROW_WARPS; INDEX_64.
 * Chosen by gemmconv/kernels/layout/transpose.py.
 */
#include "numeric/index.cuh"
#include "geometry/plane.cuh"
#include "epilogue/store_runs.cuh"
#include "numeric/bits.cuh"

using row_piece_t = vector_of<element_t, COLUMN_UNIT>;
using column_piece_t = vector_of<element_t, ROW_UNIT>;

constexpr int kWarps = 8, kThreads = 32 * kWarps, kColumnLanes = 32 / ROW_LANES, kColumnWarps = kWarps / ROW_WARPS;
constexpr int kRowThreads = ROW_LANES * ROW_WARPS, kColumnThreads = kColumnLanes * kColumnWarps;

extern "C" __global__ void __launch_bounds__(kThreads) layout_transpose_vectors_kernel(const __grid_constant__ transpose_params p) {
    const int matrix = plane_of_thread(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tile_row = static_cast<int>(blockIdx.x) / p.tiles_columns;
    const int tile_column = static_cast<int>(blockIdx.x) % p.tiles_columns;
    const int row_thread = warp / kColumnWarps * ROW_LANES + lane / kColumnLanes;
    const int column_thread = warp % kColumnWarps * kColumnLanes + lane % kColumnLanes;
    const int row = (tile_row * kRowThreads + row_thread) * ROW_UNIT;
    const int column = (tile_column * kColumnThreads + column_thread) * COLUMN_UNIT;
    if (matrix >= p.matrices || row >= p.rows || column >= p.columns) return;
    const long long first = static_cast<long long>(matrix) * p.rows * p.columns;

    const element_t* __restrict__ source = p.source + (first + static_cast<long long>(row) * p.columns + column);
    row_piece_t pieces[ROW_UNIT];
    #pragma unroll
    for (int i = 0; i < ROW_UNIT; ++i)
        pieces[i] = *reinterpret_cast<const row_piece_t*>(source + static_cast<index_t>(i) * p.columns);

    element_t* __restrict__ target = p.target + (first + static_cast<long long>(column) * p.rows + row);
    #pragma unroll
    for (int j = 0; j < COLUMN_UNIT; ++j) {
        column_piece_t piece;
        #pragma unroll
        for (int i = 0; i < ROW_UNIT; ++i) piece.value[i] = pieces[i].value[j];
        *reinterpret_cast<column_piece_t*>(target + static_cast<index_t>(j) * p.rows) = piece;
    }
}
