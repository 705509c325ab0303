#include "../draft-length.cpp"

#include "check.h"
#include "draft-world.h"

#include <initializer_list>

using namespace dflashcpp;

static const int n_max = 7;

// conditional acceptance by position
static const world::text hopeless { 0.10 };
static const world::text poor     { 0.30 };
static const world::text pair     { 0.50, 0.46, 0.39, 0.55, 0.40 }; // the small real pair, mean length 1.92 at 7
static const world::text japanese { 0.53, 0.50 };                   // mean length 2.1
static const world::text code     { 0.79 };                         // mean length 4.1

// -- parts ------------------------------------------------------------------------------------

static void tiers_are_few_and_end_at_the_ceiling() {
    CHECK(draft_tiers(0).empty());
    CHECK((draft_tiers(1) == std::vector<int> { 1 }));
    CHECK((draft_tiers(4) == std::vector<int> { 1, 2, 3, 4 }));
    CHECK((draft_tiers(12) == std::vector<int> { 1, 2, 3, 4, 5, 6, 7, 9, 11, 12 }));
    CHECK(draft_tiers(63).size() == 13);
}

static void positions_behind_a_rejection_teach_nothing() {
    acceptance_model model(4);
    for (int i = 0; i < 50; i++) {
        model.observe(4, 1, nullptr);
    }
    CHECK(model.at(1) > 0.9);
    CHECK(model.at(2) < 0.15);
    CHECK(model.trials(3) == 0.0);
    model.observe(2, 2, nullptr); // nor do those that were not verified
    CHECK(model.trials(3) == 0.0);
}

static void acceptance_is_that_of_each_position_given_those_before() {
    acceptance_model model(3);
    for (int i = 0; i < 400; i++) {
        model.observe(3, i % 4, nullptr); // 3/4, 2/3, 1/2
    }
    CHECK(std::abs(model.at(1) - 0.75) < 0.05);
    CHECK(std::abs(model.at(2) - 0.67) < 0.05);
    CHECK(std::abs(model.at(3) - 0.50) < 0.06);
}

static void what_is_old_is_forgotten() {
    acceptance_model model(2);
    for (int i = 0; i < 500; i++) {
        model.observe(1, 0, nullptr);
    }
    CHECK(model.at(1) < 0.05);
    for (int i = 0; i < 80; i++) {
        model.observe(1, 1, nullptr);
    }
    CHECK(model.at(1) > 0.7);
    CHECK(model.hopeful(1) > model.at(1));
}

static void confidence_is_worth_what_it_was_worth_so_far() {
    acceptance_model model(2);
    const float low[] = { 0.2f, 0.2f }, high[] = { 0.95f, 0.95f };
    for (int i = 0; i < 200; i++) {
        model.observe(1, i % 10 == 0, low);
        model.observe(1, i * 7 % 10 < 6, high); // far less than it says
    }
    CHECK(std::abs(model.at(1, 0.2f) - 0.1) < 0.06);
    CHECK(std::abs(model.at(1, 0.95f) - 0.6) < 0.12);
    for (int i = 0; i < 15; i++) { // another text: nothing is right any more
        model.observe(1, 0, high);
    }
    CHECK(model.at(1, 0.95f) < 0.35);
}

static void any_confidence_gives_a_probability() {
    acceptance_model model(2);
    for (const float c : { 0.0f, 1.0f, -1.0f, 2.0f, NAN, INFINITY, -INFINITY }) {
        model.observe(1, 1, &c);
        CHECK(model.at(1, c) > 0.0 && model.at(1, c) < 1.0);
    }
}

static draft_costs known_costs(double plain_us, double row_us, double draft_us) {
    draft_costs costs(64);
    for (int i = 0; i < 30; i++) {
        for (int rows = 1; rows <= 12; rows++) {
            costs.verify.observe(rows, plain_us + row_us * (rows - 1));
            costs.draft.observe(rows, draft_us);
        }
    }
    return costs;
}

