// The two passes of dflash-model.h as ggml graphs.

#include "dflash-model.h"

#include "dflash2-graph.h"

#include "../src/llama-graph.h"
#include "../src/llama-kv-cache.h"
#include "../src/llama-kv-cache-iswa.h"

#include <cmath>

namespace dflashcpp {

namespace {

// One of the context's two caches (sliding layers have their own) as a pass uses it: where rows go, the
// rotation of a quantised cache, and who sees whom with and without causality.
class cache_input : public llm_graph_input_i {
public:
    cache_input(bool has_window, bool sliding) : has_window(has_window), sliding(sliding) {}

    const llama_kv_cache_context * cache = nullptr;

    ggml_tensor * k_idxs = nullptr;
    ggml_tensor * v_idxs = nullptr;
    ggml_tensor * k_rot  = nullptr;
    ggml_tensor * v_rot  = nullptr;
    ggml_tensor * mask[2] = { nullptr, nullptr }; // [causal]

    void find(const llama_memory_context_i * memory) {
        if (!has_window) {
            cache = static_cast<const llama_kv_cache_context *>(memory);
            return;
        }
        const auto * both = static_cast<const llama_kv_cache_iswa_context *>(memory);
        cache = sliding ? both->get_swa() : both->get_base();
    }

    void set_input(const llama_ubatch * ubatch) override {
        cache->set_input_k_idxs(k_idxs, ubatch);
        cache->set_input_v_idxs(v_idxs, ubatch);
        for (bool causal : { false, true }) {
            if (mask[causal]) {
                cache->set_input_kq_mask(mask[causal], ubatch, causal);
            }
        }
        if (k_rot) {
            cache->set_input_k_rot(k_rot);
        }
        if (v_rot) {
            cache->set_input_v_rot(v_rot);
        }
    }

    bool can_reuse(const llm_graph_params & params) override {
        find(params.mctx);
        bool same = k_idxs->ne[0] == int64_t(params.ubatch.n_tokens);
        for (const ggml_tensor * each : mask) {
            same = same && (each == nullptr || each->ne[0] == int64_t(cache->get_n_kv()));
        }
        return same;
    }

private:
    const bool has_window;
    const bool sliding;
};

ggml_tensor * rotated(ggml_context * ctx, ggml_tensor * x, ggml_tensor * rot) {
    if (rot == nullptr) {
        return x;
    }
    if (!ggml_is_contiguous(x)) {
        x = ggml_cont(ctx, x);
    }
    ggml_tensor * rows = ggml_reshape_2d(ctx, x, rot->ne[0], ggml_nelements(x) / rot->ne[0]);
    rows = ggml_mul_mat(ctx, rot, rows);
    ggml_mul_mat_set_hint(rows, GGML_HINT_SRC0_IS_HADAMARD);
    return ggml_reshape_4d(ctx, rows, x->ne[0], x->ne[1], x->ne[2], x->ne[3]);
}

struct dflash_graph : public llm_graph_context {
    const dflash_model     & model;
    const drafter_settings & settings;
    const llama_model      * target;

    ggml_tensor * positions = nullptr;
    cache_input * caches[2] = { nullptr, nullptr }; // [sliding]

    dflash_graph(const dflash_model & model, const llm_graph_params & params) :
        llm_graph_context(params),
        model(model), settings(model.settings),
        target(cparams.ctx_other ? llama_get_model(cparams.ctx_other) : nullptr) {
        // the result outlives the pass before this one
        res->t_h_nextn = nullptr;

        positions = build_inp_pos();
        if (ubatch.embd) {
            inject();
        } else {
            draft();
        }
    }

    cache_input * cache_of(int il) {
        const bool sliding = hparams.is_swa(il);
        if (caches[sliding] == nullptr) {
            auto input = std::make_unique<cache_input>(hparams.swa_type != LLAMA_SWA_TYPE_NONE, sliding);
            input->find(mctx);
            input->k_idxs = input->cache->build_input_k_idxs(ctx0, ubatch);
            input->v_idxs = input->cache->build_input_v_idxs(ctx0, ubatch);
            input->k_rot  = input->cache->build_input_k_rot(ctx0);
            input->v_rot  = input->cache->build_input_v_rot(ctx0);
            caches[sliding] = static_cast<cache_input *>(res->add_input(std::move(input)));
        }
        return caches[sliding];
    }

    ggml_tensor * mask_of(int il) {
        ggml_tensor *& mask = cache_of(il)->mask[settings.causal[il]];
        if (mask == nullptr) {
            const int64_t n_stream = cparams.kv_unified ? 1 : ubatch.n_seqs_unq;
            mask = ggml_new_tensor_4d(ctx0, cparams.flash_attn ? GGML_TYPE_F16 : GGML_TYPE_F32,
                    cache_of(il)->cache->get_n_kv(), n_tokens / n_stream, 1, n_stream);
            ggml_set_input(mask);
        }
        return mask;
    }

