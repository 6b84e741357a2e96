/* fused on Hopper: the product of weights and columns, and its fold, in one kernel. Columns are never written.
 *
 * Outputs and inputs of an axis are cut into cells, SPAN outputs and UNIT inputs each. Output r of cell j reads the inputs
 * j * UNIT + shift, where the shifts depend on r alone:
 *
 *   transposed convolution  SPAN = S * UNIT: tap k has shift = (r + P - k * D) / S, where that divides
 *   its input gradient      UNIT = S * SPAN: tap k has shift = r * S - P + k * D
 *
 * For one phase r of all cells the outputs are a matrix product
 *
 *   outputs [co, cell] = weights [co, (shift, ci)] . inputs [(shift, ci), cell]
 *
 * whose right side is, for each shift, the same input at another place. So the inputs lie flattened: images, strips of
 * columns, rows of `pitch` positions, with as many zeros between them as the shifts reach. The input that a cell sees at a
 * shift is then a constant number of positions away, whatever the cell, and any run of positions is the right side of a
 * product. (What is computed for the positions between the rows is wasted: 2 of 66 for a 3x3 kernel in strips of 64.)
 * Several inputs a cell lie in planes of their own: those at j * UNIT, those at j * UNIT + 1, ...
 *
 *   left   M block: 64 rows, which are SLOTS phases x CHANNELS output channels     (geometry/rows.cuh)
 *   right  COLUMNS positions
 *   K      steps of a shift, and UNITS units of 16 bytes of channels               (numeric/units.cuh)
 *
 * Both sides are read from shared memory, K-major, without swizzling: [unit][row or position], 16 bytes each. So a shift
 * needs no alignment but its 16 bytes, which are one position. (In load/tma_nhwc.cuh the right side lies another way.) float32 as SPLIT has two parts of TF32 on both sides, and three products; tensor cores sum short
 * chains only, which are added up in float32, because they cut their sums off where float32 would round.
 *
 * Values must be finite: an infinite input may make NaN of outputs that a weight of zero by its place, or a part that is
 * zero, keeps from it.
 *
 * A block stays on its multiprocessor and takes item after item: a tile of positions, a set of M blocks, a group. One or two of
 * its warpgroups produce: all warps but one load the inputs of the tile, chunk after chunk of channels, round them and lay them
 * out, from where they land in shared memory (load/landing.cuh) or through registers (load/registers.cuh); or, in
 * channels_last, they come to where products read them, as boxes of a tensor map (load/tma_nhwc.cuh; float32 is rounded there).
 * One thread copies the weights of each step as weights/pack.cu has laid them out. The
 * other two multiply, each BLOCKS M blocks with COLUMNS positions, and store (epilogue/store_phases.cuh). Two rings of stages lie between.
 * Where the weights of a set fit shared memory, they stay there (stationary), and a block takes items of one set alone.
 *
 * What limits it is how fast inputs come into shared memory, and chains of instructions: of each warp few are on their way at
 * a time, and no unit is busy for more than three quarters of the time. So inputs come as boxes of tensor maps where they can,
 * which bring two to three times as much as copies of 16 bytes; steps are unrolled, what all threads of a warp share stays in
 * uniform registers, and loaders work out addresses once an item. That one warpgroup is ahead of the other gains nothing;
 * that they multiply by turns (PING_PONG) gains up to 14%, where weights stay; weights that come once for two blocks of a
 * cluster, only where they do not fit the L2 cache. docs/notes has the measurements.
 *
 * Macros: ELEMENT_T, SPLIT; IN_CHANNELS, OUT_CHANNELS (of a group, of the inputs and outputs here); CHANNELS_LAST; UNIT_, SPAN_
 * with H and W; SLOTS, CHANNELS, ROW_ORDER; BLOCKS, COLUMNS; WARPGROUPS_M (2: each warpgroup has M blocks of its own; 1:
 * positions of its own), PHASE_SIDES (2: its M blocks are other phases; 1: other output channels); PHASE_SETS (of PHASE_SIDES x
 * BLOCKS x SLOTS phases), CHANNEL_SETS; UNITS (of a chunk), CHUNKS; PING_PONG (weights stay, and all inputs of an item have a
 * stage: a turn ends only then); PRODUCERS (threads: 224, or 96 where BOXED), LOADED_TOGETHER (units that one has on their way); BOXED;
 * LANDING_UNITS (0 without), LANDING_STAGES, PARTIAL_PIECES, SHARERS, LANDED_TURNS (see load/landing.cuh); WIDE (inputs that are taken together), VECTOR_LOADS (units lie aligned in
 * channels_last); PAIRING, STAGED, LINE_CELLS, VECTOR, PAIRED_CELLS (see epilogue/store_phases.cuh); INDEX_64.
 *
 * Tables, as initialisers: STEP_BEGIN (first step of each block of each phase set, and STEPS), PHASES (of each slot of each
 * block of each side of each phase set: row phase * PHASE_BASE + column phase, or -1). What depends on the size of images comes as parameters: another size compiles nothing.
 * Chosen by gemmconv/kernels/sm90/implicit_gemm_plan.py.
 */
