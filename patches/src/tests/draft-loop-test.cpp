// The loop over an engine that is all memory: what it drafts is a digest of the rows it can see, so two
// drafts are the same tokens only if the draft caches held the same rows where the layers look.

#include "../draft-length.cpp"
#include "../draft-loop.cpp"
#include "check.h"

#include <map>
#include <set>

using namespace dflashcpp;

static const size_t WIDTH = 3;

static uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t z = (a ^ (b + 0x9e3779b97f4a7c15ull + (a << 6))) * 0xbf58476d1ce4e5b9ull;
    return z ^ (z >> 29);
}

// feature of the token that belongs at `pos` of a slot; a rejected token has another one
static float feature(int32_t seq, int32_t pos, bool rejected = false) {
    return float(mix(uint64_t(seq) + 1, uint64_t(pos) + (rejected ? 1000000 : 0)) % 65521);
}

static int32_t token(int32_t seq, int32_t pos) {
    return int32_t(mix(uint64_t(seq) + 77, uint64_t(pos)) % 1000);
}

// what a drafter that sees positions [from, pos) of a slot makes of them
static uint64_t digest(const std::map<int32_t, float> & rows, int32_t from, int32_t pos) {
    uint64_t sum = 0;
    for (auto it = rows.lower_bound(from); it != rows.end() && it->first < pos; ++it) {
        sum += mix(uint64_t(it->first), uint64_t(it->second));
    }
    return sum;
}

static void candidates_of(uint64_t seen, int32_t anchor, int32_t i, size_t predecessor, candidate_row & out) {
    out.ids.clear();
    out.scores.clear();
    for (uint64_t k = 0; k < 4; ++k) {
        const uint64_t code = mix(mix(seen, uint64_t(anchor)), uint64_t(i) * 16 + k + predecessor * 7);
        out.ids.push_back(int32_t(code % 997));
        out.scores.push_back(float(code % 4096) / 1024.0f);
    }
}

struct fake_engine : draft_engine {
    struct shared {
        drafter_traits traits;
        std::map<int32_t, std::map<int32_t, float>> cache; // by slot and position
        std::vector<batch_row> batch;                      // the target's newest
        std::set<int32_t> rejected;                        // its rows that will be
        std::vector<size_t> injections;                    // rows of each pass
        std::vector<size_t> decodes;                       // blocks of each pass
        size_t n_rejected_injected = 0;
        int64_t clock    = 0;
        int64_t us_row   = 10; // that a row of a draft takes
        int64_t us_step  = 1000;
        bool fail_inject = false;
        bool fail_decode = false;
    };

    shared & s;
    std::vector<draft_block> blocks;
    int32_t width = 0;

    explicit fake_engine(shared & s) : s(s) {}

    const drafter_traits & traits() const override { return s.traits; }

    void gather(int32_t first, int32_t n, float * rows) override {
        for (int32_t i = 0; i < n; ++i) {
            const batch_row & row = s.batch[size_t(first + i)];
            for (size_t w = 0; w < WIDTH; ++w) {
                rows[size_t(i) * WIDTH + w] = feature(row.seq, row.pos, s.rejected.count(first + i) > 0);
            }
        }
    }

    // as llama.cpp: no gaps
    bool add(int32_t seq, int32_t pos, float value) {
        auto & rows = s.cache[seq];
        CHECK(pos < s.traits.n_ctx);
        CHECK(rows.empty() || rows.rbegin()->first + 1 == pos || s.traits.jumps);
        rows[pos] = value;
        return s.traits.sight.n_cells == 0 || rows.size() <= s.traits.sight.n_cells;
    }

    // as llama.cpp: before a pass, cells that a window has left behind are free for anything
    void reuse_cells(int32_t seq) {
        auto & rows = s.cache[seq];
        if (s.traits.sight.all_windowed && !rows.empty()) {
            rows.erase(rows.begin(), rows.lower_bound(rows.rbegin()->first + 2 - s.traits.sight.window));
        }
    }

    bool inject(const std::vector<inject_row> & rows) override {
        CHECK(!rows.empty() && int32_t(rows.size()) <= s.traits.n_rows);
        s.injections.push_back(rows.size());
        bool fits = !s.fail_inject;
        for (const inject_row & row : rows) {
            if (&row == &rows.front() || (&row - 1)->seq != row.seq) {
                reuse_cells(row.seq);
            }
            s.n_rejected_injected += row.row[0] != feature(row.seq, row.pos);
            CHECK(row.row[0] == row.row[WIDTH - 1]);
            fits = fits && add(row.seq, row.pos, row.row[0]);
        }
        return fits;
    }