static void the_ceiling_of_a_call_holds() {
    const draft_costs costs = known_costs(1000.0, 10.0, 100.0);
    draft_length length({}, costs);
    CHECK(length.want(0) == 0);
    CHECK(length.want(-5) == 0);
    CHECK(length.want(1) == 1);
    CHECK(length.want(100) == 4); // n_max of the defaults
    const float sure[] = { 0.99f, 0.99f, 0.99f, 0.99f };
    CHECK(length.keep(2, sure) <= 2);
    draft_length_params none;
    none.n_max = 0;
    CHECK(draft_length(none, costs).want(7) == 0);
}

static void without_a_price_of_a_plain_step_nothing_is_drafted() {
    draft_costs  costs(8);
    draft_length length({}, costs);
    CHECK(length.want(4) == 0);
    costs.verify.observe(1, 1000.0);
    CHECK(length.want(4) == 3); // the first draft, before anything is known about drafts
}

static void a_doubtful_tail_is_not_verified_where_rows_are_dear() {
    const draft_costs dear = known_costs(1000.0, 300.0, 50.0);
    draft_length length({}, dear);
    const float tail[] = { 0.99f, 0.99f, 0.02f, 0.99f }, doubtful[] = { 0.02f, 0.9f, 0.9f, 0.9f };
    const float sure[] = { 0.99f, 0.99f, 0.99f, 0.99f };
    for (int i = 0; i < 300; i++) { // so much that confidence can be believed
        length.want(4);
        length.observe(std::max(1, length.keep(4, i % 2 ? sure : tail)), i % 2 ? 4 : 2);
    }
    length.want(4);
    CHECK(length.keep(4, tail) == 2);
    CHECK(length.keep(4, sure) == 4);
    CHECK(length.keep(4, doubtful) == 0);
    CHECK(length.keep(4, nullptr) == 4);
}

// else a sampled draft would be cut by what was drawn, and the output would not keep its distribution
static void a_token_is_kept_or_not_by_the_confidences_up_to_its_own() {
    const draft_costs costs = known_costs(1000.0, 200.0, 100.0);
    draft_length length({}, costs);
    world::dice  d(1);
    for (int i = 0; i < 200; i++) {
        float a[4], b[4];
        for (int k = 0; k < 4; k++) {
            a[k] = float(d.uniform());
            b[k] = float(d.uniform());
        }
        const int same = i % 4;
        std::copy(a, a + same + 1, b);
        draft_length twin = length;
        length.want(4);
        twin.want(4);
        const int kept = length.keep(4, a);
        CHECK((kept > same) == (twin.keep(i % 8 < 4 ? 4 : same + 1, b) > same)); // maybe it ended there
        length.observe(kept, std::min(kept, i % 3));
    }
}

static void lost_time_is_charged() {
    const draft_costs costs = known_costs(1000.0, 10.0, 100.0);
    draft_length length({}, costs);
    CHECK(length.want(4) > 0 && length.drafting());
    length.charge(10000.0); // ten plain steps
    CHECK(length.want(4) == 0 && !length.drafting());
}

// -- whole servers ----------------------------------------------------------------------------

static void never_much_slower_than_no_drafter(const world::machine & m, const world::text & t) {
    const world::drafter text(t, n_max);
    const int on = world::server::adaptive;
    const double longer  = world::speed(m, text, 2000, on, n_max, 1, 3) / world::speed(m, text, 2000, 0, n_max, 1, 3);
    const double shorter = world::speed(m, text, 200, on, n_max, 1, 12) / world::speed(m, text, 200, 0, n_max, 1, 12);
    CHECK(longer  >= 0.98);
    CHECK(shorter >= 0.95);
}

static void as_good_as_the_best_fixed_length(const world::machine & m, const world::text & t) {
    const world::drafter text(t, n_max);
    double best = 0.0;
    for (int n = 1; n <= n_max; n++) {
        best = std::max(best, world::speed(m, text, 2000, n, n_max, 1, 3));
    }
    CHECK(best > world::speed(m, text, 2000, 0, n_max, 1, 3));
    CHECK(world::speed(m, text, 2000, world::server::adaptive, n_max, 1, 3) >= 0.97 * best);
}

static double alternating(const world::machine & m, int length) {
    const world::drafter bad(hopeless, n_max), good(code, n_max);
    world::outcome all;
    for (int seed = 1; seed <= 12; seed++) {
        world::server s(m, n_max, 1, length, seed);
        for (int phase = 0; phase < 6; phase++) {
            const auto o = s.run(phase % 2 ? good : bad, 400);
            all.tokens += o.tokens;
            all.us     += o.us;
        }
    }
    return all.speed();
}

