// The searches behind Q4_K, Q5_K and Q6_K, eight sub-blocks at a time. C, no llama.cpp types.
//
// ggml looks for the best scale (and minimum) of every sub-block by trying some 20 of them, one sub-block
// after another, in scalar code: floats must be added in order, so the compiler cannot vectorise it. The
// sub-blocks do not depend on each other. Here each is one lane of a vector and goes through exactly the
// same operations in the same order, so every bit of the result is the same, several times sooner.
//
// Mirrors make_qkx2_quants and make_qx_quants of ggml/src/ggml-quants.c; the real test compares all bytes.

#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__FAST_MATH__) && !defined(__FMA__)
// elsewhere, or where multiply and add are fused, the order of rounding is not known to be the same
#define DFLASHCPP_K_QUANT_SEARCH 1

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors pass only between functions that are inlined
#endif

#include <math.h>
#include <stdint.h>

#define DFLASHCPP_INLINE static inline __attribute__((always_inline))

typedef float   dflashcpp_f8 __attribute__((vector_size(32)));
typedef int32_t dflashcpp_i8 __attribute__((vector_size(32)));

DFLASHCPP_INLINE dflashcpp_f8 dflashcpp_pick(dflashcpp_i8 mask, dflashcpp_f8 yes, dflashcpp_f8 no) {
    return (dflashcpp_f8) ((mask & (dflashcpp_i8) yes) | (~mask & (dflashcpp_i8) no));
}

DFLASHCPP_INLINE dflashcpp_i8 dflashcpp_pick_int(dflashcpp_i8 mask, dflashcpp_i8 yes, dflashcpp_i8 no) {
    return (mask & yes) | (~mask & no);
}

DFLASHCPP_INLINE dflashcpp_f8 dflashcpp_abs(dflashcpp_f8 value) {
    return (dflashcpp_f8) ((dflashcpp_i8) value & 0x7fffffff);
}

// nearest_int of ggml, then clamped
DFLASHCPP_INLINE dflashcpp_i8 dflashcpp_nearest(dflashcpp_f8 value, int32_t least, int32_t most) {
    dflashcpp_i8 near = ((dflashcpp_i8) (value + 12582912.f) & 0x007fffff) - 0x00400000;
    const dflashcpp_i8 none = { 0 };
    near = dflashcpp_pick_int(near > most, none + most, near);
    return dflashcpp_pick_int(near < least, none + least, near);
}

DFLASHCPP_INLINE int dflashcpp_any(dflashcpp_i8 mask) {
    int32_t seen = 0;
    for (int lane = 0; lane < 8; ++lane) {
        seen |= mask[lane];
    }
    return seen != 0;
}

// One super-block of Q4_K (nmax 15) or Q5_K (nmax 31): x[256] in 8 sub-blocks of 32.
// Fills levels[256], scales[8] and mins[8] as 8 calls of make_qkx2_quants(32, nmax, ..., rmin, 0.1f, nstep, false)
// with ggml's weights (root mean square + |x|) do.
DFLASHCPP_INLINE void dflashcpp_with_min_body(
        const float * x, int nmax, float rmin, int nstep, uint8_t * levels, float * scales, float * mins) {
    dflashcpp_f8 v[32], w[32];
    dflashcpp_f8 squares = { 0 };
    for (int i = 0; i < 32; ++i) {
        for (int lane = 0; lane < 8; ++lane) {
            v[i][lane] = x[32*lane + i];
        }
        squares += v[i] * v[i];
    }
    dflashcpp_f8 rms = squares / 32;
    for (int lane = 0; lane < 8; ++lane) {
        rms[lane] = sqrtf(rms[lane]);
    }
    for (int i = 0; i < 32; ++i) {
        w[i] = rms + dflashcpp_abs(v[i]);
    }

    dflashcpp_f8 min = v[0], max = v[0], sum_w = w[0], sum_x = w[0] * v[0];
    for (int i = 1; i < 32; ++i) {
        min = dflashcpp_pick(v[i] < min, v[i], min);
        max = dflashcpp_pick(v[i] > max, v[i], max);
        sum_w += w[i];
        sum_x += w[i] * v[i];
    }
    const dflashcpp_f8 zero = { 0 };
    min = dflashcpp_pick(min > zero, zero, min);
    const dflashcpp_i8 flat = max == min;  // nothing to scale: level 0, scale 0
    const dflashcpp_f8 flat_min = min;

    dflashcpp_i8 best[32], now[32];
    dflashcpp_f8 iscale = (float) nmax / (max - min);
    dflashcpp_f8 scale = 1.f / iscale;
    dflashcpp_f8 best_error = zero;
    for (int i = 0; i < 32; ++i) {
        best[i] = dflashcpp_nearest(iscale * (v[i] - min), 0, nmax);
        const dflashcpp_f8 diff = scale * __builtin_convertvector(best[i], dflashcpp_f8) + min - v[i];
        best_error += w[i] * (diff * diff);
    }
    for (int step = 0; step <= nstep; ++step) {
        iscale = (rmin + 0.1f*step + nmax) / (max - min);
        dflashcpp_f8 sum_l = zero, sum_l2 = zero, sum_xl = zero;
        for (int i = 0; i < 32; ++i) {
            now[i] = dflashcpp_nearest(iscale * (v[i] - min), 0, nmax);
            const dflashcpp_f8 l = __builtin_convertvector(now[i], dflashcpp_f8);
            const dflashcpp_f8 wl = w[i] * l;
            sum_l += wl;
            sum_l2 += wl * l;
            sum_xl += wl * v[i];
        }
        const dflashcpp_f8 d = sum_w * sum_l2 - sum_l * sum_l;
        dflashcpp_f8 this_scale = (sum_w * sum_xl - sum_x * sum_l) / d;
        dflashcpp_f8 this_min = (sum_l2 * sum_x - sum_l * sum_xl) / d;
        const dflashcpp_i8 above = this_min > zero;
        this_scale = dflashcpp_pick(above, sum_xl / sum_l2, this_scale);
        this_min = dflashcpp_pick(above, zero, this_min);
        dflashcpp_f8 error = zero;
        for (int i = 0; i < 32; ++i) {
            const dflashcpp_f8 diff = this_scale * __builtin_convertvector(now[i], dflashcpp_f8) + this_min - v[i];
            error += w[i] * (diff * diff);
        }
        const dflashcpp_i8 better = (d > zero) & (error < best_error);
        if (!dflashcpp_any(better)) {
            continue;
        }
        for (int i = 0; i < 32; ++i) {
            best[i] = dflashcpp_pick_int(better, now[i], best[i]);
        }
        best_error = dflashcpp_pick(better, error, best_error);
        scale = dflashcpp_pick(better, this_scale, scale);
        min = dflashcpp_pick(better, this_min, min);
    }

    scale = dflashcpp_pick(flat, zero, scale);
    min = -dflashcpp_pick(flat, flat_min, min);
    for (int lane = 0; lane < 8; ++lane) {
        scales[lane] = scale[lane];
        mins[lane] = min[lane];
        for (int i = 0; i < 32; ++i) {
            levels[32*lane + i] = flat[lane] ? 0 : (uint8_t) best[i][lane];
        }
    }
}

