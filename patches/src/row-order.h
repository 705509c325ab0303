// Rows that came out in the order of micro-batches, put back into the order of the batch: llama.cpp splits
// a batch of several sequences of unequal length so that the rows of one sequence do not stay together.
//
// Plain types only, so that this file compiles and is tested without llama.cpp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dflashcpp {

// ids[i] is the place in the batch of the row that came out as number i
inline bool in_order(const std::vector<int32_t> & ids) {
    return std::is_sorted(ids.begin(), ids.end());
}

// Moves ids.size() rows of `width` numbers to their places.
inline void put_in_order(float * rows, size_t width, const std::vector<int32_t> & ids) {
    const std::vector<float> from(rows, rows + ids.size() * width);
    for (size_t i = 0; i < ids.size(); ++i) {
        std::copy_n(from.begin() + i * width, width, rows + ids[i] * width);
    }
}

} // namespace dflashcpp
