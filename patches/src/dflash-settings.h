// What a DFlash drafter's GGUF says of itself, what must hold for it to run, and what must hold for it to
// fit a target. Every fault is one sentence that names the key, what was expected and what was found.
//
// Plain types only, so that this file compiles and is tested without llama.cpp.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dflashcpp {

// the keys `dflash.*`; 0, empty: not in the file
struct drafter_settings {
    uint32_t n_layer = 0;
    uint32_t n_embd  = 0;
    uint32_t n_vocab = 0;
    uint32_t n_rot   = 0;

    std::vector<int32_t> taps; // layers of the target whose input is read, in the order of fc's columns

    uint32_t block_size  = 0;
    uint32_t conv_kernel = 0; // these four: DFlash-2
    uint32_t conv_group  = 0;
    uint32_t rank        = 0;
    uint32_t top_k       = 0;

    uint32_t            window = 0;
    std::vector<bool>   sliding; // per layer
    std::vector<bool>   causal;  // per layer, inside a block
    std::vector<int32_t> rope_sections;

    float logit_scale     = 0.0f;
    float softcap         = 0.0f;
    float embedding_scale = 0.0f;
    float attention_scale = 0.0f;
    float value_scale     = 0.0f;

    std::string activation = "silu";

    int32_t mask_token = -1;

    bool is_dflash2() const { return top_k > 0; }

    // numbers in one row of the selector's lattice: the candidates, then their scores behind each predecessor
    uint32_t lattice_row() const { return top_k + top_k * top_k; }
};

// what a drafter needs of its target
struct target_shape {
    std::string arch;
    uint32_t    n_layer = 0;
    uint32_t    n_embd  = 0;
    int64_t     n_head_rows = 0; // tokens the output head knows
    int64_t     n_embd_rows = 0; // tokens the embedding knows
    bool        exposes_layers = false;
};

// why a drafter with these settings cannot run; empty: it can
std::string fault(const drafter_settings & settings);

// why it cannot draft for this target; empty: it can
std::string misfit(const drafter_settings & settings, const target_shape & target, bool own_embedding, bool own_head);

} // namespace dflashcpp
