// Which positions of a sequence the draft cache is sure to have, and how much of a prompt can be reused
// so that the drafter still sees what it would see after reading the prompt anew.
//
// Two things lose rows: a bounded cache drops the oldest, and a windowed layer's cache reuses the cells that
// its window has left behind, oldest first: llama.cpp keeps all positions between the least and the
// greatest of a sequence (llama-kv-cache.cpp, apply_ubatch). What it tells is of the windowed layers where
// there are any; what full layers beside them have is kept in mind here.

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

    bool mixed() const { return window > 0 && !all_windowed; }

    // First position that windowed layers see from `pos`.
    int32_t window_from(int32_t pos) const { return std::max(0, pos - window + 1); }

    // First position that full layers have when a prompt of n positions was read.
    int32_t full_from(int32_t n) const { return n_cells > 0 ? draft_keep_from(n - 1, n_cells, n_block) : 0; }
};

class draft_cover {
public:
    int32_t end() const { return to; }

    // What the cache itself tells: the sequence has [pos_min, pos_max] (-1: it is empty).
    void look(int32_t pos_min, int32_t pos_max, const draft_sight & sight) {
        told = std::max(pos_min, 0);
        if (sight.mixed() && pos_max < 0) {
            left = std::max(left, to); // of full layers, if no more was lost than the windows
            to = 0;
            return;
        }
        to   = pos_max + 1;
        full = sight.mixed() ? std::min(full, to) : told;
    }

    // The cache lost all rows that it told of; the next one comes at `pos`.
    void restart(int32_t pos) {
        full = pos <= left ? std::min(full, pos) : pos;
        told = to = pos;
        left = 0;
    }

    // Rows below `pos` were dropped from a bounded cache.
    void drop_below(int32_t pos) {
        full = std::max(full, pos);
        told = std::max(told, pos);
    }

    // Everything was removed.
    void clear() { *this = draft_cover(); }

    // The cache holds [pos_min, pos_max] of something else now: restored, copied or shifted.
    void replaced(int32_t pos_min, int32_t pos_max, const draft_sight & sight) {
        clear();
        full = sight.n_cells > 0 ? std::max(pos_min, 0) : 0; // of a full layer, as it was when it was read
        look(pos_min, pos_max, sight);
    }

    // The largest number of positions, at most n_past, of which a prompt of n_prompt positions can reuse the
    // rows. What lies between it and n_prompt has to be read, and the drafter then sees all it would see
    // after the entire prompt. n_past > what is covered: not all of it ever reached the cache.
    int32_t reusable(int32_t n_past, int32_t n_prompt, const draft_sight & sight) const {
        const int32_t n = sight.all_windowed ? n_past : reusable_full(n_past, n_prompt, sight);
        return sight.window > 0 ? reusable_windowed(n, n_prompt, sight) : n;
    }

private:
    int32_t reusable_windowed(int32_t n_past, int32_t n_prompt, const draft_sight & sight) const {
        const int32_t need = std::max(sight.window_from(n_prompt), sight.full_from(n_prompt));
        const int32_t have = std::min(n_past, to);
        return n_past > need && told <= need && have > need ? have : std::min(n_past, need);
    }

    int32_t reusable_full(int32_t n_past, int32_t n_prompt, const draft_sight & sight) const {
        const int32_t first = sight.full_from(n_prompt);
        if (n_past <= first || full > first) {
            return std::min(n_past, first);
        }
        return std::max(first, std::min(n_past, to));
    }

    int32_t full = 0; // full layers have [full, to)
    int32_t told = 0; // the cache tells of [told, to)
    int32_t to   = 0;
    int32_t left = 0; // full layers may still have [full, left) while the windowed ones have nothing
};

} // namespace dflashcpp