    ggml_tensor * turned(ggml_tensor * x, int il) {
        return ggml_rope_ext(ctx0, x, positions, model.get_rope_factors(cparams, il), n_rot, rope_type, n_ctx_orig,
                freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow);
    }

    // keys and values of x [n_embd, n_tokens] into the cache of layer il
    void remember(ggml_tensor * x, int il) {
        const llama_layer & layer = model.layers[il];
        cache_input * input = cache_of(il);

        ggml_tensor * k = build_lora_mm(layer.wk, x, layer.wk_s);
        ggml_tensor * v = build_lora_mm(layer.wv, x, layer.wv_s);
        k = ggml_reshape_3d(ctx0, k, n_embd_head_k, n_head_kv, n_tokens);
        v = ggml_reshape_3d(ctx0, v, n_embd_head_v, n_head_kv, n_tokens);
        k = turned(build_norm(k, layer.attn_k_norm, nullptr, LLM_NORM_RMS, il), il);
        cb(k, "k", il);
        cb(v, "v", il);

        k = rotated(ctx0, k, input->k_rot);
        v = rotated(ctx0, v, input->v_rot);
        ggml_build_forward_expand(gf, input->cache->cpy_k(ctx0, k, input->k_idxs, il));
        ggml_build_forward_expand(gf, input->cache->cpy_v(ctx0, v, input->v_idxs, il));
    }

    void inject() {
        auto input = std::make_unique<llm_graph_input_embd>(hparams.n_embd_inp());
        input->embd = ggml_new_tensor_2d(ctx0, GGML_TYPE_F32, hparams.n_embd_inp(), n_tokens);
        ggml_set_input(input->embd);
        ggml_tensor * features = input->embd;
        res->add_input(std::move(input));

        ggml_tensor * z = build_norm(build_lora_mm(model.fc, features), model.output_norm_enc, nullptr, LLM_NORM_RMS, -1);
        cb(z, "encoded", -1);
        for (int il = 0; il < n_layer; ++il) {
            remember(z, il);
        }
    }

    block_shape shape() const {
        const int64_t n_blocks = std::max<int64_t>(ubatch.n_seqs_unq, 1);
        GGML_ASSERT(n_tokens % n_blocks == 0 && "blocks of one pass must be of one width");
        return { n_tokens / n_blocks, n_blocks };
    }

    void draft() {
        auto input = std::make_unique<llm_graph_input_embd>(n_embd);
        input->tokens = ggml_new_tensor_1d(ctx0, GGML_TYPE_I32, n_tokens);
        ggml_set_input(input->tokens);
        ggml_tensor * tokens = input->tokens;
        res->add_input(std::move(input));

        ggml_tensor * x = ggml_get_rows(ctx0, model.embedding_of(target), tokens);
        if (settings.embedding_scale != 0.0f) {
            x = ggml_scale(ctx0, x, settings.embedding_scale);
        }
        cb(x, "block", -1);

        for (int il = 0; il < n_layer; ++il) {
            const conv_layer & conv = model.conv[il];
            x = sublayer(x, model.layers[il].attn_norm, conv.attn_proj, conv.attn_base, il, [&](ggml_tensor * u) { return attention(u, il); });
            x = sublayer(x, model.layers[il].ffn_norm,  conv.ffn_proj,  conv.ffn_base,  il, [&](ggml_tensor * u) { return feed_forward(u, il); });
            cb(x, "layer_out", il);
        }
        if (settings.is_dflash2()) {
            select(x, tokens);
        } else {
            predict(x);
        }
    }

    // x + body(norm(x)); DFlash-2 mixes each row with the ones before it on the way in and out
    template <typename Body>
    ggml_tensor * sublayer(ggml_tensor * x, ggml_tensor * norm, ggml_tensor * proj, ggml_tensor * base, int il, Body body) {
        ggml_tensor * u = build_norm(x, norm, nullptr, LLM_NORM_RMS, il);
        if (proj == nullptr) {
            return ggml_add(ctx0, x, body(u));
        }
        ggml_tensor * weights = conv_weights(ctx0, build_lora_mm(proj, u), base);
        ggml_tensor * out     = body(block_conv(ctx0, u, weights, shape(), 0));
        return ggml_add(ctx0, x, block_conv(ctx0, out, weights, shape(), 1));
    }

