// Each vector lane against the same search written plainly for one sub-block. Byte equality with ggml itself
// is proved by tests/real/test_quantize_equals_llama.py.
#include "../k-quant-search.h"

#include "check.h"

#ifdef DFLASHCPP_K_QUANT_SEARCH

#include <algorithm>
#include <random>
#include <vector>

namespace {

struct found {
    std::vector<int> levels;
    float scale = 0, min = 0;
};

int level(float value, int least, int most) {
    return std::clamp((int) lrintf(value), least, most);
}

// weighted least squares of x ~ scale*level + min over a few trial scales
found plain_with_min(const float * x, int nmax, float rmin, int nstep) {
    float squares = 0, w[32], sum_w = 0, sum_x = 0;
    for (int i = 0; i < 32; ++i) { squares += x[i]*x[i]; }
    for (int i = 0; i < 32; ++i) { w[i] = sqrtf(squares/32) + fabsf(x[i]); }
    float min = x[0], max = x[0];
    for (int i = 0; i < 32; ++i) {
        min = std::min(min, x[i]);
        max = std::max(max, x[i]);
        sum_w += w[i];
        sum_x += w[i]*x[i];
    }
    min = std::min(min, 0.f);
    found best { std::vector<int>(32, 0), 0, min };
    if (max == min) {
        return best;
    }
    auto levels_for = [&](float iscale) {
        std::vector<int> levels;
        for (int i = 0; i < 32; ++i) { levels.push_back(level(iscale*(x[i] - best.min), 0, nmax)); }
        return levels;
    };
    auto error_of = [&](const found & one) {
        float error = 0;
        for (int i = 0; i < 32; ++i) {
            const float diff = one.scale*one.levels[i] + one.min - x[i];
            error += w[i]*(diff*diff);
        }
        return error;
    };
    const float first = nmax/(max - min);
    best.levels = levels_for(first);
    best.scale = 1/first;
    float least = error_of(best);
    for (int step = 0; step <= nstep; ++step) {
        found next;
        next.levels = levels_for((rmin + 0.1f*step + nmax)/(max - best.min));
        float sum_l = 0, sum_l2 = 0, sum_xl = 0;
        for (int i = 0; i < 32; ++i) {
            const float wl = w[i]*next.levels[i];
            sum_l += wl;
            sum_l2 += wl*next.levels[i];
            sum_xl += wl*x[i];
        }
        const float d = sum_w*sum_l2 - sum_l*sum_l;
        if (!(d > 0)) {
            continue;
        }
        next.scale = (sum_w*sum_xl - sum_x*sum_l)/d;
        next.min = (sum_l2*sum_x - sum_l*sum_xl)/d;
        if (next.min > 0) {
            next.min = 0;
            next.scale = sum_xl/sum_l2;
        }
        const float error = error_of(next);
        if (error < least) {
            least = error;
            best = next;
        }
    }
    return best;
}

void fill(std::vector<float> & x, std::mt19937 & random, int kind) {
    std::normal_distribution<float> normal(kind % 3 == 1 ? 4.f : 0.f, 0.05f);
    for (auto & value : x) { value = normal(random); }
    if (kind % 4 == 2) { std::fill(x.begin() + 32, x.begin() + 96, kind % 8 == 2 ? 0.f : -1.5f); }
    if (kind % 5 == 3) { x[7] = 1000; }
}

void test_with_min() {
    std::mt19937 random(1);
    std::vector<float> x(256);
    for (int kind = 0; kind < 400; ++kind) {
        fill(x, random, kind);
        const bool five = kind % 2;
        uint8_t levels[256];
        float scales[8], mins[8];
        dflashcpp_search_with_min(x.data(), five ? 31 : 15, five ? -0.5f : -1.f, five ? 15 : 20, levels, scales, mins);
        uint8_t narrow_levels[256];
        float narrow_scales[8], narrow_mins[8];
        dflashcpp_with_min_body(  // as on a processor without AVX2
            x.data(), five ? 31 : 15, five ? -0.5f : -1.f, five ? 15 : 20, narrow_levels, narrow_scales, narrow_mins);
        CHECK(std::equal(levels, levels + 256, narrow_levels));
        CHECK(std::equal(scales, scales + 8, narrow_scales) && std::equal(mins, mins + 8, narrow_mins));
        for (int j = 0; j < 8; ++j) {
            const found one = plain_with_min(x.data() + 32*j, five ? 31 : 15, five ? -0.5f : -1.f, five ? 15 : 20);
            CHECK(scales[j] == one.scale);
            CHECK(mins[j] == -one.min);
            CHECK(std::equal(one.levels.begin(), one.levels.end(), levels + 32*j));
        }
    }
}

// the best of all trial scales, without regard to the order of rounding: within a hair of the vector's
void test_symmetric() {
    std::mt19937 random(2);
    std::vector<float> x(128);
    for (int kind = 0; kind < 200; ++kind) {
        fill(x, random, kind);
        int8_t levels[128];
        float scales[8];
        dflashcpp_search_symmetric(x.data(), 1e-15f, levels, scales);
        int8_t narrow_levels[128];
        float narrow_scales[8];
        dflashcpp_symmetric_body(x.data(), 1e-15f, narrow_levels, narrow_scales);
        CHECK(std::equal(levels, levels + 128, narrow_levels) && std::equal(scales, scales + 8, narrow_scales));
        for (int j = 0; j < 8; ++j) {
            float error = 0, size = 0;
            for (int i = 0; i < 16; ++i) {
                const float value = x[16*j + i];
                CHECK(levels[16*j + i] >= 0 && levels[16*j + i] <= 63);
                const float diff = scales[j]*(levels[16*j + i] - 32) - value;
                error += value*value*diff*diff;
                size += value*value*value*value;
            }
            if (size == 0) {
                CHECK(scales[j] == 0);
                continue;
            }
            CHECK(error <= size/1000);
        }
    }
}

}  // namespace

int main() {
    test_with_min();
    test_symmetric();
    return failures();
}

#else

int main() {
    return 0;  // not on this processor: ggml's own code stays in use
}

#endif
