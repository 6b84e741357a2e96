/* Stores runs, neighbours in memory that one thread owns, so that a warp writes whole lines.
 *
 * LANES neighbouring threads of a warp own a line: thread l the elements l*RUN to (l+1)*RUN. Each has RUNS of them, of
 * lines that are run_distance apart in memory. The warp transposes them in shared memory, as many runs at a time as
 * its stage holds, [runs][its threads][RUN], and then stores WIDTH neighbours a thread; lines are aligned to that.
 *
 *   RUN=3, WIDTH=1, LANES=32:  thread 0 owns elements 0 1 2, and stores 0, 32 and 64
 */
#pragma once

#include "numeric/index.cuh"
#include "numeric/types.cuh"
#include "ptx/keep.cuh"

/* Elements of a run that a thread puts into the stage at once. */
__device__ constexpr int put_at_once(int run, int item_bytes) {
    const int divisor = run & -run;
    return divisor < 16 / item_bytes ? divisor : 16 / item_bytes;
}

/* Elements from a thread's run of a stage to the next one's: an odd number of 16 bytes, or of what divides the run. */
__device__ constexpr int run_pitch(int run, int item_bytes) {
    const int put = put_at_once(run, item_bytes);
    return (run / put | 1) * put;
}

/* Puts AT_ONCE runs of each thread of a warp, from `run0` on, into the stage, PITCH elements from a thread's to the next one's. */
template <int RUNS, int RUN, int AT_ONCE, int PITCH, typename T, typename VALUE>
__device__ __forceinline__ void stage_runs(T* stage, int run0, const VALUE& value) {
    constexpr int kPut = put_at_once(RUN, sizeof(T));
    __syncwarp();
    #pragma unroll
    for (int run = 0; run < AT_ONCE; ++run) {
        if (run0 + run >= RUNS) continue;
        #pragma unroll
        for (int i = 0; i < RUN; i += kPut)
            store_together<kPut>(stage + (run * 32 + threadIdx.x % 32) * PITCH + i,
                                 [&](int e) { return value(run0 + run, i + e); });
    }
    __syncwarp();
}

/* A line: where in the output it starts, and how many elements of it there are. */
struct line_t { index_t first; int elements; };

/* value(run, i) is the thread's i-th element of a run; line_of(thread) the line of the warp's n-th thread, in its first
 * run; runs counts those that are to be stored.
 */
template <int RUNS, int RUN, int LANES, int WIDTH, int STAGE_BYTES, typename T, typename VALUE, typename LINE_OF>
__device__ __forceinline__ void store_runs(
    T* output, T* stage, int runs, index_t run_distance, VALUE value, LINE_OF line_of) {
    constexpr int kItem = sizeof(T), kFit = STAGE_BYTES / (32 * RUN * kItem), kAtOnce = kFit < RUNS ? kFit : RUNS;
    constexpr int kLineVectors = LANES * RUN / WIDTH;
    static_assert(kAtOnce > 0, "a warp's stage holds no run");
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int run0 = 0; run0 < RUNS; run0 += kAtOnce) {
        stage_runs<RUNS, RUN, kAtOnce, RUN>(stage, run0, value);
        // Stores count vectors of each run, 32 apart, the first the vector-th of its line and in the stage number first.
        const auto store = [&](const line_t& line, int vector, int first, int count) {
            index_t at = line.first + (run0 * run_distance + vector * WIDTH);
            #pragma unroll
            for (int run = 0; run < kAtOnce; ++run, at += run_distance) {
                keep(at);
                #pragma unroll
                for (int v = 0; v < count; ++v)
                    if (run0 + run < RUNS && run0 + run < runs && (vector + v * 32) * WIDTH < line.elements)
                        copy<WIDTH>(output + at + v * 32 * WIDTH, stage + run * 32 * RUN + ((first + v) * 32 + lane) * WIDTH);
            }
        };
        if (kLineVectors % 32 == 0) {  // all threads store to the same line
            #pragma unroll
            for (int l = 0; l < 32 / LANES; ++l)
                store(line_of(l * LANES), lane, l * (kLineVectors / 32), kLineVectors / 32);
        } else {
            #pragma unroll
            for (int v = 0; v < RUN / WIDTH; ++v)
                store(line_of((v * 32 + lane) / kLineVectors * LANES), (v * 32 + lane) % kLineVectors, v, 1);
        }
    }
}

/* Stores runs that lie apart: each thread of a warp owns RUNS runs of RUN elements, run_distance apart in memory. The warp
 * transposes them in shared memory, [runs][its threads][RUN, padded], so that RUN/WIDTH neighbouring threads store a run.
 *
 * value(run, i) is the thread's i-th element of a run; runs_of(thread) where the warp's n-th thread has its first run, and how
 * many runs of it are to be stored; elements counts those of a run.
 */
struct apart_t { long long first; int runs; };
template <int RUNS, int RUN, int WIDTH, int STAGE_BYTES, typename T, typename VALUE, typename RUNS_OF>
__device__ __forceinline__ void store_runs_apart(
    T* output, T* stage, int elements, index_t run_distance, VALUE value, RUNS_OF runs_of) {
    constexpr int kItem = sizeof(T);
    constexpr int kPitch = run_pitch(RUN, kItem), kFit = STAGE_BYTES / (32 * kPitch * kItem);
    constexpr int kAtOnce = kFit < RUNS ? kFit : RUNS, kVectors = RUN / WIDTH;
    static_assert(kAtOnce > 0, "a warp's stage holds no run");
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int run0 = 0; run0 < RUNS; run0 += kAtOnce) {
        stage_runs<RUNS, RUN, kAtOnce, kPitch>(stage, run0, value);
        #pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int thread = (v * 32 + lane) / kVectors, element = (v * 32 + lane) % kVectors * WIDTH;
            const apart_t apart = runs_of(thread);
            if (element >= elements) continue;
            T* target = output + apart.first + static_cast<index_t>(run0) * run_distance + element;
            #pragma unroll
            for (int run = 0; run < kAtOnce; ++run, target += run_distance)
                if (run0 + run < RUNS && run0 + run < apart.runs)
                    copy<WIDTH>(target, stage + (run * 32 + thread) * kPitch + element);
        }
    }
}
