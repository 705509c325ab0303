#include "../draft-length.cpp"
#include "../draft-verify.h"

#include "check.h"

#include <cmath>
#include <functional>

namespace {

using dflashcpp::draft_choice;

struct token {
    int32_t id;
    float   p;
};

struct candidates {
    std::vector<token> data;
    size_t             size;

    explicit candidates(std::vector<token> tokens) : data(std::move(tokens)), size(data.size()) {}
};

constexpr int VOCAB = 12;
constexpr int DRAWS = 40000;

using distribution = std::vector<double>;  // by token
using sampler      = std::function<int32_t(std::mt19937 &)>;

distribution normalised(distribution weights) {
    double sum = 0.0;
    for (const double w : weights) {
        sum += w;
    }
    for (double & w : weights) {
        w /= sum;
    }
    return weights;
}

// A jagged distribution over `n` tokens from `first` on, 0 elsewhere.
distribution random_distribution(std::mt19937 & rng, int first, int n) {
    distribution weights(VOCAB, 0.0);
    for (int i = first; i < first + n; ++i) {
        weights[size_t(i)] = std::pow(dflashcpp::uniform(rng), 3.0) + 1e-3;
    }
    return normalised(weights);
}

// The tokens of `p` that are possible, the likeliest last, as a sampler chain may leave them.
candidates as_candidates(const distribution & p) {
    std::vector<token> tokens;
    for (int i = VOCAB - 1; i >= 0; --i) {
        if (p[size_t(i)] > 0.0) {
            tokens.push_back({ i, float(p[size_t(i)]) });
        }
    }
    return candidates(tokens);
}

draft_choice as_choice(const distribution & q) {
    draft_choice choice;
    for (int i = 0; i < VOCAB; ++i) {
        if (q[size_t(i)] > 0.0) {
            choice.ids.push_back(i);
            choice.q.push_back(float(q[size_t(i)]));
        }
    }
    return choice;
}

int32_t drawn_from(const distribution & p, std::mt19937 & rng) {
    return int32_t(dflashcpp::draw_by_weight(p.size(), [&](size_t i) { return p[i]; }, rng));
}

double overlap(const distribution & p, const distribution & q) {
    double sum = 0.0;
    for (size_t i = 0; i < p.size(); ++i) {
        sum += std::min(p[i], q[i]);
    }
    return sum;
}

// chi-square of DRAWS draws against `expected`; infinite where something impossible was drawn.
double chi_square(const distribution & expected, const sampler & draw, uint32_t seed) {
    std::mt19937     rng(seed);
    std::vector<int> count(expected.size(), 0);
    for (int i = 0; i < DRAWS; ++i) {
        ++count[size_t(draw(rng))];
    }
    double sum = 0.0;
    for (size_t i = 0; i < expected.size(); ++i) {
        const double n = DRAWS * expected[i];
        if (n <= 0.0 && count[i] > 0) {
            return INFINITY;
        }
        sum += n > 0.0 ? (count[i] - n) * (count[i] - n) / n : 0.0;
    }
    return sum;
}

// 1 in a million for 11 degrees of freedom; a wrong rule gives thousands.
constexpr double LIMIT = 50.0;

int32_t verified(const candidates & p, int32_t drafted, const draft_choice & q, std::mt19937 & rng) {
    return p.data[dflashcpp::verify(p, drafted, q, rng)].id;
}

void test_what_comes_out_is_distributed_as_the_target() {
    std::mt19937 shapes(7);
    for (uint32_t trial = 0; trial < 8; ++trial) {
        const distribution p = random_distribution(shapes, 0, 4 + int(trial));       // top-k and the like
        const distribution q = random_distribution(shapes, int(trial) / 2, 6);       // partly outside p
        const candidates   target = as_candidates(p);
        const draft_choice choice = as_choice(q);
        const sampler      ours   = [&](std::mt19937 & rng) { return verified(target, drawn_from(q, rng), choice, rng); };
        const sampler accept_all  = [&](std::mt19937 & rng) { return drawn_from(q, rng); };
        const sampler not_residual = [&](std::mt19937 & rng) {
            const int32_t d    = drawn_from(q, rng);
            const bool    stay = dflashcpp::uniform(rng) * q[size_t(d)] < p[size_t(d)];
            return stay ? d : drawn_from(p, rng);
        };
        CHECK(chi_square(p, ours, trial) < LIMIT);
        CHECK(chi_square(p, accept_all, trial) > LIMIT);
        CHECK(chi_square(p, not_residual, trial) > LIMIT);
    }
}

void test_a_draft_stays_as_often_as_p_and_q_overlap() {
    std::mt19937 shapes(11), rng(3);
    for (int trial = 0; trial < 8; ++trial) {
        const distribution p = random_distribution(shapes, 0, 10);
        const distribution q = random_distribution(shapes, 2, 8);
        const candidates   target = as_candidates(p);
        const draft_choice choice = as_choice(q);
        int                stayed = 0;
        for (int i = 0; i < DRAWS; ++i) {
            const int32_t d = drawn_from(q, rng);
            stayed += verified(target, d, choice, rng) == d;
        }
        const double a = overlap(p, q);
        CHECK(std::abs(double(stayed) / DRAWS - a) < 5.0 * std::sqrt(a * (1.0 - a) / DRAWS));
    }
}

// A first draw that a grammar refuses is made again from `valid`, as common_sampler_sample does.
void test_a_grammar_checked_after_the_draw_gives_the_same_mixture() {
    std::mt19937       shapes(5);
    const auto         fits  = [](int32_t id) { return id % 3 != 0; };
    const distribution p     = random_distribution(shapes, 0, VOCAB);
    const distribution q     = random_distribution(shapes, 0, 9);
    const candidates   first = as_candidates(p);
    distribution       kept(VOCAB, 0.0);
    double             refused = 0.0;
    for (int32_t i = 0; i < VOCAB; ++i) {
        (fits(i) ? kept[size_t(i)] : refused) += p[size_t(i)];
    }
    // the second pass runs the chain on what fits only, which may well be shaped otherwise (here: flatter)
    distribution second(VOCAB, 0.0);
    for (size_t i = 0; i < VOCAB; ++i) {
        second[i] = kept[i] > 0.0 ? std::sqrt(kept[i]) : 0.0;
    }
    second = normalised(second);
    distribution expected(VOCAB);
    for (size_t i = 0; i < VOCAB; ++i) {
        expected[i] = kept[i] + refused * second[i];
    }
    const candidates   again  = as_candidates(second);
    const draft_choice choice = as_choice(q);
    const sampler      ours   = [&](std::mt19937 & rng) {
        dflashcpp::token_verifier verifier(rng, drawn_from(q, rng), &choice);
        const int32_t id = first.data[verifier.select(first)].id;
        return fits(id) ? id : again.data[verifier.select(again)].id;
    };
    const sampler verify_twice = [&](std::mt19937 & rng) {
        const int32_t d  = drawn_from(q, rng);
        const int32_t id = verified(first, d, choice, rng);
        return fits(id) ? id : verified(again, d, choice, rng);
    };
    CHECK(chi_square(expected, ours, 1) < LIMIT);
    CHECK(chi_square(expected, verify_twice, 1) > LIMIT);
}

// Two tokens of a draft and the one after it, each with a p and q of its own behind what came before.
void test_a_whole_draft_has_the_joint_distribution() {
    std::mt19937              shapes(23);
    std::vector<distribution> p, q;
    for (int i = 0; i < 2; ++i) {
        p.push_back(random_distribution(shapes, 0, 3));
        q.push_back(random_distribution(shapes, 0, 3));
    }
    const distribution p0 = random_distribution(shapes, 0, 2);
    const distribution q0 = random_distribution(shapes, 0, 2);
    distribution       expected(VOCAB, 0.0);
    for (size_t a = 0; a < 2; ++a) {
        for (size_t b = 0; b < 3; ++b) {
            expected[3 * a + b] = p0[a] * p[a][b];
        }
    }
    const sampler ours = [&](std::mt19937 & rng) {
        const int32_t d0 = drawn_from(q0, rng);
        const int32_t d1 = drawn_from(q[size_t(d0)], rng);
        const int32_t a  = verified(as_candidates(p0), d0, as_choice(q0), rng);
        const candidates row = as_candidates(p[size_t(a)]);
        if (a != d0) {  // the draft ends here, the next token is drawn another time
            return 3 * a + row.data[dflashcpp::draw_token(row, rng)].id;
        }
        return 3 * a + verified(row, d1, as_choice(q[size_t(d0)]), rng);
    };
    CHECK(chi_square(expected, ours, 9) < LIMIT);
}

void test_a_token_that_was_not_sampled_is_verified_as_certain() {
    std::mt19937       shapes(2);
    const distribution p      = random_distribution(shapes, 0, 8);
    const candidates   target = as_candidates(p);
    const sampler      ours   = [&](std::mt19937 & rng) {
        dflashcpp::token_verifier verifier(rng, 3, nullptr);
        return target.data[verifier.select(target)].id;
    };
    CHECK(chi_square(p, ours, 4) < LIMIT);
}

// Text of tokens 0..3, each behind the one before, drafted three at a time and cut by confidence.
struct cut_text {
    std::vector<distribution> p, q;  // by the token before
    std::vector<std::vector<int>> followed = std::vector<std::vector<int>>(4, std::vector<int>(VOCAB, 0));
    int cut = 0, drafted = 0;

