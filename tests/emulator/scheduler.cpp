/* Launches a kernel on the CPU: one block after the other, every thread of a block a fiber.
 *
 * A fiber runs until it waits at a barrier or returns. Who runs next is pseudo-random and changes at every barrier, in
 * the same way each time: where a __syncthreads() is missing, some thread reads shared memory before it is written.
 * Shared memory holds NaN (0xff) when a block starts, so that shows in the result. What is asynchronous happens as
 * early as it may for some, and as late as it may for others.
 *
 * A mistake that is noticed while a kernel runs ends the launch with a message: barriers that not all threads reach,
 * mbarriers, bulk copies and wgmmas that are used in other ways than they may be, writes past the end of shared memory,
 * and what -fsanitize inserts checks for (see on_trap and the handlers below).
 */
#include "cuda.h"

#include <deque>
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

emulator_launch_t emulator_now;

namespace {

constexpr unsigned kMostThreads = 1024;
constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kStaticBytes = 48 << 10;    // of shared memory, all arrays of a kernel together
constexpr size_t kDynamicBytes = 227 << 10;  // the most that any architecture has
constexpr size_t kGuardBytes = 512;          // behind shared memory, where nothing may be written
constexpr size_t kMostArrays = 8;
constexpr unsigned char kUnwritten = 0xff;
constexpr unsigned kWarpgroup = 128;
constexpr int kNamedBarriers = 16;          // with that of the whole block, number 0
constexpr unsigned kTurns = 8;                 // by fewer than these a thread falls behind others, where it may
constexpr int kMostInBarrier = (1 << 20) - 1;  // arrivals, or bytes

enum state_t { READY, AT_BLOCK_BARRIER, AT_NAMED_BARRIER, AT_WARP_BARRIER, AT_WGMMA_WAIT, AT_MBARRIER, DONE };

/* A cp.async. */
struct copy_t {
    void* target;
    const void* source;
    int bytes, source_bytes;
    unsigned group = 0;  // that it is committed with

    void run() const {
        memset(target, 0, bytes);
        memcpy(target, source, source_bytes);
    }
};

/* An mbarrier. In shared memory there is only kBarrierMark, to see whether somebody writes there. */
struct barrier_t {
    unsigned char* place;
    const void* owner;    // the fiber that made it
    bool made_visible;    // to the asynchronous proxy
    int arrivals;         // of a phase
    int missing, bytes;   // in the current phase: arrivals, and what is announced less what has come
    unsigned phase;       // number of phases that are over
    unsigned seen;        // of those that some thread knows to be
    unsigned copied;      // of those that have to be for all bulk copies to be done

    void proceed() {
        if (missing > 0 || bytes != 0) return;
        missing = arrivals;
        ++phase;
    }
    bool is_over(unsigned parity) {
        if (phase % 2 == parity) return false;
        seen = phase;
        return true;
    }
};
constexpr unsigned long long kBarrierMark = 0xba221e2ba221e2ull;

/* A cp.async.bulk. */
struct bulk_copy_t {
    copy_t copy;
    size_t barrier;
};

/* A thread's arrival at a barrier that waits for copies. */
struct arrival_t {
    std::vector<copy_t> copies;
    const void* thread;
    size_t barrier;
};

/* A wgmma of one thread: its part of D. */
struct product_t {
    int type, columns, swizzled;
    float* d;
    unsigned long long a, b;
    bool accumulate;
    unsigned group;  // that it is committed with
    bool done;
    bool of_words;  // whether A is not in shared memory, but these, of rows g and g + 8: [t][g or g + 8, and 4 words on]
    std::array<unsigned, 16> words;
    bool turned = false;  // whether A is swizzled too

