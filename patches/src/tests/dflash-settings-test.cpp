#include "../dflash-settings.h"

#include "../dflash-settings.cpp"
#include "check.h"

using namespace dflashcpp;

static bool says(const std::string & sentence, const char * part) {
    return sentence.find(part) != std::string::npos;
}

static drafter_settings version_1() {
    drafter_settings s;
    s.n_layer    = 2;
    s.n_embd     = 256;
    s.n_vocab    = 512;
    s.n_rot      = 64;
    s.taps       = { 2, 4 };
    s.block_size = 16;
    s.mask_token = 500;
    s.sliding    = { false, false };
    s.causal     = { false, false };
    return s;
}

static drafter_settings version_2() {
    drafter_settings s = version_1();
    s.conv_kernel = 2;
    s.conv_group  = 16;
    s.rank        = 64;
    s.top_k       = 8;
    return s;
}

static target_shape target() {
    return { "llama", 6, 256, 512, 512, true };
}

static void test_sound_settings_have_no_fault() {
    CHECK(fault(version_1()).empty());
    CHECK(fault(version_2()).empty());
    CHECK(version_2().lattice_row() == 72);
    CHECK(misfit(version_1(), target(), false, false).empty());
}

static void test_each_fault_names_its_key() {
    struct { void (*edit)(drafter_settings &); const char * part; } cases[] = {
        { [](drafter_settings & s) { s.taps.clear(); },                    "dflash.target_layers is missing" },
        { [](drafter_settings & s) { s.taps[1] = -1; },                    "layer -1" },
        { [](drafter_settings & s) { s.n_vocab = 0; },                     "no vocabulary" },
        { [](drafter_settings & s) { s.mask_token = -1; },                 "mask_token_id is missing" },
        { [](drafter_settings & s) { s.mask_token = 512; },                "mask_token_id is 512" },
        { [](drafter_settings & s) { s.block_size = 1; },                  "block_size 1" },
        { [](drafter_settings & s) { s.activation = "relu"; },             "relu" },
        { [](drafter_settings & s) { s.window = 40; s.sliding = { true }; }, "1 entries for 2 layers" },
        { [](drafter_settings & s) { s.sliding = { true, false }; },       "no dflash.attention.sliding_window" },
        { [](drafter_settings & s) { s.causal = { true }; },               "causal_pattern" },
        { [](drafter_settings & s) { s.rope_sections = { 16, 8, 8, 0 }; }, "[32, 0, 0, 0]" },
        { [](drafter_settings & s) { s.rank = 0; },                        "dflash.selector_rank" },
        { [](drafter_settings & s) { s.block_size = 0; },                  "dflash.block_size" },
        { [](drafter_settings & s) { s.conv_kernel = 0; },                 "dflash.conv_kernel_size" },
        { [](drafter_settings & s) { s.conv_group = 24; },                 "does not divide" },
        { [](drafter_settings & s) { s.top_k = 600; },                     "512 tokens" },
    };
    for (const auto & each : cases) {
        drafter_settings s = version_2();
        each.edit(s);
        CHECK(says(fault(s), each.part));
    }
    drafter_settings text = version_1();
    text.rope_sections = { 32, 0, 0, 0 };
    text.block_size    = 0; // v1: the loop knows a default
    CHECK(fault(text).empty());
}

static void test_a_target_that_does_not_fit_is_told() {
    struct { void (*edit)(target_shape &); const char * part; } cases[] = {
        { [](target_shape & t) { t.n_embd = 128; },             "hidden size 256, this one has 128" },
        { [](target_shape & t) { t.n_layer = 4; },              "layer 4 (dflash.target_layers), the target has layers 0 to 3" },
        { [](target_shape & t) { t.exposes_layers = false; },   "architecture llama" },
        { [](target_shape & t) { t.n_head_rows = 500; },        "the target has 500" },
        { [](target_shape & t) { t.n_embd_rows = 500; },        "ends at 499" },
    };
    for (const auto & each : cases) {
        target_shape t = target();
        each.edit(t);
        CHECK(says(misfit(version_1(), t, false, false), each.part));
    }
    target_shape other = target();
    other.n_head_rows = other.n_embd_rows = 100;
    CHECK(misfit(version_1(), other, true, true).empty());
}

int main() {
    test_sound_settings_have_no_fault();
    test_each_fault_names_its_key();
    test_a_target_that_does_not_fit_is_told();
    return failures();
}
