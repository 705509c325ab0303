#include "../dflash-mask.h"
#include "check.h"

using namespace dflashcpp;

namespace {

void positions() {
    // a block at 10 .. 13: its anchor sees the masks behind it unless the layer is causal
    CHECK(sees(10, 13, false, 0));
    CHECK(!sees(10, 13, true, 0));
    CHECK(sees(13, 10, true, 0));
    CHECK(sees(10, 10, true, 0));
    CHECK(sees(10, 0, false, 0));

    // a window of 4 counts the query: 10 sees 7, not 6, and what is ahead only when not causal
    CHECK(sees(10, 7, false, 4));
    CHECK(!sees(10, 6, false, 4));
    CHECK(sees(10, 7, true, 4));
    CHECK(!sees(10, 6, true, 4));
    CHECK(sees(10, 13, false, 4));
    CHECK(!sees(10, 11, true, 4));
    CHECK(sees(10, 10, true, 1));
    CHECK(!sees(10, 9, true, 1));
    CHECK(!sees(INT32_MAX, 0, false, INT32_MAX));
    CHECK(sees(0, INT32_MAX, false, 1));
}

void masks() {
    const uint32_t sliding[] = { 1, 1, 0 };
    const uint32_t by_kind[] = { 1, 1, 0 }; // causal where it slides
    CHECK(needs_other_mask(by_kind, sliding, 3, true, false));
    CHECK(!needs_other_mask(by_kind, sliding, 3, false, false));
    CHECK(!needs_other_mask(by_kind, sliding, 3, true, true));
    CHECK(needs_other_mask(by_kind, sliding, 3, false, true));

    const uint32_t both[] = { 1, 0, 1 }; // sliding layers of either causality
    CHECK(needs_other_mask(both, sliding, 3, true, false));
    CHECK(needs_other_mask(both, sliding, 3, true, true));
    CHECK(needs_other_mask(both, sliding, 3, false, false));
    CHECK(!needs_other_mask(both, sliding, 3, false, true));

    CHECK(!needs_other_mask(both, sliding, 0, true, false));
}

} // namespace

int main() {
    positions();
    masks();
    return failures();
}
