#include "../draft-cover.h"
#include "check.h"

using namespace dflashcpp;

static draft_sight sees(int32_t window, bool all_windowed, uint32_t n_cells = 0) {
    draft_sight sight;
    sight.window       = window;
    sight.all_windowed = all_windowed;
    sight.n_cells      = n_cells;
    sight.n_block      = 4;
    return sight;
}

static void full_attention_reuses_what_was_injected() {
    const draft_sight sight = sees(0, false);
    draft_cover cover;
    CHECK(cover.reusable(0, 50, sight) == 0);
    cover.look(0, 99, sight);
    CHECK(cover.end() == 100);
    CHECK(cover.reusable(100, 150, sight) == 100);
    CHECK(cover.reusable(40, 150, sight) == 40);   // rewound
    CHECK(cover.reusable(120, 150, sight) == 100); // the rest never reached the cache
    cover.look(0, 59, sight);
    CHECK(cover.reusable(100, 150, sight) == 60);
    cover.replaced(30, 80, sight); // restored without its start
    CHECK(cover.reusable(81, 150, sight) == 0);
    cover.replaced(0, 80, sight);
    CHECK(cover.reusable(81, 150, sight) == 81);
    cover.look(-1, -1, sight);
    CHECK(cover.reusable(81, 150, sight) == 0);
}

static void windowed_layers_need_their_window_only() {
    const draft_sight sight = sees(10, true);
    draft_cover cover;
    cover.look(91, 99, sight); // a prompt of 100 positions, read from what the window sees
    CHECK(cover.reusable(100, 100, sight) == 100);
    CHECK(cover.reusable(100, 105, sight) == 100); // sees 96 ..
    CHECK(cover.reusable(100, 300, sight) == 100); // sees 291 .., nothing of what is kept matters
    CHECK(cover.reusable(99, 99, sight) == 90);    // would see 90 ..
    CHECK(cover.reusable(50, 100, sight) == 50);   // 91 .. will be read
    CHECK(cover.reusable(95, 96, sight) == 87);
    CHECK(cover.reusable(5, 6, sight) == 0);
    CHECK(cover.reusable(120, 110, sight) == 101); // 100 .. are not there, 101 .. are needed
    CHECK(cover.reusable(108, 108, sight) == 100); // 99 .. are needed, 99 is there
}

static void a_cache_with_room_to_spare_allows_small_rewinds() {
    const draft_sight sight = sees(10, true);
    draft_cover cover;
    cover.look(120, 149, sight); // 30 cells where the window needs 10
    CHECK(cover.reusable(150, 150, sight) == 150);
    CHECK(cover.reusable(149, 149, sight) == 149);
    CHECK(cover.reusable(129, 129, sight) == 129); // sees 120 ..
    CHECK(cover.reusable(128, 128, sight) == 119);
}

static void a_short_sequence_is_in_the_window() {
    const draft_sight sight = sees(10, true);
    draft_cover cover;
    cover.look(0, 5, sight);
    for (int n = 1; n <= 6; ++n) {
        CHECK(cover.reusable(n, n, sight) == n);
    }
}

static void mixed_layers_need_both() {
    const draft_sight sight = sees(10, false);
    draft_cover cover;
    cover.look(91, 99, sight);
    CHECK(cover.reusable(100, 150, sight) == 100);
    CHECK(cover.reusable(100, 101, sight) == 100);
    CHECK(cover.reusable(95, 101, sight) == 95);
    CHECK(cover.reusable(95, 96, sight) == 87);   // the window of 96 begins at 87, which is gone
    CHECK(cover.reusable(50, 150, sight) == 50);  // full layers have it, windowed ones will have read theirs
}

static void full_layers_keep_what_windowed_ones_lost() {
    const draft_sight sight = sees(10, false);
    draft_cover cover;
    cover.look(91, 99, sight);
    cover.look(-1, -1, sight); // the server removed 50 .. to read on from there
    CHECK(cover.end() == 0);
    cover.restart(50);
    cover.look(50, 79, sight);
    CHECK(cover.reusable(80, 90, sight) == 80);
    cover.clear(); // the same, but all was removed
    cover.restart(50);
    cover.look(50, 79, sight);
    CHECK(cover.reusable(80, 90, sight) == 0);
    cover.replaced(-1, -1, sight); // or restored without its draft cache
    CHECK(cover.reusable(80, 90, sight) == 0);
    cover.restart(80);
    cover.look(80, 89, sight);
    CHECK(cover.reusable(90, 95, sight) == 0);
    cover.replaced(81, 89, sight); // what a saved state tells
    CHECK(cover.reusable(90, 95, sight) == 90);
}

static void a_bounded_cache_keeps_its_newest() {
    const draft_sight sight = sees(0, false, 64);
    draft_cover cover;
    cover.look(0, 99, sight);
    cover.drop_below(40);
    CHECK(cover.reusable(100, 100, sight) == 100); // a fresh one keeps 40 ..
    CHECK(cover.reusable(100, 130, sight) == 100);
    CHECK(cover.reusable(95, 96, sight) == 36);    // a fresh one keeps 36 ..
    CHECK(cover.reusable(30, 130, sight) == 30);   // 70 .. will be read
    CHECK(cover.reusable(100, 300, sight) == 100); // 240 .. will be read
}

static void a_window_larger_than_a_bounded_cache_is_not_waited_for() {
    const draft_sight sight = sees(500, true, 64);
    draft_cover cover;
    cover.look(40, 99, sight);
    CHECK(cover.reusable(100, 101, sight) == 100);
    CHECK(cover.reusable(100, 100, sight) == 100); // a fresh one keeps 40 ..
    CHECK(cover.reusable(90, 91, sight) == 31);    // 31 ..
}

int main() {
    full_attention_reuses_what_was_injected();
    windowed_layers_need_their_window_only();
    a_cache_with_room_to_spare_allows_small_rewinds();
    a_short_sequence_is_in_the_window();
    mixed_layers_need_both();
    full_layers_keep_what_windowed_ones_lost();
    a_bounded_cache_keeps_its_newest();
    a_window_larger_than_a_bounded_cache_is_not_waited_for();
    return failures();
}
