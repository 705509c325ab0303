#include "../held-rows.h"
#include "check.h"

using namespace dflashcpp;

static void put(held_rows & held, int32_t from, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        const int32_t pos = from + int32_t(i);
        float * row = held.append(&pos, 1);
        row[0] = float(pos);
        row[1] = -float(pos);
    }
}

static bool holds(const held_rows & held, int32_t from, size_t n) {
    bool all = held.size() == n;
    for (size_t i = 0; i < n && all; ++i) {
        const float pos = float(from) + float(i);
        all = held.at(i) == int32_t(pos) && held.row(i)[0] == pos && held.row(i)[1] == -pos;
    }
    return all;
}

int main() {
    held_rows held(2);
    CHECK(held.empty());
    held.drop_from(0);
    held.drop_first(0);
    held.drop_first(3);

    put(held, 10, 5);
    CHECK(holds(held, 10, 5) && held.first() == 10 && held.last() == 14);
    held.drop_from(15);
    CHECK(holds(held, 10, 5));
    held.drop_from(13); // two rejected
    CHECK(holds(held, 10, 3));
    put(held, 13, 4);
    CHECK(holds(held, 10, 7));
    held.drop_first(2);
    CHECK(holds(held, 12, 5));
    put(held, 17, 1);
    CHECK(holds(held, 12, 6));
    held.drop_from(3);
    CHECK(held.empty());

    // an image: many rows at one position
    const int32_t image[] = { 4, 4, 4, 5 };
    held.append(image, 4);
    held.drop_from(5);
    CHECK(held.size() == 3 && held.last() == 4);
    held.drop_from(4);
    CHECK(held.empty());

    put(held, 0, 3);
    held.clear();
    CHECK(held.empty());
    put(held, 7, 2);
    CHECK(holds(held, 7, 2));
    held.drop_first(9);
    CHECK(held.empty());
    return failures();
}
