#include "pair-memory.h"

#include "device-limits.h"
#include "dflash-reserve.h"

#include "../src/llama-ext.h"

#include "llama-cpp.h"

#include <algorithm>
#include <stdexcept>

namespace dflashcpp {

namespace {

// log lines below `level` become debug lines while this lives
struct quiet_log {
    ggml_log_callback callback  = nullptr;
    void            * user_data = nullptr;
    ggml_log_level    level;

    explicit quiet_log(ggml_log_level level) : level(level) {
        llama_log_get(&callback, &user_data);
        llama_log_set([](ggml_log_level level, const char * text, void * data) {
            const auto * self = (const quiet_log *) data;
            self->callback(level >= self->level ? level : GGML_LOG_LEVEL_DEBUG, text, self->user_data);
        }, this);
    }

    ~quiet_log() { llama_log_set(callback, user_data); }

    quiet_log(const quiet_log &) = delete;
    quiet_log & operator=(const quiet_log &) = delete;
};

llama_model_ptr open_model(const char * path, llama_model_params mparams) {
    mparams.no_alloc  = true;
    mparams.load_mode = LLAMA_LOAD_MODE_NONE;
    llama_model_ptr model(llama_model_load_from_file(path, mparams));
    if (!model) {
        throw std::runtime_error(std::string("failed to load model ") + path);
    }
    return model;
}

llama_context_ptr open_context(llama_model * model, const llama_context_params & cparams) {
    llama_context_ptr ctx(llama_init_from_model(model, cparams));
    if (!ctx) {
        throw std::runtime_error("failed to create llama_context from model");
    }
    return ctx;
}

bool is_host(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    return ggml_backend_buft_is_host(buft) || dev == nullptr || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

memory_row empty_row(ggml_backend_dev_t dev, const char * name) {
    memory_row row;
    row.device      = name;
    row.description = ggml_backend_dev_description(dev);
    size_t free  = 0;
    size_t total = 0;
    ggml_backend_dev_memory(dev, &free, &total);
    row.free  = (int64_t) free;
    row.total = (int64_t) total;
    if (limit_of(row.device) >= 0) {
        row.free = row.total = limit_of(row.device) << 20;
    }
    return row;
}

memory_row & row_of(memory_rows & rows, const std::string & device, const memory_row & like) {
    const auto found = std::find_if(rows.begin(), rows.end(), [&](const memory_row & row) { return row.device == device; });
    return found != rows.end() ? *found : *rows.insert(rows.end() - 1, like); // Host stays last
}

// the device samplers that the speculative implementations attach: top-k 10 for every sequence
void attach_samplers(llama_context * ctx, std::vector<llama_sampler_ptr> & chains) {
    for (uint32_t seq = 0; seq < llama_n_seq_max(ctx); ++seq) {
        chains.emplace_back(llama_sampler_chain_init(llama_sampler_chain_default_params()));
        llama_sampler_chain_add(chains.back().get(), llama_sampler_init_top_k(10));
        llama_set_sampler(ctx, (llama_seq_id) seq, chains.back().get());
    }
}

common_json to_json(const memory_rows & rows) {
    common_json list = common_json::array();
    for (const auto & row : rows) {
        list.push_back({
            {"device",      row.device},
            {"description", row.description},
            {"total",       row.total},
            {"free",        row.free},
            {"model",       row.model},
            {"context",     row.context},
            {"compute",     row.compute},
        });
    }
    return list;
}

} // namespace

memory_rows rows_of(const llama_context * ctx) {
    const llama_model * model = llama_get_model(ctx);

    memory_rows rows;
    for (int i = 0; i < llama_model_n_devices(model); i++) {
        ggml_backend_dev_t dev = llama_model_get_device(model, i);
        rows.push_back(empty_row(dev, ggml_backend_dev_name(dev)));
    }
    rows.push_back(empty_row(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), "Host"));

    for (const auto & [buft, mb] : llama_get_memory_breakdown(ctx)) {
        ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
        memory_row & row = is_host(buft) ? rows.back() : row_of(rows, ggml_backend_dev_name(dev), empty_row(dev, ggml_backend_dev_name(dev)));
        row.model   += mb.model;
        row.context += mb.context;
        row.compute += mb.compute;
    }
    return rows;
}

pair_memory measure_pair(
        const char                   * path_target,
        const llama_model_params     & mparams,
        const llama_context_params   & cparams,
        const common_fit_extra_model & draft,
        ggml_log_level                 log_level) {
    const quiet_log quiet(log_level);

    pair_memory result;

    llama_model_ptr   model_tgt = open_model(path_target, mparams);
    llama_context_ptr ctx_tgt   = open_context(model_tgt.get(), cparams);
    result.n_ctx  = llama_n_ctx(ctx_tgt.get());
    result.growth = rows_of(ctx_tgt.get());

    llama_context_params cparams_dft = *draft.cparams;
    cparams_dft.n_ctx     = draft_context(draft.n_ctx_max, result.n_ctx, cparams_dft.n_seq_max, cparams_dft.n_ubatch, draft.n_block);
    cparams_dft.ctx_other = ctx_tgt.get();

    std::vector<llama_sampler_ptr> chains; // outlive the context that uses them

    llama_model_ptr   model_dft = open_model(draft.path_model, *draft.mparams);
    llama_context_ptr ctx_dft   = open_context(model_dft.get(), cparams_dft);
    if (draft.backend_sampling && llama_model_dflash_selector_top_k(model_dft.get()) == 0) {
        attach_samplers(ctx_dft.get(), chains);
        llama_sched_reserve(ctx_dft.get());
    }
    result.draft = rows_of(ctx_dft.get());

    const int32_t * layers = llama_model_target_layer_ids(model_dft.get());
    for (uint32_t i = 0; i < llama_model_target_layer_ids_n(model_dft.get()); ++i) {
        if (layers[i] < llama_model_n_layer(model_tgt.get())) {
            llama_set_embeddings_layer_inp(ctx_tgt.get(), (uint32_t) layers[i], true);
        }
    }
    llama_sched_reserve(ctx_tgt.get());
    result.target = rows_of(ctx_tgt.get());

    for (size_t i = 0; i < result.growth.size(); ++i) {
        memory_row & row = result.growth[i];
        row.compute = result.target[i].compute - std::min(result.target[i].compute, row.compute);
        row.model   = row.context = 0;
    }
    return result;
}

pair_memory measure_target(
        const char                 * path,
        const llama_model_params   & mparams,
        const llama_context_params & cparams,
        ggml_log_level               log_level) {
    const quiet_log quiet(log_level);

    llama_model_ptr   model = open_model(path, mparams);
    llama_context_ptr ctx   = open_context(model.get(), cparams);

    pair_memory result;
    result.target = rows_of(ctx.get());
    result.n_ctx  = llama_n_ctx(ctx.get());
    return result;
}

common_json to_json(const memory_rows & target, const memory_rows & draft) {
    return common_json({ {"target", to_json(target)}, {"draft", to_json(draft)} });
}

} // namespace dflashcpp
