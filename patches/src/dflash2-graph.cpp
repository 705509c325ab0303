#include "dflash2-graph.h"

#include <algorithm>

namespace dflashcpp {

namespace {

// [rank, top_k, width - 1, n_blocks]: what stands before each mask, the anchor or the candidates of the mask before
ggml_tensor * predecessor_rows(
        ggml_context * ctx, const selector_weights & weights, ggml_tensor * candidates, ggml_tensor * tokens, block_shape shape) {
    const int64_t rank   = weights.predecessor->ne[0];
    const int64_t n_mask = shape.width - 1;

    ggml_tensor * anchors = ggml_cont_1d(ctx,
            ggml_view_2d(ctx, tokens, 1, shape.n_blocks, shape.width * tokens->nb[0], 0), shape.n_blocks);
    ggml_tensor * first = ggml_reshape_4d(ctx, ggml_get_rows(ctx, weights.predecessor, anchors), rank, 1, 1, shape.n_blocks);
    first = ggml_repeat_4d(ctx, first, rank, weights.top_k, 1, shape.n_blocks);
    if (n_mask == 1) {
        return first;
    }

    ggml_tensor * rows = ggml_get_rows(ctx, weights.predecessor, candidates);
    rows = ggml_view_4d(ctx, rows, rank, weights.top_k, n_mask - 1, shape.n_blocks,
            rows->nb[1], weights.top_k * rows->nb[1], n_mask * weights.top_k * rows->nb[1], 0);
    return ggml_concat(ctx, first, rows, 2);
}

} // namespace

ggml_tensor * conv_weights(ggml_context * ctx, ggml_tensor * delta, ggml_tensor * base) {
    const int64_t n_embd   = base->ne[0];
    const int64_t slots    = base->ne[1] * base->ne[2]; // taps of both sides
    const int64_t n_groups = delta->ne[0] / slots;
    const int64_t group    = n_embd / n_groups;

    ggml_tensor * one = ggml_reshape_4d(ctx, delta, 1, n_groups, slots, delta->ne[1]);
    ggml_tensor * all = ggml_repeat_4d(ctx, one, group, n_groups, slots, delta->ne[1]);
    return ggml_add(ctx, all, ggml_reshape_3d(ctx, base, group, n_groups, slots));
}

ggml_tensor * block_conv(ggml_context * ctx, ggml_tensor * x, ggml_tensor * weights, block_shape shape, int side) {
    GGML_ASSERT(x->ne[1] == shape.n_tokens() && weights->ne[3] == shape.n_tokens());
    GGML_ASSERT(side == 0 || side == 1);
    if (!ggml_is_contiguous(x)) {
        x = ggml_cont(ctx, x);
    }
    const int64_t group    = weights->ne[0];
    const int64_t n_groups = weights->ne[1];
    const int64_t taps     = weights->ne[2] / 2;
    const size_t  row      = x->nb[1];
    const size_t  block    = shape.width * row;
    const size_t  wblock   = shape.width * weights->nb[3];

    // a tap adds the tokens `tap` before to all but the first `tap` of a block; one of the width or more adds nothing
    ggml_tensor * sum = nullptr;
    for (int64_t tap = 0; tap < std::min(taps, shape.width); ++tap) {
        const int64_t rest   = shape.width - tap;
        ggml_tensor * values = ggml_view_4d(ctx, x, group, n_groups, rest, shape.n_blocks, group * x->nb[0], row, block, 0);
        ggml_tensor * weight = ggml_view_4d(ctx, weights, group, n_groups, rest, shape.n_blocks,
                weights->nb[1], weights->nb[3], wblock, tap * weights->nb[3] + (side * taps + tap) * weights->nb[2]);
        ggml_tensor * term = ggml_mul(ctx, values, weight);
        sum = tap == 0 ? term : ggml_acc_inplace(ctx, sum, term, group * x->nb[0], row, block, tap * row);
    }
    return ggml_reshape_2d(ctx, sum, x->ne[0], shape.n_tokens());
}

ggml_tensor * mask_rows(ggml_context * ctx, ggml_tensor * x, block_shape shape) {
    GGML_ASSERT(x->ne[1] == shape.n_tokens() && shape.width > 1);
    ggml_tensor * rows = ggml_view_3d(ctx, x, x->ne[0], shape.width - 1, shape.n_blocks,
            x->nb[1], shape.width * x->nb[1], x->nb[1]);
    if (!ggml_is_contiguous(rows)) {
        rows = ggml_cont(ctx, rows);
    }
    return ggml_reshape_2d(ctx, rows, x->ne[0], shape.n_masks());
}

ggml_tensor * selector_lattice(
        ggml_context * ctx, const selector_weights & weights, ggml_tensor * logits, ggml_tensor * gate,
        ggml_tensor * tokens, block_shape shape, int64_t n_row) {
    GGML_ASSERT(tokens->ne[0] == shape.n_tokens() && n_row >= weights.row_width());
    if (shape.width < 2) {
        return ggml_fill(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_row, shape.n_tokens()), 0.0f);
    }
    GGML_ASSERT(logits->ne[1] == shape.n_masks() && gate->ne[1] == shape.n_masks());

    const int64_t top_k  = weights.top_k;
    const int64_t rank   = weights.successor->ne[0];
    const int64_t n_mask = shape.width - 1;

    ggml_tensor * candidates = ggml_top_k(ctx, logits, int(top_k));
    ggml_tensor * unary = ggml_get_rows(ctx, ggml_reshape_3d(ctx, logits, 1, logits->ne[0], logits->ne[1]), candidates);
    ggml_tensor * ids = ggml_reshape_1d(ctx, candidates, top_k * shape.n_masks());

    ggml_tensor * before = predecessor_rows(ctx, weights, ids, tokens, shape);
    ggml_tensor * after  = ggml_reshape_4d(ctx, ggml_get_rows(ctx, weights.successor, ids), rank, top_k, n_mask, shape.n_blocks);

    before = ggml_mul(ctx, before, ggml_reshape_4d(ctx, gate, rank, 1, n_mask, shape.n_blocks));
    ggml_tensor * scores = ggml_mul_mat(ctx, after, before);
    scores = ggml_add(ctx, scores, ggml_reshape_4d(ctx, unary, top_k, 1, n_mask, shape.n_blocks));

    ggml_tensor * rows = ggml_concat(ctx,
            ggml_cast(ctx, ggml_reshape_3d(ctx, candidates, top_k, n_mask, shape.n_blocks), GGML_TYPE_F32),
            ggml_reshape_3d(ctx, scores, top_k * top_k, n_mask, shape.n_blocks), 0);
    rows = ggml_pad_ext(ctx, rows, 0, int(n_row - weights.row_width()), 1, 0, 0, 0, 0, 0);
    return ggml_reshape_2d(ctx, rows, n_row, shape.n_tokens());
}

} // namespace dflashcpp