    void run(int thread) const;
};

/* What all threads of a warpgroup have to do alike: the arguments of a wgmma or a wait. */
using step_t = std::array<unsigned long long, 5>;

struct fiber_t {
    emulator_thread_t thread;  // first, so that emulator_now.thread leads to its fiber
    std::vector<copy_t> copies;  // that it has to wait for
    unsigned copy_groups;        // committed
    int named_barrier, expected; // that it waits at, and for how many threads
    std::vector<product_t> products;  // likewise
    unsigned groups;           // of wgmmas, committed
    bool fenced;               // whether wgmma_fence was called since the last wait
    size_t steps;              // that it has done with its warpgroup
    unsigned products_of_words; // begun
    unsigned mask;             // of the warp barrier it waits at
    size_t barrier;            // the mbarrier it waits at
    unsigned parity;
    bool started;
    ucontext_t start;
    jmp_buf resume;
    std::unique_ptr<char[]> stack;
};

struct shared_array_t {
    int declaration;
    unsigned char* begin;
    size_t bytes;
};

fiber_t fibers[kMostThreads];
unsigned char states[kMostThreads];  // of the fibers, state_t; not in them, since they are looked through again and again
unsigned char turns[kMostThreads];   // for which a fiber stays where it is, though it could go on
unsigned thread_count;
size_t dynamic_bytes;  // of shared memory
uint32_t random_state;
unsigned long long exchange[kMostThreads / 32][32];
jmp_buf scheduler;
char message[512];  // empty while nothing is wrong

void (*kernel_call)(const void*);
const void* kernel_params;

alignas(1024) unsigned char static_shared[kStaticBytes + kMostArrays * (kGuardBytes + 16)];
// The current block's.
std::vector<shared_array_t> shared_arrays;
std::vector<barrier_t> barriers;
int passed[kNamedBarriers];  // threads that came to a barrier and went on, since it was last complete
std::vector<bulk_copy_t> bulk_copies;  // to be done
std::vector<arrival_t> arrivals;       // to come
std::deque<std::vector<unsigned char>> boxes;  // that were copied from
std::vector<step_t> steps[kMostThreads / kWarpgroup];

uint32_t draw() {
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

/* A pseudo-random number below another one. */
uint32_t below(uint32_t count) { return static_cast<uint32_t>(1ull * draw() * count >> 24); }

fiber_t& current() { return *reinterpret_cast<fiber_t*>(emulator_now.thread); }
unsigned char& state_of(const fiber_t& fiber) { return states[&fiber - fibers]; }

void leave() {
    if (_setjmp(current().resume) == 0) _longjmp(scheduler, 1);
}

template <typename... Values> [[noreturn]] void fail(const char* format, Values... values) {
    snprintf(message, sizeof(message), format, values...);
    _longjmp(scheduler, 1);
}

/* A check has failed, in a kernel that does not call the handlers below. */
void on_trap(int) { fail("a trap"); }

/* While there is one, traps end the launch. The instruction is an illegal one, or one for debuggers. */
struct trapping_t {
    static constexpr int kSignals[2] = {SIGILL, SIGTRAP};
    struct sigaction before[2];

    trapping_t() {
        struct sigaction action = {};
        action.sa_handler = on_trap;
        action.sa_flags = SA_NODEFER;  // the handler does not return
        for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &action, &before[i]);
    }
    ~trapping_t() {
        for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &before[i], nullptr);
    }
};

bool waited;  // for the launch before, a thread of the block that runs

/* Goes on with the next block or launch. */
void fiber_main() {
    for (;;) {
        kernel_call(kernel_params);
        if (!current().products.empty()) fail("a wgmma that was never waited for");
        state_of(current()) = DONE;
        leave();
    }
}

/* Lets others go first. */
void fall_behind() {
    turns[&current() - fibers] = below(kTurns);
    leave();
}

void prepare(fiber_t& fiber) {
    if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
    if (state_of(fiber) != DONE) {  // it is new, or was left where a launch was ended
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.get();
        fiber.start.uc_stack.ss_size = kStackBytes;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, fiber_main, 0);
        fiber.started = false;
    }
    state_of(fiber) = READY;
    turns[&fiber - fibers] = 0;
    fiber.copies.clear();
    fiber.copy_groups = 0;
    fiber.products.clear();
    fiber.groups = 0;
    fiber.fenced = false;
    fiber.steps = 0;
    fiber.products_of_words = 0;
}

/* Runs a fiber until it leaves. */
__attribute__((noinline)) void run(fiber_t& fiber) {
    emulator_now.thread = &fiber.thread;
    if (_setjmp(scheduler) != 0) return;
    if (std::exchange(fiber.started, true)) _longjmp(fiber.resume, 1);
    setcontext(&fiber.start);
}

/* Lets those threads of a warp go on whose whole mask waits at the barrier. Returns whether there were any. */
bool release_warp(unsigned first, unsigned lanes) {
    const fiber_t* const warp = fibers + first;
    unsigned char* const state = states + first;
    bool released = false;
    for (unsigned lane = 0; lane < lanes; ++lane) {
        if (state[lane] != AT_WARP_BARRIER) continue;
        const unsigned mask = warp[lane].mask;
        bool all = true;
        for (unsigned other = 0; all && other < lanes; ++other)
            if (mask >> other & 1) all = state[other] == AT_WARP_BARRIER && warp[other].mask == mask;
        if (!all) continue;
        released = true;
        for (unsigned other = 0; other < lanes; ++other)
            if (mask >> other & 1) state[other] = READY;
    }
    return released;
}

/* Lets go on who waits at a named barrier, where all have come. Returns whether there were any. */
bool release_named() {
    int waiting[kNamedBarriers], expected[kNamedBarriers] = {};
    memcpy(waiting, passed, sizeof(passed));
    for (unsigned i = 0; i < thread_count; ++i) {
        if (states[i] != AT_NAMED_BARRIER) continue;
        ++waiting[fibers[i].named_barrier];
        expected[fibers[i].named_barrier] = fibers[i].expected;
    }
    bool released = false;
    for (int number = 1; number < kNamedBarriers; ++number) {
        if (expected[number] == 0 || waiting[number] < expected[number]) continue;
        passed[number] = 0;
        released = true;
        for (unsigned i = 0; i < thread_count; ++i)
            if (states[i] == AT_NAMED_BARRIER && fibers[i].named_barrier == number) states[i] = READY;
    }
    return released;
}

/* Lets a warpgroup go on after its wgmmas. Returns whether it does. */
bool release_warpgroup(unsigned first) {
    for (unsigned i = first; i < first + kWarpgroup; ++i)
        if (states[i] != AT_WGMMA_WAIT) return false;
    memset(states + first, READY, kWarpgroup);
    return true;
}

void do_copy(const bulk_copy_t& bulk) {
    bulk.copy.run();
    barriers[bulk.barrier].bytes -= bulk.copy.bytes;
    barriers[bulk.barrier].proceed();
}

