// Which positions of a sequence the draft cache is sure to have, and how much of a prompt can be reused
// so that the drafter still sees what it would see after reading the prompt anew.
//
// Two things lose rows: a bounded cache drops the oldest, and a windowed layer's cache reuses any cell that
// its window has left behind, in no order. So behind a last position `to - 1`, windowed layers are sure of
// the last `window` positions only, and after a rewind of less.

#pragma once

#include "dflash-reserve.h"

#include <algorithm>
#include <cstdint>

namespace dflashcpp {

// How far the layers of a drafter see.
struct draft_sight {
    int32_t  window       = 0;     // positions a windowed layer sees, its own counted; 0: no layer is windowed
    bool     all_windowed = false; // no layer sees further than the window
    uint32_t n_cells      = 0;     // of a bounded cache, for one sequence; 0: as many as needed
    uint32_t n_block      = 1;     // tokens of a block

    // First position that windowed layers see from `pos`.
    int32_t window_from(int32_t pos) const { return std::max(0, pos - window + 1); }

    // First position that full layers have when a prompt of n positions was read.
    int32_t full_from(int32_t n) const { return n_cells > 0 ? draft_keep_from(n - 1, n_cells, n_block) : 0; }
};

class draft_cover {
public:
    int32_t end() const { return to; }

    // The cache lost all rows of the sequence; the next one comes at `pos`.
    void restart(int32_t pos) { full = windowed = to = pos; }

    // Rows up to `last` were added behind end().
    void add(int32_t last, const draft_sight & sight) {
        to = last + 1;
        narrow(sight);
    }

    // Rows below `pos` were dropped from a bounded cache.
    void drop_below(int32_t pos) {
        full     = std::max(full, pos);
        windowed = std::max(windowed, pos);
    }

    // What the cache itself tells: the sequence ends at pos_max (-1: it is empty). Less than was known
    // means a rewind.
    void trim(int32_t pos_max) {
        to       = std::min(to, pos_max + 1);
        full     = std::min(full, to);
        windowed = std::min(windowed, to);
    }

    // The cache holds [pos_min, pos_max] of something else now: restored, copied or shifted.
    void replaced(int32_t pos_min, int32_t pos_max, const draft_sight & sight) {
        full = windowed = std::max(pos_min, 0);
        to = pos_max + 1;
        narrow(sight);
        if (sight.window > 0 && !sight.all_windowed && sight.n_cells == 0) {
            full = 0; // pos_min is that of the windowed layers' cache
        }
    }

    // The largest number of positions, at most n_past, of which a prompt of n_prompt positions can reuse the
    // rows. What lies between it and n_prompt has to be read, and the drafter then sees all it would see
    // after the entire prompt. n_past > what is covered: not all of it ever reached the cache.
    int32_t reusable(int32_t n_past, int32_t n_prompt, const draft_sight & sight) const {
        return sight.all_windowed ? reusable_windowed(n_past, n_prompt, sight) : reusable_full(n_past, n_prompt, sight);
    }

private:
    void narrow(const draft_sight & sight) {
        if (sight.window > 0) {
            windowed = std::max(windowed, std::min(to, sight.window_from(to)));
        }
    }

    int32_t reusable_windowed(int32_t n_past, int32_t n_prompt, const draft_sight & sight) const {
        const int32_t need = sight.window_from(n_prompt);
        if (n_past <= need) {
            return n_past; // all that is needed will be read
        }
        const int32_t have = std::min(n_past, to);
        return windowed <= need && have > need ? have : need;
    }

    int32_t reusable_full(int32_t n_past, int32_t n_prompt, const draft_sight & sight) const {
        const int32_t first = sight.full_from(n_prompt);
        if (full > first) {
            return std::min(n_past, first);
        }
        const int32_t have = std::min(n_past, to);
        if (sight.window == 0 || have == 0) {
            return have;
        }
        // rows are only added right behind what the windowed layers have
        const int32_t need = std::min(have - 1, sight.window_from(n_prompt));
        return windowed <= need ? have : 0;
    }

    int32_t full     = 0; // full layers have [full, to)
    int32_t windowed = 0; // windowed layers have [windowed, to)
    int32_t to       = 0;
};

} // namespace dflashcpp
