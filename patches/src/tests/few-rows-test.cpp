#include "../few-rows.h"

#include "check.h"

#include <cmath>
#include <vector>

using namespace dflashcpp;

// a number that BF16 holds exactly, as its upper half
static bf16_bits bits(float x) {
    uint32_t whole;
    std::memcpy(&whole, &x, sizeof(whole));
    return bf16_bits(whole >> 16);
}

static float number(bf16_bits x) {
    const uint32_t whole = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &whole, sizeof(f));
    return f;
}

struct case_of {
    static constexpr int64_t pad = 32; // between rows

    int64_t n_matrix, n_activations, width;
    std::vector<bf16_bits> matrix, activations;
    std::vector<float>     out;

    case_of(int64_t n_matrix, int64_t n_activations, int64_t width)
        : n_matrix(n_matrix), n_activations(n_activations), width(width) {
        uint32_t state = 1;
        const auto next = [&] {
            state = state * 1664525u + 1013904223u;
            return bits((int(state >> 24) - 128) / 64.0f);
        };
        matrix.resize(size_t(n_matrix * (width + pad)));
        activations.resize(size_t(n_activations * (width + pad)));
        for (bf16_bits & x : matrix) { x = next(); }
        for (bf16_bits & x : activations) { x = next(); }
        out.assign(size_t(n_activations * (n_matrix + 1)), NAN);
    }

    few_rows product(int64_t n) {
        return { matrix.data(), width + pad, n_matrix, activations.data(), width + pad, n, out.data(), n_matrix + 1, width };
    }

    double expected(int64_t row, int64_t activation) const {
        double sum = 0.0;
        for (int64_t k = 0; k < width; ++k) {
            sum += double(number(matrix[size_t(row * (width + pad) + k)])) * number(activations[size_t(activation * (width + pad) + k)]);
        }
        return sum;
    }

    float at(int64_t row, int64_t activation) const { return out[size_t(activation * (n_matrix + 1) + row)]; }
};

static void test_products_are_right() {
    for (int64_t n = 1; n <= few_rows_most; ++n) {
        case_of c(11, n, 96); // two tiles and three rows
        few_rows_multiply(c.product(n), 0, 11);
        for (int64_t i = 0; i < 11; ++i) {
            for (int64_t j = 0; j < n; ++j) {
                CHECK(std::fabs(c.at(i, j) - c.expected(i, j)) < 1e-3);
            }
        }
    }
}

static void test_only_the_share_is_written() {
    case_of c(16, 2, 64);
    few_rows_multiply(c.product(2), 4, 10);
    for (int64_t j = 0; j < 2; ++j) {
        for (int64_t i = 0; i < 17; ++i) {
            CHECK(std::isnan(c.at(i, j)) == (i < 4 || i >= 10));
        }
    }
}

// A verified row must not depend on how many are verified with it.
static void test_the_number_of_rows_changes_no_bit() {
    case_of alone(8, few_rows_most, 576);
    case_of together(8, few_rows_most, 576);
    few_rows_multiply(together.product(few_rows_most), 0, 8);
    for (int64_t n = 1; n < few_rows_most; ++n) {
        few_rows_multiply(alone.product(n), 0, 8);
        for (int64_t i = 0; i < 8; ++i) {
            for (int64_t j = 0; j < n; ++j) {
                CHECK(alone.at(i, j) == together.at(i, j));
            }
        }
    }
}

static void test_shares_cover_all_rows_and_begin_at_tiles() {
    for (const int64_t rows : { 1, 16, 192, 576, 49152, 202048 }) {
        for (const int64_t threads : { 1, 2, 6, 64 }) {
            const int64_t share = few_rows_share(rows, threads);
            CHECK(share >= few_rows_tile && share % few_rows_tile == 0);
            CHECK(share <= 256);
        }
    }
    CHECK(few_rows_share(192, 2) <= 192 / 2); // both threads have work
}

static void test_what_pays() {
    CHECK(!few_rows_pay(1, 576));                // as upstream: there is nothing to share
    CHECK(!few_rows_pay(few_rows_most + 1, 576));
    CHECK(!few_rows_pay(4, 570));                // not a multiple of what is multiplied at once
    CHECK(!few_rows_pay(4, 4096));
#if defined(__AVX512BF16__)
    CHECK(few_rows_pay(2, 576) && few_rows_pay(few_rows_most, few_rows_width));
#else
    CHECK(!few_rows_pay(2, 576));
#endif
}

int main() {
    test_products_are_right();
    test_only_the_share_is_written();
    test_the_number_of_rows_changes_no_bit();
    test_shares_cover_all_rows_and_begin_at_tiles();
    test_what_pays();
    return failures();
}