void arrive(barrier_t& barrier, int bytes) {
    if (barrier.missing == 0) fail("more than %d arrivals in a phase of an mbarrier", barrier.arrivals);
    barrier.bytes += bytes;
    --barrier.missing;
    barrier.proceed();
}

/* Has the i-th of the arrivals that are to come. */
void have_arrival(size_t i) {
    std::swap(arrivals[i], arrivals.back());
    const arrival_t arrival = std::move(arrivals.back());
    arrivals.pop_back();
    for (const copy_t& copy : arrival.copies) copy.run();
    arrive(barriers[arrival.barrier], 0);
}

/* Does one of the bulk copies that are left, or has one of the arrivals. */
bool do_some_copy() {
    if (!arrivals.empty()) {
        have_arrival(below(arrivals.size()));
        return true;
    }
    if (bulk_copies.empty()) return false;
    std::swap(bulk_copies[below(bulk_copies.size())], bulk_copies.back());
    const bulk_copy_t bulk = bulk_copies.back();
    bulk_copies.pop_back();
    do_copy(bulk);
    return true;
}

/* Lets go on who may. What is asynchronous waits until everything else does. Threads that have returned need not come to
 * the block's barrier. */
bool release() {
    unsigned count[DONE + 1] = {};
    for (unsigned i = 0; i < thread_count; ++i) {
        if (states[i] == AT_MBARRIER && barriers[fibers[i].barrier].is_over(fibers[i].parity)) states[i] = READY;
        ++count[states[i]];
    }
    bool ready = count[READY] > 0;
    if (count[AT_WARP_BARRIER] > 0)
        for (unsigned first = 0; first < thread_count; first += 32)
            ready |= release_warp(first, thread_count - first < 32 ? thread_count - first : 32);
    if (count[AT_WGMMA_WAIT] > 0)
        for (unsigned first = 0; first + kWarpgroup <= thread_count; first += kWarpgroup)
            ready |= release_warpgroup(first);
    if (count[AT_NAMED_BARRIER] > 0) ready |= release_named();
    if (ready) return true;
    if (count[AT_BLOCK_BARRIER] > 0 && count[AT_BLOCK_BARRIER] + count[DONE] == thread_count) {
        for (unsigned i = 0; i < thread_count; ++i)
            if (states[i] == AT_BLOCK_BARRIER) states[i] = READY;
        return true;
    }
    return count[AT_MBARRIER] > 0 && do_some_copy();
}

/* After all that can run has run. */
void check_end() {
    unsigned count[DONE + 1] = {};
    for (unsigned i = 0; i < thread_count; ++i) ++count[states[i]];
    if (count[DONE] < thread_count)
        snprintf(message, sizeof(message),
                 "deadlock: %u threads at a block barrier, %u at one with a number, %u at a warp barrier, %u at "
                 "wgmma_wait, %u at an mbarrier, %u returned",
                 count[AT_BLOCK_BARRIER], count[AT_NAMED_BARRIER], count[AT_WARP_BARRIER],
                 count[AT_WGMMA_WAIT], count[AT_MBARRIER], count[DONE]);
    for (const barrier_t& barrier : barriers)
        if (!message[0] && barrier.seen < barrier.copied)
            snprintf(message, sizeof(message), "a bulk copy that was never waited for");
}

bool written(const unsigned char* begin) {
    for (size_t i = 0; i < kGuardBytes; ++i)
        if (begin[i] != kUnwritten) return true;
    return false;
}

void run_block() {
    shared_arrays.clear();
    barriers.clear();
    memset(passed, 0, sizeof(passed));
    bulk_copies.clear();
    arrivals.clear();
    boxes.clear();
    for (std::vector<step_t>& of_warpgroup : steps) of_warpgroup.clear();
    memset(emulator_dynamic_shared, kUnwritten, dynamic_bytes + kGuardBytes);
    for (unsigned i = 0; i < thread_count; ++i) prepare(fibers[i]);
    static unsigned short ready[kMostThreads];
    do {
        unsigned count = 0;
        for (unsigned i = 0; i < thread_count; ++i) {
            if (states[i] != READY) continue;
            if (turns[i] > 0) --turns[i];
            else ready[count++] = i;
        }
        for (unsigned i = 0; i < count; ++i) {
            std::swap(ready[i], ready[i + below(count - i)]);
            run(fibers[ready[i]]);
            if (message[0]) return;
        }
    } while (release());
    check_end();
    if (message[0]) return;
    bool past_end = written(emulator_dynamic_shared + dynamic_bytes);
    for (const shared_array_t& array : shared_arrays) past_end |= written(array.begin + array.bytes);
    if (past_end) snprintf(message, sizeof(message), "a write past the end of shared memory");
}

bool in_shared(const void* address, size_t bytes) {
    const auto inside = [&](const unsigned char* begin, size_t size) {
        const size_t offset = static_cast<const unsigned char*>(address) - begin;  // large where it lies before
        return offset <= size && bytes <= size - offset;
    };
    bool found = inside(emulator_dynamic_shared, dynamic_bytes);
    for (const shared_array_t& array : shared_arrays) found |= inside(array.begin, array.bytes);
    return found;
}

