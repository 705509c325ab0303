#include "../cost-curve.h"
#include "check.h"

#include <cstdint>

using namespace dflashcpp;

static bool near(double a, double b, double share) {
    return std::abs(a - b) <= share * b;
}

static void nothing_is_known_at_first() {
    cost_curve curve(32);
    CHECK(!curve.known());
    CHECK(curve.at(5) == 0.0);
    curve.observe(0, 100.0);
    curve.observe(3, 0.0);
    curve.observe(3, -1.0);
    CHECK(!curve.known());
}

static void widths_between_the_known_ones_are_interpolated() {
    cost_curve curve(32);
    curve.observe(1, 100.0);
    CHECK(curve.at(9) == 100.0); // one width: as if rows cost nothing
    curve.observe(5, 200.0);
    CHECK(curve.at(0) == 0.0);
    CHECK(curve.at(1) == 100.0);
    CHECK(curve.at(3) == 150.0);
    CHECK(curve.at(3.5) == 162.5);
    CHECK(near(curve.at(9), 300.0, 1e-9));
    CHECK(curve.at(100) == curve.at(32));
    CHECK(curve.known(5) && !curve.known(4) && !curve.known(33));
}

static void rows_never_become_cheaper_beyond_what_was_seen() {
    cost_curve curve(32);
    curve.observe(2, 110.0);
    curve.observe(6, 100.0);
    CHECK(curve.at(20) == curve.at(6));
}

static void a_wider_batch_than_the_widest_counts_as_it() {
    cost_curve curve(4);
    curve.observe(9, 50.0);
    CHECK(curve.known(4));
    CHECK(curve.at(4) == 50.0);
}

static void a_pause_turns_nothing() {
    cost_curve curve(8);
    for (int i = 0; i < 100; i++) {
        curve.observe(1, 1000.0 + 20.0 * (i % 3));
        curve.observe(4, 1500.0 + 20.0 * (i % 3));
    }
    const double before = curve.at(4) / curve.at(1);
    curve.observe(4, 200000.0);
    CHECK(near(curve.at(4) / curve.at(1), before, 0.02));
}

static void a_pause_at_the_first_call_of_a_width_is_forgotten() {
    cost_curve curve(8);
    curve.observe(1, 1000.0);
    curve.observe(4, 200000.0);
    CHECK(curve.at(4) <= 2500.0);
    for (int i = 0; i < 4; i++) {
        curve.observe(4, 1200.0);
    }
    CHECK(near(curve.at(4), 1200.0, 0.1));
}

static void a_change_that_stays_is_learned() {
    cost_curve curve(8);
    for (int i = 0; i < 200; i++) {
        curve.observe(4, 1000.0);
    }
    for (int i = 0; i < 60; i++) {
        curve.observe(4, 3000.0);
    }
    CHECK(near(curve.at(4), 3000.0, 0.05));
}

// the context grows: what the width in use tells holds for the others, too
static void widths_drift_together() {
    cost_curve curve(8);
    for (int i = 0; i < 50; i++) {
        curve.observe(1, 1000.0);
        curve.observe(4, 1400.0);
    }
    for (int i = 0; i < 300; i++) {
        curve.observe(4, 1400.0 * (1.0 + i / 300.0));
    }
    CHECK(curve.at(1) > 1350.0);
    CHECK(near(curve.at(4), 2800.0, 0.05));
}

static void changing_the_width_has_its_own_price() {
    cost_curve curve(8);
    int last = 0;
    for (int i = 0; i < 400; i++) {
        const int rows = i % 10 < 5 ? 2 : 6;
        curve.observe(rows, (rows == 2 ? 1000.0 : 1200.0) + (rows != last && last != 0 ? 300.0 : 0.0));
        last = rows;
    }
    CHECK(curve.last() == 6);
    CHECK(curve.change() > 150.0 && curve.change() < 350.0);
    CHECK(near(curve.at(2), 1000.0, 0.08));
    CHECK(near(curve.at(6), 1200.0, 0.08));
}

// many slots: each width is seen once or twice, and the times scatter
static void wide_batches_are_smoothed() {
    cost_curve curve(128);
    uint32_t state = 1;
    for (int i = 0; i < 400; i++) {
        state = state * 1664525u + 1013904223u;
        const int    rows  = 30 + int(state >> 8) % 40;
        const double noise = 1.0 + 0.05 * (double((state >> 16) % 200) / 100.0 - 1.0);
        curve.observe(rows, (1000.0 + 50.0 * rows) * noise);
    }
    for (int rows = 35; rows < 65; rows++) {
        CHECK(near(curve.at(rows), 1000.0 + 50.0 * rows, 0.04));
    }
}

static void doubt_falls_with_what_was_seen() {
    cost_curve curve(8);
    curve.observe(1, 1000.0);
    curve.observe(4, 1000.0);
    const double once = curve.doubt(4);
    for (int i = 0; i < 20; i++) {
        curve.observe(4, 1000.0 + i % 2);
    }
    CHECK(curve.doubt(4) < 0.5 * once);
    CHECK(curve.doubt(5) > curve.doubt(4));
    CHECK(curve.age(1) == 21 && curve.age(4) == 0);
}

int main() {
    nothing_is_known_at_first();
    widths_between_the_known_ones_are_interpolated();
    rows_never_become_cheaper_beyond_what_was_seen();
    a_wider_batch_than_the_widest_counts_as_it();
    a_pause_turns_nothing();
    a_pause_at_the_first_call_of_a_width_is_forgotten();
    a_change_that_stays_is_learned();
    widths_drift_together();
    changing_the_width_has_its_own_price();
    wide_batches_are_smoothed();
    doubt_falls_with_what_was_seen();
    return failures();
}
