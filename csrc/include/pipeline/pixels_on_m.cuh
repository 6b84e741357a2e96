/* Products of positions (rows) and lines (columns), for sm90/gemm_depth_to_space.cu and sm90/gemm_fold_pixels.cu.
 *
 *   columns [(image, ih, iw), (co, kh, kw)] = sum over ci of input [ci, (image, ih, iw)] weight [ci, (co, kh, kw)]
 *
 * An item is up to POSITION_BLOCKS * 128 positions times some line blocks, each of LINES lines. Each of two warpgroups
 * multiplies 64 of every 128 positions. kLoaders threads copy inputs to slots, and one thread copies weights to stages:
 * a slot or a stage has a chunk, 128 bytes of channels. If an item has several line blocks, and slots for all of its
 * chunks, inputs are held: they are copied once, and read for every line block. Otherwise each line block has a copy.
 *
 * A warp loads the inputs of its 16 positions from slots into registers, and rounds float32 to TF32 there. Tensor cores
 * read weights from stages. Those of 16 bits keep their order, [ci][line] (ptx/wgmma.cuh). Those of TF32 must be
 * K-major: they are PACKED by weights/pack.cu.
 *
 * Macros: ELEMENT_T, KERNEL_H, KERNEL_W; LINES (a multiple of 16 up to 256, all taps of some output channels);
 *   PACKED (1 for float32, 0 for 16 bits); WHOLE_CHANNELS (1 if all chunks are full); POSITION_BLOCKS (1 or 2);
 *   PIECE (inputs that are copied together); OWN_BYTES (shared memory of the kernel's own, a multiple of 16);
 *   WINDOWED (1 if items are windows of images of one row; 0 if they are whole images, or go across images);
 *   CHUNK_CLASS (1 for one chunk, 2 for an even number, 3 for three, five, ...; 1 for all if POSITION_BLOCKS is 2).
 */
#pragma once

#define WGMMA_COLUMNS LINES
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "numeric/divide.cuh"
#include "numeric/integers.cuh"
#include "pipeline/persistent.cuh"
#include "ptx/tma.cuh"
#include "numeric/units.cuh"
#include "numeric/unroll.cuh"
#include "ptx/wgmma.cuh"

struct pixels_on_m_params {
#if PACKED
    const unit_t* __restrict__ weights;  // [line_blocks][chunks], as stages have them
#else
    tensor_map_t weights;  // [channels][lines]; a box has kChannels channels of 64 lines
#endif
    const ELEMENT_T* __restrict__ input;
    const ELEMENT_T* __restrict__ bias;  // or null
    ELEMENT_T* __restrict__ output;
    int positions;        // positions of all images
    int items;            // items of all sets
    int in_channels, out_channels;
    int chunks;           // chunks of in_channels, the last of which may not be full
    int line_blocks;      // line blocks of all sets, the last of which may not be full
    // Reciprocals (numeric/divide.cuh) of sets; of an image's pixels, windows, width and cells; of cells in a row.
    unsigned long long of_sets, of_pixels, of_windows, of_width, of_cells, of_cells_w;
    int in_h, in_w;
    int images;           // whole images of an item; 0 if items go across images
    int item_positions;   // positions of an item; a multiple of PIECE, like step and left
    int windows;          // windows of an image
    int step;             // positions from one window to the next
    int left;             // left halo: positions of a window before that of its first cell
    int sets;             // sets that the line blocks are divided into
    int set_line_blocks;  // line blocks of a set; the last set may have fewer
    int held;             // 1 if an item's inputs stay in their slots for all of its line blocks
    int slots, stages;    // buffers of the two rings
    int first_stage, first_own, first_barrier;  // bytes of shared memory before stages, OWN_BYTES and barriers
};

constexpr int kItem = sizeof(ELEMENT_T), kTaps = KERNEL_H * KERNEL_W;
constexpr int kBlockPositions = 128, kPositions = POSITION_BLOCKS * kBlockPositions, kBlockOuts = LINES / kTaps;
static_assert(LINES % 16 == 0 && LINES % kTaps == 0, "a line block has all taps of its output channels");

// Shared memory: inputs [slots][kChannels][kPositions], whose pieces of 16 bytes are swapped; weights [stages], either
// [64 lines][kChannels] of 128 bytes, swizzled, or [kSteps][2][LINES] of 16; the kernel's own; biases [warps][kBlockOuts];
// barriers.
constexpr int kChannels = 128 / kItem, kSteps = 4;  // channels of a chunk; products that they take
constexpr int kRowBytes = kPositions * kItem, kSlotBytes = kChannels * kRowBytes;
constexpr int kBoxBytes = 64 * 128, kStageBytes = PACKED ? LINES * 128 : ceil_div(LINES, 64) * kBoxBytes;
constexpr int kConsumers = 256, kLoaders = 96, kProducers = kLoaders + 32, kThreads = kConsumers + kProducers;
extern __shared__ __align__(1024) unsigned char shared[];
__device__ __forceinline__ unsigned char* slot_of(int slot) { return shared + slot * kSlotBytes; }
__device__ __forceinline__ unsigned char* stage_of(const pixels_on_m_params& p, int stage) {
    return shared + (p.first_stage + stage * kStageBytes);
}

