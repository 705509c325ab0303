// The k largest of many numbers, for ggml's TOP_K on the CPU.
//
// Once k numbers are held, nearly every further one is below the worst held: blocks are compared with it in
// a loop that the compiler turns into vector code, and only a block with a hit is looked at number by number.
// Upstream fills an array with all the indices and sorts it partially, however small k is.
//
// Ties go to the lower index and NaN counts as the lowest number, so the result depends on the numbers alone,
// not on how a row was divided.

#pragma once

#include <algorithm>
#include <cstdint>

namespace dflashcpp {

// Whether index a comes before index b: larger number, or the same and a lower index.
struct top_k_before {
    const float * values;

    bool operator()(int32_t a, int32_t b) const {
        const float x = values[a];
        const float y = values[b];
        if (x > y || x < y) {
            return x > y;
        }
        const bool x_nan = x != x;
        const bool y_nan = y != y;
        return x_nan == y_nan ? a < b : y_nan;
    }
};

// Indices of the best k of those offered so far: a heap in `out` with the worst of them in front.
class top_k_heap {
  public:
    top_k_heap(const float * values, int32_t * out, int64_t k) : before{ values }, out(out), k(k) {}

    void offer(int32_t index) {
        if (n < k) {
            out[n++] = index;
            std::push_heap(out, out + n, before);
        } else if (before(index, out[0])) {
            std::pop_heap(out, out + k, before);
            out[k - 1] = index;
            std::push_heap(out, out + k, before);
        }
    }

    // indices from `begin` up to `end`
    void offer_range(int64_t begin, int64_t end) {
        int64_t i = begin;
        for (; i < end && n < k; ++i) {
            offer(int32_t(i));
        }
        for (; i + BLOCK <= end; i += BLOCK) {
            if (any_above(before.values + i, before.values[out[0]])) {
                offer_each(i, i + BLOCK);
            }
        }
        offer_each(i, end);
    }

    // best first; returns how many there are
    int64_t finish() {
        std::sort_heap(out, out + n, before);
        return n;
    }

  private:
    static constexpr int64_t BLOCK = 64;

    // also true for NaN on either side, which offer() then looks at
    static bool any_above(const float * values, float floor) {
        int hits = 0;
        for (int64_t i = 0; i < BLOCK; ++i) {
            hits |= !(values[i] <= floor);
        }
        return hits != 0;
    }

    void offer_each(int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            offer(int32_t(i));
        }
    }

    top_k_before before;
    int32_t *    out;
    int64_t      k;
    int64_t      n = 0;
};

// Best k of values[begin .. end), best first; returns how many there are (fewer than k in a short range).
inline int64_t top_k(const float * values, int64_t begin, int64_t end, int64_t k, int32_t * out) {
    if (k <= 0) {
        return 0;
    }
    top_k_heap heap(values, out, k);
    heap.offer_range(begin, end);
    return heap.finish();
}

// The same of the n indices in `some` only (each once; not the memory of `out`).
inline int64_t top_k_of(const float * values, const int32_t * some, int64_t n, int64_t k, int32_t * out) {
    if (k <= 0) {
        return 0;
    }
    top_k_heap heap(values, out, k);
    for (int64_t i = 0; i < n; ++i) {
        heap.offer(some[i]);
    }
    return heap.finish();
}

// Whether rows are better cut into a part for each thread than given to threads whole: too few rows to keep
// the threads busy, and parts that are long. The parts' bests need n_rows * k numbers of scratch a thread.
inline bool top_k_cuts_rows(int64_t n_rows, int64_t n, int64_t k, int64_t n_threads) {
    const bool uneven = n_rows % n_threads != 0 && n_rows < 4 * n_threads;
    return n_threads > 1 && uneven && n_rows * k <= n && n / n_threads >= 16 * k && n / n_threads >= 2048;
}

} // namespace dflashcpp
