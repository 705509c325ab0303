// Products of a BF16 matrix with few rows of activations, for ggml's matrix multiplication on the CPU.
//
// Verifying drafts, or drafting blocks, multiplies every matrix of a model with a few rows, and that takes
// as long as reading the matrix if the memory is kept busy. Upstream multiplies tiles of four matrix rows; it
// reads four places of memory by turns, and where rows are short the processor does not see what is needed
// next. Here the next tile, which lies behind this one, is fetched in the order it lies there meanwhile.
//
// The sum of a product does not depend on how many activation rows go together.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace dflashcpp {

using bf16_bits = uint16_t;

// out[j * out_stride + i] = matrix row i * activation row j. Strides in numbers, not bytes.
struct few_rows {
    const bf16_bits * matrix;
    int64_t           matrix_stride;
    int64_t           n_matrix; // rows
    const bf16_bits * activations;
    int64_t           activation_stride;
    int64_t           n_activations; // rows
    float *           out;
    int64_t           out_stride;
    int64_t           width; // of a row
};

constexpr int64_t few_rows_most  = 16;
constexpr int64_t few_rows_group = 8;    // activation rows that are multiplied at once
constexpr int64_t few_rows_lanes = 32;   // numbers that are multiplied at once
constexpr int64_t few_rows_width = 2048; // longer rows are fetched ahead well enough without help
constexpr int64_t few_rows_tile  = 4;    // matrix rows

// Whether few_rows_multiply() is the faster way.
inline bool few_rows_pay(int64_t n_activations, int64_t width) {
#if defined(__AVX512BF16__)
    return n_activations >= 2 && n_activations <= few_rows_most && width <= few_rows_width && width % few_rows_lanes == 0;
#else
    (void) n_activations, (void) width;
    return false;
#endif
}

namespace few_rows_detail {

#if defined(__AVX512BF16__)

struct sum {
    __m512 lanes = _mm512_setzero_ps();

    void add(const bf16_bits * a, const bf16_bits * b) { lanes = _mm512_dpbf16_ps(lanes, load(a), load(b)); }

    float value() const {
        alignas(64) float all[16];
        _mm512_store_ps(all, lanes);
        const __m256 eight = _mm256_add_ps(_mm256_load_ps(all), _mm256_load_ps(all + 8));
        const __m128 four  = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two   = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }

    static __m512bh load(const bf16_bits * p) { return (__m512bh) _mm512_loadu_si512(p); }
};

inline void fetch(const char * line) { _mm_prefetch(line, _MM_HINT_T0); }

#else

struct sum {
    float lanes = 0.0f;

    void add(const bf16_bits * a, const bf16_bits * b) {
        for (int64_t i = 0; i < few_rows_lanes; ++i) {
            lanes += widen(a[i]) * widen(b[i]);
        }
    }

    float value() const { return lanes; }

    static float widen(bf16_bits x) {
        const uint32_t bits = uint32_t(x) << 16;
        float f;
        std::memcpy(&f, &bits, sizeof(f));
        return f;
    }
};

inline void fetch(const char *) {}

#endif

// Rows [i, i + M) of the matrix with all N activations; `next`: what is needed after these.
template <int M, int N>
void multiply(const few_rows & p, int64_t i, const bf16_bits * next) {
    const bf16_bits * rows  = p.matrix + i * p.matrix_stride;
    const char *      lines = reinterpret_cast<const char *>(next);
    sum sums[M][N];
    for (int64_t k = 0; k < p.width; k += few_rows_lanes) {
        for (int m = 0; m < M; ++m, lines += few_rows_lanes * sizeof(bf16_bits)) {
            fetch(lines);
        }
        for (int m = 0; m < M; ++m) {
            for (int n = 0; n < N; ++n) {
                sums[m][n].add(rows + m * p.matrix_stride + k, p.activations + n * p.activation_stride + k);
            }
        }
    }
    for (int n = 0; n < N; ++n) {
        for (int m = 0; m < M; ++m) {
            p.out[n * p.out_stride + i + m] = sums[m][n].value();
        }
    }
}

// The same for any number of activations up to few_rows_group, from number `first` on.
template <int M>
void multiply_group(few_rows p, int64_t first, int64_t n, int64_t i, const bf16_bits * next) {
    p.activations += first * p.activation_stride;
    p.out         += first * p.out_stride;
    switch (n) {
        case 1: return multiply<M, 1>(p, i, next);
        case 2: return multiply<M, 2>(p, i, next);
        case 3: return multiply<M, 3>(p, i, next);
        case 4: return multiply<M, 4>(p, i, next);
        case 5: return multiply<M, 5>(p, i, next);
        case 6: return multiply<M, 6>(p, i, next);
        case 7: return multiply<M, 7>(p, i, next);
        case 8: return multiply<M, 8>(p, i, next);
    }
}

template <int M>
void multiply_tile(const few_rows & p, int64_t i, int64_t next) {
    const int64_t half = (p.n_activations + 1) / 2;
    const int64_t n    = p.n_activations <= few_rows_group ? p.n_activations : half;
    for (int64_t first = 0; first < p.n_activations; first += n) {
        multiply_group<M>(p, first, std::min(n, p.n_activations - first), i, p.matrix + next * p.matrix_stride);
    }
}

} // namespace few_rows_detail

// Rows [begin, end) of the matrix. Width a multiple of few_rows_lanes, at most few_rows_most activations.
inline void few_rows_multiply(const few_rows & p, int64_t begin, int64_t end) {
    constexpr int64_t tile = few_rows_tile;
    int64_t i = begin;
    for (; i + tile <= end; i += tile) {
        few_rows_detail::multiply_tile<tile>(p, i, i + 2 * tile <= p.n_matrix ? i + tile : i);
    }
    for (; i < end; ++i) {
        few_rows_detail::multiply_tile<1>(p, i, i);
    }
}

// Rows of the matrix that a thread takes at once: enough to read in one go, few enough to share evenly.
inline int64_t few_rows_share(int64_t n_matrix, int64_t n_threads) {
    const int64_t parts = 4 * few_rows_tile * std::max<int64_t>(1, n_threads);
    return few_rows_tile * std::clamp<int64_t>((n_matrix + parts - 1) / parts, 4, 64);
}

} // namespace dflashcpp
