#include "../draft-length.cpp"
#include "check.h"

using namespace dflashcpp;

static void tiers_end_at_the_ceiling() {
    CHECK(draft_tiers(0).empty());
    CHECK((draft_tiers(4) == std::vector<int>{ 1, 2, 3, 4 }));
    CHECK((draft_tiers(12) == std::vector<int>{ 1, 2, 3, 4, 5, 6, 7, 9, 11, 12 }));
}

static void costs_between_known_widths_are_interpolated() {
    cost_curve curve(32);
    CHECK(curve.at(5) == 0.0);
    curve.observe(1, 100.0);
    curve.observe(5, 300.0);
    CHECK(curve.at(0) == 0.0);
    CHECK(curve.at(1) == 100.0);
    CHECK(curve.at(3) == 200.0);
    CHECK(curve.at(7) == 400.0);
}

static void positions_after_a_rejection_teach_nothing() {
    acceptance_model model(4);
    for (int i = 0; i < 50; i++) {
        model.observe(4, 1, nullptr);
    }
    CHECK(model.at(1) > 0.9);
    CHECK(model.at(2) < 0.1);
    CHECK(model.trials(3) == 0.0);
}

int main() {
    tiers_end_at_the_ceiling();
    costs_between_known_widths_are_interpolated();
    positions_after_a_rejection_teach_nothing();
    return failures();
}