struct barriers_t { barrier_t full, empty; };
__device__ __forceinline__ barriers_t& barriers_of_slot(const pixels_on_m_params& p, int slot) {
    return reinterpret_cast<barriers_t*>(shared + p.first_barrier)[slot];
}
__device__ __forceinline__ barriers_t& barriers_of_stage(const pixels_on_m_params& p, int stage) {
    return barriers_of_slot(p, p.slots + stage);
}

/* Where an item begins. Its index is place * sets + set: its place is a window, or some images, or some positions. */
struct item_t {
    int image;        // WINDOWED: the window's. Otherwise the first image, or 0 if items go across images
    int position;     // WINDOWED: the first one in that image, or before it. Otherwise the first one in all images
    int line_block;   // the first line block
    int line_blocks;  // how many the item has
    __device__ __forceinline__ item_t(const pixels_on_m_params& p, int index) {
        const int place = divided(index, p.of_sets), set = index - place * p.sets;
        image = WINDOWED ? divided(place, p.of_windows) : place * p.images;
        line_block = set * p.set_line_blocks, line_blocks = least(p.set_line_blocks, p.line_blocks - line_block);
        position = WINDOWED ? (place - image * p.windows) * p.step - p.left : place * p.item_positions;
    }
};

/* Where a slot has byte `bytes` of the positions of a channel. The order of pieces depends on the channel: a warp reads
 * 32 bytes of each of four channels at a time, or 16 of each of eight, and all of them lie in different banks.
 */
__device__ __forceinline__ int swapped(int bytes, int channel) {
    return bytes ^ (kItem == 4 ? channel % 4 * 32 : channel % 8 * 16);
}

/* Begins to copy the weights of all items. One thread. */
__device__ __forceinline__ void produce_weights(const pixels_on_m_params& p) {
    ring_t ring;
    if (PACKED) grid_dependency_wait();
    each_item<item_t>(p, [&](const item_t& item) {
        int line_block = item.line_block, chunk = 0;
        #pragma unroll 1
        for (int i = 0; i < item.line_blocks * p.chunks; ++i, ring.advance(p.stages)) {
            unsigned char* stage = stage_of(p, ring.stage);
            barrier_t& full = barriers_of_stage(p, ring.stage).full;
            barrier_wait(barriers_of_stage(p, ring.stage).empty, ring.parity ^ 1);
            barrier_arrive_expecting(full, kStageBytes);
#if PACKED
            const long long first = (static_cast<long long>(line_block) * p.chunks + chunk) * (LINES * 8);
            bulk_copy(stage, p.weights + first, kStageBytes, full);
#else
            #pragma unroll
            for (int box = 0; box < kStageBytes / kBoxBytes; ++box)
                tma_load(stage + box * kBoxBytes, p.weights, line_block * LINES + box * 64, chunk * kChannels, 0, 0, full);
#endif
            if (++chunk == p.chunks) chunk = 0, ++line_block;
        }
    });
}

