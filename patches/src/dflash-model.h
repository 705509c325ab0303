// DFlash and DFlash-2 as a model of llama.cpp, for bases that do not have the architecture.
//
// One context does two passes, told apart by what the batch holds:
//   features (embd, one row of taps x hidden a token): encoded and written to the cache of every layer
//   tokens (blocks of an anchor and masks): drafted; DFlash gives logits, DFlash-2 the selector's lattice
//     as "nextn" rows of n_embd_out numbers, one for every token of the batch
// Blocks of several sequences stand one after the other and are of one width.

#pragma once

#include "../src/llama-model.h"

#include "dflash-settings.h"

#include <string>
#include <vector>

namespace dflashcpp {

// what a layer has beyond llama_layer (DFlash-2)
struct conv_layer {
    ggml_tensor * attn_base = nullptr; // [n_embd, taps, 2]
    ggml_tensor * attn_proj = nullptr; // [n_embd, 2 * taps * groups]
    ggml_tensor * ffn_base  = nullptr;
    ggml_tensor * ffn_proj  = nullptr;
};

struct dflash_model : public llama_model_base {
    drafter_settings settings;

    std::vector<conv_layer> conv;

    ggml_tensor * selector_predecessor = nullptr; // [rank, n_vocab]
    ggml_tensor * selector_successor   = nullptr; // [rank, n_vocab]
    ggml_tensor * selector_hidden      = nullptr; // [n_embd, rank]

    explicit dflash_model(const llama_model_params & params) : llama_model_base(params) {}

    void load_arch_hparams(llama_model_loader & ml) override;
    void load_arch_tensors(llama_model_loader & ml) override;
    std::unique_ptr<llm_graph_context> build_arch_graph(const llm_graph_params & params) const override;

    // its own, or the target's
    ggml_tensor * embedding_of(const llama_model * target) const;
    ggml_tensor * head_of     (const llama_model * target) const;

private:
    std::vector<std::string> created; // names of tensors that were asked for

    ggml_tensor * tensor(llm_tensor which, const char * suffix, std::initializer_list<int64_t> ne, int il = -1, bool needed = true);

    void load_ends();
    void load_layer(int il);
    void load_selector();
    void refuse_unplaced(const llama_model_loader & ml) const;
};

// Throws where this drafter cannot work on this target (null: none was given), in one sentence.
void check_target(const llama_model & drafter, const llama_model * target);

// trained block of a drafter, 0 when its file does not say
uint32_t block_size(const llama_model & drafter);

} // namespace dflashcpp
