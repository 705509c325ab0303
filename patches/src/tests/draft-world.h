// A simulated server for draft-length-test.cpp: texts that are more or less easy to draft, machines on
// which rows cost more or less. Deterministic: own random numbers, fixed seeds.

#pragma once

#include "../draft-length.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace world {

class dice {
public:
    explicit dice(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15ull + 1) {}

    double uniform() { // splitmix64
        state += 0x9e3779b97f4a7c15ull;
        uint64_t z = state;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return double((z ^ (z >> 31)) >> 11) / 9007199254740992.0;
    }

    double normal() {
        return std::sqrt(-2.0 * std::log(1.0 - uniform())) * std::cos(6.283185307179586 * uniform());
    }

private:
    uint64_t state;
};

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Acceptance of the i-th drafted token where all before it were accepted; the last value goes on.
using text = std::vector<double>;

struct block {
    std::vector<float> confidence;
    int                right = 0; // leading tokens that the target would accept
};

// Blocks of a text: some are easier than others, and the drafter's confidence tells so, roughly and too highly.
class drafter {
public:
    drafter(const text & t, int n_max) : odds(n_max) {
        dice d(7);
        std::vector<double> ease(800), weight(800, 1.0), own(800);
        for (auto & e : ease) {
            e = d.normal();
        }
        for (size_t i = 0; i < odds.size(); i++) {
            for (auto & o : own) {
                o = d.normal();
            }
            odds[i] = solve(t[std::min(i, t.size() - 1)], ease, own, weight);
            for (size_t k = 0; k < weight.size(); k++) {
                weight[k] *= sigmoid(odds[i] + ease[k] + own[k]);
            }
        }
    }

    block draw(dice & d) const {
        block b;
        const double ease = d.normal();
        bool all = true;
        for (const double base : odds) {
            const double x = base + ease + d.normal();
            all     = all && d.uniform() < sigmoid(x);
            b.right += all;
            b.confidence.push_back(float(sigmoid(1.2 * x + 0.5 + 0.5 * d.normal())));
        }
        return b;
    }

private:
    // The base at which blocks that came this far are accepted at rate p.
    static double solve(double p, const std::vector<double> & ease, const std::vector<double> & own,
                        const std::vector<double> & weight) {
        double low = -10.0, high = 10.0;
        for (int round = 0; round < 30; round++) {
            const double middle = 0.5 * (low + high);
            double hits = 0.0, all = 0.0;
            for (size_t k = 0; k < ease.size(); k++) {
                hits += weight[k] * sigmoid(middle + ease[k] + own[k]);
                all  += weight[k];
            }
            (hits < p * all ? low : high) = middle;
        }
        return low;
    }

    std::vector<double> odds;
};

struct machine {
    double (*verify)(int rows); // us
    double (*draft)(int rows);
    double resume = 0.0; // us more of the first draft of a request or after a pause
};

// Two cores and a model of 135M in BF16; an A4000 with a 27B; a fast card.
inline const machine cpu   { [](int r) { return 7900.0 * (1.0 + 0.17 * (r - 1)); }, [](int r) { return 1900.0 + 150.0 * r; }, 4000.0 };
inline const machine a4000 { [](int r) { return 44400.0 * (r <= 8 ? 1.0 : 1.3) * (1.0 + 0.005 * (r - 1)); }, [](int r) { return 5800.0 + 270.0 * r; } };
inline const machine fast  { [](int r) { return 10000.0 * (1.0 + 0.012 * (r - 1)); }, [](int r) { return 1400.0 + 20.0 * r; } };
// rows are nearly free up to 8 and dear beyond
inline const machine knee  { [](int r) { return r <= 8 ? 10000.0 * (1.0 + 0.01 * r) : 10000.0 * (1.1 + 0.08 * (r - 8)); }, [](int r) { return 1400.0 + 20.0 * r; } };

