/* Loaders of sm90/implicit_gemm.cu whose inputs land in shared memory as they lie in memory, and become units from there. Copies
 * go on while threads compute, and are 16 bytes each, so that much more is on its way than registers hold.
 *
 * NCHW. A run is what of a patch lies in one piece in memory: a row of a strip or, where nothing lies between rows
 * (WHOLE_IMAGES), an image; RUN_PITCH positions, the zeros behind it among them. It lands as pieces of 16 bytes that are
 * aligned in memory, and begins somewhere in the first of them. Runs land behind each other, with two pieces to spare each,
 * because it depends on the tile where runs begin. For channels, one after the other, the same: planes are whole pieces.
 *
 *   landing [LANDING_STAGES][LANDING_UNITS units of channels][UNIT_H][kRunPieces] of 16 bytes
 *
 * Where each patch has parts of one strip alone, a landing is a box of a tensor map (LANDING_BOX), which one thread begins to
 * copy: rows of the strip, zeros where there is no image or, where positions are those of images alone, a stretch of an image:
 *
 *   landing [LANDING_STAGES][LANDING_UNITS units of channels][BOX_ROWS][BOX_WIDTH] values
 *
 * What is left of the image may be read from a piece before a run's first input: nobody uses it. Zeros land for the rest of
 * a run that is right of the image, and of a piece, where not all rows are whole pieces (PARTIAL_PIECES).
 */
#pragma once

#include "ptx/cp_async.cuh"
#include "load/patch_elements.cuh"
#include "ptx/keep.cuh"
#include "ptx/named_barrier.cuh"

constexpr int kPixels = RUN_PITCH * UNIT_W;  // of a run in a row of the input
constexpr int kLandings = CHUNKS * UNITS / LANDING_UNITS;  // of an item
static_assert(UNITS % LANDING_UNITS == 0 && LANDING_STAGES >= 2, "a chunk is whole landings; one lands while another is read");

/* Where a patch begins: in which run, of all, and after how many of its positions. */
struct start_t { int run, skipped; };
__device__ __forceinline__ start_t start_of(const implicit_gemm_params& p, int tile) {
    const int position = tile * kTile + FIRST + p.strip_rows * PITCH;  // from one strip before the first
    return {position / RUN_PITCH - (WHOLE_IMAGES ? 1 : p.strip_rows), position % RUN_PITCH};
}

/* A run: pixels of an image. `origin` is that of its first position, or would be; those in the image are from begin to end. */
struct run_t {
    int image;  // -1: there is no such run
    int origin, begin, end;
};
__device__ __forceinline__ run_t run_of(const implicit_gemm_params& p, int run, int plane_row) {
#if WHOLE_IMAGES
    const bool there = run >= 0 && run < p.batch;
    return {there ? run : -1, 0, 0, p.h_in * p.w_in};
#else
    const int strip = divided(run + p.strip_rows, p.by_strip_rows) - 1, row = run - strip * p.strip_rows;
    const int image = strip < 0 ? p.batch : divided(strip, p.by_strips), across = strip - image * p.strips;
    const int ih = (row + p.origin_h) * UNIT_H + plane_row;
    if (image >= p.batch || static_cast<unsigned>(ih) >= p.h_in) return {-1, 0, 0, 0};
    const int begin = ih * p.w_in;
    return {image, begin + (across * p.strip_cells + p.origin_w) * UNIT_W, begin, begin + p.w_in};
#endif
}

/* How the i-th run of a patch lands: its first piece, and the pixel that this begins with. */
struct landed_t { int piece, pixel; };
__device__ __forceinline__ landed_t landed(const start_t& start, int i, int origin) {
    const int before = i * RUN_PITCH - start.skipped;  // positions
    return {max(before, 0) * UNIT_W / kPiece + 2 * i, origin + max(-before, 0) * UNIT_W & -kPiece};
}

/* Where a piece of a patch comes from: the place of the group's first channel in the input, plus one less than the elements
 * to copy; -1 for zeros.
 */