/* Number of the barrier at a place. */
size_t barrier_at(const void* place) {
    for (size_t i = 0; i < barriers.size(); ++i) {
        if (barriers[i].place != place) continue;
        if (memcmp(place, &kBarrierMark, sizeof(kBarrierMark)) != 0) fail("a write over an mbarrier");
        return i;
    }
    fail("an mbarrier that was not initialised");
}

// wgmma. A matrix is what csrc/include/ptx/wgmma.cuh says.

constexpr unsigned long long kMatrixBits = 0x3fff'3fff'3fff, kSwizzledBit = 1ull << 62;
constexpr unsigned long long kLines128 = 1, kLines64 = 2;  // bits 62-63
size_t address_of(unsigned long long matrix) { return (matrix & 0x3fff) * 16; }
size_t leading_of(unsigned long long matrix) { return (matrix >> 16 & 0x3fff) * 16; }
size_t stride_of(unsigned long long matrix) { return (matrix >> 32 & 0x3fff) * 16; }
/* For a matrix in lines; 0 for others. */
size_t line_bytes_of(unsigned long long matrix) { return matrix >> 62 == kLines128 ? 128 : matrix >> 62 == kLines64 ? 64 : 0; }

using floats_t = float __attribute__((vector_size(16)));
using words_t = uint32_t __attribute__((vector_size(16)));
using halves_t = uint16_t __attribute__((vector_size(8)));

/* 16 bytes of a matrix as floats. */
template <int TYPE> struct piece_t {
    static constexpr int kVectors = TYPE == EMULATOR_TF32 ? 1 : 2;
    floats_t values[kVectors];

    explicit piece_t(const unsigned char* from) {
        for (int i = 0; i < kVectors; ++i) {
            words_t words;
            if (TYPE == EMULATOR_TF32) {
                memcpy(&words, from, sizeof(words));
                words &= ~0x1fffu;
            } else {
                halves_t halves;
                memcpy(&halves, from + i * sizeof(halves), sizeof(halves));
                words = __builtin_convertvector(halves, words_t);
                if (TYPE == EMULATOR_BFLOAT16) words <<= 16;
                else words = float_words(words);
            }
            values[i] = reinterpret_cast<floats_t>(words);
        }
    }
    /* What emulator_half_to_float does. */
    static words_t float_words(words_t halves) {
        const floats_t magnitude = reinterpret_cast<floats_t>((halves & 0x7fff) << 13) * 0x1p112f;
        const words_t not_finite = reinterpret_cast<words_t>((halves & 0x7c00) == 0x7c00);
        return reinterpret_cast<words_t>(magnitude) | (not_finite & 0x7f800000) | (halves & 0x8000) << 16;
    }
};

/* Where a byte of swizzled lines is, which would be at `address`. */
size_t swizzled(size_t address, size_t line_bytes) {
    return address ^ (address / 128 % (line_bytes == 128 ? 8 : 4)) * 16;
}

/* Two columns of a swizzled B, or two rows of such an A, as ones that are not; the first has an even number. */
struct swizzled_rows_t {
    uint16_t values[2][16];

    swizzled_rows_t(unsigned long long matrix, unsigned column) {
        const size_t first = address_of(matrix) + column / 64 * leading_of(matrix), begin = column % 8 * 2;
        for (unsigned half = 0; half < 2; ++half) {
            const size_t lines = first + half * stride_of(matrix);
            for (unsigned k = 0; k < 8; ++k) {
                const size_t line = lines + k * 128, piece = column % 64 / 8 ^ line / 128 % 8;
                uint16_t both[2];
                memcpy(both, emulator_dynamic_shared + line + piece * 16 + begin, sizeof(both));
                for (int i = 0; i < 2; ++i) values[i][half * 8 + k] = both[i];
            }
        }
    }
    const unsigned char* row(int i) const { return reinterpret_cast<const unsigned char*>(values[i]); }
};