/* Begins to copy the inputs of all items. A thread has one piece of a position block, and every kAtOnce-th channel. */
__device__ __forceinline__ void produce_inputs(const pixels_on_m_params& p) {
    constexpr int kPieces = kBlockPositions / PIECE, kAtOnce = kLoaders / kPieces;  // of a channel; channels
    static_assert(kLoaders % kPieces == 0, "threads have whole channels");
    const int thread = threadIdx.x - 32, first = thread / kPieces, piece = thread % kPieces * PIECE;
    const int pixels = p.in_h * p.in_w;
    ring_t ring;
    each_item<item_t>(p, [&](const item_t& item) {
        const ELEMENT_T* source[POSITION_BLOCKS];
        bool inside[POSITION_BLOCKS];
        #pragma unroll
        for (int row = 0; row < POSITION_BLOCKS; ++row) {
            const int own = row * kBlockPositions + piece, position = item.position + own;
            const int image = WINDOWED ? item.image : divided(position, p.of_pixels);
            inside[row] = own < p.item_positions && 0 <= position && position < (WINDOWED ? pixels : p.positions);
            source[row] = p.input;
            // Channel 0 of a pixel is at image * in_channels * pixels + pixel. If WINDOWED, `position` is the pixel;
            // otherwise it is image * pixels + pixel, and in_channels - 1 times image * pixels are missing.
            const int missing = WINDOWED ? p.in_channels : p.in_channels - 1;
            if (inside[row]) source[row] += static_cast<long long>(image) * missing * pixels + position;
        }
        const int chunks = p.held ? p.chunks : item.line_blocks * p.chunks;
        int chunk = 0;
        #pragma unroll 1
        for (int i = 0; i < chunks; ++i, ring.advance(p.slots)) {
            const int before = chunk * kChannels;  // channels
            if (++chunk == p.chunks) chunk = 0;
            unsigned char* slot = slot_of(ring.stage);
            barrier_wait(barriers_of_slot(p, ring.stage).empty, ring.parity ^ 1);
            #pragma unroll
            for (int row = 0; row < POSITION_BLOCKS; ++row) {
                const ELEMENT_T* from = source[row] + static_cast<long long>(before + first) * pixels;
                #pragma unroll 4
                for (int channel = first; channel < kChannels; channel += kAtOnce) {
                    const bool is = inside[row] && (WHOLE_CHANNELS || before + channel < p.in_channels);
                    const int there = swapped((row * kBlockPositions + piece) * kItem, channel);
                    unsigned char* target = slot + (channel * kRowBytes + there);
                    const ELEMENT_T* here = is ? from : p.input;
                    if constexpr (PIECE * kItem == 16) copy_piece_async(target, here, is);
                    else cp_async<PIECE * kItem>(target, here, is);
                    from += kAtOnce * pixels;
                }
            }
            barrier_arrive_when_copied(barriers_of_slot(p, ring.stage).full);
        }
    });
    wait_for_copies();
}

/* The words of a slot that wgmma_rows asks of a lane, for each product: of 16 positions from 16 * `group` on. Rows g and
 * g + 8 of a product are positions 2g and 2g + 1 if they are PAIRED, else g and g + 8.
 */
struct inputs_t { unsigned of[kSteps][4]; };
template <bool PAIRED> __device__ __forceinline__ void load_inputs(inputs_t& words, const unsigned char* slot, int group) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = group * 16 * kItem;  // bytes
    const auto word = [&](const unsigned char* from) { return *reinterpret_cast<const unsigned*>(from); };
    if constexpr (kItem == 4) {
        const unsigned char* row = slot + t * kRowBytes;
        const unsigned char* from = row + swapped(first + g * (PAIRED ? 8 : 4), t);
        const unsigned char* other = PAIRED ? from + 4 : row + swapped(first + g * 4 + 32, t);
        #pragma unroll
        for (int step = 0; step < kSteps; ++step)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {  // channels t and t + 4
                const int there = (step * 8 + half * 4) * kRowBytes;
                words.of[step][half * 2] = mma_words<float>::rounded(word(from + there));
                words.of[step][half * 2 + 1] = mma_words<float>::rounded(word(other + there));
            }
    } else if constexpr (PAIRED) {
        const unsigned char* even = slot + (t * 2 * kRowBytes + swapped(first + g * 4, t * 2));
        const unsigned char* odd = slot + ((t * 2 + 1) * kRowBytes + swapped(first + g * 4, t * 2 + 1));
        #pragma unroll
        for (int step = 0; step < kSteps; ++step)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {  // channels 2t, 2t + 1; and 8 on
                const int there = (step * 16 + half * 8) * kRowBytes;
                const unsigned a = word(even + there), b = word(odd + there);
                words.of[step][half * 2] = halves(a, b, false, false);
                words.of[step][half * 2 + 1] = halves(a, b, true, true);
            }
    } else {
        const int channel = lane / 16 * 8 + lane % 8;
        const unsigned char* row = slot + (channel * kRowBytes + swapped(first + lane / 8 % 2 * 16, channel));
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) load_matrices_turned(words.of[step], row + step * 16 * kRowBytes);
    }
}

/* The sums of a line block, for a warp's 16 positions of every 128. `slots` and `stages` move on by one for each chunk.
 * If `frees`, producers may fill the slots again. PEELED chunks are multiplied before the loop, and meanwhile(i) is
 * called while the products of the i-th of them run.
 */
