// Feeds the policy of draft-length.h with what a drafting loop does and how long it takes.
//
// A cycle goes from the end of one draft call to the begin of the next: the target verifies, the server does
// all the rest. It teaches what a step costs only when nothing but the expected rows was decoded in it, once:
// no prompt, no other slot that came or went. Time is given in microseconds, of any clock that runs on.

#pragma once

#include "draft-length.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dflashcpp {

class draft_pace {
public:
    // max_rows: rows of the widest batch or draft pass that is told apart
    draft_pace(int n_seq, int n_max, int max_rows) : costs(max_rows) {
        draft_length_params params;
        params.n_max = n_max;
        slots.reserve(size_t(n_seq));
        for (int seq = 0; seq < n_seq; ++seq) {
            slots.push_back({ draft_length(params, costs), 0, false, false, 0.0 });
        }
    }

    draft_pace(const draft_pace &) = delete;
    draft_pace & operator=(const draft_pace &) = delete;

    struct wish {
        int seq;
        int ceiling; // tokens that the slot has room for
        int n;       // out: tokens to draft
    };

    // A new request of a slot. What its first draft has to bring (the last rows of the prompt) is paid like
    // what a pause put off: an answer may end before that has paid.
    void begin(int seq) {
        slots[size_t(seq)].length.begin();
        slots[size_t(seq)].paused = true;
        cycle.clean = false;
    }

    // The target decoded `rows` rows, and `us` of the loop's own work (injection) came with it.
    void processed(int rows, int64_t us) {
        cycle.rows   += rows;
        cycle.inject += us;
        ++cycle.batches;
    }

    // A draft call begins: how many tokens for each slot that may have some.
    void plan(int64_t now, std::vector<wish> & wishes) {
        if (cycle.clean && cycle.batches == 1 && cycle.rows == cycle.expected) {
            costs.verify.observe(cycle.rows, double(now - cycle.begin - cycle.inject));
        }
        std::vector<draft_slot> asked;
        for (const wish & w : wishes) {
            asked.push_back({ &slots[size_t(w.seq)].length, w.ceiling, 0 });
        }
        plan_drafts(asked.data(), asked.size());
        call = { now, 0, 0, 0, 0, 0 };
        for (slot & s : slots) {
            s.resumes = false; // of a call that came to nothing
        }
        for (size_t i = 0; i < wishes.size(); ++i) {
            slot & s  = slots[size_t(wishes[i].seq)];
            s.resumes = s.paused && asked[i].n > 0;
            call.resumed += s.resumes ? 1 : 0;
            call.planned += asked[i].n > 0 ? asked[i].n + 1 : 0;
            wishes[i].n = asked[i].n;
        }
    }

    // `us` went into rows of a slot that had been put off: they are not what every draft costs.
    void caught_up(int seq, int64_t us) {
        if (slots[size_t(seq)].paused) {
            slots[size_t(seq)].owed += double(us);
        }
        call.other += us;
    }

    bool paused(int seq) const { return slots[size_t(seq)].paused; }

    // The blocks of this call had `rows` rows, all together.
    void decoded(int rows) { call.rows += rows; }

    // How many of the n tokens that were drafted for a slot are worth verifying. confidence: draft-length.h
    int keep(int seq, int n, const float * confidence) { return slots[size_t(seq)].length.keep(n, confidence); }

    // A slot goes to the target with n drafted tokens.
    void sent(int seq, int n) {
        slot & s = slots[size_t(seq)];
        s.sent   = n;
        s.paused = !s.length.drafting() || (s.paused && s.length.length() == 0);
        if (n == 0) {
            s.length.observe(0, 0);
        }
        call.expected += n + 1;
    }

    // The draft call is over.
    void end(int64_t now) {
        const double us    = double(now - call.begin - call.other);
        const double usual = costs.draft.at(call.rows);
        charge_resumed(call.rows > 0 && usual > 0.0 ? us - usual : 0.0);
        // the first call of all loads and builds everything; one after a pause takes long, but never too short
        if (warm && !costs.draft.known()) {
            costs.draft.observe(std::max(call.rows, call.planned), us);
        } else if (warm && call.rows > 0 && (call.resumed == 0 || us < usual)) {
            costs.draft.observe(call.rows, us);
        }
        warm  = warm || call.planned > 0;
        cycle = { now, 0, 0, 0, call.expected, true };
    }

    // The target took `accepted` of the drafted tokens of a slot.
    void verified(int seq, int accepted) {
        slot & s = slots[size_t(seq)];
        if (s.sent > 0) {
            s.length.observe(s.sent, accepted);
            s.sent = 0;
        }
    }

    int length(int seq) const { return slots[size_t(seq)].length.length(); }

    const draft_costs & learned() const { return costs; }

private:
    struct slot {
        draft_length length;
        int          sent;    // tokens that are being verified
        bool         paused;  // drafting is off, rows are put off
        bool         resumes; // ... and was until this draft call
        double       owed;    // us of catching up in this draft call
    };

    struct draft_call {
        int64_t begin    = 0;
        int64_t other    = 0; // us of catching up
        int     rows     = 0; // of blocks
        int     expected = 0; // of the target's next batch
        int     resumed  = 0; // slots that drafted nothing before
        int     planned  = 0; // rows
    };

    struct between {
        int64_t begin    = 0;
        int64_t inject   = 0; // us
        int     rows     = 0;
        int     batches  = 0;
        int     expected = 0; // rows
        bool    clean    = false;
    };

    // A draft after a pause builds its graphs anew and finds its weights gone from every cache. The curve
    // tells what drafts cost that follow one another, so the `us` above it go to those that tried, with what
    // they caught up.
    void charge_resumed(double us) {
        for (slot & s : slots) {
            const double share = s.resumes ? us / call.resumed : 0.0;
            if (s.resumes || s.owed > 0.0) {
                s.length.charge(s.owed + share);
            }
            s.owed = 0.0;
        }
    }

    draft_costs       costs;
    std::vector<slot> slots;
    draft_call        call;
    bool              warm = false; // a draft was made
    between           cycle;
};

} // namespace dflashcpp