__attribute__((target("avx2"))) static void dflashcpp_with_min_avx2(
        const float * x, int nmax, float rmin, int nstep, uint8_t * levels, float * scales, float * mins) {
    dflashcpp_with_min_body(x, nmax, rmin, nstep, levels, scales, mins);
}

static void dflashcpp_search_with_min(
        const float * x, int nmax, float rmin, int nstep, uint8_t * levels, float * scales, float * mins) {
    if (__builtin_cpu_supports("avx2")) {
        dflashcpp_with_min_avx2(x, nmax, rmin, nstep, levels, scales, mins);
    } else {
        dflashcpp_with_min_body(x, nmax, rmin, nstep, levels, scales, mins);
    }
}

// Half a super-block of Q6_K: x[128] in 8 sub-blocks of 16. Fills levels[128] and scales[8] as 8 calls of
// make_qx_quants(16, 32, ..., 1, NULL) do.
DFLASHCPP_INLINE void dflashcpp_symmetric_body(const float * x, float least, int8_t * levels, float * scales) {
    const dflashcpp_f8 zero = { 0 };
    dflashcpp_f8 v[16], w[16], max = zero, amax = zero;
    for (int i = 0; i < 16; ++i) {
        for (int lane = 0; lane < 8; ++lane) {
            v[i][lane] = x[16*lane + i];
        }
        const dflashcpp_f8 ax = dflashcpp_abs(v[i]);
        const dflashcpp_i8 more = ax > amax;
        amax = dflashcpp_pick(more, ax, amax);
        max = dflashcpp_pick(more, v[i], max);
        w[i] = v[i] * v[i];
    }
    const dflashcpp_i8 empty = amax < least;

    dflashcpp_i8 best[16], now[16];
    dflashcpp_f8 iscale = -32.f / max, sumlx = zero, suml2 = zero;
    for (int i = 0; i < 16; ++i) {
        best[i] = dflashcpp_nearest(iscale * v[i], -32, 31);
        const dflashcpp_f8 l = __builtin_convertvector(best[i], dflashcpp_f8);
        sumlx += w[i] * v[i] * l;
        suml2 += w[i] * l * l;
    }
    dflashcpp_f8 scale = dflashcpp_pick(suml2 != zero, sumlx / suml2, zero);
    dflashcpp_f8 score = scale * sumlx;
    for (int step = -9; step <= 9; ++step) {
        if (step == 0) {
            continue;
        }
        iscale = -(32 + 0.1f*step) / max;
        sumlx = suml2 = zero;
        for (int i = 0; i < 16; ++i) {
            now[i] = dflashcpp_nearest(iscale * v[i], -32, 31);
            const dflashcpp_f8 l = __builtin_convertvector(now[i], dflashcpp_f8);
            sumlx += w[i] * v[i] * l;
            suml2 += w[i] * l * l;
        }
        const dflashcpp_i8 better = (suml2 > zero) & (sumlx * sumlx > score * suml2);
        if (!dflashcpp_any(better)) {
            continue;
        }
        for (int i = 0; i < 16; ++i) {
            best[i] = dflashcpp_pick_int(better, now[i], best[i]);
        }
        scale = dflashcpp_pick(better, sumlx / suml2, scale);
        score = dflashcpp_pick(better, scale * sumlx, score);
    }
    for (int lane = 0; lane < 8; ++lane) {
        scales[lane] = empty[lane] ? 0 : scale[lane];
        for (int i = 0; i < 16; ++i) {
            levels[16*lane + i] = empty[lane] ? 0 : (int8_t) (best[i][lane] + 32);
        }
    }
}

__attribute__((target("avx2"))) static void dflashcpp_symmetric_avx2(
        const float * x, float least, int8_t * levels, float * scales) {
    dflashcpp_symmetric_body(x, least, levels, scales);
}

static void dflashcpp_search_symmetric(const float * x, float least, int8_t * levels, float * scales) {
    if (__builtin_cpu_supports("avx2")) {
        dflashcpp_symmetric_avx2(x, least, levels, scales);
    } else {
        dflashcpp_symmetric_body(x, least, levels, scales);
    }
}

#endif
