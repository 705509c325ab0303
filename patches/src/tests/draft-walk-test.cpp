#include "../draft-walk.h"
#include "check.h"


using namespace dflashcpp;

static bool near(double a, double b, double off = 1e-6) {
    return std::fabs(a - b) < off;
}

static void reads_the_row_of_the_predecessor() {
    const float row[] = { 7, 9, /* behind 0 */ 1, 2, /* behind 1 */ 4, 3 };
    candidate_row out;
    read_lattice(row, 2, 0, out);
    CHECK((out.ids == std::vector<int32_t>{ 7, 9 }));
    CHECK(best_candidate(out.scores) == 1);
    read_lattice(row, 2, 1, out);
    CHECK(best_candidate(out.scores) == 0);
}

static void is_as_sure_as_its_softmax() {
    CHECK(near(confidence({ 0.0f, 0.0f }), 0.5));
    CHECK(near(confidence({ 0.0f, std::log(3.0f) }), 0.75));
    CHECK(near(confidence({ 1000.0f, -1000.0f }), 1.0));
    CHECK(near(confidence({ 5.0f }), 1.0));
}

static void has_temperature_and_nothing_else_in_q() {
    const auto q = draw_probabilities({ 0.0f, 2.0f * std::log(3.0f) }, 2.0f);
    CHECK(near(q[0], 0.25) && near(q[1], 0.75));
    const auto cold = draw_probabilities({ 1.0f, 1.5f, 1.0f }, 1e-4f);
    CHECK(cold[0] == 0.0f && cold[1] == 1.0f);
    const auto wide = draw_probabilities({ 3e38f, -3e38f }, 1e-3f);
    CHECK(wide[0] == 1.0f && wide[1] == 0.0f);
}

static void never_draws_what_cannot_be() {
    CHECK(draw({ 0.25f, 0.75f }, 0.0) == 0);
    CHECK(draw({ 0.25f, 0.75f }, 0.2499) == 0);
    CHECK(draw({ 0.25f, 0.75f }, 0.25) == 1);
    CHECK(draw({ 0.0f, 1.0f, 0.0f }, 0.0) == 1);
    CHECK(draw({ 0.5f, 0.4999999f, 0.0f }, 0.99999999) == 1); // q may sum to a little less than 1
}

static void draws_as_often_as_q_says() {
    const candidate_row row = { { 10, 20, 30, 40 }, { 0.3f, -1.0f, 1.2f, 0.0f } };
    const std::vector<float> q = draw_probabilities(row.scores, 0.7f);
    std::vector<int> count(4);
    const int n = 200000;
    for (int seed = 0; seed < n; ++seed) { // a fresh generator a draft, as the loop does it
        draft_random random(seed);
        draft_choice choice;
        ++count[choose(row, 0.7f, random, choice)];
        CHECK(choice.ids == row.ids && choice.q == q);
    }
    double chi = 0.0;
    for (size_t i = 0; i < 4; ++i) {
        chi += (count[i] - n * q[i]) * (count[i] - n * q[i]) / (n * q[i]);
    }
    CHECK(chi < 16.27); // 3 degrees of freedom, 0.1 %
}

static void draws_positions_independently() {
    const std::vector<float> half = { 0.5f, 0.5f };
    int both[4] = {};
    const int n = 200000;
    for (int seed = 0; seed < n; ++seed) {
        draft_random random(seed);
        const size_t first = draw(half, random.next());
        ++both[2 * first + draw(half, random.next())];
    }
    for (const int count : both) {
        CHECK(near(count / double(n), 0.25, 0.005));
    }
}

static void is_greedy_at_temperature_zero() {
    const candidate_row row = { { 10, 20, 30 }, { 1.0f, 3.0f, 3.0f } };
    draft_random random(1);
    draft_choice choice;
    CHECK(choose(row, 0.0f, random, choice) == 1); // the first of equals, as max_element
    CHECK(choose(row, -1.0f, random, choice) == 1);
    CHECK(choose(row, std::nanf(""), random, choice) == 1);
    CHECK(choice.ids.empty() && choice.q.empty());
}

int main() {
    reads_the_row_of_the_predecessor();
    is_as_sure_as_its_softmax();
    has_temperature_and_nothing_else_in_q();
    never_draws_what_cannot_be();
    draws_as_often_as_q_says();
    draws_positions_independently();
    is_greedy_at_temperature_zero();
    return failures();
}
