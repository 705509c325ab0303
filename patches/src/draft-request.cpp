#include "draft-request.h"

#include "device-limits.h"
#include "pair-memory.h"

#include "../common/log.h"
#include "../common/speculative.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace dflashcpp {

namespace {

void print_rows(const memory_rows & rows, const char * prefix) {
    for (const auto & row : rows) {
        std::printf("%s%s %zu %zu %zu \n", prefix, row.device.c_str(), row.model >> 20, row.context >> 20, row.compute >> 20);
    }
}

// Host memory is paged and mapped, integrated devices share it: only a device of its own has a hard limit.
bool has_limit(const memory_row & row) {
    if (limit_of(row.device) >= 0) {
        return true;
    }
    ggml_backend_dev_t dev = row.device == "Host" ? nullptr : ggml_backend_dev_by_name(row.device.c_str());
    return dev != nullptr && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU && row.total > 0 &&
           std::getenv("GGML_CUDA_ENABLE_UNIFIED_MEMORY") == nullptr;
}

bool any_limit() {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (ggml_backend_dev_type(ggml_backend_dev_get(i)) == GGML_BACKEND_DEVICE_TYPE_GPU) {
            return true;
        }
    }
    return std::getenv("DFLASHCPP_DEVICE_MEMORY") != nullptr;
}

size_t self_on(const memory_rows & rows, const std::string & device) {
    const auto found = std::find_if(rows.begin(), rows.end(), [&](const memory_row & row) { return row.device == device; });
    return found == rows.end() ? 0 : found->self();
}

} // namespace

draft_request::draft_request(const common_params & base)
    : path(base.speculative.draft.mparams.path)
    , params(common_base_params_to_speculative(base))
    , mparams(common_model_params_to_llama(params))
    , cparams(common_context_params_to_llama(params)) {
    cparams.n_rs_seq = 0;
    model = {
        /*.path_model       =*/ path.c_str(),
        /*.mparams          =*/ &mparams,
        /*.cparams          =*/ &cparams,
        /*.shares_model     =*/ false,
        /*.backend_sampling =*/ common_speculative_samples_on_backend(base.speculative),
        /*.n_ctx_max        =*/ common_speculative_draft_n_ctx_max(base.speculative),
        /*.n_block          =*/ 1u + std::max(0, base.speculative.draft.n_max),
    };
}

void set_server_defaults(common_params & params) {
    if (params.n_parallel < 0) {
        params.n_parallel = 4;
        params.kv_unified = true;
    }
    if (params.kv_unified_per_slot > 0 && params.n_ctx == 0) {
        params.n_ctx = params.n_parallel * params.kv_unified_per_slot;
    }
    const auto limits = common_speculative_get_output_limits(
            params.n_batch, params.n_parallel, common_speculative_n_max(&params.speculative));
    params.n_outputs_max         = std::max(1, limits.total);
    params.n_outputs_max_per_seq = std::max(1, limits.per_seq);
}

bool drafter_fits(
        const common_params        & params,
        const llama_model_params   & mparams,
        const llama_context_params & cparams) {
    if (!params.speculative.has_dft() || !any_limit()) {
        return true;
    }
    const draft_request draft(params);
    pair_memory pair;
    try {
        pair = measure_pair(params.model.path.c_str(), mparams, cparams, *draft.extra(), (ggml_log_level) (GGML_LOG_LEVEL_CONT + 1));
    } catch (const std::runtime_error & error) {
        LOG_DBG("%s: %s\n", __func__, error.what());
        return true; // loading it says why
    }
    for (const auto & row : pair.draft) {
        const int64_t target = (int64_t) self_on(pair.target, row.device);
        const int64_t left   = std::max<int64_t>(0, row.free - target);
        if (has_limit(row) && (int64_t) row.self() > left) {
            LOG_ERR("drafter needs %zu MiB on %s, %lld MiB free (%lld MiB, the target %s takes %lld MiB): "
                    "shorten -c, lower -ub or -np, or move layers off it with -ngl or -ngld\n",
                    (row.self() + (1 << 20) - 1) >> 20, row.device.c_str(), (long long) left >> 20,
                    (long long) row.free >> 20, target > row.free ? "alone" : "beside it", (long long) target >> 20);
            return false;
        }
    }
    return true;
}

int print_pair(
        const common_params        & params,
        const llama_model_params   & mparams,
        const llama_context_params & cparams,
        const draft_request        & draft) {
    const char * path = params.model.path.c_str();
    pair_memory pair;
    try {
        pair = draft.wanted() ? measure_pair(path, mparams, cparams, *draft.extra(), GGML_LOG_LEVEL_ERROR)
                              : measure_target(path, mparams, cparams, GGML_LOG_LEVEL_ERROR);
    } catch (const std::runtime_error & error) {
        LOG_ERR("%s: %s\n", __func__, error.what());
        return 1;
    }
    if (params.fit_params_json) {
        common_json json = to_json(pair.target, pair.draft);
        json.set({"n_ctx", pair.n_ctx});
        std::printf("%s\n", json.dump().c_str());
    } else {
        print_rows(pair.target, "");
        print_rows(pair.draft, "draft ");
    }
    return 0;
}

} // namespace dflashcpp
