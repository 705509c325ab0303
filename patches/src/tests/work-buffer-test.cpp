#include "../work-buffer.h"

#include "check.h"

#include <vector>

using namespace dflashcpp;

static uintptr_t address(const uint8_t * p) {
    return reinterpret_cast<uintptr_t>(p);
}

// wherever the allocator put it: on a line, and all that is needed still lies inside
static void test_every_buffer_begins_on_a_line() {
    const size_t needed = 1000;
    std::vector<uint8_t> memory(needed + work_slack + work_line);
    for (size_t shift = 0; shift < work_line; ++shift) {
        uint8_t * allocated = memory.data() + shift;
        uint8_t * begin     = work_begin(allocated, true);
        CHECK(address(begin) % work_line == 0);
        CHECK(begin >= allocated && begin < allocated + work_line);
        CHECK(begin + needed <= allocated + needed + work_slack);
    }
}

// what it is measured against: never on a line, inside as well
static void test_switched_off_it_straddles_lines() {
    std::vector<uint8_t> memory(2 * work_slack);
    for (size_t shift = 0; shift < work_line; ++shift) {
        uint8_t * allocated = memory.data() + shift;
        uint8_t * begin     = work_begin(allocated, false);
        CHECK(address(begin) % work_line == work_line / 2);
        CHECK(begin >= allocated && begin <= allocated + work_slack);
    }
}

static void test_it_is_on_unless_switched_off() {
    std::vector<uint8_t> memory(work_slack);
    CHECK(work_begin(memory.data()) == work_begin(memory.data(), true));
}

int main() {
    test_every_buffer_begins_on_a_line();
    test_switched_off_it_straddles_lines();
    test_it_is_on_unless_switched_off();
    return failures();
}
