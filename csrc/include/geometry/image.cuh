/* Macros: KERNEL_H, KERNEL_W, IN_H, IN_W. */
#pragma once

constexpr int kTaps = KERNEL_H * KERNEL_W, kPixels = IN_H * IN_W;  // of an image
