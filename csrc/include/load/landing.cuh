/* Loaders of sm90/implicit_gemm.cu whose inputs land in shared memory as they lie in memory, and become units from there. Copies
 * go on while threads compute, and are 16 bytes each, so that much more is on its way than registers hold.
 *
 * NCHW. A run is what of a patch lies in one piece in memory: a row of a strip or, where nothing lies between rows
 * (whole_images), an image; run_pitch positions, the zeros behind it among them. It lands as pieces of 16 bytes that are
 * aligned in memory, and begins somewhere in the first of them. Runs land behind each other, with two pieces to spare each,
 * because it depends on the tile where runs begin. For channels, one after the other, the same: planes are whole pieces.
 *
 *   landing [LANDING_STAGES][LANDING_UNITS units of channels][UNIT_H][run_pieces] of 16 bytes
 *
 * What is left of the image may be read from a piece before a run's first input: nobody uses it. Zeros land for the rest of
 * a run that is right of the image, and of a piece, where not all rows are whole pieces (PARTIAL_PIECES).
 */
#pragma once

#include "ptx/cp_async.cuh"
#include "load/patch_elements.cuh"
#include "ptx/keep.cuh"
#include "ptx/named_barrier.cuh"

constexpr int kLandings = CHUNKS * UNITS / LANDING_UNITS;  // of an item
static_assert(UNITS % LANDING_UNITS == 0 && LANDING_STAGES >= 2, "a chunk is whole landings; one lands while another is read");

/* Where a patch begins: in which run, of all, and after how many of its positions. */
struct start_t { int run, skipped; };
__device__ __forceinline__ start_t start_of(const implicit_gemm_params& p, int tile) {
    const int position = tile * kTile + p.first + p.strip_rows * p.pitch;  // from one strip before the first
    const int run = divided(position, p.by_run_pitch);
    return {run - (p.whole_images ? 1 : p.strip_rows), position - run * p.run_pitch};
}

/* A run: pixels of an image. `origin` is that of its first position, or would be; those in the image are from begin to end. */
struct run_t {
    int image;  // -1: there is no such run
    int origin, begin, end;
};
__device__ __forceinline__ run_t run_of(const implicit_gemm_params& p, int run, int plane_row) {
    if (p.whole_images) {
        const bool there = run >= 0 && run < p.batch;
        return {there ? run : -1, 0, 0, p.h_in * p.w_in};
    }
    const int strip = divided(run + p.strip_rows, p.by_strip_rows) - 1, row = run - strip * p.strip_rows;
    const int image = strip < 0 ? p.batch : divided(strip, p.by_strips), across = strip - image * p.strips;
    const int ih = (row + p.origin_h) * UNIT_H + plane_row;
    if (image >= p.batch || static_cast<unsigned>(ih) >= p.h_in) return {-1, 0, 0, 0};
    const int begin = ih * p.w_in;
    return {image, begin + (across * p.strip_cells + p.origin_w) * UNIT_W, begin, begin + p.w_in};
}

/* How the i-th run of a patch lands: its first piece, and the pixel that this begins with. */
struct landed_t { int piece, pixel; };
__device__ __forceinline__ landed_t landed(const implicit_gemm_params& p, const start_t& start, int i, int origin) {
    const int before = i * p.run_pitch - start.skipped;  // positions
    return {max(before, 0) * UNIT_W / kPiece + 2 * i, origin + max(-before, 0) * UNIT_W & -kPiece};
}

/* Where a piece of a patch comes from: the place of the group's first channel in the input, plus one less than the elements
 * to copy; -1 for zeros.
 */
__device__ __forceinline__ index_t place_of(const implicit_gemm_params& p, const start_t& start, int piece) {
    const int row = divided_small(piece, p.by_run_pieces), own = piece - row * p.run_pieces;
    const int i = divided((own + 1) * kPiece + start.skipped * UNIT_W - 1, p.by_run_span);
    const run_t run = run_of(p, start.run + i, row);
    const landed_t at = landed(p, start, i, run.origin);
    const int pixel = at.pixel + (own - at.piece) * kPiece;
    const int wanted = min(p.run_pitch, start.skipped + p.patch - i * p.run_pitch) * UNIT_W;  // pixels of the run
    const int last = min(run.end, run.origin + wanted);
    const int count = min(kPiece, PARTIAL_PIECES || pixel >= last ? last - pixel : kPiece);
    if (run.image < 0 || count <= 0 || pixel + kPiece <= run.begin) return -1;
    const index_t pixels = static_cast<index_t>(p.h_in) * p.w_in;
    return run.image * (p.groups * IN_CHANNELS * pixels) + pixel + count - 1;
}

