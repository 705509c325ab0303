// Which keys a query of a drafter sees, and for which layers that needs a mask of its own.
//
// A layer may be causal or not (it then sees the whole block it stands in) and may slide (look back over a
// window only); every combination occurs. Plain numbers only, so that this file is tested without llama.cpp.

#pragma once

#include <cstdint>

namespace dflashcpp {

// Positions of one sequence. window: keys looked back over, the query's own among them; 0 for no window.
inline bool sees(int32_t query, int32_t key, bool causal, int32_t window) {
    if (causal && key > query) {
        return false;
    }
    return window <= 0 || int64_t(query) - key < window;
}

// Whether any layer that slides (or, with `slides` false, any that does not) has another causality than
// the context. causal, sliding: one number a layer, 0 or not.
inline bool needs_other_mask(const uint32_t * causal, const uint32_t * sliding, int n_layer, bool slides, bool context_causal) {
    for (int il = 0; il < n_layer; ++il) {
        if ((sliding[il] != 0) == slides && (causal[il] != 0) != context_causal) {
            return true;
        }
    }
    return false;
}

} // namespace dflashcpp
