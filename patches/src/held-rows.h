// Target features of one sequence that the draft cache does not have yet, oldest first.
//
// Each row is written once, by whoever fills what append() returns, and is handed to the drafter from
// where it lies. Positions do not decrease.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dflashcpp {

class held_rows {
public:
    explicit held_rows(size_t width) : width(width) {}

    bool    empty() const { return pos.empty(); }
    size_t  size()  const { return pos.size(); }
    int32_t first() const { return pos.front(); }
    int32_t last()  const { return pos.back(); }

    int32_t       at(size_t i)  const { return pos[i]; }
    const float * row(size_t i) const { return rows.data() + i * width; }

    // Room for n more rows at these positions; valid until the next call that changes anything.
    float * append(const int32_t * positions, size_t n) {
        const size_t used = pos.size() * width;
        if (rows.size() < used + n * width) {
            rows.resize(used + n * width);
        }
        pos.insert(pos.end(), positions, positions + n);
        return rows.data() + used;
    }

    // Forgets rows at `from` and behind it.
    void drop_from(int32_t from) {
        pos.erase(std::lower_bound(pos.begin(), pos.end(), from), pos.end());
    }

    // Forgets the n oldest rows.
    void drop_first(size_t n) {
        if (n < pos.size()) {
            std::copy(rows.begin() + n * width, rows.begin() + pos.size() * width, rows.begin());
        }
        pos.erase(pos.begin(), pos.begin() + std::min(n, pos.size()));
    }

    void clear() { pos.clear(); }

private:
    size_t               width;
    std::vector<float>   rows; // keeps its size when rows go, so that it is not cleared again
    std::vector<int32_t> pos;
};

} // namespace dflashcpp