/* Where a spot lands, in bytes. */
__device__ __forceinline__ int landed_spot(const implicit_gemm_params& p, const start_t& start, spot_t spot) {
    const int row = spot.plane / UNIT_W, position = start.skipped + spot.position;
    const int i = divided(position, p.by_run_pitch), column = position - i * p.run_pitch;
    const run_t run = run_of(p, start.run + i, row);
    const landed_t at = landed(p, start, i, run.origin);
    const int pixel = run.origin + column * UNIT_W + spot.plane % UNIT_W;
    return ((row * p.run_pieces + at.piece) * kPiece + pixel - at.pixel) * static_cast<int>(sizeof(ELEMENT_T));
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

/* The piece that a loader copies: of one place in the patch, in every kSharers-th channel, which it shares with others. */
constexpr int kSharers = SHARERS;
struct own_piece_t {
    const char* source;  // of the next landing's first channel that is the loader's
    int bytes;
    int pieces, sharer, piece;  // of a channel; which of those who share, and its piece

    __device__ __forceinline__ own_piece_t(const implicit_gemm_params& p, int thread)
        : pieces(UNIT_H * p.run_pieces), sharer(divided_small(thread, p.by_pieces)), piece(thread - sharer * pieces) {}
    __device__ __forceinline__ bool idle() const { return sharer >= kSharers; }
    __device__ __forceinline__ void place(const implicit_gemm_params& p, const item_t& item) {
        const start_t start = start_of(p, item.tile);
        const index_t place = idle() ? -1 : place_of(p, start, piece), first = place < 0 ? 0 : place & -kPiece;
        source = at(reinterpret_cast<const char*>(p.input + first), p, item.group * IN_CHANNELS + sharer);
        bytes = place < 0 ? 0 : (static_cast<int>(place & kPiece - 1) + 1) * static_cast<int>(sizeof(ELEMENT_T));
    }
    /* Begins to copy a landing, whose channels begin with `channel`, and goes on to the next one. */
    __device__ __forceinline__ void copy(const implicit_gemm_params& p, unit_t* target, int channel) {
        constexpr bool kAllChannels = IN_CHANNELS == kLandings * kLandingChannels;
        const char* from = source;
        source = at(from, p, kLandingChannels);
        if (idle()) return;
        unit_t* to = target + sharer * pieces + piece;
        #pragma unroll
        for (int c = 0; c < kLandingChannels; c += kSharers) {
            if (c + kSharers > kLandingChannels && c + sharer >= kLandingChannels) continue;
            const bool there = kAllChannels || channel + c + sharer < IN_CHANNELS;
            const char* begin = kAllChannels || there ? at(from, p, c) : reinterpret_cast<const char*>(p.input);
            const int count = there ? bytes : 0;
            if (PARTIAL_PIECES) copy_some_async(to + c * pieces, begin, count);
            else copy_piece_async(to + c * pieces, begin, count);
        }
    }
    /* Address of a pixel that lies `channels` channels after this one. */
    static __device__ __forceinline__ const char* at(const char* pixel, const implicit_gemm_params& p, int channels) {
        return pixel + static_cast<long long>(p.h_in * p.w_in) * (channels * static_cast<int>(sizeof(ELEMENT_T)));
    }
};

/* Spots that a loader makes units of: where they land, in bytes, and where they are laid out, in units. */
constexpr int kTurns = LANDED_TURNS;  // at least those that there are
constexpr bool kRoom = kProducerRegisters > 72;  // for what a thread has taken up, while it begins to copy
constexpr int kWords = SPLIT || !kRoom ? 8 : 16;  // that a thread takes up together
constexpr int kTogether = least(kTurns, ceil_div(kWords, kElements * ceil_div(kSpotBytes, 4)));  // turns
struct own_spots_t {
    int from[kTurns];
    int shares, channel_bytes;

    __device__ __forceinline__ explicit own_spots_t(const implicit_gemm_params& p)
        : shares(spots_of(p) * LANDING_UNITS), channel_bytes(p.landed_channel) {}
    /* `landed`: where all spots land. */
    __device__ __forceinline__ void place(const implicit_gemm_params& p, const int* landed, int thread) {
        #pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            const int share = thread + turn * PRODUCERS, unit = divided_small(share, p.by_spots);
            if (share < shares) from[turn] = landed[share - unit * spots_of(p)] + unit * (kElements * channel_bytes);
        }
    }
    /* Takes up what has landed for turns from `first` on. */
    __device__ __forceinline__ void take(
        spot_unit_t (&values)[kTogether], const unit_t* landing, int first, int thread) const {
        #pragma unroll
        for (int k = 0; k < kTogether; ++k) {
            const int turn = first + k;
            if (turn >= kTurns || thread + turn * PRODUCERS >= shares) continue;
            const char* source = reinterpret_cast<const char*>(landing) + from[turn];
            #pragma unroll
            for (int e = 0; e < kElements; ++e)
                values[k].channel[e] = *reinterpret_cast<const words_t<kSpotBytes>*>(source + e * channel_bytes);
        }
    }
    /* Lays it out as units of a patch. */
    __device__ __forceinline__ void put(
        const implicit_gemm_params& p, unit_t* patch, const spot_unit_t (&values)[kTogether], int first, int thread) const {
        #pragma unroll
        for (int k = 0; k < kTogether; ++k) {
            const int turn = first + k, share = thread + turn * PRODUCERS;
            if (turn >= kTurns || share >= shares) continue;
            const int unit = divided_small(share, p.by_spots);
            const int place = place_in_unit(p, spot_at(p, share - unit * spots_of(p)));
            store_spot(p, patch + unit * p.unit_pitch + place, values[k], thread);
        }
    }
};

