/* The operands of the sums d[N / 2] of a wgmma in inline assembly, for N from 16 to 256 in steps of 16: TEXT_N their numbers,
 * SUMS_N the registers, AFTER_N the numbers of operands that follow.
 *
 * A kernel that has one N and one type alone names them before, WGMMA_COLUMNS and ELEMENT_T, and the others are left out:
 * the compiler took up to 70 ms to read them all.
 */
#pragma once

#define TEXT_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TEXT_32 TEXT_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TEXT_48 TEXT_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TEXT_64 TEXT_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TEXT_80 TEXT_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TEXT_96 TEXT_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TEXT_112 TEXT_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TEXT_128 TEXT_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TEXT_144 TEXT_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TEXT_160 TEXT_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TEXT_176 TEXT_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TEXT_192 TEXT_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TEXT_208 TEXT_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TEXT_224 TEXT_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TEXT_240 TEXT_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TEXT_256 TEXT_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16 SUMS_8(0)
#define SUMS_32 SUMS_16, SUMS_8(8)
#define SUMS_48 SUMS_32, SUMS_8(16)
#define SUMS_64 SUMS_48, SUMS_8(24)
#define SUMS_80 SUMS_64, SUMS_8(32)
#define SUMS_96 SUMS_80, SUMS_8(40)
#define SUMS_112 SUMS_96, SUMS_8(48)
#define SUMS_128 SUMS_112, SUMS_8(56)
#define SUMS_144 SUMS_128, SUMS_8(64)
#define SUMS_160 SUMS_144, SUMS_8(72)
#define SUMS_176 SUMS_160, SUMS_8(80)
#define SUMS_192 SUMS_176, SUMS_8(88)
#define SUMS_208 SUMS_192, SUMS_8(96)
#define SUMS_224 SUMS_208, SUMS_8(104)
#define SUMS_240 SUMS_224, SUMS_8(112)
#define SUMS_256 SUMS_240, SUMS_8(120)
#define NUMBERS_8 8, 9, 10, 11, 12, 13, 14, 15
#define NUMBERS_16 16, 17, 18, 19, 20, 21, 22, 23
#define NUMBERS_24 24, 25, 26, 27, 28, 29, 30, 31
#define NUMBERS_32 32, 33, 34, 35, 36, 37, 38, 39
#define NUMBERS_40 40, 41, 42, 43, 44, 45, 46, 47
#define NUMBERS_48 48, 49, 50, 51, 52, 53, 54, 55
#define NUMBERS_56 56, 57, 58, 59, 60, 61, 62, 63
#define NUMBERS_64 64, 65, 66, 67, 68, 69, 70, 71
#define NUMBERS_72 72, 73, 74, 75, 76, 77, 78, 79
#define NUMBERS_80 80, 81, 82, 83, 84, 85, 86, 87
#define NUMBERS_88 88, 89, 90, 91, 92, 93, 94, 95
#define NUMBERS_96 96, 97, 98, 99, 100, 101, 102, 103
#define NUMBERS_104 104, 105, 106, 107, 108, 109, 110, 111
#define NUMBERS_112 112, 113, 114, 115, 116, 117, 118, 119
#define NUMBERS_120 120, 121, 122, 123, 124, 125, 126, 127
#define NUMBERS_128 128, 129, 130, 131, 132, 133, 134, 135
#define NUMBERS_136 136, 137, 138, 139, 140, 141, 142, 143
#define NUMBERS_144 144, 145, 146, 147, 148, 149, 150, 151
#define AFTER_16 NUMBERS_8, NUMBERS_16, NUMBERS_24
#define AFTER_32 NUMBERS_16, NUMBERS_24, NUMBERS_32
#define AFTER_48 NUMBERS_24, NUMBERS_32, NUMBERS_40
#define AFTER_64 NUMBERS_32, NUMBERS_40, NUMBERS_48
#define AFTER_80 NUMBERS_40, NUMBERS_48, NUMBERS_56
#define AFTER_96 NUMBERS_48, NUMBERS_56, NUMBERS_64
#define AFTER_112 NUMBERS_56, NUMBERS_64, NUMBERS_72
#define AFTER_128 NUMBERS_64, NUMBERS_72, NUMBERS_80
#define AFTER_144 NUMBERS_72, NUMBERS_80, NUMBERS_88
#define AFTER_160 NUMBERS_80, NUMBERS_88, NUMBERS_96
#define AFTER_176 NUMBERS_88, NUMBERS_96, NUMBERS_104
#define AFTER_192 NUMBERS_96, NUMBERS_104, NUMBERS_112
#define AFTER_208 NUMBERS_104, NUMBERS_112, NUMBERS_120
#define AFTER_224 NUMBERS_112, NUMBERS_120, NUMBERS_128
#define AFTER_240 NUMBERS_120, NUMBERS_128, NUMBERS_136
#define AFTER_256 NUMBERS_128, NUMBERS_136, NUMBERS_144
