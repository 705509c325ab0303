// The drafter of a command line, as the server would load it, for tools that only measure it.

#pragma once

#include "../common/common.h"
#include "../common/fit.h"

namespace dflashcpp {

// Holds everything that the pointers of `extra` refer to.
class draft_request {
public:
    explicit draft_request(const common_params & params);

    draft_request(const draft_request &) = delete;
    draft_request & operator=(const draft_request &) = delete;

    // whether the command line names a drafter
    bool wanted() const { return !path.empty(); }

    // nullptr without a drafter
    const common_fit_extra_model * extra() const { return wanted() ? &model : nullptr; }

private:
    std::string            path;
    common_params          params;
    llama_model_params     mparams;
    llama_context_params   cparams;
    common_fit_extra_model model;
};

// What tools/server makes of the flags before it loads anything: the number of slots when it is left
// open, and the rows a decode may ask logits of.
void set_server_defaults(common_params & params);

// Whether every device has room for the drafter beside the target, as far as devices say what is free;
// an error is logged when not. Memory that cannot be measured is not held against the drafter.
bool drafter_fits(
        const common_params        & params,
        const llama_model_params   & mparams,
        const llama_context_params & cparams);

// Print the memory of the pair on stdout, in MiB or as JSON; 1 when it cannot be measured.
int print_pair(
        const common_params        & params,
        const llama_model_params   & mparams,
        const llama_context_params & cparams,
        const draft_request        & draft);

} // namespace dflashcpp
