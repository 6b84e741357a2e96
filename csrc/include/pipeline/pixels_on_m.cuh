/* Products of positions (image, ih, iw), their rows, and lines (co, kh, kw), their columns: sums over ci of
 * input [ci, position] weight [ci, line]. For sm90/gemm_depth_to_space.cu and sm90/gemm_fold_pixels.cu.
 *
 * An item is up to POSITION_BLOCKS * 128 positions times a line block, LINES lines. It is multiplied in chunks of 128
 * bytes of channels. A stage is a buffer of shared memory for a chunk: kLoaders threads copy the inputs of the item's
 * positions to it, and one thread the weights of its lines. Stages are a ring, so copies are a few chunks ahead.
 *
 * Two warpgroups multiply 64 of every 128 positions each. A warp loads the inputs of 16 positions from a stage into
 * registers, and rounds float32 to TF32 there. Tensor cores read weights from the stage: those of 16 bits in the order
 * of the tensor, [ci][line] (ptx/wgmma.cuh). Those of TF32 must be K-major: they are PACKED by weights/pack.cu.
 *
 * Macros: ELEMENT_T, KERNEL_H, KERNEL_W; LINES (a multiple of 16 up to 256, all taps of some output channels);
 *   PACKED (1 for float32, 0 for 16 bits); WHOLE_CHANNELS (1 if all chunks are full); POSITION_BLOCKS (1 or 2);
 *   PIECE (inputs that are copied together); COLUMN_BYTES (shared memory for columns, a multiple of 16; may be 0);
 *   WINDOWED (1 if items are windows of images of one row; 0 if they are whole images, or go across images);
 *   CHUNK_CLASS (1, 2 or 3, by the number of chunks: see the table at multiply).
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
    int items;            // of all positions and line blocks
    int in_channels, out_channels;
    int chunks;           // chunks of in_channels, the last of which may not be full
    int line_blocks;      // the last of which may not be full
    // Reciprocals (numeric/divide.cuh) of line_blocks; of an image's pixels, windows, width and cells; of cells in a row.
    unsigned long long by_line_blocks, by_pixels, by_windows, by_width, by_cells, by_cells_w;
    int in_h, in_w;
    int images;           // whole images of an item; 0 if items go across images
    int item_positions;   // positions of an item; a multiple of PIECE, like step and left
    int windows;          // windows of an image
    int step;             // positions from one window to the next
    int left;             // left halo: positions of a window before that of its first cell
    int stages;           // buffers of the ring
    int first_columns, first_barrier;  // bytes of shared memory before columns, and before barriers
};

constexpr int kItem = sizeof(ELEMENT_T), kTaps = KERNEL_H * KERNEL_W;
constexpr int kBlockPositions = 128, kPositions = POSITION_BLOCKS * kBlockPositions, kBlockOuts = LINES / kTaps;
static_assert(LINES % 16 == 0 && LINES % kTaps == 0, "a line block has all taps of its output channels");

// Shared memory: stages; columns; biases [warps][kBlockOuts]; barriers. A stage has inputs [kChannels][kPositions], whose
// pieces of 16 bytes are swapped, then weights, either PACKED [kSteps][2][LINES] of 16 bytes, or boxes [kChannels] of 128
// bytes (64 lines), swizzled.
constexpr int kChannels = 128 / kItem, kSteps = 4;  // channels of a chunk; products that they take
constexpr int kChannelBytes = kPositions * kItem, kInputBytes = kChannels * kChannelBytes, kBoxBytes = 64 * 128;
constexpr int kWeightBytes = PACKED ? LINES * 128 : ceil_div(LINES, 64) * kBoxBytes;
constexpr int kConsumers = 256, kLoaders = 96, kProducers = kLoaders + 32, kThreads = kConsumers + kProducers;
extern __shared__ __align__(1024) unsigned char shared[];
__device__ __forceinline__ unsigned char* inputs_of(int stage) { return shared + stage * (kInputBytes + kWeightBytes); }
__device__ __forceinline__ unsigned char* weights_of(int stage) { return inputs_of(stage) + kInputBytes; }

struct barriers_t { barrier_t full, empty; };  // of a stage
__device__ __forceinline__ barriers_t& barriers_of(const pixels_on_m_params& p, int stage) {
    return reinterpret_cast<barriers_t*>(shared + p.first_barrier)[stage];
}

/* Where an item begins. Its index is place * line_blocks + line block: its place is a window, or some images, or some
 * positions. So blocks that run at the same time mostly have the same inputs, from the L2 cache. Shares of neighbouring
 * items, one for each block, took 2 to 7% longer.
 */
