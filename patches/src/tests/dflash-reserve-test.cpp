#include "../dflash-reserve.h"
#include "check.h"

using namespace dflashcpp;

int main() {
    // one slot, 4 drafted tokens, trained block of 16
    CHECK(draft_rows(5, 1, 16) == 5);
    // a block is never longer than the trained one, however many outputs were asked for
    CHECK(draft_rows(2048, 1, 16) == 16);
    CHECK(draft_rows(2048, 4, 8) == 32);
    // unknown block: what was asked for
    CHECK(draft_rows(20, 4, 0) == 20);
    // at least one row a sequence
    CHECK(draft_rows(1, 4, 16) == 4);
    CHECK(draft_rows(0, 0, 0) == 1);
    CHECK(draft_rows(UINT32_MAX, UINT32_MAX, UINT32_MAX) == UINT32_MAX);

    CHECK(draft_ubatch(0, 512, 1, 5) == DEFAULT_INJECT_ROWS);
    CHECK(draft_ubatch(0, 64, 1, 5) == 64);      // never more than the target gives at once
    CHECK(draft_ubatch(256, 64, 1, 5) == 256);   // unless it was asked for
    CHECK(draft_ubatch(16, 512, 4, 16) == 64);   // the blocks of all slots go in one pass
    CHECK(draft_ubatch(0, 32, 16, 16) == 256);
    CHECK(draft_ubatch(0, 512, 0, 0) == DEFAULT_INJECT_ROWS);
    CHECK(draft_ubatch(0, 0, 0, 0) == 1);
    CHECK(draft_ubatch(0, 512, UINT32_MAX, UINT32_MAX) == UINT32_MAX);

    CHECK(draft_context(0, 4096, 1, 128, 5) == 4096);
    CHECK(draft_context(1024, 4096, 1, 128, 5) == 1024);
    CHECK(draft_context(8192, 4096, 1, 128, 5) == 4096);
    CHECK(draft_context(1, 4096, 4, 128, 5) == 4 * 133); // every slot injects and drafts
    CHECK(draft_context(1, 100, 4, 128, 5) == 100);

    // 256 cells, a block of 5: positions 0 .. 250 and the block fill it, the next row drops position 0
    CHECK(draft_keep_from(0, 256, 5) == 0);
    CHECK(draft_keep_from(250, 256, 5) == 0);
    CHECK(draft_keep_from(251, 256, 5) == 1);
    CHECK(draft_keep_from(1000, 256, 5) == 750);
    CHECK(draft_keep_from(INT32_MAX - 1, 256, 5) == INT32_MAX - 251);
    return failures();
}