static void as_good_as_every_fixed_length_where_the_text_changes(const world::machine & m, double least) {
    double best = 0.0;
    for (int n = 0; n <= n_max; n++) {
        best = std::max(best, alternating(m, n));
    }
    CHECK(alternating(m, world::server::adaptive) > least * best);
}

static void probes_are_rare_and_find_the_way_back() {
    const world::drafter bad(hopeless, n_max), good(code, n_max);
    double back = 0.0;
    for (int seed = 1; seed <= 8; seed++) {
        world::server s(world::cpu, n_max, 1, world::server::adaptive, seed);
        s.run(bad, 1000);
        const auto off = s.run(bad, 1000);
        CHECK(off.drafts > 0);
        CHECK(off.drafts < 0.05 * off.steps);
        CHECK(off.us < 1.02 * 1.045 * 7900.0 * off.tokens); // 1.045: what the clock adds on average, pauses aside
        double tokens = 0.0;
        double drafted = 0.0;
        while (drafted < 20 && tokens < 1000) { // within the same request
            const auto o = s.run(good, 1);
            tokens  += o.tokens;
            drafted += o.drafts;
        }
        CHECK(tokens < 600); // a try is dear: it brings the rows that were put off
        CHECK(s.run(good, 400).drafts > 40);
        back += tokens;
    }
    CHECK(back < 8 * 300);
}

static void what_was_learned_outlives_a_request() {
    const world::drafter bad(hopeless, n_max);
    world::server s(world::cpu, n_max, 1, world::server::adaptive, 1);
    s.run(bad, 500);
    world::outcome all;
    for (int i = 0; i < 20; i++) {
        s.begin();
        const auto o = s.run(bad, 100);
        all.drafts += o.drafts;
        all.steps  += o.steps;
    }
    CHECK(all.drafts < 0.08 * all.steps);
}

// A request brings something to try with, but an answer of a few tokens cannot pay for it.
static void short_answers_pay_for_few_tries(double tokens) {
    const world::drafter bad(hopeless, n_max);
    double with = 0.0, without = 0.0;
    for (int seed = 1; seed <= 12; seed++) {
        for (const int length : { world::server::adaptive, 0 }) {
            world::server s(world::cpu, n_max, 1, length, seed);
            s.run(bad, 100);
            for (int request = 0; request < 60; request++) {
                s.begin();
                const double us = s.run(bad, tokens).us;
                (length == 0 ? without : with) += request < 12 ? 0.0 : us;
            }
        }
    }
    CHECK(without / with >= 0.98);
}

// ... and yet the way back to drafting is found in them.
static void short_answers_find_the_way_back() {
    const world::drafter bad(hopeless, n_max), good(code, n_max);
    double back = 0.0;
    for (int seed = 1; seed <= 8; seed++) {
        world::server s(world::cpu, n_max, 1, world::server::adaptive, seed);
        for (int request = 0; request < 40; request++) {
            s.begin();
            s.run(bad, 12);
        }
        double tokens = 0.0, drafts = 0.0;
        while (drafts < 20 && tokens < 1000) {
            s.begin();
            const auto o = s.run(good, 12);
            tokens += o.tokens;
            drafts += o.drafts;
        }
        CHECK(tokens < 600);
        back += tokens;
    }
    CHECK(back < 8 * 350);
}

// Four requests of a text that drafts well, then four of 96 tokens that do not: what the first earned is not
// spent on the second.
static void another_request_may_be_about_something_else() {
    const world::drafter good(code, n_max), bad(hopeless, n_max);
    double with = 0.0, without = 0.0;
    for (int seed = 1; seed <= 12; seed++) {
        for (const int length : { world::server::adaptive, 0 }) {
            world::server s(world::a4000, n_max, 1, length, seed);
            for (int request = 0; request < 8; request++) {
                s.begin();
                const double us = s.run(request < 4 ? good : bad, 96).us;
                (length == 0 ? without : with) += request < 4 ? 0.0 : us;
            }
        }
    }
    CHECK(without / with >= 0.98);
}

