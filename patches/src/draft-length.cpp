#include "draft-length.h"

#include <algorithm>
#include <cmath>

namespace dflashcpp {

namespace {

constexpr double learn_cost    = 0.05; // share of a new observation in a settled cost
constexpr double drift_cost    = 0.03; // how much of it the other widths follow
constexpr double learn_change  = 0.05;
constexpr double first_most    = 2.5;  // a width is taken as at most this many times what the others say
constexpr double learn_spread  = 0.05;
constexpr double keep_position = 0.98; // forgetting of acceptance, for each test of that position
constexpr double keep_bin      = 0.99;
constexpr double keep_idle     = 0.99; // ... and for each plain step: what was learned grows old
constexpr double keep_trust    = 0.95; // ... of how far confidences can be trusted, for each test
constexpr double forget_block  = 0.03; // ... of what tiers bring, for each block
constexpr double trust_prior   = 2.0;
constexpr double first_guess   = 0.6;  // acceptance before anything was seen
constexpr int    first_length  = 3;

double clamp_to(double x, double low, double high) { return std::min(high, std::max(low, x)); }

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

// -- cost_curve -------------------------------------------------------------------------------

cost_curve::cost_curve(int max_rows) : points(std::max(1, max_rows) + 1), curve(points.size()) {}

bool cost_curve::known(int rows) const {
    return rows >= 0 && rows < (int) points.size() && points[rows].weight > 0.0;
}

double cost_curve::doubt(int rows) const {
    const double weight = known(rows) ? points[rows].weight / (1.0 + age(rows) / 500.0) : 0.5;
    return std::min(0.2, spread / std::sqrt(weight));
}

int cost_curve::age(int rows) const {
    return known(rows) ? n_calls - points[rows].seen : n_calls;
}

double cost_curve::at(int rows) const {
    return curve[std::min(std::max(rows, 0), (int) curve.size() - 1)];
}

void cost_curve::observe(int rows, double us) {
    if (rows < 1 || !(us > 0.0)) {
        return;
    }
    rows = std::min(rows, (int) points.size() - 1);
    const bool changed = last_rows != 0 && rows != last_rows;
    last_rows = rows;
    auto & p  = points[rows];
    p.seen    = ++n_calls;
    if (p.weight == 0.0) {
        // the first call of a width also pays for its graph, and may be disturbed
        const double most = n_known > 0 ? first_most * at(rows) : us;
        p.us     = std::min(most, std::max(0.5 * us, us - (changed ? change_us : 0.0)));
        p.weight = 0.5;
        n_known++;
    } else {
        const double ratio = std::pow(learn(p, us, changed), drift_cost);
        for (auto & other : points) {
            other.us *= &other == &p ? 1.0 : ratio;
        }
    }
    redraw();
}

// Returns how many times the expected cost was seen.
double cost_curve::learn(point & p, double us, bool changed) {
    const double expected = p.us + (changed ? change_us : 0.0);
    const bool   young    = p.weight < 2.0;
    if (young && us < 0.5 * expected) {
        p.us     = us;
        p.weight = 1.0;
        return 1.0;
    }
    // a call is taken as at most three times as odd as calls were of late: a pause passes, a change stays
    const double odd   = us / expected - 1.0;
    const double seen  = expected * (1.0 + clamp_to(odd, -3.0 * spread, 3.0 * spread));
    const double error = seen - expected;
    spread += learn_spread * (std::min(1.0, std::abs(odd)) - spread);
    const double share = std::max(learn_cost, 1.0 / (p.weight + 1.0));
    if (changed) {
        change_us = clamp_to(change_us + learn_change * error, 0.0, 0.5 * p.us);
    }
    p.us    += (changed ? 0.5 : 1.0) * share * error;
    p.weight = std::min(p.weight + 1.0, 1.0 / learn_cost);
    return young ? 1.0 : seen / expected;
}

void cost_curve::redraw() {
    int below  = -1;
    int before = -1;
    for (int i = 1; i < (int) points.size(); i++) {
        if (points[i].weight == 0.0) {
            continue;
        }
        draw_between(below, i);
        before = below;
        below  = i;
    }
    // beyond the widest known: on at the slope of the last two, never a falling one
    const double slope = before < 1 ? 0.0 : (points[below].us - points[before].us) / (below - before);
    for (int i = below + 1; i < (int) curve.size(); i++) {
        curve[i] = points[below].us + std::max(0.0, slope) * (i - below);
    }
}

// The curve from known width a to known width b; a < 1: there is none below b.
void cost_curve::draw_between(int a, int b) {
    for (int i = std::max(a, 1); i <= b; i++) {
        const double t = a < 1 ? 1.0 : double(i - a) / (b - a);
        curve[i] = t * points[b].us + (a < 1 ? 0.0 : (1.0 - t) * points[a].us);
    }
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
    const double c = clamp_to(confidence, 1e-4, 1.0 - 1e-4);
    const double x = clamp_to(std::log(c / (1.0 - c)) + 2.0, 0.0, n_bins - 1.0);
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
        return clamp_to(first, 0.001, 0.999);
    }
    const double later = later_ones.mean(first, 2.0);
    const int    last  = std::min(i, (int) by_position.size()) - 1;
    return clamp_to(last == 0 ? later : by_position[last].mean(later, 6.0), 0.001, 0.999);
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
    const double prior = 0.5 * (at(i) + confidence);
    return (1.0 - k.share) * by_bin(i > 1, k.bin, prior) + k.share * by_bin(i > 1, k.bin + 1, prior);
}

// Another text can make every confidence worth less (or more) at once; the bins follow too slowly.
double acceptance_model::trust() const {
    return clamp_to((hits_seen + trust_prior) / (hits_foretold + trust_prior), 0.05, 1.5);
}

double acceptance_model::at(int i, float confidence) const {
    return clamp_to(uncorrected(i, confidence) * trust(), 0.001, 0.98);
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
                                       const cost_curve & verify, int rows_others) const {
    const int    from = tier == 0 ? 0 : tiers[tier - 1];
    const int    to   = tiers[tier];
    const double one  = verify.at(rows_others + 1);
    outlook o = before;
    for (int i = from + 1; i <= to; i++) {
        o.path *= model.hopeful(i);
        o.gain += o.path;
    }
    o.us += before.full * (verify.at(rows_others + 1 + to) - verify.at(rows_others + 1 + from));

    const double   lean = 2.0;
    const auto   & s    = by_tier[tier];
    const double * row  = &kept[tier * width];
    double us = 0.0;
    for (int k = 1; k <= to; k++) {
        us += row[k] * (verify.at(rows_others + 1 + k) - one);
    }
    const double all = s.weight + lean;
    return { (s.gain + lean * o.gain) / all, (us + lean * o.us) / all,
             (row[to] + lean * o.full) / all, (s.path + lean * o.path) / all };
}

// -- draft_length -----------------------------------------------------------------------------

draft_length::draft_length(const draft_length_params & params, const draft_costs & costs) :
    params(params), costs(&costs), model(params.n_max), history(params.n_max),
    confidences(std::max(1, params.n_max)), chances(confidences.size()), averages(confidences.size()),
    bank(params.stake) {
    for (const int n : history.tiers) {
        current = n <= first_length ? n : current;
    }
}

void draft_length::begin() {
    planned = drafted = 0;
    bank    = std::min(limit(), bank + 0.3);
    history.soften(8.0);
}

double draft_length::plain_us() const {
    return costs->verify.at(others.rows + 1);
}

double draft_length::plain_rate() const {
    const double us = plain_us();
    return us > 0.0 ? (others.tokens + 1.0) / us : 0.0;
}

// The draft call is one for all slots: each pays its share of it.
double draft_length::draft_us(int n) const {
    const int all = others.draft_rows + n + 1;
    return costs->draft.at(all) * (n + 1) / all;
}

double draft_length::expected() const {
    double path = 1.0;
    double sum  = 1.0;
    for (int i = 1; i <= planned; i++) {
        path *= model.at(i);
        sum  += path;
    }
    return sum;
}

// What was seldom tried is given the benefit of the doubt: one standard error.
draft_length::choice draft_length::best(int ceiling) const {
    choice top { 0, plain_rate(), 0.0 };
    choice now = top;
    const double affordable = bank / plain_rate();
    tier_history::outlook o;
    for (size_t t = 0; t < history.tiers.size() && history.tiers[t] <= ceiling; t++) {
        o = history.at(t, o, model, costs->verify, others.rows);
        const double hope = o.gain + std::sqrt(0.7 * (o.gain + 0.05) / (history.blocks() + 2.0));
        const double us   = draft_us(history.tiers[t]) + o.us;
        const choice c { history.tiers[t], (others.tokens + 1.0 + hope) / ((plain_us() + us) * (1.0 - costs->verify.doubt(others.rows + history.tiers[t] + 1))), us };
        if (us > affordable) {
            break;
        }
        top = c.rate > top.rate ? c : top;
        now = c.n == current    ? c : now;
    }
    return now.n > 0 && now.rate * (1.0 + params.hysteresis) > top.rate ? now : top;
}

// What a token costs without a drafter must stay known where that decides.
bool draft_length::plain_is_stale(const choice & top) const {
    return others.rows == 0 && costs->verify.age(1) > 100 && top.rate < 1.4 * plain_rate();
}

int draft_length::choose(int ceiling) const {
    ceiling = std::min(ceiling, params.n_max);
    if (ceiling < 1 || !costs->verify.known()) {
        return 0;
    }
    if (!costs->draft.known()) {
        return std::min(current, ceiling);
    }
    const choice top = best(ceiling);
    if (top.rate <= plain_rate() || plain_is_stale(top)) {
        return 0;
    }
    return top.n;
}

int draft_length::want(int ceiling, const draft_load & load) {
    others  = load;
    planned = drafted = choose(ceiling);
    on      = planned > 0;
    if (planned > 0) {
        current = planned;
    } else if (ceiling > 0) {
        bank = std::min(limit(), bank + params.probe_share);
        history.soften(std::max(4.0, history.blocks() * keep_idle));
    }
    return planned;
}

// What going on from i tokens to some longer tier brings, in tokens. Of what lies behind token i + 1
// only averages may be used, see the head of the header.
double draft_length::going_on(int i, double path, int limit, double per_us) const {
    const double here = costs->verify.at(others.rows + i + 1);
    double gain = 0.0;
    double top  = -1e300;
    for (int j = i; j < limit; j++) {
        path *= j == i ? chances[j] : averages[j];
        gain += path;
        top   = std::max(top, gain - per_us * (costs->verify.at(others.rows + j + 2) - here));
    }
    return top;
}

// How many of the first `limit` tokens are verified, what they bring, and how likely all are right.
int draft_length::stop(int limit, double per_us, double & gain, double & path) const {
    gain = 0.0;
    path = 1.0;
    int i = 0;
    while (i < limit && going_on(i, path, limit, per_us) > 0.0) {
        path *= chances[i++];
        gain += path;
    }
    path = i == limit ? path : 0.0;
    return i;
}

int draft_length::keep(int n, const float * confidence) {
    n = std::min(n, params.n_max);
    drafted         = n;
    has_confidences = confidence != nullptr;
    for (int i = 0; i < n; i++) {
        averages[i]    = model.at(i + 1);
        confidences[i] = has_confidences ? confidence[i] : 0.0f;
        chances[i]     = has_confidences ? model.at(i + 1, confidence[i]) : averages[i];
    }
    const double per_us = std::max(plain_rate(), best(n).rate);
    history.forget(forget_block);
    double gain = 0.0;
    double path = 1.0;
    for (size_t t = 0; t < history.tiers.size() && history.tiers[t] <= n; t++) {
        const int kept = stop(history.tiers[t], per_us, gain, path);
        history.observe(t, kept, gain, path);
    }
    const int kept = has_confidences ? stop(n, per_us, gain, path) : n;
    if (kept == 0) {
        settle(-plain_rate() * draft_us(n));
    }
    return kept;
}

void draft_length::observe(int verified, int accepted) {
    if (verified < 1) {
        return;
    }
    model.observe(verified, accepted, has_confidences ? confidences.data() : nullptr);
    const double more = costs->verify.at(others.rows + verified + 1) - plain_us();
    settle(accepted - plain_rate() * (draft_us(drafted) + more));
}

void draft_length::charge(double us) {
    settle(-plain_rate() * us);
}

void draft_length::settle(double gain) {
    earned = std::max(0.0, earned + gain) * (1.0 - 1.0 / 512.0);
    bank   = std::min(limit(), bank + gain);
}

double draft_length::limit() const {
    return params.stake + std::min(2.0 * params.stake, 0.1 * earned);
}

// -- several slots ----------------------------------------------------------------------------

void plan_drafts(draft_slot * slots, size_t n_slots, const draft_load & rest) {
    for (size_t i = 0; i < n_slots; i++) {
        slots[i].n = std::min(slots[i].ceiling, slots[i].length->current);
    }
    for (int sweep = 0; sweep < 2; sweep++) {
        for (size_t i = 0; i < n_slots; i++) {
            draft_load load = rest;
            for (size_t j = 0; j < n_slots; j++) {
                if (j != i) {
                    auto & other = *slots[j].length;
                    other.planned    = slots[j].n;
                    load.rows       += slots[j].n + 1;
                    load.draft_rows += slots[j].n > 0 ? slots[j].n + 1 : 0;
                    load.tokens     += other.expected();
                }
            }
            slots[i].length->others = load;
            slots[i].n = slots[i].length->choose(slots[i].ceiling);
        }
    }
    for (size_t i = 0; i < n_slots; i++) {
        const draft_load load = slots[i].length->others;
        slots[i].n = slots[i].length->want(slots[i].ceiling, load);
    }
}

} // namespace dflashcpp