__device__ __forceinline__ index_t place_of(const implicit_gemm_params& p, const start_t& start, int piece) {
    const int row = piece / kRunPieces, own = piece % kRunPieces;
    const int i = ((own + 1) * kPiece + start.skipped * UNIT_W - 1) / (kPixels + 2 * kPiece);
    const run_t run = run_of(p, start.run + i, row);
    const landed_t at = landed(start, i, run.origin);
    const int pixel = at.pixel + (own - at.piece) * kPiece;
    const int wanted = min(RUN_PITCH, start.skipped + PATCH - i * RUN_PITCH) * UNIT_W;  // pixels of the run
    const int last = min(run.end, run.origin + wanted);
    const int count = min(kPiece, PARTIAL_PIECES || pixel >= last ? last - pixel : kPiece);
    if (run.image < 0 || count <= 0 || pixel + kPiece <= run.begin) return -1;
    const index_t pixels = static_cast<index_t>(p.h_in) * p.w_in;
    return run.image * (p.groups * IN_CHANNELS * pixels) + pixel + count - 1;
}

/* Where the box of a patch begins; after how many positions of its first row the patch does, and after how many columns of
 * each row its strip.
 */
struct box_t { int image, row, column, skipped, skew; };
__device__ __forceinline__ box_t box_of(const implicit_gemm_params& p, int tile) {
    const int strip = divided(tile, p.by_strip_tiles), position = (tile - strip * p.strip_tiles) * kTile + FIRST;
    const int image = divided(strip, p.by_strips), across = strip - image * p.strips;
    if (BOX_ROWS == 1) return {image, 0, position, 0, 0};
    constexpr int kAbove = ceil_div(FIRST < 0 ? -FIRST : 0, PITCH);  // rows
    const int row = (position + kAbove * PITCH) / PITCH - kAbove;
    const int column = across * p.strip_cells + p.origin_w, aligned = column & -kPiece;
    return {image, row + p.origin_h, aligned, position - row * PITCH, column - aligned};
}

/* Where a spot lands, in bytes. */
__device__ __forceinline__ int landed_spot(const implicit_gemm_params& p, const start_t& start, spot_t spot) {
    const int row = spot.plane / UNIT_W, position = start.skipped + spot.position;
    const int i = position / RUN_PITCH, column = position % RUN_PITCH;
    const run_t run = run_of(p, start.run + i, row);
    const landed_t at = landed(start, i, run.origin);
    const int pixel = run.origin + column * UNIT_W + spot.plane % UNIT_W;
    return ((row * kRunPieces + at.piece) * kPiece + pixel - at.pixel) * static_cast<int>(sizeof(ELEMENT_T));
}

/* The same in a box. */
__device__ __forceinline__ int boxed_spot(const box_t& box, spot_t spot) {
    if (BOX_ROWS == 1) return spot.position * static_cast<int>(sizeof(ELEMENT_T));
    const int position = box.skipped + spot.position;
    return (position / PITCH * BOX_WIDTH + position % PITCH + box.skew) * static_cast<int>(sizeof(ELEMENT_T));
}

/* A loader's way through the landings of item after item. */
struct way_t {
    int i, landing;
    item_t item;

    __device__ __forceinline__ explicit way_t(const implicit_gemm_params& p) : i(blockIdx.x), landing(0), item(item_of(p, i)) {}
    __device__ __forceinline__ bool ended(const implicit_gemm_params& p) const { return i >= p.items; }
    __device__ __forceinline__ void advance(const implicit_gemm_params& p) {
        if (++landing < kLandings) return;
        landing = 0;
        i += gridDim.x;
        if (!ended(p)) item = item_of(p, i);
    }
};

/* Pieces that a loader copies: of one place in the patch, or of few where there are more than loaders, in all channels or,
 * where it shares them with others, in every kSharers-th.
 */
constexpr int kSharers = PRODUCERS / kPieces > 0 ? PRODUCERS / kPieces : 1;
constexpr int kOwnPieces = ceil_div(kPieces, PRODUCERS);
struct own_pieces_t {
    const char* source[kOwnPieces];  // of the next landing's first channel that is the loader's
    int bytes[kOwnPieces];

