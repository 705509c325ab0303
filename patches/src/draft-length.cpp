#include "draft-length.h"

#include <algorithm>
#include <cmath>

namespace dflashcpp {

namespace {

constexpr double learn_cost    = 0.08; // share of a new observation in a settled cost
constexpr double drift_cost    = 0.03; // how much of it the other widths follow
constexpr double learn_change  = 0.05;
constexpr double disturbed     = 1.5;  // a settled cost takes one call as at most this many times itself
constexpr double keep_position = 0.98; // forgetting of acceptance, for each test of that position
constexpr double keep_bin      = 0.99;
constexpr double keep_idle     = 0.99; // ... and for each plain step: what was learned grows old
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
        p.us     = std::max(0.5 * us, us - (changed ? change_us : 0.0));
        p.weight = 0.5; // the first call of a width also pays for its graph
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
    const double seen  = clamp_to(us, expected / disturbed, expected * disturbed);
    const double error = seen - expected;
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
        if (confidence != nullptr) {
            const knot k    = place(confidence[i]);
            auto     * bins = &by_confidence[i > 0 ? n_bins : 0];
            bins[k.bin    ].observe(hit, keep_bin, 1.0 - k.share);
            bins[k.bin + 1].observe(hit, keep_bin, k.share);
        }
    }
}

void acceptance_model::soften(double trials) {
    for (auto & r : by_position) {
        if (r.trials > trials) {
            r.hits  *= trials / r.trials;
            r.trials = trials;
        }
    }
}

double acceptance_model::at(int i) const {
    // a position that was seldom tested leans on the one before it
    double p = first_guess;
    const int last = std::min(i, (int) by_position.size());
    for (int k = 0; k < last; k++) {
        p = by_position[k].mean(p, 2.0);
    }
    return clamp_to(p, 0.001, 0.999);
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

double acceptance_model::at(int i, float confidence) const {
    const knot   k     = place(confidence);
    const double prior = 0.5 * (at(i) + confidence);
    const double p = (1.0 - k.share) * by_bin(i > 1, k.bin, prior) + k.share * by_bin(i > 1, k.bin + 1, prior);
    return clamp_to(p, 0.001, 0.999);
}

// -- draft_length -----------------------------------------------------------------------------

draft_length::draft_length(const draft_length_params & params, const draft_costs & costs) :
    params(params), costs(&costs), model(params.n_max), tiers(draft_tiers(params.n_max)),
    seen(std::max(1, params.n_max)), bank(params.stake) {
    for (const int n : tiers) {
        current = n <= first_length ? n : current;
    }
}

void draft_length::begin() {
    planned = drafted = 0;
    bank    = std::min(params.stake, bank + 0.3);
    model.soften(8.0);
}

// The draft call is one for all slots: each pays its share of it.
double draft_length::cost(int n_drafted, int n_verified) const {
    const int    rows  = n_drafted > 0 ? n_drafted + 1 : 0;
    const int    total = rows + others.draft_rows;
    const double draft = rows > 0 ? costs->draft.at(total) * rows / total : 0.0;
    return draft + costs->verify.at(others.rows + n_verified + 1);
}

double draft_length::plain_rate() const {
    const double us = cost(0, 0);
    return us > 0.0 ? (others.tokens + 1.0) / us : 0.0;
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

double draft_length::rate(int n, bool hopeful) const {
    double path   = 1.0;
    double tokens = others.tokens + 1.0;
    for (int i = 1; i <= n; i++) {
        path   *= hopeful ? model.hopeful(i) : model.at(i);
        tokens += path;
    }
    const double us = cost(n, n);
    return us > 0.0 ? tokens / us : 0.0;
}

draft_length::choice draft_length::best(int ceiling, bool hopeful) const {
    choice top { 0, plain_rate() };
    for (const int n : tiers) {
        if (n > ceiling) {
            break;
        }
        const double r = rate(n, hopeful);
        if (r > top.rate) {
            top = { n, r };
        }
    }
    return top;
}

// What a token costs without a drafter must stay known where that decides.
bool draft_length::plain_is_stale(const choice & top) const {
    const int rows = others.rows + 1;
    if (!costs->verify.known(rows) || (others.rows == 0 && costs->verify.age(rows) > 0 && !costs->draft.known())) {
        return !costs->verify.known();
    }
    return others.rows == 0 && costs->verify.age(rows) > 100 && top.rate < 1.4 * plain_rate();
}

int draft_length::choose(int ceiling) {
    ceiling = std::min(ceiling, params.n_max);
    if (ceiling < 1 || tiers.empty() || !costs->verify.known()) {
        return 0;
    }
    if (!costs->draft.known()) {
        return std::min(current, ceiling);
    }
    choice top = best(ceiling, true);
    if (top.n == 0 || plain_is_stale(top)) {
        return 0;
    }
    if (current > 0 && current <= ceiling && rate(current, true) * (1.0 + params.hysteresis) > top.rate) {
        top.n = current;
    }
    const double price = plain_rate() * (cost(top.n, top.n) - cost(0, 0));
    return bank >= price ? top.n : 0;
}

int draft_length::want(int ceiling, const draft_load & load) {
    others   = load;
    has_seen = false;
    planned  = drafted = choose(ceiling);
    on       = planned > 0;
    if (planned > 0) {
        current = planned;
    } else if (ceiling > 0) {
        bank = std::min(params.stake, bank + params.probe_share);
        model.soften(std::max(4.0, model.trials(1) * keep_idle));
    }
    return planned;
}

// What going on from i tokens to some longer tier brings, in tokens. Of what lies behind token i + 1
// only averages may be used, see the head of the header.
double draft_length::worth_going_on(int i, double path, float confidence, int n, double per_us) const {
    const double here = costs->verify.at(others.rows + i + 1);
    double gain = 0.0;
    double top  = -1e300;
    for (int j = i + 1; j <= n; j++) {
        path *= j == i + 1 ? model.at(j, confidence) : model.at(j);
        gain += path;
        if (j == n || std::find(tiers.begin(), tiers.end(), j) != tiers.end()) {
            top = std::max(top, gain - per_us * (costs->verify.at(others.rows + j + 1) - here));
        }
    }
    return top;
}

int draft_length::keep(int n, const float * confidence) {
    n = std::min(n, params.n_max);
    drafted  = n;
    has_seen = confidence != nullptr;
    if (!has_seen) {
        return n;
    }
    std::copy(confidence, confidence + n, seen.begin());
    const double per_us = std::max(plain_rate(), rate(n, false));
    double path = 1.0;
    int    kept = 0;
    for (int i = 0; i < n; i++) {
        const bool stop_here = i == 0 || std::find(tiers.begin(), tiers.end(), i) != tiers.end();
        if (stop_here && worth_going_on(i, path, confidence[i], n, per_us) <= 0.0) {
            break;
        }
        path *= model.at(i + 1, confidence[i]);
        kept  = i + 1;
    }
    if (kept == 0) {
        settle(-plain_rate() * (cost(n, 0) - cost(0, 0)));
    }
    return kept;
}

void draft_length::observe(int verified, int accepted) {
    if (verified < 1) {
        return;
    }
    model.observe(verified, accepted, has_seen ? seen.data() : nullptr);
    settle(accepted - plain_rate() * (cost(std::max(drafted, verified), verified) - cost(0, 0)));
}

void draft_length::charge(double us) {
    settle(-plain_rate() * us);
}

void draft_length::settle(double gain) {
    bank = std::min(params.stake, bank + gain);
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