    bool decode(const std::vector<draft_block> & which, int32_t w) override {
        CHECK(w >= 2 && int32_t(which.size()) * w <= s.traits.n_rows);
        blocks = which;
        width  = w;
        s.clock += 50 + s.us_row * int64_t(which.size()) * w;
        s.decodes.push_back(which.size());
        if (s.fail_decode) {
            return false;
        }
        for (const draft_block & block : which) {
            reuse_cells(block.seq);
            for (int32_t i = 0; i < w; ++i) {
                CHECK(add(block.seq, block.pos + i, -1.0f));
            }
        }
        return true;
    }

    void candidates(int32_t row, size_t predecessor, candidate_row & out) override {
        const draft_block & block = blocks[size_t(row / width)];
        const draft_sight & sight = s.traits.sight;
        const int32_t from = sight.all_windowed ? sight.window_from(block.pos) : 0;
        candidates_of(digest(s.cache[block.seq], from, block.pos), block.anchor, row % width, predecessor, out);
    }

    int32_t pos_min(int32_t seq) override { return s.cache[seq].empty() ? -1 : s.cache[seq].begin()->first; }
    int32_t pos_max(int32_t seq) override { return s.cache[seq].empty() ? -1 : s.cache[seq].rbegin()->first; }

    void remove(int32_t seq, int32_t from, int32_t to) override {
        auto & rows = s.cache[seq];
        rows.erase(rows.lower_bound(std::max(from, 0)), to < 0 ? rows.end() : rows.lower_bound(to));
    }

    int64_t now_us() override { return s.clock; }
};

// A server with slots whose text is given, and a drafter whose drafts are right as often as it comes.
struct world {
    fake_engine::shared shared;
    draft_loop          loop;
    std::vector<int32_t> n;   // tokens of each slot whose features exist; the anchor is at n
    uint64_t step = 0;

    static fake_engine::shared make(const drafter_traits & traits) {
        fake_engine::shared s;
        s.traits = traits;
        return s;
    }

    world(const drafter_traits & traits, const draft_loop_params & params)
        : shared(make(traits)), loop(std::make_unique<fake_engine>(shared), params), n(size_t(traits.n_seq)) {}

    // the target reads positions [from, to) of a slot's prompt, `chunk` at a time
    void read(int32_t seq, int32_t from, int32_t to, int32_t chunk, bool told = true) {
        shared.cache[seq].erase(shared.cache[seq].lower_bound(from), shared.cache[seq].end()); // the server does it
        if (told) {
            loop.expect(seq, to);
        }
        for (int32_t at = from; at < to; at += chunk) {
            shared.batch.clear();
            shared.rejected.clear();
            for (int32_t pos = at; pos < std::min(to, at + chunk); ++pos) {
                shared.batch.push_back({ seq, pos });
            }
            CHECK(loop.process(shared.batch, false));
        }
        n[size_t(seq)] = to;
    }

    draft_request ask(int32_t seq, int32_t n_max = 100, float temp = 0.0f) const {
        draft_request r;
        r.seq    = seq;
        r.pos    = n[size_t(seq)];
        r.anchor = token(seq, r.pos);
        r.n_max  = n_max;
        r.temp   = temp;
        return r;
    }

    // what a drafter that read all of the slot's text drafts
    std::vector<int32_t> right(const draft_request & r, int32_t n_tokens, int32_t from) const {
        std::map<int32_t, float> rows;
        for (int32_t pos = from; pos < r.pos; ++pos) {
            rows[pos] = feature(r.seq, pos);
        }
        std::vector<int32_t> tokens;
        candidate_row row;
        size_t chosen = 0;
        for (int32_t i = 1; i <= n_tokens; ++i) {
            candidates_of(digest(rows, from, r.pos), r.anchor, i, chosen, row);
            chosen = best_candidate(row.scores);
            tokens.push_back(row.ids[chosen]);
        }
        return tokens;
    }

