#include "../draft-length.cpp"
#include "../draft-pace.h"
#include "check.h"

#include <cmath>

using namespace dflashcpp;

// A machine where a step takes plain + extra * drafted us and a draft call of n tokens takes draft us.
struct machine {
    draft_pace pace;
    int64_t clock = 0;
    int64_t plain = 1000, extra = 100, draft = 200;
    int accepts = 3; // of the tokens, always the same
    int seen_n  = 0;

    machine() : pace(2, 4, 16) {}

    void step(int ceiling = 4, int other_rows = 0, int64_t wait = 0, int batches = 1) {
        std::vector<draft_pace::wish> wishes = { { 0, ceiling, 0 } };
        pace.plan(clock, wishes);
        const int n = wishes[0].n;
        CHECK(n >= 0 && n <= ceiling);
        seen_n = n;
        int kept = 0;
        if (n > 0) {
            clock += draft;
            pace.decoded(n + 1);
            const std::vector<float> sure(size_t(n), 0.9f);
            kept = pace.keep(0, n, sure.data());
            CHECK(kept >= 0 && kept <= n);
        }
        pace.sent(0, kept);
        pace.end(clock);
        clock += plain + extra * kept + wait;
        for (int i = 0; i < batches; ++i) {
            pace.processed(kept + 1 + other_rows, 0);
        }
        if (kept > 0) {
            pace.verified(0, std::min(kept, accepts));
        }
    }
};

static void learns_what_steps_cost() {
    machine m;
    for (int i = 0; i < 200; ++i) {
        m.step();
    }
    const draft_costs & costs = m.pace.learned();
    CHECK(std::fabs(costs.draft.at(5) - 200) < 20);
    CHECK(std::fabs(costs.verify.at(5) - 1400) < 100);
    CHECK(m.seen_n >= 3 && m.pace.length(0) == m.seen_n);
}

static void does_not_learn_from_steps_with_more_in_them() {
    machine m;
    for (int i = 0; i < 100; ++i) {
        m.step();
    }
    const double before = m.pace.learned().verify.at(5);
    for (int i = 0; i < 100; ++i) {
        m.step(4, 100, 1000000); // another slot reads a prompt
        m.step(4, 0, 1000000, 2); // the batch came in pieces
    }
    m.step();
    m.pace.begin(0); // a new request: nobody knows how long it took to come
    m.clock += 100000000;
    m.step();
    CHECK(std::fabs(m.pace.learned().verify.at(5) - before) < 0.2 * before);
}

static void stops_drafting_where_it_does_not_pay() {
    machine m;
    m.accepts = 0;
    m.draft   = 2000;
    m.extra   = 1000;
    int drafted = 0;
    for (int i = 0; i < 600; ++i) {
        m.step();
        drafted += i >= 300 && m.seen_n > 0;
    }
    CHECK(drafted < 30);
    CHECK(m.pace.paused(0));
    m.pace.caught_up(0, 500);
    m.pace.begin(0);
    CHECK(m.pace.paused(0));
}

// Every try is paid with all it took, so that a text without hope loses what was staked on it and no more.
static void pays_for_what_a_draft_after_a_pause_takes() {
    machine m;
    for (int i = 0; i < 100; ++i) {
        m.step();
    }
    m.accepts = 0;
    const int64_t usual = m.draft;
    const int steps = 2000;
    const int64_t begin = m.clock;
    m.pace.begin(0);
    for (int i = 0; i < steps; ++i) {
        m.draft = m.pace.paused(0) ? 5 * usual : usual;
        m.step();
    }
    const double lost = double(m.clock - begin) / m.plain - steps; // tokens
    CHECK(lost < 2.5 + 0.006 * steps + 2.0); // begun with, probes, the last of them
    CHECK(m.pace.paused(0));
}

// The last rows of a prompt go into the draft cache before the first draft: time, too.
static void pays_for_the_prompt_that_the_first_draft_brings() {
    machine m;
    for (int i = 0; i < 100; ++i) {
        m.step();
    }
    const int64_t catching_up = 10 * m.plain;
    m.pace.begin(0);
    std::vector<draft_pace::wish> wishes = { { 0, 4, 0 } };
    m.pace.plan(m.clock, wishes);
    CHECK(wishes[0].n > 0);
    m.clock += catching_up;
    m.pace.caught_up(0, catching_up);
    m.clock += m.draft;
    m.pace.decoded(wishes[0].n + 1);
    m.pace.sent(0, 0);
    m.pace.end(m.clock);
    m.step();
    CHECK(m.seen_n == 0); // nothing is left to stake
}

// A slot whose first draft came to nothing owes nothing for what another drafts after it.
static void a_draft_that_failed_is_not_charged_later() {
    machine m;
    for (int i = 0; i < 100; ++i) {
        m.step();
    }
    m.pace.begin(1);
    std::vector<draft_pace::wish> wishes = { { 1, 4, 0 } };
    m.pace.plan(m.clock, wishes);
    CHECK(wishes[0].n > 0);
    m.pace.sent(1, 0);
    m.pace.end(m.clock); // nothing was decoded
    m.draft *= 3;
    m.step(); // slot 0
    CHECK(m.seen_n > 0);
    m.pace.plan(m.clock, wishes);
    CHECK(wishes[0].n > 0);
}

static void leaves_catching_up_out_of_the_cost_of_a_draft() {
    machine m;
    for (int i = 0; i < 50; ++i) {
        m.step();
    }
    std::vector<draft_pace::wish> wishes = { { 0, 4, 0 } };
    m.pace.plan(m.clock, wishes);
    m.clock += 1000000; // a prompt's last rows
    m.pace.caught_up(0, 1000000);
    m.clock += m.draft;
    m.pace.decoded(5);
    m.pace.sent(0, 4);
    m.pace.end(m.clock);
    CHECK(std::fabs(m.pace.learned().draft.at(5) - 200) < 20);
}

static void gives_nothing_to_slots_without_room() {
    machine m;
    for (int i = 0; i < 20; ++i) {
        m.step(0);
        CHECK(m.seen_n == 0);
    }
    std::vector<draft_pace::wish> none;
    m.pace.plan(m.clock, none);
    m.pace.end(m.clock);
}

int main() {
    learns_what_steps_cost();
    does_not_learn_from_steps_with_more_in_them();
    stops_drafting_where_it_does_not_pay();
    pays_for_what_a_draft_after_a_pause_takes();
    pays_for_the_prompt_that_the_first_draft_brings();
    a_draft_that_failed_is_not_charged_later();
    leaves_catching_up_out_of_the_cost_of_a_draft();
    gives_nothing_to_slots_without_room();
    return failures();
}
