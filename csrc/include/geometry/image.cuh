/* Macros: KERNEL_H, KERNEL_W. */
#pragma once

constexpr int kTaps = KERNEL_H * KERNEL_W;
