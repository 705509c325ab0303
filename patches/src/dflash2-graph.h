// The two parts of a DFlash-2 drafter that DFlash does not have, as ggml graphs: the local convolution
// inside a block and the candidate selector. They need ggml alone, so that llama.cpps which know DFlash-2,
// DFlash only, or neither build the very same graph.
//
// A draft pass holds `n_blocks` blocks of `width` tokens, block after block; the first token of a block is
// its anchor, the others are masks. All tensors are F32 but for the weights, token ids and candidates.

#pragma once

#include "ggml.h"

#include <cstdint>

namespace dflashcpp {

struct block_shape {
    int64_t width;
    int64_t n_blocks;

    int64_t n_tokens() const { return width * n_blocks; }
    int64_t n_masks()  const { return (width - 1) * n_blocks; }
};

// Weights of the convolutions in front of a sublayer and behind it, for every token [group, n_groups, 2 * taps, n_tokens]:
// base + delta. delta: [2 * taps * n_groups, n_tokens], projected from the input of the sublayer; base: [n_embd, taps, 2].
ggml_tensor * conv_weights(ggml_context * ctx, ggml_tensor * delta, ggml_tensor * base);

// Local convolution of x [n_embd, n_tokens] inside each block; what lies before a block counts as 0:
//   y[i][c] = sum over taps t <= i of weights[side][t][i][c] * x[i - t][c]
// side 0 is in front of the sublayer, 1 behind it.
ggml_tensor * block_conv(ggml_context * ctx, ggml_tensor * x, ggml_tensor * weights, block_shape shape, int side);

// The rows of x [n, n_tokens] that predict a token: all but the anchors, [n, n_masks]. Needs width > 1.
ggml_tensor * mask_rows(ggml_context * ctx, ggml_tensor * x, block_shape shape);

struct selector_weights {
    ggml_tensor * predecessor; // [rank, n_vocab]
    ggml_tensor * successor;   // [rank, n_vocab]
    int64_t       top_k;

    // numbers in one row of the lattice
    int64_t row_width() const { return top_k + top_k * top_k; }
};

// The lattice [n_row, n_tokens]: for each mask its top_k candidates (ids as numbers, best logits, in no
// order to rely on) and behind them, for each candidate of the mask before (top_k times the same for the
// first mask: behind the anchor), the scores of the candidates: logit + sum over r of
// predecessor[p][r] * gate[r] * successor[c][r]. Rows of anchors, and what n_row has over row_width(), are 0.
// logits: [n_vocab, n_masks], gate: [rank, n_masks] (both unused, may be null, when width is 1),
// tokens: [n_tokens] I32
ggml_tensor * selector_lattice(
        ggml_context * ctx, const selector_weights & weights, ggml_tensor * logits, ggml_tensor * gate,
        ggml_tensor * tokens, block_shape shape, int64_t n_row);

} // namespace dflashcpp
