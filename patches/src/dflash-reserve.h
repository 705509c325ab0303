// How many rows the context of a block drafter (DFlash, DSpark) has to be sized for.
//
// Such a context does two unlike things: it drafts n_seq blocks of 1 + n_max tokens, with the head
// over the whole vocabulary, and it injects target features, with no head at all. Sizing both for
// the target's ubatch costs 4 B x n_ubatch x n_vocab of logits that nothing ever reads.
//
// Plain numbers only, so that this file compiles and is tested without llama.cpp.

#pragma once

#include <algorithm>
#include <cstdint>

namespace dflashcpp {

// Rows of one injection pass when nothing else was asked for: prompt speed is flat from here up
// (benchmarks/draft_buffer.py), the graph input alone is taps x hidden x rows x 4 B.
constexpr uint32_t DEFAULT_INJECT_ROWS = 128;

// Rows that all sequences together draft in one pass, at most `n_outputs_max`.
// block_size: trained block of the drafter, 0 when unknown.
inline uint32_t draft_rows(uint32_t n_outputs_max, uint32_t n_seq_max, uint32_t block_size) {
    const uint64_t trained = block_size > 0 ? uint64_t(n_seq_max) * block_size : n_outputs_max;
    const uint64_t rows    = std::min<uint64_t>(n_outputs_max, trained);
    return uint32_t(std::max<uint64_t>(rows, std::max(n_seq_max, 1u)));
}

// ubatch of the draft context: one injection pass, or the blocks of all sequences where that is
// more, because attention inside a block is not causal and a block must not be split.
// n_wanted: rows asked for per injection pass, 0 for the default; n_ubatch_tgt: the target's ubatch.
inline uint32_t draft_ubatch(uint32_t n_wanted, uint32_t n_ubatch_tgt, uint32_t n_parallel, uint32_t n_block) {
    const uint32_t n_inject = n_wanted > 0 ? n_wanted : std::min(DEFAULT_INJECT_ROWS, n_ubatch_tgt);
    const uint64_t n_blocks = uint64_t(std::max(n_parallel, 1u)) * n_block;
    return uint32_t(std::min<uint64_t>(std::max<uint64_t>({ n_inject, n_blocks, 1 }), UINT32_MAX));
}

// Tokens of the draft cache over all slots: `wanted` (0: as many as the target's), never more than the
// target's, never less than one injection pass and one block for every slot.
inline uint32_t draft_context(uint32_t wanted, uint32_t n_ctx_tgt, uint32_t n_parallel, uint32_t n_ubatch, uint32_t n_block) {
    if (wanted == 0) {
        return n_ctx_tgt;
    }
    const uint64_t least = uint64_t(std::max(n_parallel, 1u)) * (uint64_t(n_ubatch) + n_block);
    return uint32_t(std::min<uint64_t>(n_ctx_tgt, std::max<uint64_t>(wanted, least)));
}

// First position that a sequence keeps in a bounded draft cache of `n_cells` cells, so that rows up to
// `pos_last` and a block behind them find room: the oldest go, whether they are one or a prompt.
inline int32_t draft_keep_from(int32_t pos_last, uint32_t n_cells, uint32_t n_block) {
    const int64_t first = int64_t(pos_last) + 1 + n_block - n_cells;
    return int32_t(std::max<int64_t>(first, 0));
}

} // namespace dflashcpp