    bool fresh(const draft_request & r) const {
        const draft_sight & sight = shared.traits.sight;
        return r.tokens == right(r, int32_t(r.tokens.size()), sight.all_windowed ? sight.window_from(r.pos) : 0);
    }

    // the target decodes anchors and drafts; returns nothing, but slots move on
    void verify(const std::vector<draft_request> & requests) {
        shared.batch.clear();
        shared.rejected.clear();
        std::vector<std::pair<int32_t, int32_t>> accepted;
        for (const draft_request & r : requests) {
            const int32_t drafted = int32_t(r.tokens.size());
            const int32_t kept    = int32_t(mix(++step, 5) % uint64_t(drafted + 1));
            for (int32_t i = 0; i <= drafted; ++i) {
                if (i > kept) {
                    shared.rejected.insert(int32_t(shared.batch.size()));
                }
                shared.batch.push_back({ r.seq, r.pos + i });
            }
            accepted.push_back({ r.seq, r.pos + kept + 1 });
        }
        shared.clock += shared.us_step;
        CHECK(loop.process(shared.batch, false));
        for (const auto & [seq, pos] : accepted) {
            loop.verified(seq, pos - n[size_t(seq)] - 1);
            n[size_t(seq)] = pos;
            auto & rows = shared.cache[seq];
            rows.erase(rows.lower_bound(pos), rows.end()); // as the server does
        }
    }

    // drafts and verifies for these slots, `steps` times
    bool run(const std::vector<int32_t> & seqs, int steps, int32_t n_max = 100) {
        bool all = true;
        for (int i = 0; i < steps; ++i) {
            std::vector<draft_request> requests;
            for (const int32_t seq : seqs) {
                requests.push_back(ask(seq, n_max));
            }
            loop.draft(requests);
            for (const draft_request & r : requests) {
                all = all && fresh(r) && int32_t(r.tokens.size()) == std::min(n_max, loop.n_max());
            }
            verify(requests);
        }
        return all;
    }
};

static drafter_traits make_traits(int32_t n_seq = 1, int32_t window = 0) {
    drafter_traits t;
    t.n_seq   = n_seq;
    t.n_rows  = 16;
    t.n_ctx   = 2000;
    t.width   = WIDTH;
    t.block   = 8;
    t.lattice = true;
    t.sight.window       = window;
    t.sight.all_windowed = window > 0;
    t.sight.n_block      = 5;
    return t;
}

static draft_loop_params make_params(int32_t n_max = 4) {
    draft_loop_params p;
    p.n_max = n_max;
    return p;
}

static size_t sum(const std::vector<size_t> & values) {
    size_t total = 0;
    for (const size_t value : values) {
        total += value;
    }
    return total;
}

static void drafts_what_it_would_with_all_rows() {
    for (const bool lazy : { true, false }) {
        for (const int32_t window : { 0, 5, 40 }) {
            draft_loop_params params = make_params();
            params.lazy = lazy;
            world w(make_traits(1, window), params);
            w.read(0, 0, 100, 33);
            CHECK(w.run({ 0 }, 100));
            CHECK((w.shared.n_rejected_injected == 0) == lazy);
        }
    }
}

static void injects_each_row_once_and_late() {
    world w(make_traits(), make_params());
    w.read(0, 0, 100, 50);
    CHECK(sum(w.shared.injections) == 96); // as few as hold the rest back
    CHECK(w.run({ 0 }, 20));
    CHECK(w.loop.flush(0, w.n[0]));
    CHECK(sum(w.shared.injections) == size_t(w.n[0]));
}

static void skips_prompt_that_no_layer_sees() {
    world told(make_traits(1, 10), make_params());
    told.read(0, 0, 500, 60);
    CHECK(told.run({ 0 }, 50));
    world untold(make_traits(1, 10), make_params());
    untold.read(0, 0, 500, 60, false);
    CHECK(untold.run({ 0 }, 50));
    CHECK(sum(untold.shared.injections) - sum(told.shared.injections) == 500 - 9);

    told.read(0, told.n[0], told.n[0] + 300, 60); // another turn, with a gap behind the old rows
    CHECK(told.run({ 0 }, 10));
    told.read(0, told.n[0], told.n[0] + 3, 60); // and one that leaves none
    CHECK(told.run({ 0 }, 10));
}