    /* Whose pieces are taken by loaders that this one is not among. */
    static __device__ __forceinline__ bool idle(int k, int thread) {
        return kOwnPieces > 1 ? thread + k * PRODUCERS >= kPieces : thread >= kSharers * kPieces;
    }
    __device__ __forceinline__ void place(const implicit_gemm_params& p, const item_t& item, int thread) {
        const start_t start = start_of(p, item.tile);
        const int channel = item.group * IN_CHANNELS + thread / kPieces;
        #pragma unroll
        for (int k = 0; k < kOwnPieces; ++k) {
            const index_t place = idle(k, thread) ? -1 : place_of(p, start, thread % kPieces + k * PRODUCERS);
            const index_t first = place < 0 ? 0 : place & -kPiece;
            source[k] = at(reinterpret_cast<const char*>(p.input + first), p, channel);
            bytes[k] = place < 0 ? 0 : (static_cast<int>(place & kPiece - 1) + 1) * static_cast<int>(sizeof(ELEMENT_T));
        }
    }
    /* Begins to copy a landing, whose channels begin with `first`, and goes on to the next one. */
    __device__ __forceinline__ void copy(const implicit_gemm_params& p, unit_t* target, int first, int thread) {
        constexpr bool kAllChannels = IN_CHANNELS == kLandings * kLandingChannels;
        const int own = thread / kPieces;
        #pragma unroll
        for (int k = 0; k < kOwnPieces; ++k) {
            const char* from = source[k];
            source[k] = at(from, p, kLandingChannels);
            if (idle(k, thread)) continue;
            unit_t* to = target + own * kPieces + thread % kPieces + k * PRODUCERS;
            #pragma unroll
            for (int c = 0; c < kLandingChannels; c += kSharers) {
                if (c + kSharers > kLandingChannels && c + own >= kLandingChannels) continue;
                const bool there = kAllChannels || first + c + own < IN_CHANNELS;
                const char* begin = kAllChannels || there ? at(from, p, c) : reinterpret_cast<const char*>(p.input);
                const int count = there ? bytes[k] : 0;
                if (PARTIAL_PIECES) copy_some_async(to + c * kPieces, begin, count);
                else copy_piece_async(to + c * kPieces, begin, count);
            }
        }
    }
    /* The same pixel so many channels on. */
    static __device__ __forceinline__ const char* at(const char* pixel, const implicit_gemm_params& p, int channels) {
        return pixel + static_cast<long long>(p.h_in * p.w_in) * (channels * static_cast<int>(sizeof(ELEMENT_T)));
    }
};

/* Begins to copy the box of a landing whose channels begin with `first`. */
__device__ __forceinline__ void copy_landing(
    const implicit_gemm_params& p, const item_t& item, unit_t* target, int first, barrier_t& landed) {
#if LANDING_BOX
    barrier_arrive_expecting(landed, kLandingUnits * 16);
    const box_t box = box_of(p, item.tile);
    tma_load(target, p.map, box.column, box.row, item.group * IN_CHANNELS + first, box.image, landed);
#endif
}

/* Spots that a loader makes units of: where they land, in bytes. */
constexpr int kShares = kSpots * LANDING_UNITS, kTurns = ceil_div(kShares, PRODUCERS);
constexpr bool kRoom = kProducerRegisters > 72;  // for what a thread has taken up, while it begins to copy
constexpr int kWords = SPLIT || !kRoom ? 8 : 16;  // that a thread takes up together
constexpr int kTogether = least(kTurns, ceil_div(kWords, kElements * ceil_div(kSpotBytes, 4)));  // turns
struct own_spots_t {
    int from[kTurns];

