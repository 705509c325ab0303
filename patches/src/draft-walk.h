// From the drafter's rows to drafted tokens: one position after the other, greedily or by sampling.
//
// A position has candidates and their scores. Greedy takes the best. At temperature T the token is drawn
// from q = softmax(scores / T), and q is kept: the target verifies against it, so that the answer has the
// target's distribution whatever q was. Nothing else shapes q (no top-k, no top-p).
//
// Whether a position is looked at at all may depend on its scores and on the tokens before it, never on
// the token drawn there: a token that was thrown away because of what it was would leave a biased q behind.
//
// Plain types only, so that this file compiles and is tested without llama.cpp.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dflashcpp {

// what a drafted token was drawn from: its candidates and their probabilities, which sum to 1
struct draft_choice {
    std::vector<int32_t> ids;
    std::vector<float>   q;
};

// the candidates of one position and their scores (logits) behind the token chosen before
struct candidate_row {
    std::vector<int32_t> ids;
    std::vector<float>   scores;
};

// Uniform numbers in [0, 1) for one draft: splitmix64 started at its seed, salted so that another
// generator with the same seed (the target's sampler) does not run in step with it.
class draft_random {
public:
    explicit draft_random(uint64_t seed) : state(seed ^ 0xd1b54a32d192ed03ull) {}

    double next() {
        state += 0x9e3779b97f4a7c15ull;
        uint64_t z = state;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return double((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
    }

private:
    uint64_t state;
};

// A row of DFlash-2's lattice: `k` candidate ids (as float), then k x k scores, [predecessor][candidate].
// `predecessor`: the candidate chosen at the position before; the first position has the anchor in all rows.
inline void read_lattice(const float * row, size_t k, size_t predecessor, candidate_row & out) {
    out.ids.assign(row, row + k);
    const float * scores = row + k + predecessor * k;
    out.scores.assign(scores, scores + k);
}

inline size_t best_candidate(const std::vector<float> & scores) {
    return size_t(std::max_element(scores.begin(), scores.end()) - scores.begin());
}

// The drafter's own probability of its best candidate (temperature 1): how sure it is of this position.
inline float confidence(const std::vector<float> & scores) {
    const float best = scores[best_candidate(scores)];
    float sum = 0.0f;
    for (const float score : scores) {
        sum += std::exp(score - best);
    }
    return 1.0f / sum;
}

// softmax(scores / temp), temp > 0
inline std::vector<float> draw_probabilities(const std::vector<float> & scores, float temp) {
    const float best = scores[best_candidate(scores)];
    std::vector<double> weights;
    double sum = 0.0;
    for (const float score : scores) {
        weights.push_back(std::exp((double(score) - best) / temp));
        sum += weights.back();
    }
    std::vector<float> q;
    for (const double weight : weights) {
        q.push_back(float(weight / sum));
    }
    return q;
}

// The index that `u` in [0, 1) falls on; never one of probability 0.
inline size_t draw(const std::vector<float> & q, double u) {
    double sum = 0.0;
    size_t last = 0;
    for (size_t i = 0; i < q.size(); ++i) {
        if (q[i] <= 0.0f) {
            continue;
        }
        sum += q[i];
        last = i;
        if (u < sum) {
            break;
        }
    }
    return last;
}

// Chooses one candidate of `row`: the best at temp <= 0, else one drawn from q, which goes to `choice`
// (left alone when greedy).
inline size_t choose(const candidate_row & row, float temp, draft_random & random, draft_choice & choice) {
    if (!(temp > 0.0f)) {
        return best_candidate(row.scores);
    }
    choice.ids = row.ids;
    choice.q   = draw_probabilities(row.scores, temp);
    return draw(choice.q, random.next());
}

} // namespace dflashcpp
