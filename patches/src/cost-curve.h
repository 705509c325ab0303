// What a call costs by its number of rows, measured as it runs.
//
// Units: us (microseconds), rows (tokens of one batch).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace dflashcpp {

// Cost of a call by its number of rows, measured as it runs. Widths never seen are interpolated.
// A growing context or a busy machine slows every width, so each observation also moves the others.
class cost_curve {
public:
    explicit cost_curve(int max_rows);

    void   observe(int rows, double us);
    bool   known() const { return n_known > 0; }
    bool   known(int rows) const;
    double at(double rows) const;      // us; 0 for no rows and while nothing was observed
    double doubt(int rows) const;      // standard error of at(), a share of it
    double change() const { return change_us; } // us that a call takes more when its width is new
    int    last()   const { return last_rows; } // width of the newest call
    int    age(int rows) const;        // calls since this width was seen
    bool   young(int rows) const;      // seen once or twice: that may have been an odd call

private:
    struct point {
        double us     = 0.0;
        double weight = 0.0; // observations, forgotten
        int    seen   = 0;   // n_calls of the newest one
    };

    // shares of a new observation ...
    static constexpr double learn_width  = 0.03; // in the settled cost of its width
    static constexpr double learn_all    = 0.03; // in those of all widths
    static constexpr double learn_change = 0.05;
    static constexpr double learn_spread = 0.05;
    // observations after which a width is known well
    static constexpr double settled      = 2.0;
    // a width seen first is taken as at most this many times what the others say
    static constexpr double first_most   = 2.5;

    void learn(point & p, double us, bool changed);
    void redraw();
    void draw_between(int a, int b);
    void smooth(int rows);

    std::vector<point>  points; // by rows
    std::vector<double> curve;  // us by rows, of all points together
    double change_us = 0.0;
    double spread    = 0.1; // of the time that calls of one width take, a share of it
    int    last_rows = 0;
    int    n_known   = 0;
    int    n_calls   = 0;
};

inline cost_curve::cost_curve(int max_rows) : points(std::max(1, max_rows) + 1), curve(points.size()) {}

inline bool cost_curve::known(int rows) const {
    return rows >= 0 && rows < (int) points.size() && points[rows].weight > 0.0;
}

inline double cost_curve::doubt(int rows) const {
    const double weight = known(rows) ? points[rows].weight / (1.0 + age(rows) / 500.0) : 0.5;
    return std::min(0.2, spread / std::sqrt(weight));
}

inline int cost_curve::age(int rows) const {
    return known(rows) ? n_calls - points[rows].seen : n_calls;
}

inline bool cost_curve::young(int rows) const {
    return known(rows) && points[rows].weight < settled;
}

inline double cost_curve::at(double rows) const {
    const double x = std::clamp(rows, 0.0, curve.size() - 1.0);
    const size_t i = std::min((size_t) x, curve.size() - 2);
    return curve[i] + (x - i) * (curve[i + 1] - curve[i]);
}

inline void cost_curve::observe(int rows, double us) {
    if (rows < 1 || !(us > 0.0)) {
        return;
    }
    rows = std::min(rows, (int) points.size() - 1);
    const bool changed = last_rows != 0 && rows != last_rows;
    last_rows = rows;
    auto & p  = points[rows];
    p.seen    = ++n_calls;
    if (p.weight > 0.0) {
        learn(p, us, changed);
    } else {
        // the first call of a width also pays for its graph, and may be disturbed
        const double most = n_known > 0 ? first_most * at(rows) : us;
        p.us     = std::min(most, std::max(0.5 * us, us - (changed ? change_us : 0.0)));
        p.weight = 0.5;
        n_known++;
    }
    redraw();
}

// What a settled width tells is told of all by one half: a longer context or a busy machine.
inline void cost_curve::learn(point & p, double us, bool changed) {
    const double expected = p.us + (changed ? change_us : 0.0);
    const bool   young    = p.weight < settled;
    if (young && us < 0.8 * expected) {
        p.us     = us;
        p.weight = 1.0;
        return;
    }
    // a call is taken as at most three times as odd as calls were of late: a pause passes, a change stays
    const double odd   = us / expected - 1.0;
    const double taken = std::clamp(odd, -3.0 * spread, 3.0 * spread);
    spread += learn_spread * (std::min(1.0, std::abs(odd)) - spread);
    if (changed) {
        change_us = std::clamp(change_us + learn_change * taken * expected, 0.0, 0.5 * p.us);
    }
    p.us    += (changed ? 0.5 : 1.0) * std::max(learn_width, 1.0 / (p.weight + 1.0)) * taken * expected;
    p.weight = std::min(p.weight + 1.0, 1.0 / learn_width);
    for (auto & any : points) {
        any.us *= young ? 1.0 : 1.0 + learn_all * taken;
    }
}

inline void cost_curve::redraw() {
    int below = 0;
    for (int i = 1; i < (int) points.size(); i++) {
        if (points[i].weight > 0.0) {
            draw_between(below, i);
            below = i;
        }
    }
    for (int i = 1; i <= below; i++) {
        smooth(i);
    }
    // beyond the widest known: on at the slope of the last third, never a falling one
    const int    from  = std::max(1, below * 2 / 3);
    const double slope = below > from ? (curve[below] - curve[from]) / (below - from) : 0.0;
    for (int i = below + 1; i < (int) curve.size(); i++) {
        curve[i] = curve[below] + std::max(0.0, slope) * (i - below);
    }
}

// The curve from known width a to known width b; a == 0: there is none below b.
inline void cost_curve::draw_between(int a, int b) {
    for (int i = std::max(a, 1); i <= b; i++) {
        const double t = a == 0 ? 1.0 : double(i - a) / (b - a);
        curve[i] = t * points[b].us + (1.0 - t) * points[a].us;
    }
}

// Wide batches have many widths, each seldom seen: a line through those within an eighth.
inline void cost_curve::smooth(int rows) {
    const int half = rows / 8;
    const int last = std::min(rows + half, (int) points.size() - 1);
    double w = 0.0, x = 0.0, y = 0.0, xx = 0.0, xy = 0.0;
    for (int i = rows - half; half > 0 && i <= last; i++) {
        const double d = i - rows;
        const double v = points[i].weight * (1.0 - std::abs(d) / (half + 1));
        w += v, x += v * d, y += v * points[i].us, xx += v * d * d, xy += v * d * points[i].us;
    }
    const double spread_x = w * xx - x * x;
    if (spread_x > 1e-6 * w * w) {
        curve[rows] = (xx * y - x * xy) / spread_x;
    }
}

} // namespace dflashcpp