    /* `landed`: where all spots land. */
    __device__ __forceinline__ void place(const int* landed, int thread) {
        #pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            const int share = thread + turn * PRODUCERS, spot = share % kSpots, unit = share / kSpots;
            from[turn] = landed[spot] + unit * (kElements * kLandedChannel);
        }
    }
    /* Takes up what has landed for turns from `first` on. */
    __device__ __forceinline__ void take(
        spot_unit_t (&values)[kTogether], const unit_t* landing, int first, int thread) const {
        #pragma unroll
        for (int k = 0; k < kTogether; ++k) {
            const int turn = first + k;
            if (turn >= kTurns || thread + turn * PRODUCERS >= kShares) continue;
            const char* source = reinterpret_cast<const char*>(landing) + from[turn];
            #pragma unroll
            for (int e = 0; e < kElements; ++e)
                values[k].channel[e] = *reinterpret_cast<const words_t<kSpotBytes>*>(source + e * kLandedChannel);
        }
    }
    /* Lays it out as units of a patch. */
    __device__ __forceinline__ void put(
        unit_t* patch, const spot_unit_t (&values)[kTogether], int first, int thread) const {
        #pragma unroll
        for (int k = 0; k < kTogether; ++k) {
            const int turn = first + k, share = thread + turn * PRODUCERS;
            if (turn >= kTurns || share >= kShares) continue;
            const spot_t at = spot_at(share % kSpots);
            store_spot(patch + share / kSpots * UNIT_PITCH + at.plane * PATCH + at.position, values[k], thread);
        }
    }
};

/* Loads the patches of tile after tile, chunk after chunk. Landings begin LANDING_STAGES - 1 before they are read. Where the
 * spots of a tile land is worked out once, for all loaders, in one of two tables, which the next tile's does not touch.
 */
__device__ __forceinline__ void produce_patches(const implicit_gemm_params& p, const stages_t& s, int thread) {
    keep(thread);
    way_t begun(p), read(p);
    ring_t<PATCH_STAGES> ring;
    ring_t<LANDING_STAGES> from, to;
    ring_t<2> tables;
    own_pieces_t pieces;
    own_spots_t spots;
    const auto place = [&] {
        if (!LANDING_BOX && !begun.ended(p) && begun.landing == 0) pieces.place(p, begun.item, thread);
    };
    const auto begin = [&] {
        if (!begun.ended(p)) {
            unit_t* target = s.landing + to.stage * kLandingUnits;
            const int first = begun.landing * kLandingChannels;
            if (!LANDING_BOX) pieces.copy(p, target, first, thread);
            else if (thread == 0) copy_landing(p, begun.item, target, first, s.landed_full[to.stage]);
            begun.advance(p);
            to.advance();
        }
        if (!LANDING_BOX) cp_async_commit();
    };
    #pragma unroll 1
    for (int i = 1; i < LANDING_STAGES; ++i) {
        place();
        begin();
    }
    #pragma unroll 1
    for (; !read.ended(p); read.advance(p)) {
        int* landed = s.landed + tables.stage * kSpots;
        if (read.landing == 0) {
            if (LANDING_BOX) {
                const box_t box = box_of(p, read.item.tile);
                for (int i = thread; i < kSpots; i += PRODUCERS) landed[i] = boxed_spot(box, spot_at(i));
            } else {
                const start_t start = start_of(p, read.item.tile);
                for (int i = thread; i < kSpots; i += PRODUCERS) landed[i] = landed_spot(p, start, spot_at(i));
            }
            tables.advance();
        }
        place();
        if (LANDING_BOX) barrier_wait(s.landed_full[from.stage], from.parity);
        else cp_async_wait<LANDING_STAGES - 2>();
        named_barrier_sync<kLoadersMeet, PRODUCERS>();
        if (read.landing == 0) spots.place(landed, thread);
        const unit_t* landing = s.landing + from.stage * kLandingUnits;
        from.advance();
        const int unit = read.landing * LANDING_UNITS % UNITS;  // of the chunk
        unit_t* patch = s.patches + ring.stage * kPatchUnits + unit * UNIT_PITCH;
        spot_unit_t values[kTogether];
        if (!kRoom) begin();
        spots.take(values, landing, 0, thread);
        if (kRoom) begin();
        if (unit == 0) barrier_wait(s.patch_empty[ring.stage], ring.parity ^ 1);
        spots.put(patch, values, 0, thread);
        #pragma unroll
        for (int turn = kTogether; turn < kTurns; turn += kTogether) {
            spots.take(values, landing, turn, thread);
            spots.put(patch, values, turn, thread);
        }
        if (unit + LANDING_UNITS < UNITS) continue;
        fence_async_proxy();
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(s.patch_full[ring.stage]);
        ring.advance();
    }
}