#include "ptx/elect.cuh"
#include "ptx/pdl.cuh"
#include "ptx/named_barrier.cuh"
#if BOXED
#include "load/tma_nhwc.cuh"
#elif LANDING_UNITS > 0
#include "load/landing.cuh"
#else
#include "load/registers.cuh"
#endif
#include "epilogue/store_phases.cuh"

/* Copies the weights of step after step; where they all stay (stationary), those of the first item alone. One thread. */
__device__ __forceinline__ void produce_weights(const implicit_gemm_params& p, const stages_t& s) {
    grid_dependency_wait();  // which lays them out; all else may begin before
    ring_t ring;
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const item_t item = item_of(p, i);
        const int phase_set = phase_set_of(item.set), first = first_step(phase_set);
        const int steps = first_step(phase_set + 1) - first;
        const long long matrices_before = static_cast<long long>(item.group) * CHANNEL_SETS * STEPS +
                                          first * CHANNEL_SETS + item.set % CHANNEL_SETS * steps;
        const unit_t* source = p.packed + matrices_before * CHUNKS * kWeightUnits;
        #pragma unroll 1
        for (int step = 0; step < steps * CHUNKS; ++step) {
            if (!p.stationary) barrier_wait(s.weight_empty[ring.stage], ring.parity ^ 1);
            barrier_t& full = s.weight_full[ring.stage];
            barrier_arrive_expecting(full, kWeightUnits * 16);
            bulk_copy(s.weights + ring.stage * kWeightUnits, source, kWeightUnits * 16, full);
            source += kWeightUnits;
            ring.advance(p.weight_stages);
        }
        if (p.stationary) return;
    }
}

/* A warpgroup's part of item after item. `warpgroup` is the same for a whole warp, as far as the compiler can see.
 *
 * Where weights stay, warpgroups multiply by turns (PING_PONG): the tensor cores do not stand still while one of them stores. For
 * that the inputs of a whole item must fit their stages: the other warpgroup lets go of them in its turn.
 */
