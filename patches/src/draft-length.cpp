#include "draft-length.h"

#include <algorithm>
#include <cmath>

namespace dflashcpp {

namespace {

constexpr double keep_position = 0.98; // forgetting of acceptance, for each test of that position
constexpr double keep_bin      = 0.99;
constexpr double keep_idle     = 0.99; // ... and for each plain step: what was learned grows old
constexpr double keep_trust    = 0.95; // ... of how far confidences can be trusted, for each test
constexpr double forget_block  = 0.03; // ... of what tiers bring, for each block
constexpr double trust_prior   = 2.0;
constexpr double first_guess   = 0.6;  // acceptance before anything was seen
constexpr int    first_length  = 3;
constexpr double new_request   = 0.4;  // tokens that each request may stake anew at most,
constexpr double request_share = 0.006; // ... of the tokens that a request usually makes,
constexpr double most_begun    = 2.5;  // ... and all that is staked when it begins
constexpr int    most_checks   = 8;    // plain steps that a request may spend on knowing better what one costs
constexpr int    patience      = 500;  // steps without a draft until one is made whatever the estimates say
constexpr double keep_usual    = 0.75; // forgetting of what a request makes, for each of them

// a confidence strictly between 0 and 1, whatever was given
double sane(float confidence) {
    return confidence > 1e-4f ? std::min<double>(confidence, 1.0 - 1e-4) : 1e-4;
}

} // namespace

std::vector<int> draft_tiers(int n_max) {
    std::vector<int> tiers;
    for (const int n : { 1, 2, 3, 4, 5, 6, 7, 9, 11, 15, 23, 31 }) {
        if (n < n_max) {
            tiers.push_back(n);
        }
    }
    if (n_max > 0) {
        tiers.push_back(n_max);
    }
    return tiers;
}

// -- acceptance_model -------------------------------------------------------------------------

void acceptance_model::rate::observe(bool hit, double keep, double weight) {
    const double kept = 1.0 - (1.0 - keep) * weight;
    hits   = hits   * kept + (hit ? weight : 0.0);
    trials = trials * kept + weight;
}

acceptance_model::acceptance_model(int n_max) :
    by_position(std::max(1, n_max)), by_confidence(2 * n_bins) {}

// bins are even in the logarithm of the odds: 1:7, 1:3, 1:1, 3:1, 7:1, ... about
acceptance_model::knot acceptance_model::place(float confidence) {
    const double c = sane(confidence);
    const double x = std::clamp(std::log(c / (1.0 - c)) + 2.0, 0.0, n_bins - 1.0);
    const int  bin = std::min((int) x, n_bins - 2);
    return { bin, x - bin };
}

void acceptance_model::observe(int verified, int accepted, const float * confidence) {
    const int tested = std::min({ verified, accepted + 1, (int) by_position.size() });
    for (int i = 0; i < tested; i++) {
        const bool hit = i < accepted;
        by_position[i].observe(hit, keep_position);
        if (i > 0) {
            later_ones.observe(hit, keep_position);
        }
        if (confidence == nullptr) {
            continue;
        }
        hits_seen     = hits_seen     * keep_trust + (hit ? 1.0 : 0.0);
        hits_foretold = hits_foretold * keep_trust + uncorrected(i + 1, confidence[i]);
        const knot k    = place(confidence[i]);
        auto     * bins = &by_confidence[i > 0 ? n_bins : 0];
        bins[k.bin    ].observe(hit, keep_bin, 1.0 - k.share);
        bins[k.bin + 1].observe(hit, keep_bin, k.share);
    }
}

// A position that was seldom tested leans on all of them but the first, these on the first.
double acceptance_model::at(int i) const {
    const double first = by_position[0].mean(first_guess, 2.0);
    if (i <= 1) {
        return std::clamp(first, 0.001, 0.999);
    }
    const double later = later_ones.mean(first, 2.0);
    const int    last  = std::min(i, (int) by_position.size()) - 1;
    return std::clamp(last == 0 ? later : by_position[last].mean(later, 6.0), 0.001, 0.999);
}

double acceptance_model::trials(int i) const {
    return by_position[std::min(std::max(i, 1), (int) by_position.size()) - 1].trials;
}

double acceptance_model::hopeful(int i) const {
    const double p = at(i);
    return std::min(0.999, p + std::sqrt(p * (1.0 - p) / (trials(i) + 2.0)));
}

double acceptance_model::by_bin(bool later, int bin, double prior) const {
    return by_confidence[(later ? n_bins : 0) + bin].mean(prior, 3.0);
}

double acceptance_model::uncorrected(int i, float confidence) const {
    const knot   k     = place(confidence);
    const double prior = 0.5 * (at(i) + sane(confidence));
    return (1.0 - k.share) * by_bin(i > 1, k.bin, prior) + k.share * by_bin(i > 1, k.bin + 1, prior);
}

// Another text can make every confidence worth less (or more) at once; the bins follow too slowly.
double acceptance_model::trust() const {
    return std::clamp((hits_seen + trust_prior) / (hits_foretold + trust_prior), 0.05, 1.5);
}

double acceptance_model::at(int i, float confidence) const {
    return std::clamp(uncorrected(i, confidence) * trust(), 0.001, 0.98);
}

// -- tier_history -----------------------------------------------------------------------------

tier_history::tier_history(int n_max) :
    tiers(draft_tiers(n_max)), by_tier(tiers.size()), kept(tiers.size() * (std::max(0, n_max) + 1)),
    width(std::max(0, n_max) + 1) {}

void tier_history::observe(size_t tier, int n_kept, double gain, double path) {
    by_tier[tier].weight += 1.0;
    by_tier[tier].gain   += gain;
    by_tier[tier].path   += path;
    kept[tier * width + n_kept] += 1.0;
}

double tier_history::blocks() const {
    return by_tier.empty() ? 0.0 : by_tier[0].weight;
}

void tier_history::forget(double share) {
    for (auto & s : by_tier) {
        s.weight *= 1.0 - share;
        s.gain   *= 1.0 - share;
        s.path   *= 1.0 - share;
    }
    for (auto & k : kept) {
        k *= 1.0 - share;
    }
}

void tier_history::soften(double most) {
    if (blocks() > most) {
        forget(1.0 - most / blocks());
    }
}

tier_history::outlook tier_history::at(size_t tier, const outlook & before, const acceptance_model & model,
                                       const cost_curve & verify, double rows_others) const {
    const int    from = tier == 0 ? 0 : tiers[tier - 1];
    const int    to   = tiers[tier];
    const double one  = verify.at(rows_others + 1);
    outlook o = before;
    for (int i = from + 1; i <= to; i++) {
        o.path *= model.hopeful(i);
        o.gain += o.path;
    }
    o.rows += before.full * (to - from);
    o.us   += before.full * (verify.at(rows_others + 1 + to) - verify.at(rows_others + 1 + from));

    const double   lean = 2.0;
    const auto   & s    = by_tier[tier];
    const double * row  = &kept[tier * width];
    double us   = 0.0;
    double rows = 0.0;
    for (int k = 1; k <= to; k++) {
        us   += row[k] * (verify.at(rows_others + 1 + k) - one);
        rows += row[k] * k;
    }
    const double all = s.weight + lean;
    return { (s.gain + lean * o.gain) / all, (us + lean * o.us) / all, (rows + lean * o.rows) / all,
             (row[to] + lean * o.full) / all, (s.path + lean * o.path) / all };
}

// -- draft_length -----------------------------------------------------------------------------

draft_length::draft_length(const draft_length_params & params, const draft_costs & costs) :
    params(params), costs(&costs), model(params.n_max), history(params.n_max), ahead(history.tiers.size()),
    confidences(std::max(1, params.n_max)), chances(confidences.size()), averages(confidences.size()),
    worst(params.stake), usual(new_request / request_share), bank(params.stake) {
    for (const int n : history.tiers) {
        current = n <= first_length ? n : current;
    }
}

void draft_length::begin() {
    planned = drafted = 0;
    usual   = made > 0.0 ? keep_usual * usual + (1.0 - keep_usual) * made : usual;
    made    = 0.0;
    checks  = 0;
    bank    = std::min(most_begun, bank + std::min(new_request, request_share * usual));
    history.soften(8.0);
}

double draft_length::plain_us() const {
    return costs->verify.at(others.rows + 1);
}

double draft_length::plain_rate() const {
    const double us = plain_us();
    return us > 0.0 ? (others.tokens + 1.0) / us : 0.0;
}

double draft_length::tokens_in(double us) const {
    const double none = costs->verify.at(others.plain_rows + 1);
    return none > 0.0 ? us * (others.plain_rows + 1) / none : 0.0;
}

// The draft call is one for all slots: each pays its share of it.
double draft_length::draft_us(int n) const {
    const int all = others.draft_rows + n + 1;
    return costs->draft.at(all) * (n + 1) / all;
}

double draft_length::expected() const {
    return 1.0 + at_tier(planned).gain;
}

// The outlook at the longest tier up to n.
tier_history::outlook draft_length::at_tier(int n) const {
    tier_history::outlook found;
    for (size_t t = 0; t < ahead.size() && history.tiers[t] <= n; t++) {
        found = ahead[t];
    }
    return found;
}

// What was seldom tried is given the benefit of the doubt: one standard error.
void draft_length::look_ahead() {
    tier_history::outlook o;
    for (size_t t = 0; t < ahead.size(); t++) {
        o = history.at(t, o, model, costs->verify, others.rows);
        ahead[t] = o;
        ahead[t].gain += std::sqrt(0.7 * (o.gain + 0.05) / (history.blocks() + 2.0));
    }
}

draft_length::choice draft_length::best(int ceiling) const {
    const double plain  = plain_us();
    choice top { 0, plain_rate() };
    choice now = top;
    for (size_t t = 0; t < ahead.size() && history.tiers[t] <= ceiling; t++) {
        const int    n     = history.tiers[t];
        const double more  = draft_us(n) + ahead[t].us;
        const double doubt = others.rows > 0.0 ? 0.0 : costs->verify.doubt(n + 1);
        const choice c { n, (others.tokens + 1.0 + ahead[t].gain) / ((plain + more) * (1.0 - doubt)) };
        if (tokens_in(more) <= bank) {
            top = c.rate > top.rate ? c : top;
            now = n == current      ? c : now;
        }
    }
    return now.n > 0 && now.rate * (1.0 + params.hysteresis) > top.rate ? now : top;
}

// What a token costs without a drafter must stay known where that decides.
bool draft_length::plain_is_stale(const choice & top) const {
    if (checks < most_checks && costs->verify.young(others.plain_rows + 1)) {
        return true;
    }
    return others.rows == 0.0 && costs->verify.age(1) > (top.rate < 1.4 * plain_rate() ? 100 : 400);
}

bool draft_length::overdue(int n) const {
    return n > 0 && idle >= patience && bank >= most_begun && tokens_in(draft_us(n) + at_tier(n).us) <= bank;
}

int draft_length::choose(int ceiling) {
    off     = false;
    dared   = false;
    ceiling = std::min(ceiling, params.n_max);
    if (ceiling < 1 || !costs->verify.known()) {
        return 0;
    }
    if (!costs->draft.known()) {
        return std::min(current, ceiling);
    }
    look_ahead();
    const choice top = best(ceiling);
    dared = top.n == 0 && (dares || overdue(std::min(first_length, ceiling)));
    if (dared) {
        return std::min(first_length, ceiling);
    }
    off = top.n == 0;
    return plain_is_stale(top) ? 0 : top.n;
}

int draft_length::want(int ceiling, const draft_load & load) {
    others  = load;
    made   += 1.0;
    planned = drafted = choose(ceiling);
    idle    = planned > 0 ? 0 : idle + 1;
    checks += planned == 0 && !off ? 1 : 0;
    dares   = false;
    if (planned > 0) {
        current = planned;
    } else if (ceiling > 0) {
        bank = std::min(limit(), bank + params.probe_share);
        history.soften(std::max(4.0, history.blocks() * keep_idle));
    }
    return planned;
}

// Of the target's batch with n drafted tokens; another width than the last pays for a new graph.
double draft_length::verify_us(int n) const {
    const double rows = others.rows + n + 1;
    return costs->verify.at(rows) + (std::lround(rows) == costs->verify.last() ? 0.0 : costs->verify.change());
}

// What going on from i tokens to some longer tier brings, in tokens. Of what lies behind token i + 1
// only averages may be used, see the head of the header.
double draft_length::going_on(int i, double path, int limit, double per_us) const {
    const double here = verify_us(i);
    double gain = 0.0;
    double top  = -1e300;
    for (int j = i; j < limit; j++) {
        path *= j == i ? chances[j] : averages[j];
        gain += path;
        top   = std::max(top, gain - per_us * (verify_us(j + 1) - here));
    }
    return top;
}

// How many of the first n tokens of a draft of `limit` are verified, what they bring, and how likely
// all are right. A draft that ended early may not be told by that before its end: hence `limit`.
int draft_length::stop(int n, int limit, double per_us, double & gain, double & path) const {
    gain = 0.0;
    path = 1.0;
    int i = 0;
    while (i < n && going_on(i, path, limit, per_us) > 0.0) {
        path *= chances[i++];
        gain += path;
    }
    path = i == limit ? path : 0.0;
    return i;
}

int draft_length::keep(int n, const float * confidence) {
    n               = std::clamp(n, 0, params.n_max);
    drafted         = n;
    has_confidences = confidence != nullptr;
    const int limit = std::max(n, planned);
    for (int i = 0; i < limit; i++) {
        averages[i] = model.at(i + 1);
    }
    for (int i = 0; i < n; i++) {
        confidences[i] = has_confidences ? confidence[i] : 0.0f;
        chances[i]     = has_confidences ? model.at(i + 1, confidence[i]) : averages[i];
    }
    const double per_us = std::max(plain_rate(), best(limit).rate);
    history.forget(forget_block);
    double gain = 0.0;
    double path = 1.0;
    for (size_t t = 0; t < history.tiers.size() && history.tiers[t] <= n; t++) {
        const int kept = stop(history.tiers[t], history.tiers[t], per_us, gain, path);
        history.observe(t, kept, gain, path);
    }
    return has_confidences ? stop(n, limit, per_us, gain, path) : n;
}

void draft_length::observe(int verified, int accepted) {
    const int n = std::max(planned, drafted); // a draft that ended early took as long
    if (n < 1) {
        return;
    }
    double more = draft_us(n);
    if (verified > 0) {
        made += accepted;
        model.observe(verified, accepted, has_confidences ? confidences.data() : nullptr);
        more += costs->verify.at(others.rows + verified + 1) - plain_us();
    }
    const double gain = accepted - tokens_in(more);
    settle(gain);
    idle = dared && gain > 0.0 ? patience : idle;
}

void draft_length::charge(double us) {
    const double lost = tokens_in(us);
    settle(-std::min(lost, worst));
    worst = lost > worst ? 2.0 * worst : std::max(params.stake, 0.5 * worst);
}

void draft_length::settle(double gain) {
    earned = std::max(0.0, earned + gain) * (1.0 - 1.0 / 512.0);
    bank   = std::min(limit(), bank + gain);
}

double draft_length::limit() const {
    return params.stake + std::min(2.0 * params.stake, 0.1 * earned);
}

// -- several slots ----------------------------------------------------------------------------

// What all slots but one put into the step.
draft_load load_beside(const draft_slot * slots, size_t n_slots, size_t one, const draft_load & rest) {
    draft_load load = rest;
    for (size_t j = 0; j < n_slots; j++) {
        if (j != one) {
            const auto o = slots[j].length->at_tier(slots[j].n);
            load.rows       += 1.0 + o.rows;
            load.tokens     += 1.0 + o.gain;
            load.draft_rows += slots[j].n > 0 ? slots[j].n + 1 : 0;
            load.plain_rows += 1;
        }
    }
    return load;
}

// The length that were best if all slots used the same. Slots that decide one after the other do not
// find it where a draft pays only if several share it.
int common_length(draft_slot * slots, size_t n_slots, const draft_load & rest) {
    const draft_costs & costs = *slots[0].length->costs;
    int    top_n    = 0;
    double top_rate = 0.0;
    for (int n = 0; n <= slots[0].length->params.n_max; n++) {
        for (size_t i = 0; i < n_slots; i++) {
            slots[i].n = std::min(n, slots[i].ceiling);
        }
        const draft_load all  = load_beside(slots, n_slots, n_slots, rest);
        const double     rate = all.tokens / (costs.draft.at(all.draft_rows) + costs.verify.at(all.rows));
        if (rate > top_rate) {
            top_n    = n;
            top_rate = rate;
        }
    }
    return top_n;
}

// A draft that is dear for one slot alone, all of them may be able to pay for.
void dare_together(draft_slot * slots, size_t n_slots, const draft_load & rest) {
    bool all = n_slots > 1;
    for (size_t i = 0; i < n_slots; i++) {
        all = all && slots[i].n == 0 && slots[i].ceiling > 0;
    }
    for (size_t i = 0; all && i < n_slots; i++) {
        slots[i].n = std::min(first_length, slots[i].ceiling);
    }
    const bool tried = all;
    for (size_t i = 0; all && i < n_slots; i++) {
        slots[i].length->others = load_beside(slots, n_slots, i, rest);
        all = slots[i].length->overdue(slots[i].n);
    }
    for (size_t i = 0; tried && i < n_slots; i++) {
        slots[i].length->dares = all;
        slots[i].n = all ? slots[i].n : 0;
    }
}

void plan_drafts(draft_slot * slots, size_t n_slots, const draft_load & rest) {
    const int common = n_slots > 1 ? common_length(slots, n_slots, rest) : 0;
    for (size_t i = 0; i < n_slots; i++) {
        slots[i].n = std::min(common, slots[i].ceiling);
    }
    for (int sweep = 0; sweep < 2 && n_slots > 1; sweep++) {
        for (size_t i = 0; i < n_slots; i++) {
            slots[i].length->others = load_beside(slots, n_slots, i, rest);
            slots[i].n = slots[i].length->choose(slots[i].ceiling);
        }
    }
    dare_together(slots, n_slots, rest);
    for (size_t i = 0; i < n_slots; i++) {
        slots[i].n = slots[i].length->want(slots[i].ceiling, load_beside(slots, n_slots, i, rest));
    }
}

} // namespace dflashcpp
