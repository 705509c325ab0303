#include "dflash-settings.h"

namespace dflashcpp {

namespace {

std::string number(int64_t value) {
    return std::to_string(value);
}

std::string fault_of_version_2(const drafter_settings & s) {
    const struct { const char * key; uint32_t value; } needed[] = {
        { "conv_kernel_size", s.conv_kernel }, { "conv_group_size", s.conv_group },
        { "selector_rank",    s.rank        }, { "block_size",      s.block_size },
    };
    for (const auto & each : needed) {
        if (each.value == 0) {
            return std::string("a DFlash-2 drafter (dflash.selector_top_k ") + number(s.top_k) + ") needs dflash." + each.key;
        }
    }
    if (s.n_embd % s.conv_group != 0) {
        return "dflash.conv_group_size " + number(s.conv_group) + " does not divide the hidden size " + number(s.n_embd);
    }
    if (s.top_k > s.n_vocab) {
        return "dflash.selector_top_k " + number(s.top_k) + " is more than the " + number(s.n_vocab) + " tokens of the vocabulary";
    }
    return "";
}

std::string fault_of_layers(const drafter_settings & s) {
    if (s.window > 0 && s.sliding.size() != s.n_layer) {
        return "dflash.attention.sliding_window_pattern has " + number(s.sliding.size()) + " entries for " + number(s.n_layer) + " layers";
    }
    for (bool slides : s.sliding) {
        if (slides && s.window == 0) {
            return "dflash.attention.sliding_window_pattern has sliding layers, but there is no dflash.attention.sliding_window";
        }
    }
    if (!s.causal.empty() && s.causal.size() != s.n_layer) {
        return "dflash.attention.causal_pattern has " + number(s.causal.size()) + " entries for " + number(s.n_layer) + " layers";
    }
    return "";
}

// text stands at one position in all dimensions: only then is M-RoPE the plain rotation
std::string fault_of_rope(const drafter_settings & s) {
    for (size_t i = 1; i < s.rope_sections.size(); ++i) {
        if (s.rope_sections[i] != 0) {
            return "dflash.rope.dimension_sections must be that of text, [" + number(s.n_rot / 2) + ", 0, 0, 0]";
        }
    }
    return "";
}

} // namespace

std::string fault(const drafter_settings & s) {
    if (s.taps.empty()) {
        return "dflash.target_layers is missing: nobody knows which layers of the target the drafter reads";
    }
    for (int32_t tap : s.taps) {
        if (tap < 0) {
            return "dflash.target_layers names the layer " + number(tap);
        }
    }
    if (s.n_vocab == 0) {
        return "the file has no vocabulary (tokenizer.ggml.tokens)";
    }
    if (s.mask_token < 0 || uint32_t(s.mask_token) >= s.n_vocab) {
        return "tokenizer.ggml.mask_token_id is " + (s.mask_token < 0 ? "missing" : number(s.mask_token)) +
                "; it must be one of the " + number(s.n_vocab) + " tokens of the vocabulary";
    }
    if (s.block_size == 1) {
        return "dflash.block_size 1 leaves nothing to draft";
    }
    if (s.activation != "silu" && s.activation != "gelu" && s.activation != "gelu_pytorch_tanh") {
        return "dflash.hidden_activation is " + s.activation + "; known are silu, gelu and gelu_pytorch_tanh";
    }
    for (const std::string & found : { fault_of_layers(s), fault_of_rope(s), s.is_dflash2() ? fault_of_version_2(s) : "" }) {
        if (!found.empty()) {
            return found;
        }
    }
    return "";
}

std::string misfit(const drafter_settings & s, const target_shape & target, bool own_embedding, bool own_head) {
    if (target.n_embd != s.n_embd) {
        return "the drafter was trained for a target of hidden size " + number(s.n_embd) + ", this one has " + number(target.n_embd);
    }
    for (int32_t tap : s.taps) {
        if (uint32_t(tap) >= target.n_layer) {
            return "the drafter reads the input of layer " + number(tap) + " (dflash.target_layers), the target has layers 0 to " +
                    number(int64_t(target.n_layer) - 1);
        }
    }
    if (!target.exposes_layers) {
        return "this llama.cpp does not give out the layer inputs of a target of architecture " + target.arch;
    }
    if (!own_head && target.n_head_rows != int64_t(s.n_vocab)) {
        return "the drafter borrows the target's output head and has a vocabulary of " + number(s.n_vocab) + " tokens, the target has " +
                number(target.n_head_rows);
    }
    if (!own_embedding && target.n_embd_rows <= s.mask_token) {
        return "the mask token " + number(s.mask_token) + " has no row in the target's token embedding, which ends at " +
                number(target.n_embd_rows - 1);
    }
    return "";
}

} // namespace dflashcpp
