/* Loops that are unrolled for certain: what they index must stay in registers. */
#pragma once

template <int VALUE> struct constant { static constexpr int value = VALUE; };

/* Calls body(constant<0>()), body(constant<1>()), ... */
template <int COUNT, int NEXT = 0, typename BODY> __device__ __forceinline__ void each(const BODY& body) {
    if constexpr (NEXT < COUNT) {
        body(constant<NEXT>());
        each<COUNT, NEXT + 1>(body);
    }
}
