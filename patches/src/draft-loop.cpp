#include "draft-loop.h"

#include "dflash-trace.h"

#include <algorithm>
#include <climits>

namespace dflashcpp {

draft_loop::draft_loop(std::unique_ptr<draft_engine> engine, const draft_loop_params & params)
    : engine(std::move(engine)), traits(this->engine->traits()), params(params) {
    const int32_t longest = std::max(0, traits.block - 1);
    this->params.n_max = std::min(params.n_max, longest);
    this->params.n_min = std::min(params.n_min, longest);
    this->params.block = std::min(params.block, traits.block);
    slots.assign(traits.n_seq, slot{ held_rows(traits.width), draft_cover(), 0, false, 0 });
    if (params.adaptive) {
        const int32_t widest = std::max(1 + this->params.n_max, this->params.block);
        pace = std::make_unique<draft_pace>(traits.n_seq, this->params.n_max, traits.n_seq * widest);
    }
}

void draft_loop::begin(int32_t seq) {
    if (pace) {
        pace->begin(seq);
    }
}

void draft_loop::verified(int32_t seq, int32_t n) {
    if (pace) {
        pace->verified(seq, n);
    }
}

void draft_loop::expect(int32_t seq, int32_t end) {
    slots[seq].expected = end;
}

bool draft_loop::process(const std::vector<batch_row> & rows, bool embeddings) {
    const int64_t begin_us = engine->now_us();
    for (size_t begin = 0; begin < rows.size();) {
        size_t end = begin + 1;
        while (end < rows.size() && rows[end].seq == rows[begin].seq) {
            ++end;
        }
        const int32_t seq = rows[begin].seq;
        // an M-RoPE image has one position for all its rows: the drafter can jump over it, but no
        // windowed cache could ever free cells for it
        const bool pinned = embeddings && end - begin > 1 && rows[begin].pos == rows[end - 1].pos;
        if (seq >= 0 && seq < traits.n_seq && !pinned && !take(seq, rows, begin, end)) {
            return false;
        }
        begin = end;
    }
    if (pace) {
        pace->processed(int32_t(rows.size()), engine->now_us() - begin_us);
    }
    return true;
}

// Rows at the start of `pos` that no layer sees from the end of the prompt on.
int32_t draft_loop::unseen(const slot & s, const std::vector<int32_t> & pos) const {
    if (!params.lazy || !traits.sight.all_windowed) {
        return 0;
    }
    const int32_t from = traits.sight.window_from(s.expected);
    return int32_t(std::lower_bound(pos.begin(), pos.end(), from) - pos.begin());
}

bool draft_loop::take(int32_t seq, const std::vector<batch_row> & rows, size_t begin, size_t end) {
    slot & s = slots[seq];
    std::vector<int32_t> pos;
    for (size_t i = begin; i < end; ++i) {
        pos.push_back(rows[i].pos);
    }
    s.prompt = s.prompt || pos.front() < s.expected;
    s.held.drop_from(pos.front()); // decoded anew
    if (!s.held.empty() && s.held.last() + 1 != pos.front() && !traits.jumps) {
        s.held.clear(); // of something that is no longer there
    }
    size_t at = size_t(unseen(s, pos));
    if (at > 0) {
        s.held.clear(); // older still
    }
    // rows held so far were accepted, those of this batch may not be: they do not go together, unless it
    // is so long that it must be prompt
    const size_t most = size_t(traits.n_rows);
    const size_t more = pos.size() - at;
    if (more <= most && s.held.size() + more > most && !inject({ seq })) {
        return false;
    }
    while (at < pos.size()) {
        if (s.held.size() == most && !inject({ seq })) {
            return false;
        }
        const size_t n = std::min(most - s.held.size(), pos.size() - at);
        engine->gather(int32_t(begin + at), int32_t(n), s.held.append(pos.data() + at, n));
        at += n;
    }
    return params.lazy || inject({ seq });
}

// Brings the cache of a sequence to where its held rows go on.
void draft_loop::make_room(int32_t seq) {
    slot & s = slots[seq];
    sync(seq);
    const int32_t first = s.held.first();
    const int32_t last  = engine->pos_max(seq);
    if (last >= first) {
        engine->remove(seq, first, -1);
        sync(seq);
    } else if (last >= 0 && last + 1 < first && !traits.jumps) {
        engine->remove(seq, -1, -1); // llama.cpp wants positions without gaps
        s.cover.clear();
    }
    if (engine->pos_max(seq) < 0) {
        s.cover.restart(first);
    }
    if (traits.sight.n_cells > 0) {
        const int32_t keep = draft_keep_from(s.held.last(), traits.sight.n_cells, traits.sight.n_block);
        if (keep > 0) {
            engine->remove(seq, 0, keep);
            s.cover.drop_below(keep);
        }
    }
}

bool draft_loop::inject(const std::vector<int32_t> & seqs) {
    std::vector<inject_row> pass;
    for (const int32_t seq : seqs) {
        const held_rows & held = slots[seq].held;
        if (held.empty()) {
            continue;
        }
        make_room(seq);
        for (size_t i = 0; i < held.size(); ++i) {
            pass.push_back({ seq, held.at(i), held.row(i) });
            if (int32_t(pass.size()) == traits.n_rows) {
                if (!inject_pass(pass)) {
                    return false;
                }
                pass.clear();
            }
        }
    }
    if (!pass.empty() && !inject_pass(pass)) {
        return false;
    }
    for (const int32_t seq : seqs) {
        slots[seq].held.clear();
    }
    return true;
}

bool draft_loop::inject_pass(const std::vector<inject_row> & pass) {
    if (!engine->inject(pass)) {
        return false;
    }
    for (size_t begin = 0; begin < pass.size();) {
        const int32_t seq = pass[begin].seq;
        std::vector<int32_t> pos;
        while (begin + pos.size() < pass.size() && pass[begin + pos.size()].seq == seq) {
            pos.push_back(pass[begin + pos.size()].pos);
        }
        sync(seq);
        trace().inject(seq, pos, pass[begin].row, traits.width);
        begin += pos.size();
    }
    return true;
}

void draft_loop::sync(int32_t seq) {
    slots[seq].cover.look(engine->pos_min(seq), engine->pos_max(seq), traits.sight);
}

bool draft_loop::flush(int32_t seq, int32_t end) {
    slots[seq].held.drop_from(end);
    return inject({ seq });
}

void draft_loop::replaced(int32_t seq) {
    slot & s = slots[seq];
    s.held.clear();
    s.cover.replaced(engine->pos_min(seq), engine->pos_max(seq), traits.sight);
}

int32_t draft_loop::reusable(int32_t seq, int32_t n_past, int32_t n_prompt) {
    slot & s = slots[seq];
    s.held.drop_from(n_past);
    if (!inject({ seq })) {
        return 0;
    }
    sync(seq);
    return s.cover.reusable(n_past, n_prompt, traits.sight);
}

int32_t draft_loop::known(int32_t seq) {
    sync(seq);
    const slot & s = slots[seq];
    return s.held.empty() ? s.cover.end() : s.held.last() + 1;
}

// Brings n_max of each request down to what is drafted.
void draft_loop::choose_lengths(std::vector<draft_request> & requests) {
    std::vector<draft_pace::wish> wishes;
    for (draft_request & request : requests) {
        const int32_t room = std::min(request.n_max, traits.n_ctx - request.pos - 1);
        request.n_max = std::max(0, std::min(room, params.n_max));
        wishes.push_back({ request.seq, request.n_max, 0 });
    }
    if (pace) {
        pace->plan(engine->now_us(), wishes);
        for (size_t i = 0; i < requests.size(); ++i) {
            requests[i].n_max = std::min(wishes[i].n, requests[i].n_max);
        }
    }
}

// Injects what is held of all slots that draft; in one pass, but for rows that not every draft has to bring.
bool draft_loop::catch_up(const std::vector<plan> & plans) {
    std::vector<int32_t> usual;
    for (const plan & p : plans) {
        const int32_t seq = p.request->seq;
        if (!pace || !(slots[seq].prompt || pace->paused(seq))) {
            usual.push_back(seq);
            continue;
        }
        const int64_t begin = engine->now_us();
        if (!inject({ seq })) {
            return false;
        }
        pace->caught_up(seq, engine->now_us() - begin);
    }
    return inject(usual);
}

void draft_loop::draft(std::vector<draft_request> & requests) {
    for (const draft_request & request : requests) {
        slots[request.seq].held.drop_from(request.pos); // rejected
        slots[request.seq].expected = 0;
    }
    choose_lengths(requests);
    int32_t longest = 0;
    for (const draft_request & request : requests) {
        slots[request.seq].length = request.n_max;
        longest = std::max(longest, request.n_max);
    }
    std::vector<plan> plans;
    for (draft_request & request : requests) {
        if (request.n_max > 0) {
            // all as wide as the longest, so that they go into one pass; the context may end before
            const int32_t width = std::min(std::max(params.block, 1 + longest), traits.n_ctx - request.pos);
            plans.push_back({ &request, request.n_max, width });
        }
    }
    if (catch_up(plans)) {
        draft_blocks(plans);
    }
    for (const draft_request & request : requests) {
        slots[request.seq].prompt = slots[request.seq].prompt && !slots[request.seq].held.empty();
        if (pace) {
            pace->sent(request.seq, int32_t(request.tokens.size()));
        }
    }
    if (pace) {
        pace->end(engine->now_us());
    }
}

void draft_loop::draft_blocks(std::vector<plan> & plans) {
    std::stable_sort(plans.begin(), plans.end(), [](const plan & a, const plan & b) { return a.width > b.width; });
    for (size_t begin = 0; begin < plans.size();) {
        const int32_t width = std::min(plans[begin].width, traits.n_rows);
        std::vector<draft_block> blocks;
        while (begin + blocks.size() < plans.size() && int32_t(blocks.size() + 1) * width <= traits.n_rows) {
            const plan & p = plans[begin + blocks.size()];
            if (std::min(p.width, traits.n_rows) != width) {
                break;
            }
            blocks.push_back({ p.request->seq, p.request->pos, p.request->anchor });
        }
        const bool decoded = engine->decode(blocks, width);
        if (pace) {
            pace->decoded(int32_t(blocks.size()) * width);
        }
        for (size_t i = 0; i < blocks.size(); ++i) {
            if (decoded) {
                walk(plans[begin + i], int32_t(i) * width);
            }
            engine->remove(blocks[i].seq, blocks[i].pos, -1);
        }
        begin += blocks.size();
    }
}

// Reads a draft off the block that begins at `row`.
void draft_loop::walk(const plan & p, int32_t row) {
    draft_request & request = *p.request;
    draft_random    random(request.seed);
    candidate_row   candidates;
    size_t          chosen = 0;
    const int32_t   n = std::min(p.n, traits.n_rows - 1);
    for (int32_t i = 1; i <= n; ++i) {
        engine->candidates(row + i, chosen, candidates);
        if (traits.lattice) {
            trace().candidates(candidates.ids.data(), candidates.scores.data(), int32_t(candidates.ids.size()));
        }
        const float sure = confidence(candidates.scores);
        if (sure < params.p_min) {
            break;
        }
        draft_choice choice;
        chosen = choose(candidates, request.temp, random, choice);
        request.tokens.push_back(candidates.ids[chosen]);
        request.sure.push_back(sure);
        if (!choice.ids.empty()) {
            request.choices.push_back(std::move(choice));
        }
    }
    if (pace) {
        shorten(request, size_t(pace->keep(request.seq, int32_t(request.tokens.size()), request.sure.data())));
    }
    // a sampled draft must not be dropped for what was drawn in it
    if (!(request.temp > 0.0f) && int32_t(request.tokens.size()) < params.n_min) {
        shorten(request, 0);
    }
    trace().draft(request.seq, request.pos, request.anchor, request.tokens);
}

void draft_loop::shorten(draft_request & request, size_t n) const {
    if (n < request.tokens.size()) {
        request.tokens.resize(n);
        request.sure.resize(n);
        request.choices.resize(std::min(n, request.choices.size()));
    }
}

} // namespace dflashcpp