/* A row of a matrix; of B, a column. */
template <int TYPE> struct row_t {
    piece_t<TYPE> first, second;

    row_t(unsigned long long matrix, int row)
        : first(place_of(matrix, row, 0)), second(place_of(matrix, row, 1)) {}
    row_t(const unsigned char* place, size_t leading) : first(place), second(place + leading) {}
    static const unsigned char* place_of(unsigned long long matrix, int row, int piece) {
        const size_t group = address_of(matrix) + row / 8 * stride_of(matrix), line_bytes = line_bytes_of(matrix);
        if (line_bytes > 0) return emulator_dynamic_shared + swizzled(group + row % 8 * line_bytes + piece * 16, line_bytes);
        return emulator_dynamic_shared + group + piece * leading_of(matrix) + row % 8 * 16;
    }
    float times(const row_t& other) const {
        floats_t sums = first.values[0] * other.first.values[0] + second.values[0] * other.second.values[0];
        for (int i = 1; i < first.kVectors; ++i)
            sums += first.values[i] * other.first.values[i] + second.values[i] * other.second.values[i];
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
};

/* Row g or g + 8 of A of a thread's warp; `half` says which. */
template <int TYPE> row_t<TYPE> row_of(const product_t& product, int row, int half) {
    if (product.turned) return {swizzled_rows_t(product.a, row / 2 * 2).row(row % 2), 16};
    if (!product.of_words) return {product.a, row};
    unsigned words[8];
    for (int i = 0; i < 8; ++i) words[i] = product.words[i % 4 * 4 + i / 4 * 2 + half];
    return {reinterpret_cast<const unsigned char*>(words), 16};
}

template <int TYPE> void multiply(const product_t& product, int thread) {
    const int row = thread / 32 % 4 * 16 + thread % 32 / 4;
    const row_t<TYPE> rows[2] = {row_of<TYPE>(product, row, 0), row_of<TYPE>(product, row + 8, 1)};
    float* d = product.d;
    const auto add = [&](int e, const row_t<TYPE>& other) {
        for (int h = 0; h < 2; ++h) d[2 * h + e] = (product.accumulate ? d[2 * h + e] : 0) + rows[h].times(other);
    };
    for (int column = thread % 4 * 2; column < product.columns; column += 8, d += 4) {
        if (product.swizzled) {
            const swizzled_rows_t others(product.b, column);
            for (int e = 0; e < 2; ++e) add(e, {others.row(e), 16});
        } else {
            for (int e = 0; e < 2; ++e) add(e, {product.b, column + e});
        }
    }
}

void product_t::run(int thread) const {
    if (type == EMULATOR_HALF) multiply<EMULATOR_HALF>(*this, thread);
    else if (type == EMULATOR_BFLOAT16) multiply<EMULATOR_BFLOAT16>(*this, thread);
    else multiply<EMULATOR_TF32>(*this, thread);
}

/* Notes what a thread does, which all threads of its warpgroup do. */
void do_alike(const step_t& step) {
    const uint3& block = emulator_now.block_dim;
    fiber_t& fiber = current();
    if (block.y * block.z != 1 || fiber.thread.index.x / kWarpgroup >= block.x / kWarpgroup)
        fail("wgmma by threads that are no whole warpgroup");
    std::vector<step_t>& of_warpgroup = steps[fiber.thread.index.x / kWarpgroup];
    if (fiber.steps == of_warpgroup.size()) of_warpgroup.push_back(step);
    if (of_warpgroup[fiber.steps++] != step) fail("a wgmma that the threads of a warpgroup do not all do alike");
}

/* A product happens at any time until the thread waits for it: here at once for odd warps, and in the end for even ones. */
void begin(product_t product) {
    fiber_t& fiber = current();
    if (!fiber.fenced) fail("a wgmma without wgmma_fence");
    product.done = fiber.thread.index.x / 32 % 2;
    fiber.products.push_back(product);
    if (product.done) product.run(fiber.thread.index.x);
}

void check_swizzled_matrix(unsigned long long matrix, int columns) {
    if ((matrix & ~kMatrixBits) != kSwizzledBit) fail("%016llx for a swizzled matrix of wgmma", matrix);
    if ((address_of(matrix) | leading_of(matrix) | stride_of(matrix)) % 128 != 0) fail("a misaligned swizzled matrix");
    if (address_of(matrix) + (columns - 1) / 64 * leading_of(matrix) + stride_of(matrix) + 1024 > dynamic_bytes)
        fail("a matrix of wgmma past the end of shared memory");
}

void check_matrix(unsigned long long matrix, int rows) {
    const size_t line_bytes = line_bytes_of(matrix);
    if ((matrix & ~kMatrixBits) != matrix >> 62 << 62 || matrix >> 62 == 3) fail("%016llx for a matrix of wgmma", matrix);
    if (line_bytes > 0) {
        if (address_of(matrix) % line_bytes > line_bytes - 32) fail("a line of wgmma that goes on in the next");
        if (stride_of(matrix) % (line_bytes == 128 ? 128 : 512) != 0) fail("lines of wgmma that are not in the same order");
        if (address_of(matrix) / line_bytes * line_bytes + (rows / 8 - 1) * stride_of(matrix) + 8 * line_bytes > dynamic_bytes)
            fail("a matrix of wgmma past the end of shared memory");
    } else if (address_of(matrix) + (rows / 8 - 1) * stride_of(matrix) + leading_of(matrix) + 128 > dynamic_bytes)
        fail("a matrix of wgmma past the end of shared memory");
}

}  // namespace