__device__ __forceinline__ void consume(const implicit_gemm_params& p, const stages_t& s, int warpgroup) {
    const int side = WARPGROUPS_M == 2 ? warpgroup : 0, place = WARPGROUPS_M == 2 ? 0 : warpgroup * COLUMNS;
    const bool speaker = threadIdx.x % 32 == 0;  // arrives at barriers for its warp
    const descriptor_t all_weights = descriptor_k_major(s.weights + side * 64, kRows * 16, 128);
    ring_t patches, weights;
    const int patch_bytes = patch_units(p) * 16, along = step_bytes(p);
    bool settled = false;  // whether all weights have come, and stay
    if (PING_PONG && warpgroup == 1) named_barrier_arrive<kTurnOf0, 256>();
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const item_t item = item_of(p, i);
        const int phase_set = phase_set_of(item.set);
        const descriptor_t all_patches = patches_of(p, s, item.tile, place);
        float sums[BLOCKS][COLUMNS / 2];
        [[maybe_unused]] float chain[SPLIT ? COLUMNS / 2 : 1];
        #pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            if (!SPLIT && first_step(phase_set, block) < first_step(phase_set, block + 1)) continue;
            #pragma unroll
            for (int d = 0; d < COLUMNS / 2; ++d) sums[block][d] = 0.0f;
        }
        if (PING_PONG && warpgroup == 0) named_barrier_sync<kTurnOf0, 256>();
        if (PING_PONG && warpgroup == 1) named_barrier_sync<kTurnOf1, 256>();
        // Stages that products in flight may still read; -1 for none.
        int held_weights = -1, held_patch = -1;
        const auto release_patch = [&] {
            if (speaker && held_patch >= 0) barrier_arrive(s.patch_empty[held_patch]);
            held_patch = -1;
        };
        const auto release_weights = [&] {
            if (!p.stationary && speaker) barrier_arrive(s.weight_empty[held_weights]);
        };
        #pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            barrier_wait(s.patch_full[patches.stage], patches.parity);
            const descriptor_t right = advance(all_patches, patches.stage * patch_bytes);
            #pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const int begin = first_step(phase_set, block), steps = first_step(phase_set, block + 1) - begin;
                #pragma unroll (kUnrolledSteps)
                for (int step = 0; step < kMostSteps; ++step) {
                    if (step >= steps) break;
                    const descriptor_t left = advance(all_weights, weights.stage * kWeightUnits * 16);
                    const descriptor_t shifted = advance(right, p.step_offset[begin + step] * kPositionBytes);
                    if (!settled) barrier_wait(s.weight_full[weights.stage], weights.parity);
                    wgmma_fence();
#if SPLIT
                    const bool first = step % kChain == 0;  // of a chain
                    #pragma unroll
                    for (int k = 0; k < kSteps; ++k) {
                        constexpr int kLeftPart = UNITS * kRows * 16;
                        const int l = k * 2 * kRows * 16, r = k * along;
                        const descriptor_t left_part = advance(left, l), right_part = advance(shifted, r);
                        wgmma<ELEMENT_T, COLUMNS>(chain, left_part, advance(shifted, r + patch_bytes / 2), k > 0 || !first);
                        wgmma<ELEMENT_T, COLUMNS>(chain, advance(left, l + kLeftPart), right_part, 1);
                        wgmma<ELEMENT_T, COLUMNS>(chain, left_part, right_part, 1);
                    }
                    wgmma_commit();
                    if ((step + 1) % kChain == 0 || step + 1 == steps) {
                        wgmma_finish(chain);
                        #pragma unroll
                        for (int d = 0; d < COLUMNS / 2; ++d) sums[block][d] += chain[d];
                    } else {
                        wgmma_wait<1>();
                    }
#else
                    descriptor_t lefts[kSteps], rights[kSteps];
                    #pragma unroll
                    for (int k = 0; k < kSteps; ++k) {
                        lefts[k] = advance(left, k * 2 * kRows * 16);
                        rights[k] = advance(shifted, k * along);
                    }
                    wgmma<ELEMENT_T, COLUMNS>(sums[block], lefts, rights, step > 0 || chunk > 0);
                    wgmma_commit();
                    wgmma_wait<1>();
#endif
                    if (step == 0) release_patch();
                    if (step > 0 || held_weights >= 0) release_weights();
                    held_weights = weights.stage;
                    weights.advance(p.weight_stages);
                }
            }
            release_patch();  // of a chunk before one without steps
            held_patch = patches.stage;
            patches.advance(p.patch_stages);
        }
        if (PING_PONG && warpgroup == 0) named_barrier_arrive<kTurnOf1, 256>();
        if (PING_PONG && warpgroup == 1) named_barrier_arrive<kTurnOf0, 256>();
        #pragma unroll
        for (int block = 0; block < BLOCKS; ++block) wgmma_finish(sums[block]);
        release_patch();
        if (held_weights >= 0) release_weights();
        store_tile(p, item, sums, item.tile * kTile + place, side, s.outputs + warpgroup * 4 * kWarpOutputs);
        if (p.stationary) weights = {}, settled = true;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) sm90_implicit_gemm_kernel(const __grid_constant__ implicit_gemm_params p) {
    const stages_t s = stages(p);
    init_barriers<kThreads / 32>([&](int warp) {  // each warp some of them: there may be dozens, and all else waits
        constexpr int kFilling = kRounded ? kRounders / 32 : BOXED ? 1 : PRODUCERS / 32, kMultiplying = 8;  // warps
        #pragma unroll 1
        for (barrier_t* b = s.patch_full + warp; b < s.landed_full + landed_stages(p); b += kThreads / 32) {
            const bool empty = b >= s.patch_empty && b < s.weight_full || b >= s.weight_empty && b < s.landed_full;
            barrier_init(*b, empty ? kMultiplying : b < s.patch_empty ? kFilling : 1);
        }
    });
    const auto produce = [&] {
        const int thread = threadIdx.x;
        if (thread >= kProducers - PRODUCERS) produce_patches(p, s, thread - (kProducers - PRODUCERS));
        else if (elected()) produce_weights(p, s);
    };
    run_roles<kProducers, 128, kConsumerRegisters, kProducerRegisters>(
        produce, [&](int warpgroup) { consume(p, s, warpgroup); });
}