static void lengths_are_tiers_and_change_seldom() {
    const world::drafter good(code, 15);
    world::server s(world::a4000, 15, 1, world::server::adaptive, 3);
    s.run(good, 1000);
    const auto tiers = draft_tiers(15);
    int changes = 0;
    int last    = -1;
    for (int i = 0; i < 200; i++) {
        world::outcome o;
        s.step(good, o);
        const int n = s.slot(0).length();
        CHECK(n == 0 || std::find(tiers.begin(), tiers.end(), n) != tiers.end());
        changes += n != last;
        last = n;
    }
    CHECK(changes < 40);
}

static void several_slots(const world::machine & m, const world::text & t, int n_slots, double least, double most_kept) {
    const world::drafter text(t, n_max);
    double best = world::speed(m, text, 1000 * n_slots, 0, n_max, n_slots, 1);
    for (int n = 1; n <= n_max; n++) {
        best = std::max(best, world::speed(m, text, 1000 * n_slots, n, n_max, n_slots, 1));
    }
    world::server s(m, n_max, n_slots, world::server::adaptive, 1);
    const auto o = s.run(text, 1000 * n_slots);
    CHECK(o.speed() >= least * best);
    CHECK(o.verified / o.steps < most_kept);
}

static void a_slot_alone_drafts_more_than_one_among_many() {
    const world::drafter text(code, n_max);
    world::server alone(world::knee, n_max, 1, world::server::adaptive, 1);
    const auto o = alone.run(text, 1000);
    CHECK(o.verified / o.steps > 5.0);
    several_slots(world::knee, code, 4, 0.97, 2.5);
    several_slots(world::knee, code, 16, 0.98, 0.2); // one by one they would all lose
    several_slots(world::cpu, hopeless, 4, 0.98, 0.1);
    several_slots(world::knee, japanese, 4, 0.96, 1.5);
}

static void other_rows_of_the_step_count() {
    const draft_costs costs = known_costs(1000.0, 10.0, 100.0);
    draft_slot slot { nullptr, 4, 0 };
    draft_length length({}, costs);
    slot.length = &length;
    plan_drafts(&slot, 1);
    CHECK(slot.n == 4);
    CHECK(length.expected() > 1.0);
    draft_load many; // 60 tokens a step, and a draft that keeps all of them waiting
    many.rows = many.tokens = 60.0;
    many.plain_rows = 60;
    plan_drafts(&slot, 1, many);
    CHECK(slot.n == 0);
    plan_drafts(&slot, 0);
}

int main() {
    tiers_are_few_and_end_at_the_ceiling();
    positions_behind_a_rejection_teach_nothing();
    acceptance_is_that_of_each_position_given_those_before();
    what_is_old_is_forgotten();
    confidence_is_worth_what_it_was_worth_so_far();
    any_confidence_gives_a_probability();
    the_ceiling_of_a_call_holds();
    without_a_price_of_a_plain_step_nothing_is_drafted();
    a_doubtful_tail_is_not_verified_where_rows_are_dear();
    a_token_is_kept_or_not_by_the_confidences_up_to_its_own();
    lost_time_is_charged();
    for (const auto & t : { hopeless, poor }) {
        never_much_slower_than_no_drafter(world::cpu, t);
    }
    never_much_slower_than_no_drafter(world::a4000, hopeless);
    never_much_slower_than_no_drafter(world::fast, hopeless);
    for (const auto & t : { pair, japanese, code }) {
        as_good_as_the_best_fixed_length(world::cpu, t);
        as_good_as_the_best_fixed_length(world::a4000, t);
    }
    as_good_as_the_best_fixed_length(world::fast, code);
    as_good_as_every_fixed_length_where_the_text_changes(world::cpu, 1.05);
    as_good_as_every_fixed_length_where_the_text_changes(world::fast, 0.97); // drafts are cheap also where they fail
    probes_are_rare_and_find_the_way_back();
    what_was_learned_outlives_a_request();
    short_answers_pay_for_few_tries(8);
    short_answers_pay_for_few_tries(20);
    short_answers_find_the_way_back();
    another_request_may_be_about_something_else();
    lengths_are_tiers_and_change_seldom();
    a_slot_alone_drafts_more_than_one_among_many();
    other_rows_of_the_step_count();
    return failures();
}
