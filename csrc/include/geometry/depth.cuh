/* The depth axis of volumes, whose macros end in _D. An image is one slice: its loops over the depth fold away. */
#pragma once

#ifdef KERNEL_D
constexpr bool kIsVolume = true;
#else
constexpr bool kIsVolume = false;
constexpr int KERNEL_D = 1, STRIDE_D = 1, PADDING_D = 0, DILATION_D = 1;
#endif