struct item_t {
    int image;        // WINDOWED: the window's. Otherwise the first image, or 0 if items go across images
    int position;     // WINDOWED: the first one in that image, or before it. Otherwise the first one in all images
    int line_block;
    __device__ __forceinline__ item_t(const pixels_on_m_params& p, int index) {
        const int place = divided(index, p.by_line_blocks);
        line_block = index - place * p.line_blocks;
        image = WINDOWED ? divided(place, p.by_windows) : place * p.images;
        position = WINDOWED ? (place - image * p.windows) * p.step - p.left : place * p.item_positions;
    }
};

/* Where the inputs of a stage have byte `bytes` of the positions of a channel. The order of pieces depends on the
 * channel: a warp reads 32 bytes of each of four channels at a time, or 16 of each of eight, and all of them lie in
 * different banks.
 */
__device__ __forceinline__ int swapped(int bytes, int channel) {
    return bytes ^ (kItem == 4 ? channel % 4 * 32 : channel % 8 * 16);
}

/* Begins to copy the weights of all items. One thread. */
__device__ __forceinline__ void produce_weights(const pixels_on_m_params& p) {
    ring_t ring;
    if (PACKED) grid_dependency_wait();
    each_item<item_t>(p, [&](const item_t& item) {
        #pragma unroll 1
        for (int chunk = 0; chunk < p.chunks; ++chunk, ring.advance(p.stages)) {
            unsigned char* to = weights_of(ring.stage);
            barrier_t& full = barriers_of(p, ring.stage).full;
            barrier_wait(barriers_of(p, ring.stage).empty, ring.parity ^ 1);
            barrier_arrive_expecting(full, kWeightBytes);
#if PACKED
            const long long first = (static_cast<long long>(item.line_block) * p.chunks + chunk) * (LINES * 8);
            bulk_copy(to, p.weights + first, kWeightBytes, full);
#else
            #pragma unroll
            for (int box = 0; box < kWeightBytes / kBoxBytes; ++box)
                tma_load(to + box * kBoxBytes, p.weights, item.line_block * LINES + box * 64, chunk * kChannels, 0, 0, full);
#endif
        }
    });
}

