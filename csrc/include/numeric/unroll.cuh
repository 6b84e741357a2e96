/* Loops that are always unrolled, so that arrays which they index stay in registers. */
#pragma once

template <int VALUE> struct constant { static constexpr int value = VALUE; };

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

/* Calls body(constant<i>()) for an i below COUNT that is known at run time, to select registers by name. */
template <int COUNT, typename BODY> __device__ __forceinline__ void only(int i, const BODY& body) {
    each<COUNT>([&](auto one) {
        if (i == decltype(one)::value) body(one);
    });
}