extern "C" {

alignas(1024) unsigned char emulator_dynamic_shared[kDynamicBytes + kGuardBytes];

void emulator_block_barrier() {
    state_of(current()) = AT_BLOCK_BARRIER;
    leave();
}

void emulator_warp_barrier(unsigned mask) {
    fiber_t& fiber = current();
    const int lane = fiber.thread.lane;
    if (!(mask >> lane & 1)) fail("lane %d is not in the mask %08x of its warp barrier", lane, mask);
    state_of(fiber) = AT_WARP_BARRIER;
    fiber.mask = mask;
    leave();
}

/* The shared array of a declaration: the first thread of a block that comes along makes it. */
void* emulator_shared_array(int declaration, unsigned long bytes) {
    size_t used = 0, reserved = 0;
    for (const shared_array_t& array : shared_arrays) {
        if (array.declaration == declaration) return array.begin;
        used += array.bytes;
        reserved = (array.begin - static_shared) + array.bytes + kGuardBytes;
    }
    if (used + bytes > kStaticBytes) fail("%lu bytes of static shared memory, of at most 48 KiB", used + bytes);
    if (shared_arrays.size() == kMostArrays) fail("more than %lu shared arrays", kMostArrays);
    unsigned char* begin = static_shared + (reserved + 15) / 16 * 16;
    memset(begin, kUnwritten, bytes + kGuardBytes);
    shared_arrays.push_back({declaration, begin, bytes});
    return begin;
}

/* cp.async, to an offset in dynamic shared memory; zeros follow the bytes of the source. May happen at any time until
 * the thread waits for it: here at once for odd threads, and in the end for even ones.
 */
void emulator_copy_async(unsigned target, const void* source, int bytes, int source_bytes) {
    if (target % bytes != 0 || reinterpret_cast<uintptr_t>(source) % bytes != 0)
        fail("a misaligned copy of %d bytes", bytes);
    if (source_bytes < 0 || source_bytes > bytes) fail("a copy of %d bytes of %d", source_bytes, bytes);
    const copy_t copy = {emulator_dynamic_shared + target, source, bytes, source_bytes, current().copy_groups};
    if (current().thread.index.x % 2) copy.run();
    else current().copies.push_back(copy);
}

void emulator_commit_copies() { ++current().copy_groups; }

/* Completes all groups but the last so many; where that is negative, all copies, those that arrivals wait for among them. */
void emulator_wait_for_copies(int pending) {
    fiber_t& fiber = current();
    for (size_t i = arrivals.size(); pending < 0 && i-- > 0;)
        if (arrivals[i].thread == &fiber) have_arrival(i);
    size_t count = 0;
    for (; count < fiber.copies.size(); ++count) {
        if (pending >= 0 && fiber.copies[count].group + pending >= fiber.copy_groups) break;
        fiber.copies[count].run();
    }
    fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + count);
}

/* bar.sync: waits for threads of whole warps. */
void emulator_barrier(int number, int threads) {
    if (number < 1 || number >= kNamedBarriers || threads % 32 != 0 || threads < 32)
        fail("barrier %d of %d threads", number, threads);
    fiber_t& fiber = current();
    state_of(fiber) = AT_NAMED_BARRIER;
    fiber.named_barrier = number;
    fiber.expected = threads;
    leave();
}

/* bar.arrive: counts for those who wait. */
void emulator_barrier_pass(int number, int threads) {
    if (number < 1 || number >= kNamedBarriers || threads % 32 != 0 || threads < 64)
        fail("barrier %d of %d threads", number, threads);
    if (++passed[number] >= threads) fail("barrier %d has %d arrivals and nobody who waits", number, passed[number]);
    fall_behind();
}

void emulator_barrier_init(void* barrier, int arrivals) {
    if (!in_shared(barrier, sizeof(kBarrierMark))) fail("an mbarrier outside of shared memory");
    if (arrivals < 1 || arrivals > kMostInBarrier) fail("an mbarrier for %d arrivals", arrivals);
    for (const barrier_t& other : barriers)
        if (other.place == barrier) fail("an mbarrier that is initialised twice");
    memcpy(barrier, &kBarrierMark, sizeof(kBarrierMark));
    barriers.push_back({static_cast<unsigned char*>(barrier), &current(), false, arrivals, arrivals, 0, 0, 0, 0});
}

void emulator_barrier_init_done() {
    for (barrier_t& barrier : barriers) barrier.made_visible |= barrier.owner == &current();
}

/* Arrives, expecting bytes or 0. Those who wait for it may be faster than this thread. */
void emulator_barrier_arrive(void* place, int bytes) {
    barrier_t& barrier = barriers[barrier_at(place)];
    if (bytes < 0 || barrier.bytes + bytes > kMostInBarrier) fail("an mbarrier that expects too many bytes");
    arrive(barrier, bytes);
    if (bytes == 0) fall_behind();
}

/* Arrives once the thread's copies are complete: now, or when nothing else can go on. */
void emulator_barrier_arrive_when_copied(void* place) {
    fiber_t& fiber = current();
    arrivals.push_back({std::move(fiber.copies), &fiber, barrier_at(place)});
    fiber.copies.clear();
    if (draw() % 2) have_arrival(arrivals.size() - 1);
}

void emulator_barrier_wait(void* place, int parity) {
    const size_t barrier = barrier_at(place);
    if (parity != 0 && parity != 1) fail("an mbarrier waited for with parity %d", parity);
    if (barriers[barrier].is_over(parity)) return;
    fiber_t& fiber = current();
    state_of(fiber) = AT_MBARRIER;
    fiber.barrier = barrier;
    fiber.parity = parity;
    leave();
}

/* cp.async.bulk, at once or when nothing else can go on. */
void emulator_bulk_copy(void* target, const void* source, int bytes, void* place) {
    const size_t barrier = barrier_at(place);
    if (!barriers[barrier].made_visible) fail("a bulk copy for an mbarrier without barrier_init_done");
    if (reinterpret_cast<uintptr_t>(target) % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0 ||
        bytes < 16 || bytes % 16 != 0)
        fail("a misaligned bulk copy of %d bytes", bytes);
    if (!in_shared(target, bytes)) fail("a bulk copy past the end of shared memory");
    if (barriers[barrier].bytes - bytes < -kMostInBarrier) fail("bulk copies of too many bytes for an mbarrier");
    barriers[barrier].copied = barriers[barrier].phase + 1;
    const bulk_copy_t bulk = {{target, source, bytes, bytes}, barrier};
    if (draw() % 2) do_copy(bulk);
    else bulk_copies.push_back(bulk);
}