    ggml_tensor * attention(ggml_tensor * u, int il) {
        const llama_layer & layer = model.layers[il];
        cache_input * input = cache_of(il);

        ggml_tensor * q = ggml_reshape_3d(ctx0, build_lora_mm(layer.wq, u, layer.wq_s), n_embd_head_k, n_head, n_tokens);
        q = turned(build_norm(q, layer.attn_q_norm, nullptr, LLM_NORM_RMS, il), il);
        cb(q, "q", il);
        q = rotated(ctx0, q, input->k_rot);
        ggml_build_forward_expand(gf, q);
        remember(u, il);

        const float scale = settings.attention_scale != 0.0f ? settings.attention_scale : 1.0f / std::sqrt(float(n_embd_head_k));
        ggml_tensor * out = build_attn_mha(q, input->cache->get_k(ctx0, il), input->cache->get_v(ctx0, il),
                nullptr, mask_of(il), layer.attn_sinks, nullptr, scale, il);
        out = rotated(ctx0, out, input->v_rot);
        out = build_lora_mm(layer.wo, out, layer.wo_s);
        return settings.value_scale != 0.0f ? ggml_scale(ctx0, out, settings.value_scale) : out;
    }

    ggml_tensor * feed_forward(ggml_tensor * u, int il) {
        const llama_layer & layer = model.layers[il];
        return build_ffn(u,
                layer.ffn_up,   nullptr, layer.ffn_up_s,
                layer.ffn_gate, nullptr, layer.ffn_gate_s,
                layer.ffn_down, nullptr, layer.ffn_down_s,
                nullptr, settings.activation == "silu" ? LLM_FFN_SILU : LLM_FFN_GELU, LLM_FFN_PAR, il);
    }

    // logits of final-normed rows, after multiplier and soft-cap
    ggml_tensor * logits_of(ggml_tensor * rows) {
        ggml_tensor * logits = build_lora_mm(model.head_of(target), rows);
        if (settings.logit_scale != 0.0f) {
            logits = ggml_scale(ctx0, logits, settings.logit_scale);
        }
        if (settings.softcap > 0.0f) {
            logits = ggml_scale(ctx0, logits, 1.0f / settings.softcap);
            logits = ggml_scale(ctx0, ggml_tanh(ctx0, logits), settings.softcap);
        }
        return logits;
    }

    // DFlash: logits of the rows that are asked for
    void predict(ggml_tensor * x) {
        x = ggml_get_rows(ctx0, x, build_inp_out_ids());
        ggml_tensor * rows   = build_norm(x, model.output_norm, nullptr, LLM_NORM_RMS, -1);
        ggml_tensor * logits = logits_of(rows);
        if (model.d2t) {
            logits = on_the_whole_vocabulary(logits);
        }
        cb(logits, "result_output", -1);
        res->t_logits = logits;
        ggml_build_forward_expand(gf, logits);
    }

    // tokens that a reduced head does not know have no chance
    ggml_tensor * on_the_whole_vocabulary(ggml_tensor * logits) {
        const int64_t n_vocab = model.vocab.n_tokens();
        const int64_t n_known = logits->ne[0];
        const int64_t n_rows  = logits->ne[1];
        ggml_tensor * all = ggml_fill(ctx0, ggml_new_tensor_3d(ctx0, GGML_TYPE_F32, 1, n_vocab, n_rows), -INFINITY);
        all = ggml_set_rows(ctx0, all,
                ggml_reshape_3d(ctx0, logits, 1, n_known, n_rows),
                ggml_reshape_3d(ctx0, model.d2t, n_known, 1, 1));
        return ggml_reshape_2d(ctx0, all, n_vocab, n_rows);
    }

    // DFlash-2: the lattice, of all rows
    void select(ggml_tensor * x, ggml_tensor * tokens) {
        const selector_weights weights = { model.selector_predecessor, model.selector_successor, settings.top_k };
        ggml_tensor * logits = nullptr;
        ggml_tensor * gate   = nullptr;
        if (shape().width > 1) {
            ggml_tensor * rows = build_norm(mask_rows(ctx0, x, shape()), model.output_norm, nullptr, LLM_NORM_RMS, -1);
            logits = logits_of(rows);
            gate   = build_lora_mm(model.selector_hidden, rows);
        }
        ggml_tensor * lattice = selector_lattice(ctx0, weights, logits, gate, tokens, shape(), hparams.n_embd_out());
        cb(lattice, "lattice", -1);
        res->t_h_nextn = lattice;
        ggml_build_forward_expand(gf, lattice);
    }
};

} // namespace

std::unique_ptr<llm_graph_context> dflash_model::build_arch_graph(const llm_graph_params & params) const {
    return std::make_unique<dflash_graph>(*this, params);
}

} // namespace dflashcpp
