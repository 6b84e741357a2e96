/* Loops that are always unrolled, so that arrays which they index stay in registers. */
#pragma once

/* A number that is known when compiling; a value of this type may stand where a constant must. */
template <int VALUE> struct constant {
    static constexpr int value = VALUE;
    __device__ constexpr operator int() const { return VALUE; }
};

template <int... ALL> struct indices {};
template <int COUNT, int... ALL> struct indices_below : indices_below<COUNT - 1, COUNT - 1, ALL...> {};
template <int... ALL> struct indices_below<0, ALL...> { using type = indices<ALL...>; };

template <typename BODY, int... ALL> __device__ __forceinline__ void each_of(const BODY& body, indices<ALL...>) {
    (body(constant<ALL>()), ...);
}

/* Calls body(constant<0>()), body(constant<1>()), ... By a pack: one call within the other takes longer to compile. */
template <int COUNT, typename BODY> __device__ __forceinline__ void each(const BODY& body) {
    each_of(body, typename indices_below<COUNT>::type());
}
