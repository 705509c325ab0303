#include "../row-order.h"

#include "check.h"

using namespace dflashcpp;

static void test_rows_go_where_they_belong() {
    // two sequences of three and one tokens: first one token of each, then the rest of the longer one
    const std::vector<int32_t> ids = { 0, 3, 1, 2 };
    float rows[] = { 0, 0.5f, 3, 3.5f, 1, 1.5f, 2, 2.5f };
    CHECK(!in_order(ids));
    put_in_order(rows, 2, ids);
    for (int i = 0; i < 4; ++i) {
        CHECK(rows[2 * i] == float(i) && rows[2 * i + 1] == i + 0.5f);
    }
}

static void test_rows_in_order_stay() {
    const std::vector<int32_t> ids = { 0, 1, 2 };
    float rows[] = { 7, 8, 9 };
    CHECK(in_order(ids));
    CHECK(in_order({}));
    put_in_order(rows, 1, ids);
    CHECK(rows[0] == 7 && rows[1] == 8 && rows[2] == 9);
}

int main() {
    test_rows_go_where_they_belong();
    test_rows_in_order_stay();
    return failures();
}