/* Begins to copy the inputs of all items. A thread has a piece of each position block, and every kAtOnce-th channel. */
__device__ __forceinline__ void produce_inputs(const pixels_on_m_params& p) {
    constexpr int kPieces = kBlockPositions / PIECE, kAtOnce = kLoaders / kPieces;  // of a channel; channels
    static_assert(kLoaders % kPieces == 0, "threads have whole channels");
    const int thread = threadIdx.x - 32, first_channel = thread / kPieces, piece = thread % kPieces * PIECE;
    const int pixels = p.in_h * p.in_w;
    ring_t ring;
    each_item<item_t>(p, [&](const item_t& item) {
        const ELEMENT_T* source[POSITION_BLOCKS];
        bool inside[POSITION_BLOCKS];
        #pragma unroll
        for (int block = 0; block < POSITION_BLOCKS; ++block) {
            const int in_item = block * kBlockPositions + piece, position = item.position + in_item;
            const int image = WINDOWED ? item.image : divided(position, p.by_pixels);
            inside[block] = in_item < p.item_positions && 0 <= position && position < (WINDOWED ? pixels : p.positions);
            source[block] = p.input;
            // Channel 0 is at image * in_channels * pixels + pixel. If WINDOWED, pixel = position. Otherwise
            // pixel = position - image * pixels, so it is at image * (in_channels - 1) * pixels + position.
            const int factor = WINDOWED ? p.in_channels : p.in_channels - 1;
            if (inside[block]) source[block] += static_cast<long long>(image) * factor * pixels + position;
        }
        #pragma unroll 1
        for (int chunk = 0; chunk < p.chunks; ++chunk, ring.advance(p.stages)) {
            const int before = chunk * kChannels;  // channels
            unsigned char* to = inputs_of(ring.stage);
            barrier_wait(barriers_of(p, ring.stage).empty, ring.parity ^ 1);
            #pragma unroll
            for (int block = 0; block < POSITION_BLOCKS; ++block) {
                const ELEMENT_T* from = source[block] + static_cast<long long>(before + first_channel) * pixels;
                #pragma unroll 4
                for (int channel = first_channel; channel < kChannels; channel += kAtOnce) {
                    const bool is = inside[block] && (WHOLE_CHANNELS || before + channel < p.in_channels);
                    const int there = swapped((block * kBlockPositions + piece) * kItem, channel);
                    unsigned char* target = to + (channel * kChannelBytes + there);
                    const ELEMENT_T* here = is ? from : p.input;
                    if constexpr (PIECE * kItem == 16) copy_piece_async(target, here, is);
                    else cp_async<PIECE * kItem>(target, here, is);
                    from += kAtOnce * pixels;
                }
            }
            barrier_arrive_when_copied(barriers_of(p, ring.stage).full);
        }
    });
    wait_for_copies();
}

/* Loads the words of a stage's inputs that wgmma_rows takes from lane 4g + t, for each product of a chunk. Rows g and
 * g + 8 of a product are positions 2g and 2g + 1 if PAIRED, else g and g + 8, from position 16 * `group` on. Lane 5 (g = 1, t = 1)
 * with group 2 loads for the first product these channels of positions 34 and 35 (33 and 41 if not PAIRED):
 *
 *             word[0]: row 1     word[1]: row 9     word[2]: row 1     word[3]: row 9
 *   TF32      1 of 34            1 of 35            5 of 34            5 of 35
 *   16 bits   2 and 3 of 34      2 and 3 of 35      10 and 11 of 34    10 and 11 of 35
 */
struct inputs_t { unsigned word[kSteps][4]; };
template <bool PAIRED> __device__ __forceinline__ void load_inputs(inputs_t& to, const unsigned char* from, int group) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = group * 16 * kItem;  // bytes
    const auto read = [&](const unsigned char* word) { return *reinterpret_cast<const unsigned*>(word); };
    if constexpr (kItem == 4) {
        const unsigned char* channel = from + t * kChannelBytes;
        const unsigned char* row_g = channel + swapped(first + g * (PAIRED ? 8 : 4), t);
        const unsigned char* row_g8 = PAIRED ? row_g + 4 : channel + swapped(first + g * 4 + 32, t);
        #pragma unroll
        for (int step = 0; step < kSteps; ++step)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {  // channels t and t + 4
                const int there = (step * 8 + half * 4) * kChannelBytes;
                to.word[step][half * 2] = mma_words<float>::rounded(read(row_g + there));
                to.word[step][half * 2 + 1] = mma_words<float>::rounded(read(row_g8 + there));
            }
    } else if constexpr (PAIRED) {  // a word there has two positions of a channel, one of a product the reverse
        const unsigned char* even = from + (t * 2 * kChannelBytes + swapped(first + g * 4, t * 2));
        const unsigned char* odd = from + ((t * 2 + 1) * kChannelBytes + swapped(first + g * 4, t * 2 + 1));
        #pragma unroll
        for (int step = 0; step < kSteps; ++step)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {  // channels 2t and 2t + 1, then 2t + 8 and 2t + 9
                const int there = (step * 16 + half * 8) * kChannelBytes;
                const unsigned a = read(even + there), b = read(odd + there);  // positions 2g and 2g + 1 of each
                to.word[step][half * 2] = halves(a, b, false, false);
                to.word[step][half * 2 + 1] = halves(a, b, true, true);
            }
    } else {  // ldmatrix exchanges positions and channels; lane 5 gives it the address of channel 5, positions 32 to 39
        const int channel = lane / 16 * 8 + lane % 8;
        const unsigned char* row = from + (channel * kChannelBytes + swapped(first + lane / 8 % 2 * 16, channel));
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) load_matrices_turned(to.word[step], row + step * 16 * kChannelBytes);
    }
}