static void drafts_for_all_slots_at_once() {
    world w(make_traits(3), make_params());
    for (int32_t seq = 0; seq < 3; ++seq) {
        w.read(seq, 0, 4 + seq, 50);
    }
    std::vector<draft_request> requests = { w.ask(0), w.ask(1), w.ask(2) };
    w.loop.draft(requests);
    CHECK((w.shared.injections == std::vector<size_t>{ 15 }));
    CHECK((w.shared.decodes == std::vector<size_t>{ 3 })); // 3 blocks of 5 fit into 16 rows
    w.verify(requests);
    CHECK(w.run({ 0, 1, 2 }, 30));
    CHECK(w.run({ 2, 0 }, 10));
}

static void splits_what_does_not_fit_into_a_pass() {
    world w(make_traits(16), make_params(7));
    std::vector<int32_t> seqs;
    for (int32_t seq = 0; seq < 16; ++seq) {
        w.read(seq, 0, 20 + 3 * seq, 50);
        seqs.push_back(seq);
    }
    CHECK(w.run(seqs, 20));
    CHECK(w.shared.decodes.size() == 20 * 8);
    // a block that alone is too wide is made narrower
    drafter_traits narrow = make_traits();
    narrow.n_rows = 3;
    world tight(narrow, make_params(7));
    tight.read(0, 0, 20, 50);
    std::vector<draft_request> one = { tight.ask(0) };
    tight.loop.draft(one);
    CHECK(one[0].tokens.size() == 2 && tight.fresh(one[0]));
}

static void respects_what_a_slot_has_room_for() {
    world w(make_traits(3), make_params());
    for (int32_t seq = 0; seq < 3; ++seq) {
        w.read(seq, 0, 30, 50);
    }
    std::vector<draft_request> requests = { w.ask(0, 2), w.ask(1, 0), w.ask(2, 4) };
    w.loop.draft(requests);
    CHECK(requests[0].tokens.size() == 2 && w.fresh(requests[0]));
    CHECK(requests[1].tokens.empty());
    CHECK(requests[2].tokens.size() == 4 && w.fresh(requests[2]));
    CHECK((w.shared.decodes == std::vector<size_t>{ 2 }));

    drafter_traits traits = make_traits(2); // the fake engine checks that no position is past the context
    traits.n_ctx = 33;
    world last(traits, make_params());
    last.read(0, 0, 30, 50);
    last.read(1, 0, 32, 50);
    std::vector<draft_request> end = { last.ask(0), last.ask(1) };
    last.loop.draft(end);
    CHECK(end[0].tokens.size() == 2 && end[1].tokens.empty());
}

static void never_drafts_more_than_was_trained() {
    world w(make_traits(), make_params(100));
    CHECK(w.loop.n_max() == 7);
    draft_loop_params params = make_params(2);
    params.block = 100;
    world wide(make_traits(), params);
    wide.read(0, 0, 30, 50);
    CHECK(wide.run({ 0 }, 20));
    CHECK(wide.shared.cache[0].size() <= size_t(wide.n[0])); // nothing of a block stays
}

static void catches_up_after_a_pause() {
    for (const int32_t window : { 0, 10 }) {
        world w(make_traits(2, window), make_params());
        w.read(0, 0, 30, 50);
        w.read(1, 0, 30, 50);
        CHECK(w.run({ 0, 1 }, 5));
        const size_t before = w.shared.injections.size();
        CHECK(w.run({ 0, 1 }, 100, 0)); // one token a step, nothing drafted
        CHECK(w.shared.injections.size() - before <= 2 * (100 / 16 + 1));
        CHECK(w.run({ 0, 1 }, 5));
        CHECK(w.shared.n_rejected_injected == 0);
    }
}

static void keeps_the_newest_in_a_bounded_cache() {
    drafter_traits traits = make_traits();
    traits.sight.n_cells = 64;
    traits.n_ctx = 100000;
    world w(traits, make_params());
    w.read(0, 0, 500, 70);
    CHECK(w.shared.cache[0].size() <= 64);
    for (int i = 0; i < 100; ++i) {
        std::vector<draft_request> one = { w.ask(0) };
        w.loop.draft(one);
        CHECK(one[0].tokens.size() == 4);
        CHECK(w.shared.cache[0].rbegin()->first == w.n[0] - 1 && w.shared.cache[0].size() > 40);
        w.verify(one);
    }
}

