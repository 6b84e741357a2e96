/* fused for kernels as large as their stride: a product, whose columns are shuffled into images (depth to space).
 *
 * Where taps do not overlap an output is one product,
 *
 *   output [co, ih * KERNEL_H + kh, iw * KERNEL_W + kw] = bias [co] + sum over ci of input [ci, ih, iw] weight [ci, co, kh, kw]
 *
 * so that nothing is gathered or folded: positions (image, ih, iw) times lines (co, kh, kw). What is left is that neighbours in
 * an output row are columns of the product.
 *
 * Positions are rows of the product (pipeline/pixels_on_m.cuh). If PAIRED_ROWS, rows g and g + 8 are positions 2g and 2g + 1, so
 * that a thread stores outputs of both together. The eight lanes that have the same lines store a stretch of an output row. So
 * sums go from registers to memory, not by way of shared memory, which is busy with weights. Memory takes about as long as the
 * products: outputs of an item stay in registers, and are stored while the next one's products run (DEFERRED_STORES).
 *   KERNEL_H = KERNEL_W = 2, bf16, PAIRED_ROWS: lane 5 (g = 1, t = 1) of warp 0 has lines 2 and 3, so kh = 1 of channel 0, of
 *   positions 2 and 3. Its first four sums are outputs (kw 0, kw 1) of position 2, then of 3: four neighbours of an output row,
 *   which `values` has in this order and `words` as two words. It stores 8 bytes at column 4 of row 1 of channel 0.
 *
 * Macros: those of pipeline/pixels_on_m.cuh, with one position block, no memory of its own, kernels of 1, 2, 4, 8 or 16 taps,
 * LINES a multiple of 4 * KERNEL_W where PACKED; images have one row where KERNEL_H is 1; PAIRED_ROWS (1 where KERNEL_W <= 2 and
 * rows of images are even); DEFERRED_STORES (1 or 0); WHOLE_OUTS (1 where output channels are whole blocks of lines). Chosen by
 * gemmconv/kernels/sm90/gemm_depth_to_space.py. `python -m pytest tests/test_kernels.py -k depth_to_space` runs this file on a CPU.
 */
#include "pipeline/pixels_on_m.cuh"
#include "ptx/store.cuh"

static_assert(POSITION_BLOCKS == 1 && !WINDOWED && 16 % kTaps == 0, "one position block, whole images, taps divide 16");
// Rows g and g + 8 of a warp's 16 are positions 2g and 2g + 1, or g and g + 8.
constexpr bool kPaired = PAIRED_ROWS;
static_assert(!kPaired || KERNEL_W <= 2, "outputs of two positions are neighbours");

/* Elements of a row and of a plane of outputs. */
__device__ __forceinline__ int out_width(const pixels_on_m_params& p) { return p.in_w * KERNEL_W; }
__device__ __forceinline__ int out_plane(const pixels_on_m_params& p) { return p.in_h * p.in_w * kTaps; }

/* wgmma gives a lane two lines of each tile of 8. For wide kernels weights/pack.cu has put a kernel's row of KERNEL_W lines
 * at two lines of each of several tiles, so that a lane has whole rows of outputs:
 *
 *   KERNEL_W      kLane, lines beside each other of a lane   kTiles, that they lie in   lines of lane 5 (t = 1), first turn
 *   1 or 2        2                                          1                          2, 3
 *   not PACKED    2                                          1                          2, 3
 *   4 and PACKED  4                                          2                          4, 5, 6, 7
 *   8 and PACKED  8                                          4                          8 to 15
 */
constexpr int kLane = PACKED && KERNEL_W > 2 ? KERNEL_W : 2, kTiles = kLane / 2;
constexpr int kTurns = LINES / 8 / kTiles;  // how many times a lane has such lines
static_assert(LINES % (8 * kTiles) == 0 && KERNEL_W <= 8, "tiles and lanes have whole rows of outputs");

/* The first line of a lane. */
__device__ __forceinline__ int lane_line() { return threadIdx.x % 4 * kLane; }

/* Where a lane's outputs of its first line go, of two positions and output channels from `first` on, and whether there are any. */
struct places_t {
    ELEMENT_T* target[2] = {};
    bool inside[2] = {};

    places_t() = default;
    __device__ __forceinline__ places_t(const pixels_on_m_params& p, int position, int first, int warp) {
        const int g = threadIdx.x % 32 / 4, line = lane_line(), pixels = p.in_h * p.in_w;
        const int column = line / kTaps * out_plane(p) + line % kTaps / KERNEL_W * out_width(p) + line % KERNEL_W;
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int own = position + warp * 16 + (kPaired ? g * 2 + h : g + h * 8);
            const int image = divided(own, p.by_pixels), pixel = own - image * pixels;
            const int row = KERNEL_H == 1 ? 0 : divided(pixel, p.by_width);  // pixel * KERNEL_W counts one of its KERNEL_H rows
            inside[h] = own < p.positions;
            const long long plane = static_cast<long long>(image) * p.out_channels + first;
            target[h] = p.output + (plane * out_plane(p) +
                                    (row * ((KERNEL_H - 1) * out_width(p)) + pixel * KERNEL_W + column));
        }
    }
};

