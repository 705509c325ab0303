// What a target and the drafter beside it take on every device, measured without allocating either,
// or read from two live contexts.

#pragma once

#include "../common/fit.h"

#include "../common/json.h"

#include <string>
#include <vector>

namespace dflashcpp {

// bytes of one context on one device; "Host" stands for all memory that no device owns
struct memory_row {
    std::string device;
    std::string description;
    int64_t     total   = 0;
    int64_t     free    = 0;
    size_t      model   = 0;
    size_t      context = 0;
    size_t      compute = 0;

    size_t self() const { return model + context + compute; }
};

using memory_rows = std::vector<memory_row>;

struct pair_memory {
    memory_rows target; // with the layer outputs that the drafter reads
    memory_rows draft;
    memory_rows growth; // what those layer outputs added to the target
    uint32_t    n_ctx = 0;
};

// The devices of a live context in the order of its model, Host last.
memory_rows rows_of(const llama_context * ctx);

// Measure both with no_alloc. The draft context gets what the server gives it: the target's context
// size, the target's embeddings and head, and the device samplers. Throws std::runtime_error.
pair_memory measure_pair(
        const char                   * path_target,
        const llama_model_params     & mparams,
        const llama_context_params   & cparams,
        const common_fit_extra_model & draft,
        ggml_log_level                 log_level);

// The same without a drafter.
pair_memory measure_target(
        const char                 * path,
        const llama_model_params   & mparams,
        const llama_context_params & cparams,
        ggml_log_level               log_level);

// {"target": [...], "draft": [...]}, each {"device", "description", "total", "free", "model",
// "context", "compute"} in bytes
common_json to_json(const memory_rows & target, const memory_rows & draft);

} // namespace dflashcpp
