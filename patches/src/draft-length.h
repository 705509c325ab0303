// How many tokens to draft: the number that makes tokens per second largest, 0 where drafting loses.
//
// Units: us (microseconds), rows (tokens of one batch, all slots together), tokens, probabilities.
// Nothing here knows llama.cpp or looks at a clock, and nothing allocates after construction.
//
// One step of the loop that drafts:
//   1. plan_drafts() or want(): how many tokens each slot drafts; 0: none in this step
//   2. draft; costs.draft.observe(rows fed, us of it)
//   3. keep(): how many of the drafted tokens are worth verifying, maybe none
//   4. verify; costs.verify.observe(rows of the target batch, us of the rest of the step)
//   5. observe(verified, accepted) for each slot; 0, 0 where nothing was verified
//
// What belongs where: `draft` is all time that a step without a drafter would not have spent (the
// draft call and the injection of the rows of the step before), `verify` is the rest of the step
// from one draft to the next. Steps that also read a prompt, or waited for work, are not observed.
// Injection that was put off while drafting was off goes to charge() in place of costs.draft, and so does
// what the first draft after it takes beyond the usual.
//
// Sampling stays exact because keep() decides about token i from the confidences 1..i alone: give
// the largest probability of the distribution that token i is drawn from, not the probability of
// the token that was drawn. Whether token i is verified then never depends on its own value.
#pragma once

#include "cost-curve.h"

#include <cstddef>
#include <vector>

namespace dflashcpp {

// What a step costs; one for all slots. Wider batches than `max_rows` count as that many rows.
struct draft_costs {
    cost_curve draft;
    cost_curve verify;

    explicit draft_costs(int max_rows) : draft(max_rows), verify(max_rows) {}
};

// Conditional acceptance: P(token i is accepted | tokens 1..i-1 were), i from 1.
// Positions after a rejection were not tested and teach nothing.
class acceptance_model {
public:
    explicit acceptance_model(int n_max);

    // `verified` tokens were checked, the first `accepted` of them were right.
    // confidence[i-1]: of token i; nullptr: not known.
    void observe(int verified, int accepted, const float * confidence);

    double at(int i) const;                   // by position alone
    double at(int i, float confidence) const; // by what a confidence like this was worth so far
    double hopeful(int i) const;              // at(i) plus its standard error
    double trials(int i) const;               // tests of position i, forgotten

private:
    struct rate {
        double hits   = 0.0;
        double trials = 0.0;

        void   observe(bool hit, double keep, double weight = 1.0);
        double mean(double prior, double weight) const { return (hits + prior * weight) / (trials + weight); }
    };

    struct knot { // a confidence lies between two bins
        int    bin;
        double share; // of bin + 1
    };

    static constexpr int n_bins = 8;

    static knot place(float confidence);
    double      by_bin(bool later, int bin, double prior) const;
    double      uncorrected(int i, float confidence) const;
    double      trust() const;

    std::vector<rate> by_position;   // index i-1
    rate              later_ones;    // all positions but the first together
    std::vector<rate> by_confidence; // [first token | later ones][bin]
    double hits_seen     = 0.0;      // of the newest tests: how many were right,
    double hits_foretold = 0.0;      // and how many the confidences promised
};

// What drafting n tokens brings and costs, n from the tiers, when blocks are cut short as keep()
// does it. Every block teaches about all tiers up to its own length.
class tier_history {
public:
    explicit tier_history(int n_max);

    struct outlook {
        double gain = 0.0; // tokens beyond the one that every step brings
        double us   = 0.0; // of verification beyond that of one row
        double rows = 0.0; // verified beyond the first
        double full = 1.0; // P(verified in full)
        double path = 1.0; // P(verified in full and all right)
    };

    void   observe(size_t tier, int kept, double gain, double path);
    void   forget(double share); // of all tiers
    double blocks() const; // seen, forgotten
    void   soften(double blocks);

    // The outlook at a tier; one that was seldom seen leans on `before`, that of the tier before it.
    outlook at(size_t tier, const outlook & before, const acceptance_model & model,
               const cost_curve & verify, double rows_others) const;

    const std::vector<int> tiers;

private:
    struct sums {
        double weight = 0.0;
        double gain   = 0.0;
        double path   = 0.0;
    };