/* Loads the patches of tile after tile, chunk after chunk. Landings begin LANDING_STAGES - 1 before they are read. Where the
 * spots of a tile land is worked out once, for all loaders, in one of two tables, which the next tile's does not touch.
 */
__device__ __forceinline__ void produce_patches(const implicit_gemm_params& p, const stages_t& s, int thread) {
    keep(thread);
    way_t begun(p), read(p);
    const int spots_of_patch = spots_of(p);
    ring_t ring, from, to, tables;
    own_piece_t piece(p, thread);
    own_spots_t spots(p);
    const auto place = [&] {
        if (!begun.ended(p) && begun.landing == 0) piece.place(p, begun.item);
    };
    const auto begin = [&] {
        if (!begun.ended(p)) {
            piece.copy(p, s.landing + to.stage * landing_units(p), begun.landing * kLandingChannels);
            begun.advance(p);
            to.advance(LANDING_STAGES);
        }
        cp_async_commit();
    };
    #pragma unroll 1
    for (int i = 1; i < LANDING_STAGES; ++i) {
        place();
        begin();
    }
    #pragma unroll 1
    for (; !read.ended(p); read.advance(p)) {
        int* landed = s.landed + tables.stage * spots_of_patch;
        if (read.landing == 0) {
            const start_t start = start_of(p, read.item.tile);
            #pragma unroll 1
            for (int i = thread; i < spots_of_patch; i += PRODUCERS) landed[i] = landed_spot(p, start, spot_at(p, i));
            tables.advance(2);
        }
        place();
        cp_async_wait<LANDING_STAGES - 2>();
        named_barrier_sync<kLoadersMeet, PRODUCERS>();
        if (read.landing == 0) spots.place(p, landed, thread);
        const unit_t* landing = s.landing + from.stage * landing_units(p);
        from.advance(LANDING_STAGES);
        const int unit = read.landing * LANDING_UNITS % UNITS;  // of the chunk
        unit_t* patch = s.patches + ring.stage * patch_units(p) + unit * p.unit_pitch;
        spot_unit_t values[kTogether];
        if (!kRoom) begin();
        spots.take(values, landing, 0, thread);
        if (kRoom) begin();
        if (unit == 0) barrier_wait(s.patch_empty[ring.stage], ring.parity ^ 1);
        spots.put(p, patch, values, 0, thread);
        #pragma unroll
        for (int turn = kTogether; turn < kTurns; turn += kTogether) {
            spots.take(values, landing, turn, thread);
            spots.put(p, patch, values, turn, thread);
        }
        if (unit + LANDING_UNITS < UNITS) continue;
        fence_async_proxy();
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(s.patch_full[ring.stage]);
        ring.advance(p.patch_stages);
    }
}
