// The drafting loop of DFlash and DFlash-2, for every slot of a server: what the target computed goes into
// the draft cache, blocks are decoded behind it, and tokens are read off them.
//
// One step of a slot: process() sees the rows of the target's batch (an anchor and its drafted tokens, or a
// piece of prompt) and keeps their features; draft() drops what was rejected, injects the rest for all slots
// at once, decodes the blocks and walks them.
//
// Plain C++; llama.cpp is behind `draft_engine` (draft-engine.cpp), so that the loop is tested without it.

#pragma once

#include "draft-cover.h"
#include "draft-pace.h"
#include "draft-walk.h"
#include "held-rows.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace dflashcpp {

struct drafter_traits {
    int32_t     n_seq   = 1;     // slots
    int32_t     n_rows  = 1;     // that fit into one pass of the draft context
    int32_t     n_ctx   = 0;     // positions of a sequence
    size_t      width   = 0;     // floats of a row of features
    int32_t     block   = 0;     // tokens of a block as trained, anchor included
    bool        lattice = false; // DFlash-2: a candidate's score depends on the token before
    bool        jumps   = false; // positions may leave gaps (M-RoPE)
    draft_sight sight;
};

struct inject_row {
    int32_t       seq;
    int32_t       pos;
    const float * row;
};

struct draft_block {
    int32_t seq;
    int32_t pos;
    int32_t anchor;
};

// What the loop needs of llama.cpp. Calls that return a bool have reported what went wrong.
class draft_engine {
public:
    virtual ~draft_engine() = default;

    virtual const drafter_traits & traits() const = 0;

    // Features of rows [first, first + n) of the batch that the target decoded last, one behind the other.
    virtual void gather(int32_t first, int32_t n, float * rows) = 0;

    // Writes rows to the draft cache, at most traits().n_rows; those of a sequence together and in order.
    virtual bool inject(const std::vector<inject_row> & rows) = 0;

    // Decodes blocks of `width` tokens behind the rows of their sequences; they stay in the cache.
    virtual bool decode(const std::vector<draft_block> & blocks, int32_t width) = 0;

    // Candidates and scores at a row of the blocks decoded last, behind candidate `predecessor` of the row before.
    virtual void candidates(int32_t row, size_t predecessor, candidate_row & out) = 0;

    // The draft cache of a sequence: its ends (-1: empty), and forgetting [from, to) (to < 0: all behind).
    virtual int32_t pos_min(int32_t seq) = 0;
    virtual int32_t pos_max(int32_t seq) = 0;
    virtual void    remove(int32_t seq, int32_t from, int32_t to) = 0;

    virtual int64_t now_us() = 0;
};

struct draft_loop_params {
    int32_t n_max = 3;     // tokens to draft
    int32_t n_min = 0;     // greedy drafts that are shorter are dropped
    float   p_min = 0.0f;  // a draft ends where the drafter is less sure
    int32_t block = 0;     // tokens of a decoded block; 0: as many as are read
    bool    lazy  = true;  // hold rows back until a draft needs them, without what no layer sees
    bool    adaptive = false; // draft as many tokens as pay, up to n_max: draft-length.h
};

struct batch_row {
    int32_t seq;
    int32_t pos;
};

// A slot that wants a draft behind `anchor` at `pos`.
struct draft_request {
    int32_t  seq    = 0;
    int32_t  pos    = 0;
    int32_t  anchor = 0;
    int32_t  n_max  = 0;    // room that the slot has; at most what is drafted
    float    temp   = 0.0f;
    uint32_t seed   = 0;

    std::vector<int32_t>      tokens;  // out
    std::vector<draft_choice> choices; // out: one a token when sampled, else none
    std::vector<float>        sure;    // out: the drafter's probability of its best candidate at each token
};

class draft_loop {
public:
    draft_loop(std::unique_ptr<draft_engine> engine, const draft_loop_params & params);

    // A new request of slot `seq`, its prompt is read.
    void begin(int32_t seq);

    // A new prompt of slot `seq` ends at `end` (first position behind it), for process() to know what the
    // drafter will see of it. Optional.
    void expect(int32_t seq, int32_t end);

    // The target decoded a batch of these rows, those of a slot together. embeddings: rows of an image or the
    // like. false: the draft cache took no rows.
    bool process(const std::vector<batch_row> & rows, bool embeddings);

    // Drafts for the slots that ask.
    void draft(std::vector<draft_request> & requests);

    // The target took the first n tokens of the newest draft of slot `seq`.
    void verified(int32_t seq, int32_t n);

    // Injects what is held of slot `seq` below `end`, and forgets the rest: before its cache is saved, copied
    // or shifted, and when a request is done.
    bool flush(int32_t seq, int32_t end);

    // The draft cache of slot `seq` was restored, copied or shifted behind the loop's back.
    void replaced(int32_t seq);

    // How many of n_past reusable positions a prompt of n_prompt may reuse so that the drafter drafts behind
    // it as behind a prompt that was read from its start.
    int32_t reusable(int32_t seq, int32_t n_past, int32_t n_prompt);

    // First position behind what the drafter has or will get of slot `seq`.
    int32_t known(int32_t seq);

    int32_t n_max() const { return params.n_max; }

    // Tokens that the newest draft of slot `seq` was meant to have; 0: drafting did not pay.
    int32_t length(int32_t seq) const { return slots[seq].length; }

private:
    struct slot {
        held_rows   held;
        draft_cover cover;
        int32_t     expected = 0;     // end of the prompt that is being read
        bool        prompt   = false; // rows of it are held
        int32_t     length   = 0;
    };

    struct plan {
        draft_request * request;
        int32_t         n;     // tokens
        int32_t         width; // of the block
    };

    bool take(int32_t seq, const std::vector<batch_row> & rows, size_t begin, size_t end);
    int32_t unseen(const slot & s, const std::vector<int32_t> & pos) const;
    bool inject(const std::vector<int32_t> & seqs);
    void make_room(int32_t seq);
    bool inject_pass(const std::vector<inject_row> & pass);
    void sync(int32_t seq);
    void choose_lengths(std::vector<draft_request> & requests);
    bool catch_up(const std::vector<plan> & plans);
    void draft_blocks(std::vector<plan> & plans);
    void walk(const plan & p, int32_t row);
    void shorten(draft_request & request, size_t n) const;

    std::unique_ptr<draft_engine> engine;
    const drafter_traits          traits;
    draft_loop_params             params;
    std::vector<slot>             slots;
    std::unique_ptr<draft_pace>   pace; // when adaptive
};

} // namespace dflashcpp