static void knows_what_it_can_build_on() {
    world w(make_traits(), make_params());
    w.read(0, 0, 100, 50);
    CHECK(w.loop.known(0) == 100);
    CHECK(w.loop.reusable(0, 100, 120) == 100); // held rows count, and are injected
    CHECK(w.shared.cache[0].size() == 100);
    CHECK(w.loop.reusable(0, 60, 120) == 60);

    world lost(make_traits(1, 10), make_params());
    lost.read(0, 0, 100, 50);
    CHECK(lost.run({ 0 }, 30));
    const int32_t n = lost.n[0];
    CHECK(lost.loop.reusable(0, n, n) == n);
    CHECK(lost.loop.reusable(0, 101, 101) == 92); // asked to answer the first prompt again
    lost.read(0, 92, 101, 50);
    CHECK(lost.run({ 0 }, 30));

    // saved behind 101, restored into a slot that held something else
    world other(make_traits(1, 10), make_params());
    other.read(0, 0, 300, 50);
    CHECK(other.run({ 0 }, 3));
    other.shared.cache[0].clear();
    for (int32_t pos = 92; pos < 101; ++pos) {
        other.shared.cache[0][pos] = feature(0, pos);
    }
    other.loop.replaced(0);
    CHECK(other.loop.reusable(0, 101, 101) == 101);
    other.n[0] = 101;
    CHECK(other.run({ 0 }, 10));
}

static void recovers_from_a_cache_that_is_behind() {
    world w(make_traits(), make_params());
    w.read(0, 0, 100, 50);
    CHECK(w.run({ 0 }, 3));
    w.shared.cache[0].clear(); // somebody restored a slot without its draft cache
    w.loop.replaced(0);
    CHECK(w.loop.reusable(0, w.n[0], w.n[0] + 10) == 0);
    const int32_t from = w.n[0];
    w.read(0, from, from + 40, 50); // and went on all the same
    std::vector<draft_request> one = { w.ask(0) };
    w.loop.draft(one);
    CHECK(one[0].tokens == w.right(one[0], 4, from)); // it drafts from what it has
}

static void does_not_mind_a_shift() {
    world w(make_traits(), make_params());
    w.read(0, 0, 100, 50);
    CHECK(w.run({ 0 }, 3));
    CHECK(w.loop.flush(0, w.n[0]));
    CHECK(int32_t(w.shared.cache[0].size()) == w.n[0]);
    std::map<int32_t, float> shifted;
    for (const auto & [pos, row] : w.shared.cache[0]) {
        if (pos < 10 || pos >= 50) {
            shifted[pos < 10 ? pos : pos - 40] = row;
        }
    }
    w.shared.cache[0] = shifted;
    w.loop.replaced(0);
    w.n[0] -= 40;
    std::vector<draft_request> one = { w.ask(0) };
    w.loop.draft(one);
    candidate_row row;
    candidates_of(digest(shifted, 0, w.n[0]), one[0].anchor, 1, 0, row);
    CHECK(one[0].tokens[0] == row.ids[best_candidate(row.scores)]);
    CHECK(w.loop.known(0) == w.n[0]);
}

static void samples_with_its_distribution() {
    draft_loop_params params = make_params();
    params.n_min = 100;
    world w(make_traits(), params);
    w.read(0, 0, 30, 50);
    std::set<std::vector<int32_t>> seen;
    for (uint32_t seed = 0; seed < 50; ++seed) {
        std::vector<draft_request> one = { w.ask(0, 100, 1.0f) };
        one[0].seed = seed;
        w.loop.draft(one);
        const draft_request & r = one[0];
        CHECK(r.tokens.size() == 4 && r.choices.size() == 4 && r.sure.size() == 4); // n_min does not bias it
        for (size_t i = 0; i < r.choices.size(); ++i) {
            const auto & ids = r.choices[i].ids;
            const size_t at = size_t(std::find(ids.begin(), ids.end(), r.tokens[i]) - ids.begin());
            CHECK(at < ids.size() && r.choices[i].q[at] > 0.0f);
        }
        seen.insert(r.tokens);
    }
    CHECK(seen.size() > 20);
    std::vector<draft_request> again = { w.ask(0, 100, 1.0f), };
    again[0].seed = 7;
    std::vector<draft_request> same = again;
    w.loop.draft(again);
    w.loop.draft(same);
    CHECK(again[0].tokens == same[0].tokens);
}