/* Computes the sums of an item's line block, for a warp's 16 positions of each position block. `ring` moves on by one for
 * each chunk. The products of a chunk and a position block are a group, which runs while the words of the next group are
 * loaded:
 *
 *   POSITION_BLOCKS = 1                                       POSITION_BLOCKS = 2 (groups 0a and 0b are of chunk 0)
 *   load words[0] of chunk 0, begin group 0                   load words[0] of chunk 0, begin group 0a
 *   load words[1] of chunk 1, begin group 1                   load words[1] of chunk 0, begin group 0b
 *   wait: group 0 is over; words[0] and chunk 0 are free      wait: group 0a is over; words[0] is free
 *   load words[0] of chunk 2, begin group 2                   load words[0] of chunk 1, begin group 1a
 *   wait: group 1 is over; words[1] and chunk 1 are free      wait: group 0b is over; words[1] and chunk 0 are free
 *
 * After wgmma_wait<1> only the group that was begun last may run. If that group is block 0 of a chunk, nothing reads the
 * stage of the chunk before, and the lane frees that stage for its part. If that group is block 1 (0b), it reads the stage of its own
 * chunk, and none is freed.
 *
 * kPeeled chunks are multiplied before the loop, and meanwhile(i) is called while the products of the i-th of them run.
 * Words in registers need constant indices, so an iteration takes as many chunks as use both words:
 *
 *   POSITION_BLOCKS   chunks         CHUNK_CLASS   kPeeled   an iteration
 *   1                 1              1             1         none
 *   1                 2, 4, 6, ...   2             2         2 chunks
 *   1                 3, 5, 7, ...   3             3         2 chunks
 *   2                 any            1             1         1 chunk
 */
