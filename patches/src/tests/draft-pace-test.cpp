#include "../draft-length.cpp"
#include "../draft-pace.h"
#include "check.h"

#include <cmath>

using namespace dflashcpp;

// A machine where a step takes plain + extra * drafted us and a draft call takes draft us, for all slots.
struct machine {
    draft_pace pace;
    int n_slots;
    int64_t clock = 0;
    int64_t plain = 1000, extra = 100, draft = 200;
    int64_t resume = 0; // us that a slot has to catch up after a pause
    int accepts = 3;    // of the tokens, always the same
    int least   = 0;    // shorter drafts are dropped
    bool fails  = false; // no draft can be decoded
    int seen_n  = 0;
    int64_t made = 0; // tokens of slot 0

    explicit machine(int n_slots = 1) : pace(std::max(2, n_slots), 4, 16 * n_slots), n_slots(n_slots) {}

    void step(int ceiling = 4, int other_rows = 0, int64_t wait = 0, int batches = 1) {
        std::vector<draft_pace::wish> wishes;
        for (int seq = 0; seq < n_slots; ++seq) {
            wishes.push_back({ seq, ceiling, 0 });
        }
        pace.plan(clock, wishes);
        seen_n = wishes[0].n;
        const std::vector<int> kept = draft_all(wishes);
        int rows = other_rows, all = 0;
        for (const int n : kept) {
            rows += n + 1;
            all  += n;
        }
        clock += plain + extra * all + wait;
        for (int i = 0; i < batches; ++i) {
            pace.processed(rows, 0);
        }
        made += 1 + std::min(kept[0], accepts);
        for (int seq = 0; seq < n_slots; ++seq) {
            if (kept[size_t(seq)] > 0) {
                pace.verified(seq, std::min(kept[size_t(seq)], accepts));
            }
        }
    }

    // How many plain steps longer than without a drafter the tokens since then took.
    double lost(int64_t since, int64_t before) const { return double(clock - since) / double(plain) - double(made - before); }

private:
    std::vector<int> draft_all(const std::vector<draft_pace::wish> & wishes) {
        std::vector<int> kept;
        int longest = 0;
        for (const auto & w : wishes) {
            CHECK(w.n >= 0);
            longest = std::max(longest, w.n);
            if (w.n > 0 && resume > 0 && pace.paused(w.seq)) {
                clock += resume;
                pace.caught_up(w.seq, resume);
            }
        }
        clock += longest > 0 ? draft : 0;
        for (const auto & w : wishes) {
            const std::vector<float> sure(size_t(w.n), 0.9f);
            const bool drafts = w.n > 0 && !fails;
            if (drafts) {
                pace.decoded(w.n + 1);
            }
            kept.push_back(drafts ? pace.keep(w.seq, w.n, sure.data()) : 0);
            CHECK(kept.back() >= 0 && kept.back() <= w.n);
            kept.back() = kept.back() < least ? 0 : kept.back();
        }
        for (const auto & w : wishes) {
            pace.sent(w.seq, kept[size_t(&w - wishes.data())]);
        }
        pace.end(clock);
        return kept;
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

// The first step of a server loads and builds everything. Taken for what steps cost it made every draft cheap.
static void a_slow_first_step_is_not_believed(int n_slots) {
    for (const int factor : { 1, 2, 5 }) {
        machine m(n_slots);
        m.accepts = 0;
        m.extra   = 20;
        for (int i = 0; i < 20000; ++i) {
            m.step(4, 0, i == 0 ? (factor - 1) * m.plain : 0);
        }
        CHECK(m.lost(0, 0) < 0.02 * double(m.made));
    }
}

// ... and the first draft would have been too dear for ever.
static void a_slow_first_draft_locks_nobody_out() {
    machine m;
    m.draft = 2000000;
    int drafts = 0;
    for (int i = 0; i < 300; ++i) {
        m.step();
        m.draft = m.seen_n > 0 ? 200 : m.draft;
        drafts += m.seen_n > 0;
    }
    CHECK(drafts > 200);
}

// A drafter that takes most of a step pays where nearly all is accepted. What was learned from a text where
// nothing was does not change while nothing is drafted, so a draft must be dared.
static void a_dear_drafter_finds_the_way_back(int n_slots) {
    machine m(n_slots);
    m.accepts = 0;
    m.draft   = 700;
    m.extra   = 20;
    for (int i = 0; i < 5000; ++i) {
        m.step();
    }
    m.accepts = 4;
    int steps = 0;
    for (int drafts = 0; drafts < 40 && steps < 20000; ++steps) {
        m.step();
        drafts += m.seen_n > 0;
    }
    CHECK(steps < 3000);
}

// The machine stood still while a slot caught up: that is no price of drafting.
static void a_pause_is_forgiven() {
    machine m;
    for (int i = 0; i < 100; ++i) {
        m.step();
    }
    for (int request = 0; request < 4; ++request) {
        m.pace.begin(0);
        m.resume = request == 0 ? 10000000 : 100;
        for (int i = 0; i < 100; ++i) {
            m.step();
        }
    }
    CHECK(m.seen_n > 0);
}

// What comes with every try is one, however large.
static void what_every_try_takes_is_paid_for() {
    machine m;
    for (int i = 0; i < 100; ++i) {
        m.step();
    }
    m.accepts = 0;
    m.resume  = 20 * m.plain;
    const int64_t clock = m.clock, made = m.made;
    for (int i = 0; i < 20000; ++i) {
        m.step();
    }
    CHECK(m.lost(clock, made) < 0.015 * 20000);
}

// Drafts that nobody sees: the decoder fails, or all are shorter than the least.
static void drafts_in_vain_are_paid_for() {
    for (const bool fails : { true, false }) {
        machine m;
        m.fails = fails;
        m.least = 5;
        for (int i = 0; i < 5000; ++i) {
            m.step();
        }
        CHECK(m.lost(0, 0) < 0.015 * 5000);
    }
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
    for (const int n_slots : { 1, 2, 4 }) {
        a_slow_first_step_is_not_believed(n_slots);
        a_dear_drafter_finds_the_way_back(n_slots);
    }
    a_slow_first_draft_locks_nobody_out();
    a_pause_is_forgiven();
    what_every_try_takes_is_paid_for();
    drafts_in_vain_are_paid_for();
    leaves_catching_up_out_of_the_cost_of_a_draft();
    gives_nothing_to_slots_without_room();
    return failures();
}
