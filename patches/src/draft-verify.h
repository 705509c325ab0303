// Verifying a sampled draft so that the text keeps the target's distribution.
//
// A drafted token d came out of the drafter's distribution q. With p the target's own, after the request's
// whole sampler chain, d stays with probability min(1, p(d) / q(d)), else a token is drawn from what p has
// and q has not, max(p - q, 0) made to sum to 1. What comes out is distributed as p, whatever q was, and
// stays the drafted token with probability sum min(p, q) (Leviathan et al. 2023, "Fast inference from
// transformers via speculative decoding", appendix A.1).
//
// A grammar that is checked after the draw draws a second time where the first token does not fit. Verifying
// the first draw and making the second one without regard to the draft gives exactly that mixture.
//
// `Candidates` is llama_token_data_array or anything with `size` and `data[i].id`, `data[i].p`.

#pragma once

#include "draft-walk.h"

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

namespace dflashcpp {

// The generator of one request, out of step with the chain's own of the same seed.
inline std::mt19937 verify_random(uint32_t seed) { return std::mt19937(seed ^ 0x5bd1e995u); }

// A number in [0, 1) of 53 random bits; unlike std::uniform_real_distribution the same with every compiler.
inline double uniform(std::mt19937 & rng) {
    const uint64_t high = rng() >> 5;
    const uint64_t low  = rng() >> 6;
    return double((high << 26) | low) / 9007199254740992.0;
}

// Index drawn in proportion to weight(0 .. n - 1); weights that are not positive count as 0.
// Returns n where no weight is positive.
template <class Weight> size_t draw_by_weight(size_t n, const Weight & weight, std::mt19937 & rng) {
    double total = 0.0;
    for (size_t i = 0; i < n; ++i) {
        const double w = weight(i);
        total += w > 0.0 ? w : 0.0;
    }
    double left = total * uniform(rng);
    size_t last = n;
    for (size_t i = 0; i < n; ++i) {
        const double w = weight(i);
        if (!(w > 0.0)) {
            continue;
        }
        last = i;
        if ((left -= w) < 0.0) {
            break;
        }
    }
    return last;
}

// Index of a token drawn from p; the last one where p is no distribution at all, as llama.cpp does.
template <class Candidates> size_t draw_token(const Candidates & p, std::mt19937 & rng) {
    const size_t at = draw_by_weight(p.size, [&](size_t i) { return double(p.data[i].p); }, rng);
    return at < p.size ? at : p.size - 1;
}

// q by token. Vocabularies have 250,000 tokens and q has a few: most look-ups end at the filter.
class choice_lookup {
  public:
    explicit choice_lookup(const draft_choice & choice) {
        for (size_t i = 0; i < choice.ids.size() && i < choice.q.size(); ++i) {
            q_of[choice.ids[i]] = choice.q[i];
            filter.set(size_t(choice.ids[i]) % filter.size());
        }
    }

    double operator()(int32_t token) const {
        if (!filter.test(size_t(token) % filter.size())) {
            return 0.0;
        }
        const auto found = q_of.find(token);
        return found == q_of.end() ? 0.0 : double(found->second);
    }

  private:
    std::bitset<4096>                  filter;
    std::unordered_map<int32_t, float> q_of;
};

// Index in p of the token that follows where `drafted` was drawn from `choice`. Nothing in p: p.size.
template <class Candidates>
size_t verify(const Candidates & p, int32_t drafted, const draft_choice & choice, std::mt19937 & rng) {
    if (p.size == 0) {
        return 0;
    }
    const choice_lookup q(choice);
    size_t              at = 0;
    while (at < p.size && p.data[at].id != drafted) {
        ++at;
    }
    if (at < p.size && uniform(rng) * q(drafted) < double(p.data[at].p)) {
        return at;
    }
    const auto   missing = [&](size_t i) { return double(p.data[i].p) - q(p.data[i].id); };
    const size_t drawn   = draw_by_weight(p.size, missing, rng);
    return drawn < p.size ? drawn : draw_token(p, rng);  // p is q but for rounding
}

// Chooses one token of the target: the first look at it verifies the drafted token, if there is one;
// a later one, after a grammar refused the first, draws anew.
class token_verifier {
  public:
    // A token with no draft.
    explicit token_verifier(std::mt19937 & rng) : rng(rng) {}

    // choice: null or empty where the token was not sampled, which is as if q were 1 for it.
    token_verifier(std::mt19937 & rng, int32_t drafted, const draft_choice * choice) :
        rng(rng),
        drafted(drafted),
        choice(choice && !choice->ids.empty() ? *choice : draft_choice{ { drafted }, { 1.0f } }),
        open(true) {}

    template <class Candidates> size_t select(const Candidates & p) {
        if (open) {
            open = false;
            return verify(p, drafted, choice, rng);
        }
        return draw_token(p, rng);
    }

  private:
    std::mt19937 & rng;
    int32_t        drafted = -1;
    draft_choice   choice;
    bool           open = false;
};

} // namespace dflashcpp
