/* Adds up the partial sums of split K: the last step of weight gradients, and of bias gradients.
 *
 *   partials [slices, groups, TAPS, rows, columns] -> sums [groups, rows, columns, TAPS], or [groups, rows, TAPS, columns]
 *                                                    of a weight in channels_last
 * fused's weight gradients have input channels in rows and output channels in columns. Where TAPS is 1, partials lie as the sums
 * do, and all elements are columns of one row.
 *
 * A block owns all taps of RUN columns of a row, which are contiguous in the sums: it reads pieces of READ columns of a tap,
 * transposes them in shared memory, and writes pieces of WRITE. SHARES threads share a sum, each adds every SHARES-th slice, so the
 * order is always the same.
 *
 * Macros: ELEMENT_T; SUM_T (what sums are written as: ELEMENT_T, or float, to which autocast's gradients are widened once they
 * are rounded); PARTIAL_T (of partial sums: what sums are kept in, or ELEMENT_T where there is one slice); CHANNELS_LAST (of the
 * sums); TAPS, RUN, SHARES; READ, WRITE (elements of a piece: divide RUN and columns, WRITE in NCHW TAPS times these). Chosen
 * by gemmconv/kernels/splits/reduce.py.
 */
#include "ptx/pdl.cuh"
#include "numeric/divide.cuh"
#include "numeric/types.cuh"

struct reduce_params {
    const PARTIAL_T* partials;  // written by the launch before, which may still run
    SUM_T* __restrict__ sums;
    long long elements, columns;          // of a slice; of a row
    unsigned long long by_rows, by_runs;  // 2^63 / rows of a group, / runs of a row: see numeric/divide.cuh
    int slices, rows, runs;
};

constexpr int kThreads = 256, kLanes = kThreads / SHARES, kOwn = TAPS * RUN;
constexpr int kPitch = RUN + 1, kTotals = TAPS * kPitch;  // taps of a column lie in different banks
using accumulate_t = accumulator_t<ELEMENT_T>;
using read_t = vector_of<PARTIAL_T, READ>;
using written_t = vector_of<SUM_T, WRITE>;
static_assert(RUN % READ == 0 && (CHANNELS_LAST ? RUN : kOwn) % WRITE == 0, "pieces are of one run");

extern "C" __global__ void __launch_bounds__(kThreads) splits_reduce_kernel(const __grid_constant__ reduce_params p) {
    __shared__ accumulate_t totals[SHARES][kTotals];
    const int lane = threadIdx.x % kLanes, share = threadIdx.x / kLanes;
    const int block = blockIdx.x, row = TAPS == 1 ? 0 : divided(block, p.by_runs);
    const int group = TAPS == 1 ? 0 : divided(row, p.by_rows);
    const long long first = static_cast<long long>(block - row * p.runs) * RUN;
    const int columns = p.columns - first < RUN ? static_cast<int>(p.columns - first) : RUN;
    grid_dependency_wait();
    for (int own = lane * READ; own < kOwn; own += kLanes * READ) {
        const int tap = own / RUN, column = own % RUN;
        if (column >= columns) continue;
        const int tap_row = (group * TAPS + tap) * p.rows + (row - group * p.rows);
        const PARTIAL_T* partial = p.partials + (tap_row * p.columns + first + column);
        accumulate_t total[READ] = {};
        #pragma unroll 8
        for (int slice = share; slice < p.slices; slice += SHARES) {
            const read_t piece = *reinterpret_cast<const read_t*>(partial + slice * p.elements);
            #pragma unroll
            for (int i = 0; i < READ; ++i) total[i] += widen(piece.value[i]);
        }
        #pragma unroll
        for (int i = 0; i < READ; ++i) totals[share][tap * kPitch + column + i] = total[i];
    }
    __syncthreads();
    SUM_T* sums = p.sums + (row * p.columns * TAPS + (CHANNELS_LAST ? first : first * TAPS));
    for (int i = threadIdx.x; i < kOwn / WRITE; i += kThreads) {
        const int place = i * WRITE;  // among the block's sums
        if (CHANNELS_LAST ? place % RUN >= columns : place >= columns * TAPS) continue;
        written_t piece;
        #pragma unroll
        for (int j = 0; j < WRITE; ++j) {
            const int tap = CHANNELS_LAST ? place / RUN : (place + j) % TAPS;
            const int column = CHANNELS_LAST ? place % RUN + j : (place + j) / TAPS, own = tap * kPitch + column;
            accumulate_t total = totals[0][own];
            #pragma unroll 8
            for (int other = 1; other < SHARES; ++other) total += totals[other][own];
            piece.value[j] = narrow<SUM_T>(widen(narrow<ELEMENT_T>(total)));
        }
        const long long to = CHANNELS_LAST ? place / RUN * p.columns + place % RUN : place;
        *reinterpret_cast<written_t*>(sums + to) = piece;
    }
}
