/* Launches a kernel on the CPU: one block after the other, every thread of a block a fiber.
 *
 * A fiber runs until it waits at a barrier or returns. Who runs next is pseudo-random and changes at every barrier, in
 * the same way each time: where a __syncthreads() is missing, some thread reads shared memory before it is written.
 * Shared memory holds NaN (0xff) when a block starts, so that shows in the result.
 *
 * A mistake that is noticed while a kernel runs ends the launch with a message: barriers that not all threads reach,
 * writes past the end of shared memory, and what -fsanitize inserts checks for (see the handlers below).
 */
#include "cuda.h"

#include <setjmp.h>
#include <ucontext.h>

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

enum state_t { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };

/* A cp.async. */
struct copy_t {
    void* target;
    const void* source;
    int bytes, source_bytes;

    void run() const {
        memset(target, 0, bytes);
        memcpy(target, source, source_bytes);
    }
};

struct fiber_t {
    emulator_thread_t thread;  // first, so that emulator_now.thread leads to its fiber
    std::vector<copy_t> copies;  // that it has to wait for
    state_t state;
    unsigned mask;             // of the warp barrier it waits at
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
unsigned thread_count;
unsigned long long exchange[kMostThreads / 32][32];
jmp_buf scheduler;
char message[512];  // empty while nothing is wrong

void (*kernel_call)(const void*);
const void* kernel_params;

alignas(1024) unsigned char static_shared[kStaticBytes + kMostArrays * (kGuardBytes + 16)];
std::vector<shared_array_t> shared_arrays;  // of the current block

fiber_t& current() { return *reinterpret_cast<fiber_t*>(emulator_now.thread); }

void leave() {
    if (_setjmp(current().resume) == 0) _longjmp(scheduler, 1);
}

template <typename... Values> [[noreturn]] void fail(const char* format, Values... values) {
    snprintf(message, sizeof(message), format, values...);
    _longjmp(scheduler, 1);
}

void fiber_main() {
    kernel_call(kernel_params);
    current().state = DONE;
    leave();
}

void prepare(fiber_t& fiber) {
    if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
    fiber.started = false;
    fiber.state = READY;
    fiber.copies.clear();
}

/* Runs a fiber until it leaves. */
__attribute__((noinline)) void run(fiber_t& fiber) {
    emulator_now.thread = &fiber.thread;
    if (_setjmp(scheduler) != 0) return;
    if (std::exchange(fiber.started, true)) _longjmp(fiber.resume, 1);
    setcontext(&fiber.start);
}

/* Lets those threads of a warp go on whose whole mask waits at the barrier. */
bool release_warp(fiber_t* warp, unsigned lanes) {
    bool released = false;
    for (unsigned lane = 0; lane < lanes; ++lane) {
        if (warp[lane].state != AT_WARP_BARRIER) continue;
        const unsigned mask = warp[lane].mask;
        bool all = true;
        for (unsigned other = 0; other < lanes; ++other)
            if (mask >> other & 1) all = all && warp[other].state == AT_WARP_BARRIER && warp[other].mask == mask;
        if (!all) continue;
        for (unsigned other = 0; other < lanes; ++other)
            if (mask >> other & 1) warp[other].state = READY;
        released = true;
    }
    return released;
}

/* Lets a block go on at its barrier. Threads that have returned need not come. */
bool release_block() {
    unsigned waiting = 0, done = 0;
    for (unsigned i = 0; i < thread_count; ++i) {
        waiting += fibers[i].state == AT_BLOCK_BARRIER;
        done += fibers[i].state == DONE;
    }
    if (waiting + done < thread_count) {
        snprintf(message, sizeof(message), "deadlock: %u threads at a block barrier, %u at a warp barrier, %u returned",
                 waiting, thread_count - waiting - done, done);
        return false;
    }
    for (unsigned i = 0; i < thread_count; ++i)
        if (fibers[i].state == AT_BLOCK_BARRIER) fibers[i].state = READY;
    return waiting > 0;
}

bool written(const unsigned char* begin) {
    for (size_t i = 0; i < kGuardBytes; ++i)
        if (begin[i] != kUnwritten) return true;
    return false;
}

void run_block(size_t dynamic_bytes, uint32_t random) {
    shared_arrays.clear();
    memset(emulator_dynamic_shared, kUnwritten, dynamic_bytes + kGuardBytes);
    static unsigned order[kMostThreads];
    for (unsigned i = 0; i < thread_count; ++i) {
        order[i] = i;
        prepare(fibers[i]);
    }
    bool running = true;
    while (running) {
        for (unsigned i = thread_count - 1; i > 0; --i) {
            random = random * 1664525u + 1013904223u;
            std::swap(order[i], order[(random >> 8) % (i + 1)]);
        }
        for (unsigned i = 0; i < thread_count; ++i) {
            if (fibers[order[i]].state != READY) continue;
            run(fibers[order[i]]);
            if (message[0]) return;
        }
        running = false;
        for (unsigned first = 0; first < thread_count; first += 32)
            running |= release_warp(fibers + first, thread_count - first < 32 ? thread_count - first : 32);
        running = running || release_block();
    }
    if (message[0]) return;
    bool past_end = written(emulator_dynamic_shared + dynamic_bytes);
    for (const shared_array_t& array : shared_arrays) past_end |= written(array.begin + array.bytes);
    if (past_end) snprintf(message, sizeof(message), "a write past the end of shared memory");
}

}  // namespace

extern "C" {

alignas(1024) unsigned char emulator_dynamic_shared[kDynamicBytes + kGuardBytes];

void emulator_block_barrier() {
    current().state = AT_BLOCK_BARRIER;
    leave();
}

void emulator_warp_barrier(unsigned mask) {
    fiber_t& fiber = current();
    const int lane = fiber.thread.lane;
    if (!(mask >> lane & 1)) fail("lane %d is not in the mask %08x of its warp barrier", lane, mask);
    fiber.state = AT_WARP_BARRIER;
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
    const copy_t copy = {emulator_dynamic_shared + target, source, bytes, source_bytes};
    if (current().thread.index.x % 2) copy.run();
    else current().copies.push_back(copy);
}

void emulator_wait_for_copies() {
    for (const copy_t& copy : current().copies) copy.run();
    current().copies.clear();
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

/* To 10 bits of fraction, ties away from zero. */
unsigned emulator_float_to_tf32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return std::isfinite(value) ? (bits + 0x1000) & ~0x1fffu : bits;
}

/* Runs all blocks. Returns what was wrong, or null. */
__attribute__((visibility("default"))) const char* emulator_launch(
    const emulator_kernel_t* kernel, const uint3* grid, const uint3* block, const void* params, size_t params_bytes,
    size_t dynamic_bytes) {
    message[0] = 0;
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
    uint3& index = emulator_now.block_index;
    for (index.z = 0; index.z < grid->z; ++index.z)
        for (index.y = 0; index.y < grid->y; ++index.y)
            for (index.x = 0; index.x < grid->x; ++index.x) {
                run_block(dynamic_bytes, ++turn * 2654435769u);
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
