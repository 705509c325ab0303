// What the drafting loop needs of llama.cpp, on llama.h and the staging API: two contexts, the target's and
// the drafter's. The only file of the loop that knows llama.cpp; DFLASHCPP_LLAMA_BATCH is defined on those
// that have llama_batch and llama_decode() alone.

#pragma once

#include "draft-loop.h"

#include "../common/common.h"

#include <memory>

namespace dflashcpp {

struct llama_engine_params {
    llama_context * target  = nullptr;
    llama_context * drafter = nullptr;

    int32_t n_seq    = 1;     // slots
    int32_t n_draft  = 3;     // tokens that one block is read for, at most
    bool    bounded  = false; // the draft cache drops its oldest rows
    bool    sampling = false; // DFlash: take the best candidates on the drafter's device
};

// Throws std::runtime_error where the two do not go together. `target` extracts the layer inputs that the
// drafter reads from here on.
std::unique_ptr<draft_engine> make_draft_engine(const llama_engine_params & params);

} // namespace dflashcpp