    cut_text() {
        std::mt19937 shapes(31);
        for (int i = 0; i < 4; ++i) {
            p.push_back(random_distribution(shapes, 0, 4));
            q.push_back(i % 2 ? p.back() : random_distribution(shapes, 0, 4));
        }
    }

    // by_draw: confidence taken from the token that was drawn, which is wrong
    void write(int steps, bool by_draw) {
        std::mt19937           rng(5);
        dflashcpp::draft_costs costs(8);
        for (int i = 0; i < 12; ++i) {
            costs.draft.observe(1 + i % 4, 5.0);
            costs.verify.observe(1 + i % 4, 100.0 + 35.0 * (i % 4));
        }
        dflashcpp::draft_length_params params;
        params.n_max = 3;
        dflashcpp::draft_length length(params, costs);
        size_t                  last = 0;
        for (int step = 0; step < steps; ++step) {
            std::vector<int32_t> draft;
            std::vector<float>   confidence;
            size_t               before = last;
            for (int i = length.want(3); i > 0; --i) {
                draft.push_back(drawn_from(q[before], rng));
                const double best = *std::max_element(q[before].begin(), q[before].end());
                confidence.push_back(float(by_draw ? q[before][size_t(draft.back())] : best));
                before = size_t(draft.back());
            }
            const int kept = draft.empty() ? 0 : length.keep(int(draft.size()), confidence.data());
            drafted += int(draft.size());
            cut += int(draft.size()) - kept;
            int accepted = 0;
            while (accepted < kept && draft[size_t(accepted)] == next(last, &draft[size_t(accepted)], rng)) {
                ++accepted;
            }
            if (accepted == kept) {
                next(last, nullptr, rng);
            }
            length.observe(kept, accepted);
        }
    }