/* A lane's outputs of an item, as they are stored. */
struct outputs_t {
    static constexpr int kWords = 4 * kTiles * kItem / 4;  // of a turn
    places_t places;
    int outs = 0;  // output channels that there are, from the lane's first on
    unsigned words[kTurns][kWords] = {};

    outputs_t() = default;
    /* Takes sums and biases from output channel `first` on. */
    __device__ __forceinline__ outputs_t(
        const pixels_on_m_params& p, const places_t& places, int first, const float (&sums)[LINES / 2], const float* biases)
        : places(places), outs(p.out_channels - first - lane_line() / kTaps) {
        each<kTurns>([&](auto turn) {
            constexpr int kTurn = turn, kTile = kTurn * kTiles, kOut = kTile * 8 / kTaps;
            ELEMENT_T values[4 * kTiles];  // neighbours in a row one after the other
            #pragma unroll
            for (int e = 0; e < 2 * kTiles; ++e) {
                const float bias = biases[kOut + lane_line() / kTaps + (kTaps == 1 ? e : 0)];
                #pragma unroll
                for (int h = 0; h < 2; ++h)
                    values[KERNEL_W == 1 ? e * 2 + h : h * 2 * kTiles + e] =
                        narrow<ELEMENT_T>(sums[(kTile + e / 2) * 4 + h * 2 + e % 2] + bias);
            }
            as_words<kWords>(words[kTurn], values);
        });
    }

    /* Stores turns FIRST to END - 1. */
    template <int FIRST, int END> __device__ __forceinline__ void store(const pixels_on_m_params& p) const {
        each<END - FIRST>([&](auto turn) {
            constexpr int kTurn = FIRST + turn, kFirst = kTurn * kTiles * 8, kOut = kFirst / kTaps;
            const int at = kOut * out_plane(p) + kFirst % kTaps / KERNEL_W * out_width(p);
            constexpr int kRuns = KERNEL_W == 1 ? 2 : 1, kRunWords = kWords / kRuns;  // stretches of the output
            #pragma unroll
            for (int e = 0; e < kRuns; ++e) {
                const bool exists = WHOLE_OUTS || kOut + (kTaps == 1 ? e : 0) < outs;
                const int offset = at + e * (KERNEL_H > 1 ? out_width(p) : out_plane(p));
                const unsigned* run = words[kTurn] + e * kRunWords;
                if constexpr (kPaired) {
                    store_run<kRunWords>(places.target[0] + offset, run, places.inside[0] && exists);
                } else if constexpr (kRunWords == 1) {
                    #pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const unsigned short half[1] = {static_cast<unsigned short>(run[0] >> h * 16)};
                        store_words(places.target[h] + offset, half, places.inside[h] && exists);
                    }
                } else {
                    #pragma unroll
                    for (int h = 0; h < 2; ++h)
                        store_run<kRunWords / 2>(
                            places.target[h] + offset, run + h * (kRunWords / 2), places.inside[h] && exists);
                }
            }
        });
    }

private:
    template <int COUNT> __device__ __forceinline__ static void store_run(ELEMENT_T* target, const unsigned* run, bool exists) {
        constexpr int kTogether = least(COUNT, 4);
        #pragma unroll
        for (int first = 0; first < COUNT; first += kTogether) {
            unsigned words[kTogether];
            #pragma unroll
            for (int i = 0; i < kTogether; ++i) words[i] = run[first + i];
            store_words(target + first * (4 / kItem), words, exists);
        }
    }
};

/* What consumer warp `warp` does: it multiplies item after item, and keeps outputs, which are stored during the products of
 * the next item.
 */
__device__ __forceinline__ void consume(const pixels_on_m_params& p, int warp) {
    ring_t ring;
    outputs_t outputs;  // of the item before; at first there is none: nothing of it is inside, and nothing is stored
    each_item<item_t>(p, [&](const item_t& item) {
        const int first = item.line_block * kBlockOuts;
        const places_t places(p, item.position, first, warp);
        const biases_t biases(p, first);
        float sums[1][LINES / 2];
        multiply<kPaired>(p, sums, ring, warp, [&](auto chunk) {  // each stores a share of the item before
            constexpr int kShare = chunk;
            if constexpr (DEFERRED_STORES) outputs.store<kTurns * kShare / kPeeled, kTurns * (kShare + 1) / kPeeled>(p);
        });
        biases.share(p, warp);
        outputs = outputs_t(p, places, first, sums[0], biases_of(p, warp));
        if constexpr (!DEFERRED_STORES) outputs.store<0, kTurns>(p);
    });
    if constexpr (DEFERRED_STORES) outputs.store<0, kTurns>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sm90_gemm_depth_to_space_kernel(const __grid_constant__ pixels_on_m_params p) {
    run<224, 56>(p, [&](int warp) { consume(p, warp); });
}
