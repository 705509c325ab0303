#include "draft-engine.h"

#include "../common/log.h"
#include "../common/sampling.h"
#include "../src/llama-ext.h"

#include <climits>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace dflashcpp {

namespace {

constexpr int32_t N_CANDIDATES = 10; // of a DFlash row

std::string meta(const llama_model * model, const char * key, const char * otherwise) {
    char text[64] = {};
    return llama_model_meta_val_str(model, key, text, sizeof(text)) >= 0 ? text : otherwise;
}

#ifdef DFLASHCPP_LLAMA_BATCH

// A batch of the draft context: rows of features or tokens.
class draft_batch {
public:
    draft_batch(llama_context * ctx, size_t width, int32_t n_pos)
        : ctx(ctx), width(width), n_pos(n_pos), batch(llama_batch_init(llama_n_batch(ctx), 0, 1)) {}

    ~draft_batch() { llama_batch_free(batch); }

    draft_batch(const draft_batch &) = delete;
    draft_batch & operator=(const draft_batch &) = delete;

    void clear() {
        batch.n_tokens = 0;
        rows.clear();
        row_pos.clear();
    }

    void add_token(int32_t token, int32_t pos, int32_t seq, bool output) {
        batch.token[batch.n_tokens] = token;
        add(pos, seq, output);
    }

    void add_row(const float * row, int32_t pos, int32_t seq) {
        rows.insert(rows.end(), row, row + width);
        row_pos.push_back(pos);
        add(pos, seq, false);
    }

    int32_t decode() {
        if (rows.empty()) {
            return llama_decode(ctx, batch);
        }
        // positions of rows go section by section: temporal, height, width, one that is unused
        std::vector<llama_pos> pos;
        for (int32_t section = 0; section < n_pos; ++section) {
            for (const llama_pos p : row_pos) {
                pos.push_back(section < 3 ? p : 0);
            }
        }
        llama_batch view = batch;
        view.token = nullptr;
        view.embd  = rows.data();
        view.pos   = pos.data();
        return llama_decode(ctx, view);
    }

private:
    void add(int32_t pos, int32_t seq, bool output) {
        const int32_t i = batch.n_tokens++;
        batch.pos[i]       = pos;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i]    = output;
    }

    llama_context *        ctx;
    size_t                 width;
    int32_t                n_pos;
    llama_batch            batch;
    std::vector<float>     rows;
    std::vector<llama_pos> row_pos;
};

#else

class draft_batch {
public:
    draft_batch(llama_context * ctx, size_t width, int32_t) : ctx(ctx), width(width), batch(ctx) {}

    void clear() { batch.clear(); }

    void add_token(int32_t token, int32_t pos, int32_t seq, bool output) { batch.add(token, pos, seq, output); }

    // `row` is read by decode(), not here
    void add_row(const float * row, int32_t pos, int32_t seq) {
        const llama_pos sections[4] = { pos, pos, pos, 0 };
        batch.add_embd({ const_cast<float *>(row), 1, width }, sections, seq, false);
    }

    int32_t decode() { return llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()); }

private:
    llama_context * ctx;
    size_t          width;
    common_batch    batch;
};

#endif

// The best candidates of a DFlash row: a sampler of top-k alone, on the drafter's device where that can.
class top_candidates {
public:
    top_candidates(llama_context * ctx, int32_t n_seq, bool on_device) : ctx(ctx) {
        common_params_sampling params;
        params.no_perf  = false;
        params.top_k    = N_CANDIDATES;
        params.samplers = { COMMON_SAMPLER_TYPE_TOP_K };
        sampler.reset(common_sampler_init(llama_get_model(ctx), params));
        for (int32_t seq = 0; on_device && seq < n_seq; ++seq) {
            attach(seq);
        }
    }

    ~top_candidates() {
        for (size_t seq = 0; seq < chains.size(); ++seq) {
            llama_set_sampler(ctx, llama_seq_id(seq), nullptr);
            llama_sampler_free(chains[seq]);
        }
    }

    top_candidates(const top_candidates &) = delete;
    top_candidates & operator=(const top_candidates &) = delete;

    void read(int32_t row, candidate_row & out) {
        common_sampler_reset(sampler.get());
        common_sampler_sample(sampler.get(), ctx, row, true);
        const llama_token_data_array * top = common_sampler_get_candidates(sampler.get(), true);
        out.ids.clear();
        out.scores.clear();
        for (size_t i = 0; i < top->size; ++i) {
            out.ids.push_back(top->data[i].id);
            out.scores.push_back(top->data[i].logit);
        }
    }

private:
    void attach(int32_t seq) {
        llama_sampler * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
        llama_sampler_chain_add(chain, llama_sampler_init_top_k(N_CANDIDATES));
        if (int32_t(chains.size()) == seq && llama_set_sampler(ctx, seq, chain)) {
            chains.push_back(chain);
            return;
        }
        LOG_WRN("dflash: slot %d takes its candidates on the host\n", seq);
        llama_sampler_free(chain);
    }

    llama_context *              ctx;
    common_sampler_ptr           sampler;
    std::vector<llama_sampler *> chains; // by slot
};