    int32_t next(size_t & last, const int32_t * draft, std::mt19937 & rng) {
        const candidates   row = as_candidates(p[last]);
        const draft_choice choice = as_choice(q[last]);
        const size_t at = draft ? dflashcpp::verify(row, *draft, choice, rng) : dflashcpp::draw_token(row, rng);
        const int32_t token = row.data[at].id;
        ++followed[last][size_t(token)];
        last = size_t(token);
        return token;
    }

    double chi_square() const {  // 4 x 3 degrees of freedom
        double sum = 0.0;
        for (size_t i = 0; i < 4; ++i) {
            double n = 0.0;
            for (size_t k = 0; k < 4; ++k) {
                n += followed[i][k];
            }
            for (size_t k = 0; k < 4; ++k) {
                sum += std::pow(followed[i][k] - n * p[i][k], 2) / (n * p[i][k]);
            }
        }
        return sum;
    }
};

void test_a_draft_cut_by_confidence_keeps_the_distribution() {
    cut_text ours, wrong;
    ours.write(DRAWS, false);
    wrong.write(DRAWS, true);
    CHECK(ours.cut > ours.drafted / 20 && ours.cut < ours.drafted);
    CHECK(ours.chi_square() < LIMIT);
    CHECK(wrong.chi_square() > LIMIT);
}

void test_odd_cases() {
    std::mt19937     rng(1);
    const candidates one({ { 5, 1.0f } });
    const candidates two({ { 5, 0.5f }, { 6, 0.5f } });
    const candidates nan({ { 5, NAN }, { 6, NAN } });
    for (int i = 0; i < 1000; ++i) {
        CHECK(verified(one, 7, { { 7, 5 }, { 0.75f, 0.25f } }, rng) == 5);  // drafted what p excludes
        CHECK(verified(one, 5, { { 5 }, { 1.0f } }, rng) == 5);
        CHECK(verified(two, 6, { { 5, 6 }, { 0.5f, 0.5f } }, rng) == 6);    // p is q: always kept
        CHECK(verified(two, 6, { { 5 }, { 1.0f } }, rng) == 6);             // q(d) = 0 does not divide
        CHECK(dflashcpp::verify(nan, 5, { { 5 }, { 1.0f } }, rng) == 1);
    }
    CHECK(dflashcpp::verify(candidates({}), 5, { { 5 }, { 1.0f } }, rng) == 0);
}

void test_the_same_seed_gives_the_same_tokens() {
    const candidates   p({ { 0, 0.2f }, { 1, 0.3f }, { 2, 0.5f } });
    const draft_choice q{ { 0, 1 }, { 0.6f, 0.4f } };
    std::mt19937       one(42), two(42);
    for (int i = 0; i < 1000; ++i) {
        CHECK(verified(p, i % 2, q, one) == verified(p, i % 2, q, two));
    }
}

} // namespace

int main() {
    test_what_comes_out_is_distributed_as_the_target();
    test_a_draft_stays_as_often_as_p_and_q_overlap();
    test_a_grammar_checked_after_the_draw_gives_the_same_mixture();
    test_a_whole_draft_has_the_joint_distribution();
    test_a_token_that_was_not_sampled_is_verified_as_certain();
    test_a_draft_cut_by_confidence_keeps_the_distribution();
    test_odd_cases();
    test_the_same_seed_gives_the_same_tokens();
    return failures();
}