    std::vector<sums>   by_tier;
    std::vector<double> kept; // [tier][rows beyond the first]: how often so many were verified
    size_t              width;
};

struct draft_length_params {
    int    n_max       = 4;     // ceiling, tokens
    double probe_share = 0.006; // of the time, at most, spent on finding out whether drafting pays again
    double stake       = 4.0;   // plain steps that drafting may lose before it is switched off
    double hysteresis  = 0.01;  // another length must promise this much more
};

// What the other slots put into the same step.
struct draft_load {
    double rows       = 0.0; // of the target batch, as expected
    int    draft_rows = 0;   // of the draft call
    double tokens     = 0.0; // they are expected to gain
    int    plain_rows = 0;   // of the target batch if none of them drafted; each is a token
};

// The policy of one slot. Its state outlives a request: call begin() for the next one.
//
// The length with the best expected tokens per us wins, given what the others do. Beside that runs an
// account of what drafting really brought: the slot starts with `stake` tokens, each draft pays its
// time in the tokens that no drafter had made of it and earns what was accepted, and what is not there
// cannot be spent. That bounds the loss whatever the estimates say. While drafting is off the account
// fills by `probe_share` of a token a step, which pays for the next try; a try that succeeds pays for
// more of them. A full account is tried with now and then also where the estimates promise nothing: they
// do not change while nothing is drafted.
class draft_length {
public:
    draft_length(const draft_length_params & params, const draft_costs & costs);

    // A new request: what it is about may have changed, so little of what was earned is staked on it, and
    // less where answers are short.
    void begin();

    // How many tokens to draft now, at most `ceiling` (what the request and the context have room for).
    int want(int ceiling, const draft_load & others = {});

    // How many of the n drafted tokens are worth verifying. confidence[i-1]: of token i, see above;
    // nullptr: all of them.
    int keep(int n, const float * confidence);

    // The step is done. A draft of which nothing was verified, for whatever reason, has been in vain.
    void observe(int verified, int accepted);

    // Time lost to drafting that is in no curve. Once for each try: a pause of the machine is no price, so
    // one charge counts as `stake` tokens at most; what comes again counts in full.
    void charge(double us);

    // false: drafting is off, and injection can wait until want() asks for a draft again.
    bool drafting() const { return !off; }

    int    length()   const { return planned; } // what want() answered
    double expected() const;                    // tokens of the step that want() planned

    const acceptance_model & acceptance() const { return model; }

private:
    friend draft_load load_beside(const struct draft_slot *, size_t, size_t, const draft_load &);
    friend int        common_length(struct draft_slot *, size_t, const draft_load &);
    friend void       plan_drafts(struct draft_slot *, size_t, const draft_load &);
    friend void       dare_together(struct draft_slot *, size_t, const draft_load &);

    struct choice {
        int    n    = 0;
        double rate = 0.0; // tokens of all slots per us
    };

    double plain_us() const;   // of a step in which this slot drafts nothing
    double plain_rate() const; // tokens of all slots per us of it
    double tokens_in(double us) const; // that are made in `us` when no slot drafts
    double draft_us(int n) const;
    void   look_ahead();
    tier_history::outlook at_tier(int n) const;
    choice best(int ceiling) const;
    int    choose(int ceiling);
    bool   plain_is_stale(const choice & top) const;
    bool   overdue(int n) const;
    double verify_us(int n) const;
    double going_on(int i, double path, int limit, double per_us) const;
    int    stop(int n, int limit, double per_us, double & gain, double & path) const;
    void   settle(double gain);
    double limit() const;

    draft_length_params params;
    const draft_costs * costs;
    acceptance_model    model;
    tier_history        history;
    draft_load          others;
    std::vector<tier_history::outlook> ahead; // by tier, with `others` in the same step

    // the block in flight
    std::vector<float>  confidences;
    std::vector<double> chances;  // by confidence, of each token given those before
    std::vector<double> averages; // by position alone
    bool has_confidences = false;
    int  planned = 0;
    int  drafted = 0;

    bool   off     = false; // drafting does not pay
    int    current = 0;   // tier in use
    bool   dares   = false; // with all other slots,
    bool   dared   = false; // this draft is made whatever the estimates say
    int    idle    = 0;   // steps without a draft
    int    checks  = 0;   // plain steps of this request that were to tell what one costs
    double worst   = 0.0; // tokens that a charge may take
    double made    = 0.0; // tokens of this request
    double usual   = 0.0; // that a request makes, forgotten
    double bank    = 0.0; // tokens that drafting may still lose
    double earned  = 0.0; // tokens that drafting gained, forgotten
};

// One slot of a step that drafts for several.
struct draft_slot {
    draft_length * length  = nullptr;
    int            ceiling = 0; // tokens
    int            n       = 0; // out: tokens to draft
};

// Lengths for all slots of one step together: rows that a slot adds slow the others, too.
// `rest`: rows of the target batch that belong to none of these slots, and what they gain.
void plan_drafts(draft_slot * slots, size_t n_slots, const draft_load & rest = {});

// The lengths in use up to n_max: few, so that graphs are reused.
std::vector<int> draft_tiers(int n_max);

} // namespace dflashcpp