constexpr int kPeeled = CHUNK_CLASS;
template <bool PAIRED, typename MEANWHILE>
__device__ __forceinline__ void multiply(
    const pixels_on_m_params& p, float (&sums)[POSITION_BLOCKS][LINES / 2], ring_t& ring, int warp,
    const MEANWHILE& meanwhile) {
    // Bytes from one part of a stage's weights to the next, for descriptors (ptx/wgmma.cuh), if PACKED : if not.
    constexpr int kLeadingBytes = PACKED ? LINES * 16 : kBoxBytes;  // a part: 16 bytes of channels of all lines : 64 lines
    constexpr int kStrideBytes = PACKED ? 8 * 16 : 8 * 128;         // a part: 8 lines : 8 channels
    constexpr int kStepBytes = 2 * (PACKED ? kLeadingBytes : kStrideBytes);  // what a product takes: two such parts
    constexpr int kIterationChunks = 2 / POSITION_BLOCKS;
    static_assert(POSITION_BLOCKS == 1 || (POSITION_BLOCKS == 2 && CHUNK_CLASS == 1), "see the table");
    int last_stage = 0;  // of the chunk before
    inputs_t words[2];   // running products read one while the other is loaded
    const auto multiply_chunk = [&](auto turn, int chunk, const auto& along) {
        barrier_wait(barriers_of(p, ring.stage).full, ring.parity);
        const auto describe = PACKED ? descriptor_k_major : descriptor_mn_major;
        const descriptor_t weights = describe(weights_of(ring.stage), kLeadingBytes, kStrideBytes);
        each<POSITION_BLOCKS>([&](auto block) {
            inputs_t& inputs = words[POSITION_BLOCKS == 1 ? turn : block];
            load_inputs<PAIRED>(inputs, inputs_of(ring.stage), block * 8 + warp);
            wgmma_fence();
            descriptor_t step_weights[kSteps];
            #pragma unroll
            for (int step = 0; step < kSteps; ++step) step_weights[step] = advance(weights, step * kStepBytes);
            wgmma_rows<ELEMENT_T, LINES, !PACKED>(sums[block], inputs.word, step_weights, chunk > 0);
            wgmma_commit();
            if constexpr (block == POSITION_BLOCKS - 1) along();
            wgmma_wait<1>();
            if (block == 0 && chunk > 0) barrier_arrive(barriers_of(p, last_stage).empty);
        });
        last_stage = ring.stage;
        ring.advance(p.stages);
    };
    each<kPeeled>([&](auto chunk) { multiply_chunk(constant<chunk % 2>(), chunk, [&] { meanwhile(chunk); }); });
    if constexpr (CHUNK_CLASS > 1 || POSITION_BLOCKS == 2) {
        #pragma unroll 1
        for (int chunk = kPeeled; chunk < p.chunks; chunk += kIterationChunks)
            each<kIterationChunks>([&](auto i) { multiply_chunk(constant<(kPeeled + i) % 2>(), chunk + i, [] {}); });
    }
    #pragma unroll
    for (int block = 0; block < POSITION_BLOCKS; ++block) wgmma_finish_rows(sums[block]);
    barrier_arrive(barriers_of(p, last_stage).empty);
}

/* Where biases of the `warp`-th warp that multiplies lie. */
__device__ __forceinline__ float* biases_of(const pixels_on_m_params& p, int warp) {
    return reinterpret_cast<float*>(shared + p.first_columns + COLUMN_BYTES) + warp * kBlockOuts;
}

/* Biases of a line block, from output channel `first` on: a lane loads some, and later shares them with its warp. */
struct biases_t {
    static constexpr int kLaneBiases = ceil_div(kBlockOuts, 32);
    float values[kLaneBiases] = {};

    __device__ __forceinline__ biases_t(const pixels_on_m_params& p, int first) {
        if (p.bias == nullptr) return;
        #pragma unroll
        for (int i = 0; i < kLaneBiases; ++i) {
            const int at = i * 32 + static_cast<int>(threadIdx.x % 32);
            if (at < kBlockOuts && first + at < p.out_channels) values[i] = widen(load_once(p.bias + (first + at)));
        }
    }
    __device__ __forceinline__ void share(const pixels_on_m_params& p, int warp) const {
        float* all = biases_of(p, warp);
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < kLaneBiases; ++i) {
            const int at = i * 32 + static_cast<int>(threadIdx.x % 32);
            if (at < kBlockOuts) all[at] = values[i];
        }
        __syncwarp();
    }
};

/* Runs producers, and consume(number of a consumer warp). Threads have so many registers; all begin with 168. */
template <int CONSUMER_REGISTERS, int PRODUCER_REGISTERS, typename CONSUME>
__device__ __forceinline__ void run(const pixels_on_m_params& p, const CONSUME& consume) {
    static_assert(2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 3 * 168, "no more are taken than are given up");
    init_barriers<kThreads / 32>([&](int warp) {  // each warp some of them
        #pragma unroll 1
        for (int stage = warp; stage < p.stages; stage += kThreads / 32) {
            barrier_init(barriers_of(p, stage).full, kLoaders + 1);
            barrier_init(barriers_of(p, stage).empty, kConsumers);
        }
    });
    const auto produce = [&] {
        if (threadIdx.x >= 32) produce_inputs(p);
        else if (elected()) produce_weights(p);
    };
    run_roles<kProducers, 32, CONSUMER_REGISTERS, PRODUCER_REGISTERS>(produce, consume);
}