/* A box of a tensor map of tests/emulator/__init__.py: comes as a bulk copy does. */
void emulator_copy_box(void* target, const void* map, int i, int j, int k, int l, void* place) {
    const auto* words = static_cast<const unsigned long long*>(map);
    const unsigned long long *sizes = words + 1, *strides = words + 5, *box = words + 8;
    const size_t item = words[12], line_bytes = box[0] * item, lines = box[1] * box[2] * box[3];
    const auto* base = reinterpret_cast<const unsigned char*>(words[0]);
    const size_t offset = static_cast<unsigned char*>(target) - emulator_dynamic_shared;
    if (offset % 128 != 0) fail("a misaligned box");
    if (i * static_cast<long long>(item) % 16 != 0) fail("a box that begins between pieces of 16 bytes");
    boxes.emplace_back(lines * line_bytes);
    const long long first[4] = {i, j, k, l}, steps[4] = {1, static_cast<long long>(words[14]), static_cast<long long>(words[15]), 1};
    for (size_t line = 0; line < lines; ++line) {
        const size_t offsets[4] = {0, line % box[1], line / box[1] % box[2], line / (box[1] * box[2])};
        bool inside = true;
        const unsigned char* begin = base;  // of the line, in the tensor
        for (int axis = 1; axis < 4; ++axis) {
            const long long at = first[axis] + steps[axis] * static_cast<long long>(offsets[axis]);
            inside &= at >= 0 && at < static_cast<long long>(sizes[axis]);
            begin += at * strides[axis - 1];
        }
        const long long end = inside ? sizes[0] * item : 0;
        for (size_t piece = 0; piece < line_bytes; piece += 16) {  // begins inside and ends outside, if it is cut at all
            const long long at = i * static_cast<long long>(item) + static_cast<long long>(piece);
            const size_t place = offset + line * line_bytes + piece;
            unsigned char* to = boxes.back().data() + ((words[13] != 0 ? swizzled(place, line_bytes) : place) - offset);
            const long long bytes = at < 0 || at >= end ? 0 : end - at < 16 ? end - at : 16;
            memset(to, 0, 16);
            memcpy(to, begin + at, bytes);
        }
    }
    emulator_bulk_copy(target, boxes.back().data(), lines * line_bytes, place);
}

unsigned long long emulator_matrix(const void* shared, int leading_bytes, int stride_bytes) {
    const size_t address = static_cast<const unsigned char*>(shared) - emulator_dynamic_shared;
    if (address > dynamic_bytes) fail("a matrix of wgmma outside of dynamic shared memory");
    if ((address | leading_bytes | stride_bytes) % 16 != 0) fail("a misaligned matrix of wgmma");
    if ((address | leading_bytes | stride_bytes) >> 18 != 0) fail("a matrix of wgmma that extends too far");
    return address / 16 | (leading_bytes / 16ull) << 16 | (stride_bytes / 16ull) << 32;
}

unsigned long long emulator_advanced(unsigned long long matrix, int bytes) {
    if (bytes % 16 != 0) fail("a misaligned matrix of wgmma");
    return matrix >> 32 << 32 | static_cast<uint32_t>(static_cast<uint32_t>(matrix) + bytes / 16);
}

void emulator_wgmma_fence() { current().fenced = true; }
void emulator_wgmma_commit() { ++current().groups; }

/* As the next, but the words of A come from registers of the warp. Rows g and g + 8 of the warp's 16 are all that a thread
 * needs of A, and the four lanes of its quad have those.
 */
void emulator_wgmma_rows(
    int type, int columns, int swizzled, float* d, const unsigned* a, unsigned long long b, int accumulate) {
    fiber_t& fiber = current();
    do_alike({static_cast<unsigned>(type), static_cast<unsigned>(columns), ~0ull, b, accumulate != 0});
    if (swizzled) check_swizzled_matrix(b, columns);
    else check_matrix(b, columns);
    // By turns in two places: who comes to the next barrier but one has all threads of the warp behind this one.
    static unsigned words_of[2][kMostThreads][4];
    auto& own = words_of[fiber.products_of_words++ % 2];
    memcpy(own[&fiber - fibers], a, sizeof(own[0]));
    emulator_warp_barrier(0xffffffffu);
    std::array<unsigned, 16> words;  // [lane of the quad][word]
    memcpy(words.data(), own[(&fiber - fibers) / 4 * 4], sizeof(words));
    begin({type, columns, swizzled, d, 0, b, accumulate != 0, fiber.groups, false, true, words});
}

void emulator_wgmma(
    int type, int columns, int swizzled, float* d, unsigned long long a, unsigned long long b, int accumulate) {
    do_alike({static_cast<unsigned>(type), static_cast<unsigned>(columns), a, b, accumulate != 0});
    if (swizzled) check_swizzled_matrix(b, columns);
    check_matrix(a, 64);
    if (!swizzled) check_matrix(b, columns);
    begin({type, columns, swizzled, d, a, b, accumulate != 0, current().groups});
}

void emulator_wgmma_turned(int type, int columns, float* d, unsigned long long a, unsigned long long b, int accumulate) {
    do_alike({static_cast<unsigned>(type), static_cast<unsigned>(columns), a, b, accumulate != 0});
    check_swizzled_matrix(a, 64);
    check_swizzled_matrix(b, columns);
    product_t product{type, columns, 1, d, a, b, accumulate != 0, current().groups};
    product.turned = true;
    begin(product);
}

