#include "../draft-cover.h"
#include "check.h"

using namespace dflashcpp;

static void full_attention_reuses_what_was_injected() {
    const draft_sight sight;
    draft_cover cover;
    CHECK(cover.reusable(0, 50, sight) == 0);
    cover.add(99, sight);
    CHECK(cover.end() == 100);
    CHECK(cover.reusable(100, 150, sight) == 100);
    CHECK(cover.reusable(40, 150, sight) == 40);   // rewound
    CHECK(cover.reusable(120, 150, sight) == 100); // the rest never reached the cache
    cover.trim(59);
    CHECK(cover.reusable(100, 150, sight) == 60);
    cover.trim(500); // no news
    CHECK(cover.end() == 60);
    cover.replaced(30, 80, sight); // restored without its start
    CHECK(cover.reusable(81, 150, sight) == 0);
    cover.replaced(0, 80, sight);
    CHECK(cover.reusable(81, 150, sight) == 81);
    cover.trim(-1);
    CHECK(cover.reusable(81, 150, sight) == 0);
}

static void windowed_layers_need_their_window_only() {
    draft_sight sight;
    sight.window = 10;
    sight.all_windowed = true;
    draft_cover cover;
    cover.restart(91); // a prompt of 100 positions, read from what the window sees
    cover.add(99, sight);
    CHECK(cover.reusable(100, 100, sight) == 100);
    CHECK(cover.reusable(100, 105, sight) == 100); // sees 96 ..
    CHECK(cover.reusable(100, 300, sight) == 100); // sees 291 .., nothing of what is kept matters
    CHECK(cover.reusable(99, 99, sight) == 90);    // would see 90 ..
    CHECK(cover.reusable(50, 100, sight) == 50);   // 91 .. will be read
    CHECK(cover.reusable(95, 96, sight) == 87);
    CHECK(cover.reusable(5, 6, sight) == 0);
    CHECK(cover.reusable(120, 110, sight) == 101); // 100 .. are not there, 101 .. are needed
    CHECK(cover.reusable(108, 108, sight) == 100); // 99 .. are needed, 99 is there

    cover.add(149, sight); // fifty more: cells of 91 .. are reused by now
    CHECK(cover.reusable(150, 150, sight) == 150);
    CHECK(cover.reusable(149, 150, sight) == 149);
    CHECK(cover.reusable(149, 149, sight) == 140);
    cover.replaced(120, 149, sight); // what a saved state has
    CHECK(cover.reusable(150, 151, sight) == 150);
    cover.replaced(145, 149, sight); // a state with a hole before it
    CHECK(cover.reusable(150, 151, sight) == 142);
}

static void a_short_sequence_is_in_the_window() {
    draft_sight sight;
    sight.window = 10;
    sight.all_windowed = true;
    draft_cover cover;
    cover.add(5, sight);
    for (int n = 1; n <= 6; ++n) {
        CHECK(cover.reusable(n, n, sight) == n);
    }
}

static void mixed_layers_need_both() {
    draft_sight sight;
    sight.window = 10;
    draft_cover cover;
    cover.add(99, sight);
    CHECK(cover.reusable(100, 150, sight) == 100);
    CHECK(cover.reusable(100, 101, sight) == 100);
    CHECK(cover.reusable(95, 101, sight) == 95);
    CHECK(cover.reusable(95, 96, sight) == 0);  // the window of 96 begins at 87, which is gone
    CHECK(cover.reusable(50, 150, sight) == 0); // nothing to add to: windowed layers lost 49
    cover.trim(94);
    CHECK(cover.reusable(95, 101, sight) == 95);
    cover.replaced(91, 99, sight);
    CHECK(cover.reusable(100, 120, sight) == 100);
}

static void a_bounded_cache_keeps_its_newest() {
    draft_sight sight;
    sight.n_cells = 64;
    sight.n_block = 4;
    draft_cover cover;
    cover.add(99, sight);
    cover.drop_below(40);
    CHECK(cover.reusable(100, 100, sight) == 100); // a fresh one keeps 40 ..
    CHECK(cover.reusable(100, 130, sight) == 100);
    CHECK(cover.reusable(95, 96, sight) == 36);    // a fresh one keeps 36 ..
    CHECK(cover.reusable(30, 130, sight) == 30);   // 70 .. will be read
}

int main() {
    full_attention_reuses_what_was_injected();
    windowed_layers_need_their_window_only();
    a_short_sequence_is_in_the_window();
    mixed_layers_need_both();
    a_bounded_cache_keeps_its_newest();
    return failures();
}