template <bool PAIRED, int PEELED, typename MEANWHILE>
__device__ __forceinline__ void multiply(
    const pixels_on_m_params& p, float (&sums)[POSITION_BLOCKS][LINES / 2], ring_t& stages, ring_t& slots,
    int warp, bool frees, const MEANWHILE& meanwhile) {
    static_assert(POSITION_BLOCKS <= 2, "words of two groups of products take turns");
    constexpr int kHalves = 2 / POSITION_BLOCKS;  // chunks of an iteration, after which the same words are in turn
    static_assert((CHUNK_CLASS - PEELED) % kHalves == 0, "iterations have all of their chunks");
    const bool speaker = threadIdx.x % 32 == 0;   // arrives at barriers for its warp
    int last_stage = 0;                           // the stage before, which running products may still read
    inputs_t words[2];                            // running products read one while the other is loaded
    const auto step = [&](auto half, int chunk, const auto& along) {
        barrier_wait(barriers_of_slot(p, slots.stage).full, slots.parity);
        const unsigned char* stage = stage_of(p, stages.stage);
        const descriptor_t right = PACKED ? descriptor_k_major(stage, LINES * 16, 128) : descriptor_mn_major(stage, kBoxBytes, 1024);
        each<POSITION_BLOCKS>([&](auto row) {
            constexpr int kRow = row;
            inputs_t& own = words[POSITION_BLOCKS == 1 ? half : kRow];
            load_inputs<PAIRED>(own, slot_of(slots.stage), kRow * 8 + warp);
            if (kRow == 0) barrier_wait(barriers_of_stage(p, stages.stage).full, stages.parity);
            wgmma_fence();
            descriptor_t rights[kSteps];
            #pragma unroll
            for (int k = 0; k < kSteps; ++k) rights[k] = advance(right, k * (PACKED ? LINES * 32 : 2048));
            wgmma_rows<ELEMENT_T, LINES, !PACKED>(sums[kRow], own.of, rights, chunk > 0);
            wgmma_commit();
            if constexpr (kRow == POSITION_BLOCKS - 1) {
                if (frees) barrier_arrive(barriers_of_slot(p, slots.stage).empty);  // each lane, for what it has read itself
                along();
            }
            wgmma_wait<1>();
            if (kRow == 0 && chunk > 0 && speaker) barrier_arrive(barriers_of_stage(p, last_stage).empty);
        });
        last_stage = stages.stage;
        stages.advance(p.stages);
        slots.advance(p.slots);
    };
    each<PEELED>([&](auto chunk) {
        step(constant<chunk % 2>(), chunk, [&] { meanwhile(chunk); });
    });
    if constexpr (CHUNK_CLASS > 1 || PEELED == 0) {
        #pragma unroll 1
        for (int chunk = PEELED; chunk < p.chunks; chunk += kHalves)
            each<kHalves>([&](auto half) {
                constexpr int kHalf = half;
                step(constant<(PEELED + kHalf) % 2>(), chunk + kHalf, [] {});
            });
    }
    #pragma unroll
    for (int row = 0; row < POSITION_BLOCKS; ++row) wgmma_finish_rows(sums[row]);
    if (speaker) barrier_arrive(barriers_of_stage(p, last_stage).empty);
}

/* Where biases of the `warp`-th warp that multiplies lie. */
__device__ __forceinline__ float* biases_of(const pixels_on_m_params& p, int warp) {
    return reinterpret_cast<float*>(shared + p.first_own + OWN_BYTES) + warp * kBlockOuts;
}

/* Biases of a line block, from output channel `first` on. Each lane loads some, which come while products run, and then
 * shares them with its warp.
 */
struct biases_t {
    static constexpr int kOwn = ceil_div(kBlockOuts, 32);
    float own[kOwn] = {};

    __device__ __forceinline__ biases_t(const pixels_on_m_params& p, int first) {
        if (p.bias == nullptr) return;
        #pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int at = i * 32 + static_cast<int>(threadIdx.x % 32);
            if (at < kBlockOuts && first + at < p.out_channels) own[i] = widen(load_once(p.bias + (first + at)));
        }
    }
    __device__ __forceinline__ void share(const pixels_on_m_params& p, int warp) const {
        float* all = biases_of(p, warp);
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int at = i * 32 + static_cast<int>(threadIdx.x % 32);
            if (at < kBlockOuts) all[at] = own[i];
        }
        __syncwarp();
    }
};

/* Runs producers and consumers, whose threads have so many registers; all begin with 168. `consume` gets the number of
 * a consumer warp.
 */
template <int CONSUMER_REGISTERS, int PRODUCER_REGISTERS, typename CONSUME>
__device__ __forceinline__ void run(const pixels_on_m_params& p, const CONSUME& consume) {
    static_assert(2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 3 * 168, "no more are taken than are given up");
    init_barriers<kThreads / 32>([&](int warp) {  // each warp some of them
        #pragma unroll 1
        for (int i = warp; i < p.slots + p.stages; i += kThreads / 32) {
            const bool slot = i < p.slots;
            barrier_init(barriers_of_slot(p, i).full, slot ? kLoaders : 1);
            barrier_init(barriers_of_slot(p, i).empty, slot ? kConsumers : kConsumers / 32);
        }
    });
    const auto produce = [&] {
        if (threadIdx.x >= 32) produce_inputs(p);
        else if (elected()) produce_weights(p);
    };
    run_roles<kProducers, 32, CONSUMER_REGISTERS, PRODUCER_REGISTERS>(produce, consume);
}