class llama_engine : public draft_engine {
public:
    explicit llama_engine(const llama_engine_params & params)
        : target(params.target), drafter(params.drafter), shape(describe(params)),
          taps(read_taps(params)), mask(llama_vocab_mask(llama_model_get_vocab(model()))),
          batch(drafter, shape.width, shape.jumps ? 4 : 1) {
        if (!shape.lattice) {
            top = std::make_unique<top_candidates>(drafter, params.n_seq, params.sampling);
        }
        for (const int32_t layer : taps) {
            llama_set_embeddings_layer_inp(target, uint32_t(layer), true);
        }
        // the lattice comes in the rows of h_nextn, of all tokens; DFlash has its candidates in the logits
        llama_set_embeddings_nextn(drafter, true, /*masked*/ !shape.lattice);
        llama_set_causal_attn(drafter, meta(model(), "dflash.attention.causal", "false") == "true");
        row_width = size_t(llama_n_embd_nextn(drafter));
        top_k     = read_top_k(model());
    }

    const drafter_traits & traits() const override { return shape; }

    void gather(int32_t first, int32_t n, float * rows) override {
        const size_t hidden = shape.width / taps.size();
        for (size_t k = 0; k < taps.size(); ++k) {
            const float * layer = llama_get_embeddings_layer_inp(target, uint32_t(taps[k]));
            GGML_ASSERT(layer && "the target did not extract a layer that the drafter reads");
            for (int32_t i = 0; i < n; ++i) {
                std::memcpy(rows + i * shape.width + k * hidden, layer + (first + i) * hidden, hidden * sizeof(float));
            }
        }
    }

    bool inject(const std::vector<inject_row> & rows) override {
        batch.clear();
        for (const inject_row & row : rows) {
            batch.add_row(row.row, row.pos, row.seq);
        }
        return decode_batch("inject", int32_t(rows.size()));
    }

    bool decode(const std::vector<draft_block> & blocks, int32_t width) override {
        batch.clear();
        for (const draft_block & block : blocks) {
            for (int32_t i = 0; i < width; ++i) {
                batch.add_token(i == 0 ? block.anchor : mask, block.pos + i, block.seq, !shape.lattice && i > 0);
            }
        }
        return decode_batch("draft", int32_t(blocks.size()) * width);
    }

    void candidates(int32_t row, size_t predecessor, candidate_row & out) override {
        if (!shape.lattice) {
            top->read(row, out);
            return;
        }
        const float * lattice = llama_get_embeddings_nextn(drafter);
        GGML_ASSERT(lattice && "the selector of the drafter left no lattice");
        read_lattice(lattice + size_t(row) * row_width, top_k, predecessor, out);
    }

    int32_t pos_min(int32_t seq) override { return llama_memory_seq_pos_min(llama_get_memory(drafter), seq); }
    int32_t pos_max(int32_t seq) override { return llama_memory_seq_pos_max(llama_get_memory(drafter), seq); }

    void remove(int32_t seq, int32_t from, int32_t to) override {
        llama_memory_seq_rm(llama_get_memory(drafter), seq, from, to);
    }

    int64_t now_us() override { return ggml_time_us(); }

private:
    const llama_model * model() const { return llama_get_model(drafter); }

    static size_t read_top_k(const llama_model * model) {
        return size_t(std::atoi(meta(model, "dflash.selector_top_k", "0").c_str()));
    }

    static std::vector<int32_t> read_taps(const llama_engine_params & params) {
        const llama_model * model = llama_get_model(params.drafter);
        const int32_t *     first = llama_model_target_layer_ids(model);
        return std::vector<int32_t>(first, first + llama_model_target_layer_ids_n(model));
    }

    static drafter_traits describe(const llama_engine_params & params) {
        const llama_model * model  = llama_get_model(params.drafter);
        const llama_model * target = llama_get_model(params.target);
        const uint32_t      n_taps = llama_model_target_layer_ids_n(model);
        if (n_taps == 0) {
            throw std::runtime_error("this drafter is no DFlash model: it reads no layer of the target");
        }
        if (llama_model_n_embd(model) != llama_model_n_embd(target)) {
            throw std::runtime_error("the drafter was made for a target of hidden size " +
                    std::to_string(llama_model_n_embd(model)) + ", this one has " + std::to_string(llama_model_n_embd(target)));
        }
        drafter_traits t;
        t.n_seq   = params.n_seq;
        t.n_rows  = int32_t(llama_n_ubatch(params.drafter));
        t.n_ctx   = params.bounded ? INT_MAX / 2 : int32_t(llama_n_ctx_seq(params.drafter));
        t.width   = size_t(n_taps) * size_t(llama_model_n_embd(target));
        t.block   = std::atoi(meta(model, "dflash.block_size", "16").c_str());
        t.lattice = read_top_k(model) > 0;
        t.jumps   = llama_model_rope_type(model) == LLAMA_ROPE_TYPE_MROPE;
        t.sight.window       = llama_model_n_swa(model);
        t.sight.all_windowed = llama_model_all_windowed(model);
        t.sight.n_cells      = params.bounded ? llama_n_ctx(params.drafter) / uint32_t(params.n_seq) : 0;
        t.sight.n_block      = uint32_t(1 + params.n_draft);
        return t;
    }

    bool decode_batch(const char * what, int32_t n_rows) {
        const int32_t rc = batch.decode();
        if (rc != 0) {
            LOG_WRN("dflash: the draft context could not %s %d rows (%d)\n", what, n_rows, rc);
        }
        return rc == 0;
    }

    llama_context *                 target;
    llama_context *                 drafter;
    drafter_traits                  shape;
    std::vector<int32_t>            taps;
    llama_token                     mask;
    draft_batch                     batch;
    std::unique_ptr<top_candidates> top; // DFlash
    size_t                          row_width = 0; // floats of a lattice row
    size_t                          top_k     = 0; // candidates in it
};

} // namespace

std::unique_ptr<draft_engine> make_draft_engine(const llama_engine_params & params) {
    return std::make_unique<llama_engine>(params);
}

} // namespace dflashcpp
