// Saves and restores the draft cache of a slot: see draft-stamp.h.

#pragma once

#include "draft-stamp.h"

#include "../common/common.h"

namespace dflashcpp {

inline draft_stamp stamp_of(const llama_model * drafter) {
    draft_stamp stamp;
    char        text[512];
    for (int32_t i = 0; i < llama_model_meta_count(drafter); ++i) {
        if (llama_model_meta_key_by_index(drafter, i, text, sizeof(text)) >= 0) {
            stamp.add(text);
        }
        if (llama_model_meta_val_str_by_index(drafter, i, text, sizeof(text)) >= 0) {
            stamp.add(text);
        }
    }
    stamp.add(std::to_string(llama_model_size(drafter)) + " " + std::to_string(llama_model_n_params(drafter)));
    return stamp;
}

// Writes the draft cache of `seq` beside `slot_file`. Returns the bytes written; 0: there is no such file now.
inline size_t save_draft(llama_context * drafter, const std::string & slot_file, llama_seq_id seq, const llama_tokens & tokens) {
    const std::string  name = draft_file_name(slot_file);
    const std::string  made = name + ".tmp";
    const llama_tokens all  = stamp_of(llama_get_model(drafter)).on(tokens);
    const size_t       n    = llama_state_seq_save_file(drafter, made.c_str(), seq, all.data(), all.size());
    return settle(made, name, n > 0 && seal(made, n)) ? n : 0;
}

// Replaces the draft cache of `seq` by the one saved beside `slot_file` with these tokens. Returns the bytes
// read; 0: there is none, or it is cut, of others or of another drafter, and the cache is empty.
inline size_t restore_draft(llama_context * drafter, const std::string & slot_file, llama_seq_id seq, const llama_tokens & tokens) {
    const std::string name = draft_file_name(slot_file);
    llama_tokens      all  = stamp_of(llama_get_model(drafter)).on(tokens);
    size_t            n    = 0;
    if (is_whole(name, all)) {
        size_t n_tokens = 0;
        n = llama_state_seq_load_file(drafter, name.c_str(), seq, all.data(), all.size(), &n_tokens);
    }
    if (n == 0) {
        llama_memory_seq_rm(llama_get_memory(drafter), seq, -1, -1);
    }
    return n;
}

} // namespace dflashcpp
