#include "../top-k.h"
#include "check.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

using namespace dflashcpp;

namespace {

std::vector<int32_t> by_sorting(const std::vector<float> & values, int64_t k) {
    std::vector<int32_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return std::isnan(values[a]) ? false : std::isnan(values[b]) || values[a] > values[b];
    });
    order.resize(std::min<size_t>(order.size(), size_t(k)));
    return order;
}

std::vector<int32_t> whole(const std::vector<float> & values, int64_t k) {
    std::vector<int32_t> out(size_t(k) + 1, -7);
    const int64_t n = top_k(values.data(), 0, int64_t(values.size()), k, out.data());
    CHECK(out[size_t(k)] == -7);
    out.resize(size_t(n));
    return out;
}

// by parts of `n_parts` threads, then the best of the parts' bests
std::vector<int32_t> in_parts(const std::vector<float> & values, int64_t k, int64_t n_parts) {
    std::vector<int32_t> bests;
    for (int64_t part = 0; part < n_parts; ++part) {
        std::vector<int32_t> out(static_cast<size_t>(k));
        const int64_t size = int64_t(values.size());
        const int64_t n    = top_k(values.data(), part * size / n_parts, (part + 1) * size / n_parts, k, out.data());
        bests.insert(bests.end(), out.begin(), out.begin() + n);
    }
    std::vector<int32_t> out(static_cast<size_t>(k));
    out.resize(size_t(top_k_of(values.data(), bests.data(), int64_t(bests.size()), k, out.data())));
    return out;
}

void compare(const std::vector<float> & values) {
    for (const int64_t k : { 1, 2, 4, 16, 63, 400, 5000 }) {
        const auto expected = by_sorting(values, k);
        CHECK(whole(values, k) == expected);
        CHECK(in_parts(values, k, 2) == expected);
        CHECK(in_parts(values, k, 7) == expected);
    }
}

void kinds_of_rows() {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (const size_t n : { 1u, 3u, 63u, 64u, 65u, 1000u, 4099u }) {
        std::vector<float> values(n);
        for (auto & value : values) {
            value = normal(random);
        }
        compare(values);
        std::sort(values.begin(), values.end());
        compare(values); // every number is a hit
        std::reverse(values.begin(), values.end());
        compare(values);
        for (auto & value : values) {
            value = std::round(value); // many ties
        }
        compare(values);
    }
    compare(std::vector<float>(777, 1.0f));
    compare(std::vector<float>(777, -std::numeric_limits<float>::infinity()));
}

void odd_numbers() {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float inf = std::numeric_limits<float>::infinity();
    compare({ nan, 1.0f, nan, inf, -inf, 0.0f, -0.0f, nan });
    compare(std::vector<float>(300, nan));

    std::vector<float> values(1000, nan);
    values[70] = -inf;
    values[700] = 2.0f;
    compare(values);

    CHECK(top_k(values.data(), 0, 1000, 0, nullptr) == 0);
    CHECK(top_k_of(values.data(), nullptr, 0, 0, nullptr) == 0);
    CHECK(whole({}, 4).empty());
}

void when_rows_are_cut() {
    CHECK(top_k_cuts_rows(3, 50000, 16, 2));
    CHECK(top_k_cuts_rows(1, 50000, 16, 8));
    CHECK(!top_k_cuts_rows(4, 50000, 16, 2));    // two rows each
    CHECK(!top_k_cuts_rows(3, 50000, 16, 1));
    CHECK(!top_k_cuts_rows(3, 2000, 16, 2));     // short rows
    CHECK(!top_k_cuts_rows(3, 50000, 20000, 2)); // no room for the parts' bests
    CHECK(!top_k_cuts_rows(101, 50000, 16, 2));  // many rows: one left over does not matter
}

} // namespace

int main() {
    kinds_of_rows();
    odd_numbers();
    when_rows_are_cut();
    return failures();
}