static void stops_where_it_is_unsure() {
    draft_loop_params params = make_params();
    params.p_min = 0.35f;
    world w(make_traits(), params);
    w.read(0, 0, 30, 50);
    size_t shorter = 0;
    for (int i = 0; i < 50; ++i) {
        std::vector<draft_request> one = { w.ask(0) };
        w.loop.draft(one);
        for (const float sure : one[0].sure) {
            CHECK(sure >= 0.35f);
        }
        CHECK(w.fresh(one[0]));
        shorter += one[0].tokens.size() < 4;
        w.verify(one);
    }
    CHECK(shorter > 10 && shorter < 50);

    params.n_min = 4;
    world all(make_traits(), params);
    all.read(0, 0, 30, 50);
    for (int i = 0; i < 50; ++i) {
        std::vector<draft_request> one = { all.ask(0) };
        all.loop.draft(one);
        CHECK(one[0].tokens.empty() || one[0].tokens.size() == 4);
        all.verify(one);
    }
}

static void leaves_nothing_behind_when_the_engine_fails() {
    world w(make_traits(), make_params());
    w.read(0, 0, 30, 50);
    w.shared.fail_decode = true;
    std::vector<draft_request> one = { w.ask(0) };
    w.loop.draft(one);
    CHECK(one[0].tokens.empty() && w.shared.cache[0].size() == 30);
    w.shared.fail_decode = false;
    CHECK(w.run({ 0 }, 3));
    w.shared.fail_inject = true;
    std::vector<draft_request> two = { w.ask(0) };
    w.loop.draft(two);
    CHECK(two[0].tokens.empty());
    CHECK(!w.loop.flush(0, w.n[0]));
}

static void drafts_less_where_that_pays() {
    draft_loop_params params = make_params(7);
    params.adaptive = true;
    for (const bool dear : { false, true }) {
        world w(make_traits(2), params);
        w.shared.us_row = dear ? 100000 : 1;
        w.read(0, 0, 100, 50);
        w.read(1, 0, 40, 50);
        w.loop.begin(0);
        w.loop.begin(1);
        size_t drafted = 0;
        for (int i = 0; i < 200; ++i) {
            std::vector<draft_request> requests = { w.ask(0), w.ask(1, 3) };
            w.loop.draft(requests);
            CHECK(w.fresh(requests[0]) && w.fresh(requests[1]) && requests[1].tokens.size() <= 3);
            drafted += i >= 100 ? requests[0].tokens.size() : 0;
            w.verify(requests);
        }
        CHECK(dear ? drafted < 20 : drafted > 200);
        CHECK(w.shared.n_rejected_injected == 0);
    }
}

static void jumps_over_images() {
    drafter_traits traits = make_traits();
    traits.jumps = true;
    world w(traits, make_params());
    w.read(0, 0, 10, 50);
    w.shared.batch.assign(5, { 0, 10 });
    CHECK(w.loop.process(w.shared.batch, true)); // all at one position: left out
    CHECK(w.loop.known(0) == 10);
    w.read(0, 15, 30, 50, false);
    std::vector<draft_request> one = { w.ask(0) };
    w.loop.draft(one);
    CHECK(w.shared.cache[0].size() == 25 && one[0].tokens.size() == 4);
    // slots that are not ours
    w.shared.batch = { { 5, 0 }, { -1, 0 } };
    CHECK(w.loop.process(w.shared.batch, false));
    CHECK(w.loop.process({}, false));
}

int main() {
    drafts_what_it_would_with_all_rows();
    injects_each_row_once_and_late();
    skips_prompt_that_no_layer_sees();
    drafts_for_all_slots_at_once();
    splits_what_does_not_fit_into_a_pass();
    respects_what_a_slot_has_room_for();
    never_drafts_more_than_was_trained();
    catches_up_after_a_pause();
    keeps_the_newest_in_a_bounded_cache();
    knows_what_it_can_build_on();
    recovers_from_a_cache_that_is_behind();
    does_not_mind_a_shift();
    samples_with_its_distribution();
    stops_where_it_is_unsure();
    leaves_nothing_behind_when_the_engine_fails();
    drafts_less_where_that_pays();
    jumps_over_images();
    return failures();
}
