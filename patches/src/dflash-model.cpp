#include "dflash-model.h"

#include "../src/llama-context.h"
#include "../src/llama-ext.h"
#include "../src/llama-model-loader.h"

#include <algorithm>
#include <stdexcept>

namespace dflashcpp {

namespace {

[[noreturn]] void refuse(const std::string & why) {
    throw std::runtime_error("DFlash: " + why);
}

// the numbers of an array of bools, i32 or u32; empty: no such key
std::vector<int32_t> numbers(const gguf_context * file, const char * key) {
    const int64_t id = gguf_find_key(file, key);
    if (id < 0) {
        return {};
    }
    if (gguf_get_kv_type(file, id) != GGUF_TYPE_ARRAY) {
        refuse(std::string(key) + " is not an array");
    }
    const gguf_type type = gguf_get_arr_type(file, id);
    const size_t    n    = gguf_get_arr_n(file, id);
    if (type == GGUF_TYPE_BOOL) {
        const auto * data = static_cast<const int8_t *>(gguf_get_arr_data(file, id));
        return std::vector<int32_t>(data, data + n);
    }
    if (type == GGUF_TYPE_INT32 || type == GGUF_TYPE_UINT32) {
        const auto * data = static_cast<const int32_t *>(gguf_get_arr_data(file, id));
        return std::vector<int32_t>(data, data + n);
    }
    refuse(std::string(key) + " holds " + gguf_type_name(type) + "; expected bool, i32 or u32");
}

std::vector<bool> flags(const gguf_context * file, const char * key) {
    const std::vector<int32_t> found = numbers(file, key);
    return std::vector<bool>(found.begin(), found.end());
}

uint32_t count(const gguf_context * file, const char * key) {
    const int64_t id = gguf_find_key(file, key);
    if (id < 0) {
        return 0;
    }
    if (gguf_get_kv_type(file, id) != GGUF_TYPE_UINT32) {
        refuse(std::string(key) + " is " + gguf_type_name(gguf_get_kv_type(file, id)) + "; expected u32");
    }
    return gguf_get_val_u32(file, id);
}

// every layer, or `dflash.attention.causal_pattern` where they differ; left out: not causal
std::vector<bool> causality(const gguf_context * file, bool all, uint32_t n_layer) {
    const std::vector<bool> each = flags(file, "dflash.attention.causal_pattern");
    return each.empty() ? std::vector<bool>(n_layer, all) : each;
}

// Which targets set llm_graph_result::t_layer_inp: src/models/*.cpp of the base.
bool exposes_layers(llm_arch arch) {
    switch (arch) {
        case LLM_ARCH_GEMMA4:
        case LLM_ARCH_LLAMA:
        case LLM_ARCH_LLAMA_EMBED:
        case LLM_ARCH_OPENAI_MOE:
        case LLM_ARCH_QWEN3:
        case LLM_ARCH_QWEN35:
        case LLM_ARCH_QWEN35MOE:
        case LLM_ARCH_QWEN3MOE:
#ifdef DFLASHCPP_BASE_4DF29BE
        case LLM_ARCH_DEEPSEEK4:
        case LLM_ARCH_MINIMAX_01:
        case LLM_ARCH_MINIMAX_M2:
        case LLM_ARCH_MUSE_GLIMMER:
        case LLM_ARCH_NEMOTRON_H:
        case LLM_ARCH_NEMOTRON_H_MOE:
        case LLM_ARCH_QWEN3NEXT:
#endif
            return true;
        default:
            return false;
    }
}

target_shape shape_of(const llama_model & target) {
    const auto rows = [](const ggml_tensor * t) { return t ? t->ne[1] : 0; };
    return {
        target.arch_name(), target.hparams.n_layer(), target.hparams.n_embd,
        rows(target.output), rows(target.tok_embd), exposes_layers(target.arch),
    };
}

} // namespace

void dflash_model::load_arch_hparams(llama_model_loader & ml) {
    const gguf_context * file = ml.metadata;
    drafter_settings & s = settings;

    s.n_layer = hparams.n_layer();
    s.n_embd  = hparams.n_embd;
    s.n_rot   = hparams.n_rot_full;
    s.taps    = target_layer_ids = numbers(file, "dflash.target_layers");

    s.block_size  = count(file, "dflash.block_size");
    s.conv_kernel = count(file, "dflash.conv_kernel_size");
    s.conv_group  = count(file, "dflash.conv_group_size");
    s.rank        = count(file, "dflash.selector_rank");
    s.top_k       = count(file, "dflash.selector_top_k");

    s.window        = count(file, "dflash.attention.sliding_window");
    s.sliding       = flags(file, "dflash.attention.sliding_window_pattern");
    s.causal        = causality(file, hparams.causal_attn && gguf_find_key(file, "dflash.attention.causal") >= 0, s.n_layer);
    s.rope_sections = numbers(file, "dflash.rope.dimension_sections");

    ml.get_key(LLM_KV_ATTENTION_LAYERNORM_RMS_EPS, hparams.f_norm_rms_eps);
    ml.get_key(LLM_KV_LOGIT_SCALE,                 s.logit_scale,     false);
    ml.get_key(LLM_KV_FINAL_LOGIT_SOFTCAPPING,     s.softcap,         false);
    ml.get_key(LLM_KV_EMBEDDING_SCALE,             s.embedding_scale, false);
    ml.get_key(LLM_KV_ATTENTION_SCALE,             s.attention_scale, false);
    ml.get_key(LLM_KV_ATTENTION_VALUE_SCALE,       s.value_scale,     false);
    ml.get_key(LLM_KV_HIDDEN_ACT,                  s.activation,      false);

    // rows of features come in through the embd of a batch, rows of the lattice go out as nextn rows
    hparams.n_embd_inp_impl = uint32_t(s.taps.size()) * s.n_embd;
    hparams.n_embd_out_impl = s.is_dflash2() ? s.lattice_row() : 0;
    hparams.causal_attn     = false; // the masks are made layer by layer

    if (s.window > 0 && s.sliding.size() == s.n_layer && std::count(s.sliding.begin(), s.sliding.end(), true) > 0) {
        hparams.swa_type = LLAMA_SWA_TYPE_STANDARD;
        hparams.n_swa    = s.window;
        std::copy(s.sliding.begin(), s.sliding.end(), hparams.is_swa_impl.begin());
        hparams.rope_freq_base_train_swa  = hparams.rope_freq_base_train;
        hparams.rope_freq_scale_train_swa = hparams.rope_freq_scale_train;
    }

    type = LLM_TYPE_UNKNOWN;
}

ggml_tensor * dflash_model::tensor(llm_tensor which, const char * suffix, std::initializer_list<int64_t> ne, int il, bool needed) {
    const LLM_TN_IMPL name = il < 0 ? tn(which, suffix) : tn(which, suffix, il);
    created.push_back(name.str());
    return create_tensor(name, ne, needed ? 0 : TENSOR_NOT_REQUIRED);
}

void dflash_model::load_ends() {
    const int64_t n_embd  = hparams.n_embd;
    const int64_t n_vocab = vocab.n_tokens();

    const ggml_tensor * map = ml->get_tensor_meta("d2t");
    const int64_t n_head = map ? map->ne[0] : n_vocab;
    if (map) {
        d2t = tensor(LLM_TENSOR_D2T, nullptr, { n_head });
        if (map->type != GGML_TYPE_I64 || settings.is_dflash2()) {
            refuse(settings.is_dflash2() ? "d2t: a DFlash-2 drafter works on the whole vocabulary" : "d2t must be i64");
        }
    }

    fc              = tensor(LLM_TENSOR_FC,              "weight", { hparams.n_embd_inp(), n_embd });
    output_norm_enc = tensor(LLM_TENSOR_ENC_OUTPUT_NORM, "weight", { n_embd });
    output_norm     = tensor(LLM_TENSOR_OUTPUT_NORM,     "weight", { n_embd });
    tok_embd        = tensor(LLM_TENSOR_TOKEN_EMBD,      "weight", { n_embd, n_vocab }, -1, false);
    output          = tensor(LLM_TENSOR_OUTPUT,          "weight", { n_embd, n_head  }, -1, map != nullptr);
    if (output == nullptr && tok_embd != nullptr) {
        output = create_tensor(tn(LLM_TENSOR_TOKEN_EMBD, "weight"), { n_embd, n_vocab }, TENSOR_DUPLICATED);
    }
}

void dflash_model::load_layer(int il) {
    const int64_t n_embd  = hparams.n_embd;
    const int64_t n_ff    = hparams.n_ff(il);
    const int64_t n_q     = int64_t(hparams.n_embd_head_k(il)) * hparams.n_head(il);
    const int64_t d_head  = hparams.n_embd_head_k(il);
    llama_layer & layer   = layers[il];

    layer.attn_norm   = tensor(LLM_TENSOR_ATTN_NORM,   "weight", { n_embd }, il);
    layer.wq          = tensor(LLM_TENSOR_ATTN_Q,      "weight", { n_embd, n_q }, il);
    layer.wk          = tensor(LLM_TENSOR_ATTN_K,      "weight", { n_embd, hparams.n_embd_k_gqa(il) }, il);
    layer.wv          = tensor(LLM_TENSOR_ATTN_V,      "weight", { n_embd, hparams.n_embd_v_gqa(il) }, il);
    layer.wo          = tensor(LLM_TENSOR_ATTN_OUT,    "weight", { n_q, n_embd }, il);
    layer.attn_q_norm = tensor(LLM_TENSOR_ATTN_Q_NORM, "weight", { d_head }, il);
    layer.attn_k_norm = tensor(LLM_TENSOR_ATTN_K_NORM, "weight", { d_head }, il);
    layer.attn_sinks  = tensor(LLM_TENSOR_ATTN_SINKS,  "weight", { hparams.n_head(il) }, il, false);

    layer.ffn_norm = tensor(LLM_TENSOR_FFN_NORM, "weight", { n_embd }, il);
    layer.ffn_gate = tensor(LLM_TENSOR_FFN_GATE, "weight", { n_embd, n_ff }, il);
    layer.ffn_up   = tensor(LLM_TENSOR_FFN_UP,   "weight", { n_embd, n_ff }, il);
    layer.ffn_down = tensor(LLM_TENSOR_FFN_DOWN, "weight", { n_ff, n_embd }, il);

    // one tensor for all layers, without a number in its name: the later layers share the first one's
    layer.rope_freqs = create_tensor(tn(LLM_TENSOR_ROPE_FREQS, "weight", il), { hparams.n_rot(il) / 2 },
            TENSOR_NOT_REQUIRED | (il > 0 ? TENSOR_DUPLICATED : 0));

    if (settings.is_dflash2()) {
        const int64_t taps = settings.conv_kernel;
        const int64_t rows = 2 * taps * n_embd / settings.conv_group;
        conv_layer & c = conv[il];
        c.attn_base = tensor(LLM_TENSOR_DFLASH_ATTN_CONV_BASE, nullptr,  { n_embd, taps, 2 }, il);
        c.attn_proj = tensor(LLM_TENSOR_DFLASH_ATTN_CONV_PROJ, "weight", { n_embd, rows },    il);
        c.ffn_base  = tensor(LLM_TENSOR_DFLASH_FFN_CONV_BASE,  nullptr,  { n_embd, taps, 2 }, il);
        c.ffn_proj  = tensor(LLM_TENSOR_DFLASH_FFN_CONV_PROJ,  "weight", { n_embd, rows },    il);
        if (c.attn_base->type != GGML_TYPE_F32 || c.ffn_base->type != GGML_TYPE_F32) {
            refuse("blk." + std::to_string(il) + ": the convolution's base kernels must be f32");
        }
    }
}

void dflash_model::load_selector() {
    const int64_t rank    = settings.rank;
    const int64_t n_vocab = vocab.n_tokens();
    selector_predecessor = tensor(LLM_TENSOR_DFLASH_SELECTOR_PREDECESSOR, "weight", { rank, n_vocab });
    selector_successor   = tensor(LLM_TENSOR_DFLASH_SELECTOR_SUCCESSOR,   "weight", { rank, n_vocab });
    selector_hidden      = tensor(LLM_TENSOR_DFLASH_SELECTOR_HIDDEN,      "weight", { hparams.n_embd, rank });
}

// the loader would only say how many tensors are left over
void dflash_model::refuse_unplaced(const llama_model_loader & ml) const {
    for (const auto & entry : ml.weights_map) {
        const std::string & name = entry.first;
        const bool scale = name.size() > 6 && name.compare(name.size() - 6, 6, ".scale") == 0;
        if (scale || name == "rope_freqs.weight" || std::find(created.begin(), created.end(), name) != created.end()) {
            continue;
        }
        const bool bias = name.size() > 5 && name.compare(name.size() - 5, 5, ".bias") == 0;
        refuse("the tensor " + name + (bias ? " is a bias, and DFlash layers have none" : " has no place in a drafter with these settings"));
    }
}

void dflash_model::load_arch_tensors(llama_model_loader & ml) {
    settings.n_vocab    = vocab.n_tokens();
    settings.mask_token = vocab.token_mask();

    const std::string why = fault(settings);
    if (!why.empty()) {
        refuse(why);
    }
    if (hparams.n_embd_head_k() != hparams.n_embd_head_v()) {
        refuse("dflash.attention.key_length and value_length differ");
    }

    conv.resize(settings.n_layer);
    load_ends();
    for (uint32_t il = 0; il < settings.n_layer; ++il) {
        load_layer(int(il));
    }
    if (settings.is_dflash2()) {
        load_selector();
    }
    refuse_unplaced(ml);
}

ggml_tensor * dflash_model::embedding_of(const llama_model * target) const {
    return tok_embd || target == nullptr ? tok_embd : target->tok_embd;
}

ggml_tensor * dflash_model::head_of(const llama_model * target) const {
    return output || target == nullptr ? output : target->output;
}

void check_target(const llama_model & drafter, const llama_model * target) {
    const auto & model = static_cast<const dflash_model &>(drafter);
    if (target == nullptr) {
        if (model.tok_embd == nullptr || model.output == nullptr) {
            refuse("the drafter borrows its target's token embedding and head, and no target was given");
        }
        return;
    }
    const std::string why = misfit(model.settings, shape_of(*target), model.tok_embd != nullptr, model.output != nullptr);
    if (!why.empty()) {
        refuse(why);
    }
}

uint32_t block_size(const llama_model & drafter) {
    return static_cast<const dflash_model &>(drafter).settings.block_size;
}

} // namespace dflashcpp

int32_t llama_model_dflash_selector_top_k(const llama_model * model) {
    const auto * drafter = dynamic_cast<const dflashcpp::dflash_model *>(model);
    return drafter ? int32_t(drafter->settings.top_k) : 0;
}

bool llama_model_all_windowed(const llama_model * model) {
    bool all = model->hparams.n_swa > 0;
    for (uint32_t il = 0; il < model->hparams.n_layer(); ++il) {
        all = all && model->hparams.is_swa(il);
    }
    return all;
}

int32_t llama_n_embd_nextn(const llama_context * ctx) {
    return int32_t(ctx->get_model().hparams.n_embd_out());
}