// Calls take 5 % more or less, one in a hundred up to three times as long, and now and then there is a pause.
inline double disturbed(double us, dice & d) {
    double factor = 1.0 + 0.05 * std::abs(d.normal());
    factor *= d.uniform() < 0.01 ? 1.0 + 2.0 * d.uniform() : 1.0;
    return us * factor + (d.uniform() < 0.0005 ? 200000.0 : 0.0);
}

struct outcome {
    double tokens   = 0.0;
    double us       = 0.0;
    double drafted  = 0.0; // tokens
    double verified = 0.0;
    double steps    = 0.0;
    double drafts   = 0.0; // steps with one

    double speed() const { return tokens / us; }
};

// A server of one slot or several that all work on the same text.
class server {
public:
    static constexpr int adaptive = -1;

    server(const machine & m, int n_max, int n_slots, int length, uint64_t seed) :
        m(m), n_max(n_max), length(length), luck(seed), clock(seed + 1000), costs(n_slots * (n_max + 1)) {
        dflashcpp::draft_length_params params;
        params.n_max = n_max;
        slots.reserve(n_slots);
        for (int i = 0; i < n_slots; i++) {
            slots.emplace_back(params, costs);
        }
        plan.resize(n_slots);
    }

    dflashcpp::draft_length & slot(int i) { return slots[i]; }

    void begin() {
        for (auto & s : slots) {
            s.begin();
        }
        paused = true;
    }

    // Until the slots have made so many tokens more, all together.
    outcome run(const drafter & text, double tokens) {
        outcome o;
        while (o.tokens < tokens) {
            step(text, o);
        }
        return o;
    }

    void step(const drafter & text, outcome & o) {
        for (size_t i = 0; i < slots.size(); i++) {
            plan[i] = { &slots[i], n_max, length };
        }
        if (length == adaptive) {
            plan_drafts(plan.data(), plan.size());
        }
        o.us += draft(o) + resume();
        int rows = 0;
        std::vector<int> right, kept;
        for (const auto & p : plan) {
            const block b = text.draw(luck);
            right.push_back(b.right);
            kept.push_back(length == adaptive && p.n > 0 ? p.length->keep(p.n, b.confidence.data()) : p.n);
            rows += kept.back() + 1;
        }
        const double us = disturbed(m.verify(rows), clock);
        costs.verify.observe(rows, us);
        o.us += us;
        for (size_t i = 0; i < slots.size(); i++) {
            const int accepted = std::min(right[i], kept[i]);
            if (length == adaptive) {
                slots[i].observe(kept[i], accepted);
            }
            o.tokens   += 1.0 + accepted;
            o.verified += kept[i];
            o.drafted  += plan[i].n;
            o.drafts   += plan[i].n > 0;
            o.steps    += 1.0;
        }
    }

private:
    double draft(outcome &) {
        int rows = 0;
        for (const auto & p : plan) {
            rows += p.n > 0 ? p.n + 1 : 0;
        }
        if (rows == 0) {
            return 0.0;
        }
        const double us = disturbed(m.draft(rows), clock);
        costs.draft.observe(rows, us);
        return us;
    }

    // As draft-pace.h charges it; to the first slot, they all draft the same text.
    double resume() {
        const double us = paused && plan[0].n > 0 ? m.resume : 0.0;
        if (length == adaptive && us > 0.0) {
            slots[0].charge(us);
        }
        paused = length == adaptive && !slots[0].drafting();
        return us;
    }

    machine m;
    int     n_max;
    int     length;
    bool    paused = true;
    dice    luck;
    dice    clock;
    dflashcpp::draft_costs               costs;
    std::vector<dflashcpp::draft_length> slots;
    std::vector<dflashcpp::draft_slot>   plan;
};

// Tokens per us over several runs, each on a new server.
inline double speed(const machine & m, const drafter & text, double tokens, int length, int n_max, int n_slots, int runs) {
    outcome all;
    for (int seed = 1; seed <= runs; seed++) {
        const outcome o = server(m, n_max, n_slots, length, seed).run(text, tokens);
        all.tokens += o.tokens;
        all.us     += o.us;
    }
    return all.speed();
}

} // namespace world