/* The warpgroup goes on together: one of its threads may then say that what it read may be written again. */
void emulator_wgmma_wait(int pending) {
    fiber_t& fiber = current();
    do_alike({~0ull, static_cast<unsigned>(pending), 0, 0, 0});
    fall_behind();
    size_t count = 0;  // of products that are complete then
    for (; count < fiber.products.size() && fiber.products[count].group + pending < fiber.groups; ++count)
        if (!fiber.products[count].done) fiber.products[count].run(fiber.thread.index.x);
    fiber.products.erase(fiber.products.begin(), fiber.products.begin() + count);
    fiber.fenced = false;
    state_of(fiber) = AT_WGMMA_WAIT;
    leave();
}

float emulator_half_to_float(unsigned short bits) {
    const uint32_t shifted = (bits & 0x7fffu) << 13;
    float magnitude;
    memcpy(&magnitude, &shifted, sizeof(magnitude));
    magnitude *= 0x1p112f;  // for the exponents are counted from -15, not from -127
    if ((bits & 0x7c00) == 0x7c00) magnitude = (bits & 0x3ff) == 0 ? INFINITY : NAN;
    return bits >> 15 ? -magnitude : magnitude;
}

unsigned short emulator_float_to_half(float value) {
    if (std::isnan(value)) return 0x7fff;
    const unsigned short sign = std::signbit(value) ? 0x8000 : 0;
    const float magnitude = fabsf(value);
    if (magnitude >= 65520) return sign | 0x7c00;
    int exponent;
    if (frexpf(magnitude, &exponent) == 0) return sign;
    const int unit = exponent - 11 < -24 ? -24 : exponent - 11;  // of the last place; subnormal numbers share the least
    return sign | (((unit + 24) << 10) + static_cast<int>(nearbyintf(ldexpf(magnitude, -unit))));
}

unsigned short emulator_float_to_bfloat16(float value) {
    if (std::isnan(value)) return 0x7fff;
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

unsigned emulator_float_to_tf32(float value) {
    if (std::isnan(value)) return 0x7fffffff;
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
}

/* A thread waits for the launch before, which has ended here. */
void emulator_wait_for_previous_launch() { waited = true; }

/* Runs all blocks. Returns what was wrong, or null. `overlaps` is whether the launch may begin before the one before it has
 * ended, so that a thread of each block has to wait for that.
 */
__attribute__((visibility("default"))) const char* emulator_launch(
    const emulator_kernel_t* kernel, const uint3* grid, const uint3* block, const void* params, size_t params_bytes,
    size_t shared_bytes, int overlaps) {
    message[0] = 0;
    dynamic_bytes = shared_bytes;
    const unsigned long long threads = 1ull * block->x * block->y * block->z;
    const unsigned most_threads = kernel->most_threads;
    if (params_bytes != kernel->params_bytes)
        snprintf(message, sizeof(message), "the params struct has %lu bytes in the source and %lu on the host",
                 kernel->params_bytes, params_bytes);
    else if (threads == 0 || threads > most_threads || threads > kMostThreads || block->z > 64)
        snprintf(message, sizeof(message), "the block must have from 1 to %u threads", most_threads);
    else if (grid->x - 1 > 0x7ffffffe || grid->y - 1 > 65534 || grid->z - 1 > 65534)
        snprintf(message, sizeof(message), "the grid must have from 1 to 2**31-1, 65535, 65535 blocks");
    else if (dynamic_bytes > kDynamicBytes)
        snprintf(message, sizeof(message), "more shared memory than any architecture has");
    if (message[0]) return message;

    kernel_call = kernel->call;
    kernel_params = params;
    thread_count = threads;
    emulator_now = {*grid, *block, {}, nullptr};
    for (unsigned i = 0; i < thread_count; ++i)
        fibers[i].thread = {{i % block->x, i / block->x % block->y, i / block->x / block->y},
                            static_cast<int>(i % 32), exchange[i / 32]};
    uint32_t turn = 0;
    const trapping_t trapping;
    uint3& index = emulator_now.block_index;
    for (index.z = 0; index.z < grid->z; ++index.z)
        for (index.y = 0; index.y < grid->y; ++index.y)
            for (index.x = 0; index.x < grid->x; ++index.x) {
                random_state = ++turn * 1597334677u;
                waited = false;
                run_block();
                if (!message[0] && overlaps && !waited)
                    snprintf(message, sizeof(message), "a block that did not wait for the launch before, which may go on");
                if (message[0]) return message;
            }
    return nullptr;
}

// What -fsanitize calls. The data of every check starts with its place in the source.
struct place_t { const char* file; uint32_t line, column; };
#define HANDLER(name, text)                                          \
    void __ubsan_handle_##name##_abort(const place_t* place, ...) {  \
        fail("%s in line %u of %s", text, place->line, place->file); \
    }
HANDLER(type_mismatch_v1, "a misaligned address")
HANDLER(out_of_bounds, "an index out of bounds")
HANDLER(add_overflow, "an overflow")
HANDLER(sub_overflow, "an overflow")
HANDLER(mul_overflow, "an overflow")
HANDLER(negate_overflow, "an overflow")
HANDLER(divrem_overflow, "a division by zero")
HANDLER(shift_out_of_bounds, "a shift out of range")
}
